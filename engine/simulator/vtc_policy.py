"""Virtual token counters, a published fair policy, for comparison with ours. Serving does not use it."""

from __future__ import annotations

from engine.scheduling.accounts import account_of
from engine.scheduling.backlog import Backlog
from engine.scheduling.costs import TokenCosts
from engine.scheduling.policy import SCAN_REQUESTS_MAX, CanStart, PlainPolicy, PolicyContext, first_to_start, first_unscheduled
from engine.scheduling.request import Request


class VtcPolicy(PlainPolicy):
    """Virtual token counters (Sheng et al., OSDI 2024, arXiv 2401.00588): the tenant with the smallest counter goes next.

    Round robin with a quantum of one price unit serves the smallest counter first, and its lift is the paper's. Counters
    are in the prices of the accounts; `TOKEN_PRICES` are the paper's 1 per prompt token and 2 per output token.
    """

    TOKEN_PRICES = TokenCosts(prefill_token_ps=1, prefill_pair_ps=0, decode_token_ps=2, decode_context_ps=0, swap_in_block_ps=0)

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._backlog = Backlog(quantum_ps=1, cap_ps=1 << 100)

    def on_queued(self, request: Request) -> None:
        self._backlog.join(account_of(request), self._accounts.step)

    def on_dequeued(self, request: Request) -> None:
        """A tenant without waiting requests needs no turn; its running prefills go on without one."""
        account = account_of(request)
        if not account.waiting:
            self._backlog.leave(account)

    def next_prefill(self, can_start: CanStart | None) -> Request | None:
        step = self._accounts.step
        chosen = first_unscheduled(self._accounts.prefilling, step)
        if chosen is None and can_start is not None:
            accounts = self._backlog.next_accounts(SCAN_REQUESTS_MAX, step)
            heads = (account.waiting.head for account in accounts)
            chosen, _ = first_to_start((head for head in heads if head is not None), can_start)
        return chosen
