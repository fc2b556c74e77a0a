"""The order of reading a prompt, and the choice of slots to evict."""
