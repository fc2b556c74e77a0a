"""Answers questions about a cache, as rows of a batch that decode together."""
