"""Which models are served at no cost because nobody has set a price. Knows prices; whose requests they are it is told."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from appliance.metering.prices import PriceBook


async def unpriced(prices: PriceBook, pairs: Iterable[tuple[str, str]], at: datetime) -> list[tuple[str, str]]:
    """Return those of the pairs of model and currency that have no price at `at`, in order."""
    return [
        (model, currency)
        for model, currency in sorted(set(pairs))
        if await prices.current(model, at, currency=currency) is None
    ]
