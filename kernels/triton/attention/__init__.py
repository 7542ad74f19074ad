"""Attention over pages of the KV cache, with the rotation and the cache write before it.

1 request                 lone_decode, called by rotated_decode
2 to 16 requests          decode with rotation, called by rotated_decode
more                      rope_and_cache, then decode
drafts, 2 to 8 queries    decode
chunks                    prefill; on Hopper mostly prefill_hopper; chunk_splits where tiles are few
parts                     splits, decode_tiles, e4m3_pairs, newest_token, query_tiles
"""
