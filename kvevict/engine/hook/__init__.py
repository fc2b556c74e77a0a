"""How a model's calls get into the engine and out of it: what stands in for its forwards and its attention."""
