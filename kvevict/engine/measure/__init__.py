"""Measurements of a layer's slots: the quantities from which scores are computed, and the inputs of these."""
