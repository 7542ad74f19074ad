"""Kernels in plain torch operations, shaped for CPUs; they run on any torch device."""
