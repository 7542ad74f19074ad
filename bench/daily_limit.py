"""How fast clients can use up a limit of tokens per day with and without a maximum of output tokens, by a virtual clock.

CLIENTS clients of one key send requests to a model with a context of CONTEXT_LEN tokens, each its next one as soon as the last
has ended, until the LIMIT of tokens per day refuses them for the rest of the day. Refused because of what running requests
have reserved, a client tries again after the refusal's `retry_after_s`. Conversations have the lengths of `bench.chat_lengths`,
whose longest output has 860 tokens; every request takes TTFT_S and then TOKEN_S for each token, however many run. Admission is
that of the appliance. No engine, no HTTP; deterministic.

    python -m bench.daily_limit          prints one row and adds it to bench/results/
"""

from __future__ import annotations

import asyncio
import heapq
import random
import statistics
from dataclasses import dataclass, field
from typing import Any

from appliance.base.errors import Refused
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.reservations import Reservation
from appliance.serving.tokenizer import output_room
from appliance.tenancy.principals import Limits
from bench.chat_lengths import OUTPUT_LENS, PROMPT_LENS, draw_length
from bench.rows import argument_parser, publish, row_header
from tests.support.clock import FakeClock
from tests.support.empty_sums import EmptySums
from tests.support.factories import principal
from tests.support.ledgers import utc_admission

CLIENTS = 20
CONTEXT_LEN = 131_072
LIMIT = 1_000_000
TTFT_S, TOKEN_S = 0.2, 0.025
RETRY_S_MAX = 60.0  # the longest wait for running requests; a longer one lasts until the next day
DEFAULTS = (None, 16_000, 4000, 2000, 1000)
SEEDS = range(10)


@dataclass(slots=True)
class Run:
    """One day of all clients. `at_s` is the time since its start, `ended_s` the end of its last request, `running` are start,
    output tokens and reservation by client."""

    default_max_tokens: int | None
    rng: random.Random
    clock: FakeClock = field(default_factory=FakeClock)
    at_s: float = 0.0
    ended_s: float = 0.0
    busy_s: float = 0.0
    used_tokens: int = 0
    refusals: int = 0
    served: int = 0
    running: dict[int, tuple[float, int, Reservation]] = field(default_factory=dict)

    async def day(self) -> dict[str, Any]:
        """Serve until no client is left; return what was served, and how fast."""
        admission, who = utc_admission(self.clock, EmptySums()), principal(Limits(tokens_per_day=LIMIT))
        due = [(0.0, number) for number in range(CLIENTS)]
        waiting: dict[int, tuple[int, int]] = {}
        while due:
            at_s, client = heapq.heappop(due)
            self._advance(at_s, client)
            prompt, output = waiting.pop(client, None) or self._draw()
            room = output_room(
                prompt_tokens=prompt, max_tokens=None, default_max_tokens=self.default_max_tokens, max_model_len=CONTEXT_LEN
            )
            request = AdmissionRequest(
                principal=who, model="m", prompt_tokens=prompt, max_output_tokens=None, price=None, output_room=room
            )
            try:
                reservation = await admission.admit(request)
            except Refused as refused:
                self.refusals += 1
                if refused.retry_after_s is not None and refused.retry_after_s <= RETRY_S_MAX:
                    waiting[client] = prompt, output
                    heapq.heappush(due, (self.at_s + refused.retry_after_s, client))
                continue
            output = min(output, room)
            self.running[client] = self.at_s, output, reservation
            heapq.heappush(due, (self.at_s + TTFT_S + TOKEN_S * output, client))
        return {
            "seconds": round(self.ended_s, 1),
            "running_mean": round(self.busy_s / self.ended_s, 2),
            "requests": self.served,
            "refusals": self.refusals,
            "used_tokens": self.used_tokens,
        }

    def _draw(self) -> tuple[int, int]:
        return round(draw_length(self.rng, PROMPT_LENS)), round(draw_length(self.rng, OUTPUT_LENS))

    def _advance(self, at_s: float, client: int) -> None:
        """Move the clock to `at_s`, report the progress of running requests, and settle the client's own if it has ended."""
        self.clock.advance(at_s - self.at_s)
        self.at_s = at_s
        for started_s, output, reservation in self.running.values():
            reservation.record_progress(0, max(0, min(output, int((at_s - started_s - TTFT_S) / TOKEN_S))))
        if client in self.running:
            started_s, output, reservation = self.running.pop(client)
            self.ended_s = at_s
            self.busy_s += at_s - started_s
            tokens = reservation.request.prompt_tokens + output
            reservation.settle(tokens)
            self.used_tokens += tokens
            self.served += 1


def main() -> None:
    """Run every default with every seed; each figure is the median over the seeds."""
    options = argument_parser(__doc__).parse_args()
    rows = []
    for default in DEFAULTS:
        days = [asyncio.run(Run(default, random.Random(seed)).day()) for seed in SEEDS]
        medians = {name: statistics.median(day[name] for day in days) for name in days[0]}
        rows.append({"default_max_tokens": default, **medians, "seconds_of_all": [day["seconds"] for day in days]})
    setup = {"clients": CLIENTS, "context_len": CONTEXT_LEN, "tokens_per_day": LIMIT, "ttft_s": TTFT_S, "token_s": TOKEN_S}
    publish({**row_header("daily_limit"), "setup": setup, "rows": rows}, options)


if __name__ == "__main__":
    main()
