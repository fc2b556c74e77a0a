"""Computes the cost of eviction, and shows which slots it keeps: diagnostics, plans, measurements, pictures."""
