"""Kernels in vectors of this processor's width, compiled by Numba on first use: float32 on CPUs. table names the operations.

products               linear; int8_linear, fp8_linear and int4_linear, of quantised_panels and quantised_tiles
attention              rope_and_cache; attention, of attention_tile
rows                   embedding, norm, activation
next token             sampling, of gumbel; logits, token_counts, scores
state of a step        decode_inputs
written with           vectors, tiles, prefetching
compiled and run by    compiling, threads, launching; large_pages allocates
"""
