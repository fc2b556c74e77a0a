"""An OpenAI-compatible server on Transformers' serving classes, whose memory stays bounded (docs/serve.md)."""
