"""Where a prompt's question lies: chat templates, sentences that ask, and their tokens."""
