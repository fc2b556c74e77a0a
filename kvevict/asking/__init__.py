"""Finds a prompt's question, by chat templates and by sentences that ask, and its tokens."""
