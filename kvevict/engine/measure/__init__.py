"""Numbers of a layer's slots: pure functions of values."""
