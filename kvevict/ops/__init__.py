"""The compiled kernels as functions, their signatures, and products of few rows."""
