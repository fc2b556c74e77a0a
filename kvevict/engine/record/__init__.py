"""A decoded token's step, recorded once and then replayed without Python."""
