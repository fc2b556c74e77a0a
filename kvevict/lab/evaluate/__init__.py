"""Evaluates policies: tasks, metrics, and the runner that measures every policy on every task."""
