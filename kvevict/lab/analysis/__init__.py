"""The cost of eviction and the slots that it keeps: diagnostics, plans, measurements, pictures."""
