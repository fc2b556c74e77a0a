"""Measurements of a layer's slots: quantities that scores are made of, and their inputs."""
