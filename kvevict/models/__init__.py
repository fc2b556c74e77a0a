"""What is known of types of models: structure, rotation, weights, refusals; and how models are loaded."""
