"""The storage of slots: flat buffers, cache layers, archives, and the cache object that Transformers sees."""
