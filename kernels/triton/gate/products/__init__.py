"""Configurations of the kernels of `kernels.triton.products`."""
