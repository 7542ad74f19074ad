"""Products x Wᵀ, separate or fused with the norms, activations and residual sums around them.

separate, up to 16 rows       linear; above by cuBLAS
  8-bit weights               int8, fp8; many e4m3 rows by torch._scaled_mm
  4-bit weights               int4
  up to 16 rows on Hopper     fused_byte_rows, fused_int4_rows, chosen by hopper_tiles
  either, above 512 rows      dequantised_slabs, multiplied by cuBLAS
  binds a weight              linear; quantised weights quantised
  parts                       tiles (the kernel of 16- and 8-bit weights), int4_codes, split_k
fused, 2 to 16 rows           fused_linear; 4-bit weights fused_int4
  1 row                       fused_row
  1 to 16 rows on Hopper      8-bit weights fused_byte_rows, 4-bit weights fused_int4_rows, chosen by hopper_tiles, launched by
                              hopper_rows
  parts                       epilogue; on Hopper gluon_epilogue
"""
