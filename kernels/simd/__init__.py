"""Kernels in vectors of this processor's width, compiled by Numba when they are first needed: float32 on CPUs."""
