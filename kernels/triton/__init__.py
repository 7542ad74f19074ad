"""Triton kernels. Imported on machines with a GPU, and by tests under Triton's interpreter.

table names the launcher of each operation, invariant_table those of batch-invariant engines. Where several kernels serve an
operation, its launcher chooses by shapes, types and the card, never by values on the device, and up to 16 rows also by what the
engine has found to be the fastest (`kernels.alternatives`). Each launcher is beside its kernels, in these modules:

    product, up to 16 rows        linear; above by cuBLAS
      8-bit weights               linear_int8, linear_fp8; many e4m3 rows by torch._scaled_mm
      4-bit weights               linear_int4
      up to 16 rows on Hopper     fused_byte_rows, fused_int4_rows, chosen by hopper_rows
      either, above 512 rows      dequantised_slabs, multiplied by cuBLAS
      binds a weight              linear; quantised weights quantised_products
      parts                       linear_tiles (the kernel of 16- and 8-bit weights), int4_codes, split_k
    fused product, 2 to 16 rows   fused_linear; 4-bit weights fused_int4
      1 row                       fused_row
      1 to 16 rows on Hopper      8-bit weights fused_byte_rows, 4-bit weights fused_int4_rows, chosen by hopper_rows
      parts                       epilogue; on Hopper gluon_epilogue
    attention, 1 request          lone_decode, called by rotated_decode
      2 to 16 requests            attention_decode with rotation, called by rotated_decode
      more                        rope_and_cache, then attention_decode
      drafts, 2 to 8 queries      attention_decode
      chunks                      attention_prefill; on Hopper mostly attention_prefill_hopper; chunk_splits where tiles are few
      parts                       attention_splits, decode_tiles, e4m3_pairs, newest_token, query_tiles
    experts                       router, experts; 4-bit weights experts_int4; those of mixed formats one by one in torch
      parts                       expert_tiles, expert_weights
    norms and activations         norm, activation; rows in 8 bits fp8_rows
      parts                       row_tiles
    next token                    greedy_head in greedy steps of up to 16 rows; else sampling
      parts                       gumbel, sampling_filters, sampling_rows
    beside it                     bitmask, token_counts, logprobs; drafts verifies those of a draft model
    inputs and state of a step    decode_inputs, embedding; blocks moves KV blocks
    batch-invariant               invariant_linear, invariant_int4; invariant_attention, whose kernels are in invariant_rows
    all launches                  card_properties, early_launch
    compilation                   compiled_together, kernel_cache
"""
