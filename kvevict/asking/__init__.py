"""Finds a prompt's question, by the chat template and by sentences that ask, and the question's tokens."""
