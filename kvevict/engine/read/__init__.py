"""Reading prompts and tokens: the chunks, the layers' attention, and the choice of slots to evict."""
