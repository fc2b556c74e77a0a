"""Watchers, which observe how a prompt is read, and the one that measures what each eviction costs."""
