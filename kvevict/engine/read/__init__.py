"""The reading of prompts and decoded tokens: the chunks, the layers' attention, and the choice of slots to evict."""
