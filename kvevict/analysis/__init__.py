"""What eviction costs and keeps: diagnostics, plans, measurements, pictures."""
