"""Triton kernels, one file per operation. Imported on machines with a GPU, and by tests under Triton's interpreter."""
