"""Where slots are stored, and the cache that Transformers sees."""
