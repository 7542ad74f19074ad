"""Computation on tensors, one operation at a time. The engine imports only `kernels.ops`.

    operations             the table: which operations exist, and which of them each device has
    triton, simd, torch    implementations, by what they are written in: for NVIDIA GPUs; for float32 on CPUs; for any device
    reference              simple, obviously correct twins, for tests
    triton.gate            compiles every kernel for cards that are not present, and counts registers, spills and shared memory

The modules beside these are shared by implementations: plans of attention, forms of weights, the noise that draws tokens.
"""
