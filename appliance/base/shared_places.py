"""Places that tenants share, so that whoever fills them keeps nobody else out. Counts only."""

from __future__ import annotations


def has_place(own: int, taken: int, places: int) -> bool:
    """Return whether a tenant that has `own` of the `taken` places may have one more, where there are `places`.

    A tenant alone gets all of them. What one has and what all have may together come to twice the places: of k tenants that ask
    for all they can get, each has 2 / (k + 1) of them, and there is one for whoever has none (dynamic thresholds: Choudhury and
    Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).
    """
    return own + taken < 2 * places
