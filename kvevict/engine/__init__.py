"""How a patched model reads a prompt, evicts and decodes."""
