"""The values between scheduler and runner: the tokens that one step computes, and its results. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.protocol import TokenLogprob
from engine.scheduling.request import Request


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """`num_tokens` tokens of `request` from position `start` on. `samples`: the step yields its next token.

    The scheduler keeps one for each decoding request and advances it in `apply()`, so an item is valid only from `schedule()`
    to `apply()`.

    The last `num_draft_tokens` of them are drafts of speculative decoding: tokens after the end of `request.token_ids`, which
    the step verifies. `draft_token_ids` holds them, except those of a draft model, which stay on the device.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    num_draft_tokens: int = 0
    draft_token_ids: list[int] = field(default_factory=list)

    @property
    def num_known_tokens(self) -> int:
        """Tokens that are not drafts."""
        return self.num_tokens - self.num_draft_tokens

    @property
    def draft_inputs(self) -> list[int]:
        """Draft ids for the step's inputs; token 0 stands for those known only on the device."""
        return self.draft_token_ids or [0] * self.num_draft_tokens


@dataclass(slots=True)
class BlockMoves:
    """Copies of whole KV blocks that must happen, once and in this order, before a step is run.

    `swap_out` and `swap_in` go between the device and the host tier; `copies` stay on the device (copy on write). A source
    of `swap_in` is never a target of `swap_out` in the same step.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target), both on the device

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copies)

    def kinds(self) -> list[BlockMoves]:
        """The moves of each kind by themselves, in order."""
        kinds = [BlockMoves(swap_out=self.swap_out), BlockMoves(swap_in=self.swap_in), BlockMoves(copies=self.copies)]
        return [kind for kind in kinds if kind]


@dataclass(slots=True)
class ScheduledBatch:
    """One step: decodes have one token each and come first; prefills are chunks of any length. The list of decodes is the same
    object as in the step before if no request came, went or lost blocks between them, and so are the columns `requests` and
    `tables`, the requests of decodes and their block tables. `grown`: decodes that got a block since then. `ending`: those
    that sample their last token in this step, unless they end before it."""

    decodes: list[ScheduledRequest] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    tables: list[Sequence[int]] = field(default_factory=list)
    grown: list[Request] = field(default_factory=list)
    ending: list[Request] = field(default_factory=list)
    prefills: list[ScheduledRequest] = field(default_factory=list)
    moves: BlockMoves = field(default_factory=BlockMoves)
    num_tokens: int = 0
    num_draft_tokens: int = 0

    @property
    def items(self) -> list[ScheduledRequest]:
        return self.decodes + self.prefills if self.prefills else self.decodes

    @property
    def is_empty(self) -> bool:
        return not self.num_tokens

    def add_prefill(self, request: Request, num_tokens: int) -> None:
        start = request.num_computed_tokens
        self.prefills.append(ScheduledRequest(request, start, num_tokens, samples=start + num_tokens == request.num_tokens))
        self.num_tokens += num_tokens


@dataclass(slots=True)
class StepOutput:
    """The result of a step for one scheduled request, or the error that ends this request.

    `token_ids`: the sampled token, preceded by the drafts that were accepted; empty when the step does not sample.
    `logprobs`: one entry per token, when requested. `prompt_logprobs`: one entry per prompt token that this chunk predicts.
    `error_param` names the field of the request that is to blame for `error`.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    error_param: str | None = None


RowResult = StepOutput | int | None
"""Result of a step launched ahead for one row: only a token, a full output, or None when there is nothing yet."""
