"""Money as integers: prices in micro-units per million tokens, costs in pico-units, rounded once on an invoice line.

tokens x price is exact: micro (1e-6) per million (1e6) tokens is pico (1e-12) per token.
"""

from __future__ import annotations

PICOS_PER_UNIT = 10**12
PICOS_PER_MICRO = 10**6
MICROS_PER_UNIT = 10**6
PRICE_MICROS_MAX = 10**12  # a million units per million tokens; keeps every product inside 64 bits
PERCENT_MAX = 100


def cost_picos(
    *,
    prompt_tokens: int,
    cached_tokens: int,
    completion_tokens: int,
    prompt_price: int,
    cached_price: int,
    completion_price: int,
) -> int:
    """Return the exact cost in pico-units. `cached_tokens` are those of `prompt_tokens` that were not computed anew."""
    if not 0 <= cached_tokens <= prompt_tokens or completion_tokens < 0:
        raise ValueError("token counts must satisfy 0 <= cached <= prompt and 0 <= completion")
    uncached = prompt_tokens - cached_tokens
    return uncached * prompt_price + cached_tokens * cached_price + completion_tokens * completion_price


def format_picos(picos: int, currency: str, decimals: int = 6) -> str:
    """Return `picos` for a person, truncated toward zero at `decimals` (0..12): `0.001234 EUR`."""
    sign = "-" if picos < 0 else ""
    units, rest = divmod(abs(picos), PICOS_PER_UNIT)
    return f"{sign}{units}.{rest:012d}"[: len(sign) + len(str(units)) + 1 + decimals] + f" {currency}"
