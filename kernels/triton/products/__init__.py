"""Products x Wᵀ, separate or fused with the norms, activations and residual sums around them.

Which kernel serves M rows of x. The launcher of a column tries them from top to bottom:

weights of                    16 or 32 bits          8 bits                                 4 bits
separate, launcher            linear                 int8, fp8                              int4
  M ≤ 16, on Hopper                                  fused_byte_rows *                      fused_int4_rows *
  M ≤ 16                      tiles, split-K         tiles, split-K                         int4, split-K
  M ≤ 64                      cuBLAS                 tiles, split-K                         int4, split-K
  M ≤ 512                     cuBLAS                 tiles; e4m3 rows torch._scaled_mm      int4
  more                        cuBLAS                 dequantised_slabs; torch._scaled_mm    dequantised_slabs
fused, launcher fused_linear
  M ≤ 16, on Hopper                                  fused_byte_rows *                      fused_int4_rows *
  M = 1                       fused_row *            fused_row *
  M ≤ 16                      fused_linear           fused_linear                           fused_int4

* if it can (hopper_tiles and fused_row check shapes and types) and no line below it was faster when the engine timed them at
its first start; the log then lists the kernels chosen (PRODUCTS in `kernels.alternatives`). So on an H100, 16 rows of 4-bit
products run on fused_int4_rows if groups are whole chunks of 128 columns, and else on int4 or fused_int4.

binds a weight                linear; quantised weights quantised
parts                         tiles (the kernel of 16- and 8-bit weights), int4_codes, split_k, epilogue; on Hopper hopper_rows,
                              which launches, and gluon_epilogue
"""
