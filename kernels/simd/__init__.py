"""Kernels in vectors of this processor's width, compiled by Numba on first use: float32 on CPUs."""
