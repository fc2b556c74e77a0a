"""Measures what eviction costs and what it keeps, and evaluates policies on tasks with right answers. Outside
`kvevict.lab` only `kvevict.cli` imports from it."""
