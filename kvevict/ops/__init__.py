"""The compiled kernels as Python functions, and linear layers of few rows."""
