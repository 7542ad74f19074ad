"""Fair sharing of a limited number of places between tenants, so that no tenant can take all of them. Counts only."""

from __future__ import annotations


def has_place(own: int, taken: int, places: int) -> bool:
    """Return whether a tenant that holds `own` of the `taken` places may take one more, where there are `places`.

    The rule is own + taken < 2 * places. A single tenant can take all places; k greedy tenants get 2 / (k + 1) of the places
    each, and a tenant without a place can then still take one, so that the total may exceed `places` (dynamic thresholds:
    Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).
    """
    return own + taken < 2 * places
