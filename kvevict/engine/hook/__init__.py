"""The way of a model's calls into the engine and out of it: replacements for its forwards and its attention."""
