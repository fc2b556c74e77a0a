"""What kvevict knows about Transformers models (their structure, rotation and weights, and which it refuses to patch),
and how it loads them."""
