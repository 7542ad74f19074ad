"""Triton kernels. Imported on machines with a GPU, and by tests under Triton's interpreter.

table names the launcher of each operation, invariant.table those of batch-invariant engines. Where several kernels serve an
operation, its launcher chooses by shapes, types and the card, never by values on the device, and up to 16 rows also by what the
engine has found to be the fastest (`kernels.alternatives`). Each launcher is beside its kernels, in these packages, which list
their modules. Each imports only packages above it:

    launching     properties of the card, early launches, compilation
    rows          norms, activations, rows in 8 bits
    step          inputs and state of a step: embedding, decode inputs, KV blocks
    products      with weights of 16, 8 and 4 bits; separate, or fused with norms, activations and residual sums
    attention     over pages: decodes, drafts, chunks of prompts; rotation and cache writes
    experts       mixtures of experts: routing and products
    sampling      next tokens, what their rules and filters read, log-probabilities, verification of drafts
    invariant     products and attention of batch-invariant engines
    gate          no part of serving: compiles the kernels for cards that are not present
"""
