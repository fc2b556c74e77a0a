"""Measurements: what eviction costs and keeps, tasks with right answers, and their commands. Nothing else of the
package imports from here but `kvevict.cli`."""
