"""Tasks, metrics, and the runner that puts policies to them."""
