"""Facts about types of models (structure, rotation, weights, refusals), and how models are loaded."""
