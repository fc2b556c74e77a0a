"""Answers questions about the context in a cache; the answers decode together, as rows of a batch."""
