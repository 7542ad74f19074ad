"""What one step computes and what comes out of it: the values between scheduler and runner. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.protocol import TokenLogprob
from engine.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """`num_tokens` tokens of `request` from position `start` on. `samples`: the step yields its next token."""

    request: Request
    start: int
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class ScheduledBatch:
    """One step: decodes have one token each and come first; prefills are chunks of any length."""

    decodes: list[ScheduledRequest] = field(default_factory=list)
    prefills: list[ScheduledRequest] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def items(self) -> list[ScheduledRequest]:
        return self.decodes + self.prefills

    @property
    def is_empty(self) -> bool:
        return not self.num_tokens

    def add_decode(self, request: Request) -> None:
        self.decodes.append(ScheduledRequest(request, request.num_computed_tokens, 1, samples=True))
        self.num_tokens += 1

    def add_prefill(self, request: Request, num_tokens: int) -> None:
        start = request.num_computed_tokens
        self.prefills.append(ScheduledRequest(request, start, num_tokens, samples=start + num_tokens == request.num_tokens))
        self.num_tokens += num_tokens


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step did for one scheduled request: a token when it sampled one, or the error that ends this request."""

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    error: str | None = None
