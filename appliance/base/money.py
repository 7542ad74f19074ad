"""Money as integers: prices in micro-units per million tokens, costs in pico-units, rounded once on an invoice line.

tokens x price is exact: micro (1e-6) per million (1e6) tokens is pico (1e-12) per token.
"""

from __future__ import annotations

PICOS_PER_UNIT = 10**12
PICOS_PER_MICRO = 10**6
MICROS_PER_UNIT = 10**6
PRICE_MICROS_MAX = 10**12  # a million units per million tokens; keeps every product inside 64 bits
PERCENT_MAX = 100
BASIS_POINTS = 10_000  # 100 %


def discounted(price: int, basis_points: int) -> int:
    """Return `basis_points` / 10,000 of a unit price, rounded half up to a micro-unit."""
    return (price * basis_points + BASIS_POINTS // 2) // BASIS_POINTS


def format_picos(picos: int, currency: str, decimals: int = 6) -> str:
    """Return `picos` as text, rounded half up to `decimals` (0 to 12) like an invoice: `0.001235 EUR`."""
    return f"{_decimal(divide_half_up(picos, int(10 ** (12 - decimals))), decimals)} {currency}"


def format_exactly(picos: int, currency: str) -> str:
    """Return `picos` as text without rounding, with at least six decimals: `0.0024225 EUR`."""
    text = format_picos(picos, "", 12).strip()
    return f"{text[:-6]}{text[-6:].rstrip('0')} {currency}"


def divide_half_up(amount: int, divisor: int) -> int:
    """Return `amount / divisor` rounded to the nearest integer, halves away from zero, so that rounding is symmetric in sign.

    `divisor` is positive.
    """
    rounded = (2 * abs(amount) + divisor) // (2 * divisor)
    return -rounded if amount < 0 else rounded


def micros_of_picos(picos: int) -> int:
    """Return a sum of costs in micro-units, rounded half up: the only place where costs are rounded."""
    return divide_half_up(picos, PICOS_PER_MICRO)


def minor_unit_decimals(currency: str) -> int:
    """Return the number of decimals of amounts paid in `currency` (ISO 4217): 2 for EUR, 0 for JPY."""
    return _DECIMALS_OF_CURRENCY.get(currency, 2)


def payable_micros(micros: int, currency: str) -> int:
    """Return `micros` rounded half up to the minor unit of `currency`, still in micro-units."""
    return payable_share(micros, BASIS_POINTS, currency)


def payable_share(micros: int, basis_points: int, currency: str) -> int:
    """Return `basis_points` / 10,000 of `micros`, rounded once like `payable_micros`."""
    step = int(10 ** (6 - minor_unit_decimals(currency)))
    return divide_half_up(micros * basis_points, BASIS_POINTS * step) * step


def format_micros(micros: int, *, decimals: int = 6) -> str:
    """Return `micros` as text with grouped thousands, rounded half up to `decimals` (0 to 6): `-1,234.50`."""
    return _decimal(divide_half_up(micros, int(10 ** (6 - decimals))), decimals, ",")


def _decimal(steps: int, decimals: int, grouping: str = "") -> str:
    """Return `steps` / 10^`decimals` as text with that many decimals."""
    units, rest = divmod(abs(steps), int(10**decimals))
    fraction = f".{rest:0{decimals}d}" if decimals else ""
    return f"{'-' if steps < 0 else ''}{units:{grouping}}{fraction}"


_DECIMALS_OF_CURRENCY = {
    **dict.fromkeys(("BIF", "CLP", "DJF", "GNF", "ISK", "JPY", "KMF", "KRW", "PYG", "RWF", "UGX", "UYI", "VND", "VUV"), 0),
    **dict.fromkeys(("XAF", "XOF", "XPF"), 0),
    **dict.fromkeys(("BHD", "IQD", "JOD", "KWD", "LYD", "OMR", "TND"), 3),
    **dict.fromkeys(("CLF", "UYW"), 4),
}
