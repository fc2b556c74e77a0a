"""Stores caches in files, so that a prompt is read once and questions are asked later."""
