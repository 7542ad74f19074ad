"""What tokens cost in predicted device time, in integers: the currency of fairness and of swapping versus recomputing.

A step reads the weights once for all requests, reads each request's keys and values, and multiplies. So the price of a token
is linear in the tokens computed, in the context read, and, for prompts, in both at once (attention is quadratic). The
coefficients come from the step-time model of the device (`scheduling.step_time`); the defaults are those of an 8B model in
bfloat16 on an H200. Only ratios of prices decide anything, so a wrong scale is harmless.
"""

from __future__ import annotations

from dataclasses import dataclass

PS_PER_NS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCosts:
    """Prices in picoseconds, so that integers are exact enough. Methods return the unit that their name ends with.

    prefill_token_ps      one prompt token through all matrix products
    prefill_pair_ps       one (query, key) pair of prompt attention
    decode_token_ps       one generated token: its share of the weight bytes
    decode_context_ps     one token of context whose keys and values a generated token reads
    swap_in_block_ps      one block from the host tier to the device
    """

    prefill_token_ps: int = 25_000_000
    prefill_pair_ps: int = 885
    decode_token_ps: int = 25_000_000
    decode_context_ps: int = 38_000
    swap_in_block_ps: int = 40_000_000

    def prefill_ps(self, start: int, num_tokens: int) -> int:
        """A chunk of `num_tokens` prompt tokens after `start` computed ones."""
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return num_tokens * self.prefill_token_ps + pairs * self.prefill_pair_ps

    def decode_ps(self, num_tokens: int, sum_context: int) -> int:
        """`num_tokens` requests that decode one token each, with `sum_context` tokens of context between them."""
        return num_tokens * self.decode_token_ps + sum_context * self.decode_context_ps

    def prefill_ns(self, start: int, num_tokens: int) -> int:
        return self.prefill_ps(start, num_tokens) // PS_PER_NS

    def swap_in_ns(self, num_blocks: int) -> int:
        return num_blocks * self.swap_in_block_ps // PS_PER_NS
