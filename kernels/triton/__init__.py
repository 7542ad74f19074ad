"""Triton kernels. Imported on machines with a GPU, and by tests under Triton's interpreter.

table.py names the operations, invariant_table.py those of batch-invariant engines. Most have one file and one kernel; these
have several, among which their launchers choose by shapes, types and the card, never by values on the device, and up to 16 rows
also by what the engine has found to be the fastest (`kernels.alternatives`):

    product, up to 16 rows        linear, whose kernel is in linear_tiles; above by cuBLAS
      8-bit weights               linear_int8, linear_fp8: linear_tiles; many e4m3 rows by torch._scaled_mm
      4-bit weights               linear_int4
      up to 16 rows on Hopper     fused_byte_rows, fused_int4_rows, chosen by hopper_rows
      either, above 512 rows      dequantised_slabs, multiplied by cuBLAS
    fused product, 2 to 16 rows   fused_linear; 4-bit weights fused_int4
      1 row                       fused_row
      1 to 16 rows on Hopper      8-bit weights fused_byte_rows, 4-bit weights fused_int4_rows, chosen by hopper_rows
    attention, 1 request          lone_decode
      2 to 16 requests            attention_decode with rotation, called by rotated_decode
      more                        rope_and_cache, then attention_decode
      drafts, 2 to 8 queries      attention_decode
      chunks                      attention_prefill; on Hopper mostly attention_prefill_hopper; chunk_splits where tiles are few
    experts                       experts; 4-bit weights experts_int4; those of mixed formats one by one in torch
    next token                    greedy_head in greedy steps of up to 16 rows; else sampling
"""
