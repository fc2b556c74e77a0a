"""Compressed caches in files: a prompt is read once, and questions are asked later."""
