"""The hooks of a patched model: stand-ins for its forwards and its attention function, and the arguments of its
calls."""
