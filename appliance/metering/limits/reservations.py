"""The reservation of a running request in all its limits. It ends exactly once: settled or voided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from appliance.base.money import BASIS_POINTS
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.allowances import Amount, Hold, Need
from appliance.metering.limits.decisions import LimitDecision
from appliance.metering.limits.windows import Moment


class Reservation:
    """What a request holds since `admitted_at`, in the windows and at the price of that time.

    `shadow_refusals` are the refusals by limits in shadow mode, which were not enforced.
    """

    def __init__(
        self,
        request: AdmissionRequest,
        need: Need,
        holds: Sequence[Hold],
        *,
        admitted_at: datetime,
        moment: Callable[[], Moment],
        on_end: Callable[[Reservation, int], None],
        on_recorded: Callable[[str], None],
        shadow_refusals: Sequence[LimitDecision] = (),
        cut_at_budget: bool = False,
    ) -> None:
        self.request = request
        self.need = need
        self.holds = list(holds)
        self.admitted_at = admitted_at
        self.shadow_refusals = shadow_refusals
        self._moment = moment
        self._on_end = on_end
        self._on_recorded = on_recorded
        self._cut_at_budget = cut_at_budget
        self._ended = False
        self.request_id: str | None = None
        """Id of the ledger's record of the settlement; set by `settle`."""
        self.used = Amount(tokens=0, cost_picos=0)
        self.output_tokens = 0
        self._first_output: tuple[float, int] | None = None  # time and tokens at the first progress report with output

    @property
    def reserved_tokens(self) -> int:
        """Return the tokens reserved in the buckets."""
        return self.need.expected.tokens

    @property
    def basis_points(self) -> int:
        """Return the share of the price that is paid, in ten-thousandths."""
        return BASIS_POINTS if self.request.rate is None else self.request.rate.basis_points

    def record_progress(self, cached_tokens: int, completion_tokens: int, rejected_tokens: int = 0) -> bool:
        """Update the request's progress; return whether it must end because a budget is used up."""
        self.output_tokens = completion_tokens
        if self._first_output is None and completion_tokens:
            self._first_output = (self._moment().monotonic_s, completion_tokens)
        if not self._cut_at_budget or self._ended:
            return False
        at = self._moment()
        cost_picos = self.request.cost(cached_tokens, completion_tokens, rejected_tokens=rejected_tokens)
        spent = [hold.record_cost(cost_picos, at) for hold in self.holds]  # every hold must be updated
        return any(spent)

    def set_cut_at_budget(self, cut_at_budget: bool) -> None:
        """Set whether a spent budget ends the request; if not, its cost counts towards budgets only once it has ended."""
        if not cut_at_budget:
            for hold in self.holds:
                hold.clear_running_cost()
        self._cut_at_budget = cut_at_budget

    def seconds_per_token(self, now_s: float) -> float | None:
        """Return the seconds per output token over all its answers; None before the second progress report with output."""
        if self._first_output is None or self.output_tokens <= self._first_output[1]:
            return None
        return (now_s - self._first_output[0]) / (self.output_tokens - self._first_output[1])

    @property
    def tokens_left(self) -> int:
        """Estimate the output tokens still to come: the rest of the expected output, or beyond that as many again as there
        were, up to the maximum length."""
        prompt, generated = self.request.prompt_tokens, self.output_tokens
        expected, longest = self.need.expected.tokens - prompt, self.need.worst.tokens - prompt
        return expected - generated if generated < expected else max(min(generated, longest - generated), 0)

    def settle(
        self, tokens_used: int, *, cached_tokens: int = 0, rejected_tokens: int = 0, request_id: str | None = None
    ) -> None:
        """Replace the reservation by the billed tokens, `cached_tokens` of them at the cached price.

        Call it before the settlement of `request_id` is written to the ledger (None: it has no record), and `mark_recorded`
        afterwards. Raises RuntimeError when the reservation has ended.
        """
        if tokens_used < 0:
            raise ValueError("token counts must not be negative")
        self._end()
        prompt = min(tokens_used, self.request.prompt_tokens)
        completion = tokens_used - prompt
        cost = self.request.cost(cached_tokens, completion, rejected_tokens=rejected_tokens, prompt=prompt)
        used = self.used = Amount(tokens=tokens_used, cost_picos=cost)
        self.request_id = request_id
        now_s = self._moment().monotonic_s
        for hold in self.holds:
            hold.settle(used, now_s)
        self._on_end(self, -(-completion // self.request.num_answers))

    def mark_recorded(self) -> None:
        """Note that the ledger includes the settlement from now on, or that it never will."""
        if self.request_id is not None:
            self._on_recorded(self.request_id)

    def void(self) -> None:
        """Give everything back: the request was not served. Raises RuntimeError when the reservation has ended."""
        self._end()
        now_s = self._moment().monotonic_s
        for hold in self.holds:
            hold.void(now_s)
        self._on_end(self, 0)

    def _end(self) -> None:
        if self._ended:
            raise RuntimeError("a reservation ends once")
        self._ended = True
