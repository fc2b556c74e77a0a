"""The compiled kernels as Python functions, and their use in linear layers that multiply few rows."""
