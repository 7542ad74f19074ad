"""Computation on tensors, one operation at a time. The engine imports only `kernels.ops`.

    operations             the table: which operations exist, and which of them each device has; ops binds it to a device
    triton, simd, torch    implementations, by what they are written in: for NVIDIA GPUs; for float32 on CPUs; for any device
    reference              simple, obviously correct twins, for tests
    triton.gate            compiles every kernel for cards that are not present, and counts registers, spills and shared memory

Which kernel serves an operation, its launcher decides: the one that the table of the device names or, for products with
quantised weights, `quantised_linear`. The docstring of the launcher's package says how it decides.

Shared by implementations:

    attention              attention_rows, paged_plan
    products               quantised_weights, quantised_linear; fusible_products, residual_stream
    sampling               sampling_columns, gumbel, host_tokens
    transfers              device_words, transfer
    choice, compilation    alternatives, variants
    recorded steps         recorded_operations
"""
