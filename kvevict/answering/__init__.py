"""Questions about a cache, answered as rows of a batch that decode together."""
