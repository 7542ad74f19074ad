"""What computes on tensors, one operation at a time. `kernels.ops` is all that an engine imports of it.

    operations             the table: which operations there are, and what each device has of them
    triton, simd, cpu      implementations: NVIDIA GPUs; float32 on CPUs; everything else, in plain torch
    reference              obviously right twins, for tests
    triton.gate            compiles every kernel for cards that are not here, and counts registers, spills and shared memory

The modules beside these are what implementations share: plans of attention, forms of weights, the noise that draws tokens.
"""
