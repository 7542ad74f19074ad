"""Sampling without the host: a request's parameters are in its slot, where the sampling kernels read them.

The runner over slots samples with `ColumnSampler`. It chooses exactly the tokens of `sampling.sampler`, by Gumbel-max with the
same noise. Requests that a slot cannot hold (`refusal`) use that sampler. Some rows wait for a mask from the host
(`host_masks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from engine.memory.shape import bias_rows
from engine.protocol import PlainReason, SamplingParams
from engine.sampling import scores
from engine.sampling.host_masks import needs_masks
from engine.sampling.logits_filters import is_greedy, neg_log2_min_p_of, scale_of
from engine.sampling.logits_rules import FORBIDDEN, changes_logits
from engine.sampling.randomness import signed, stream
from engine.scheduling.request import Request
from kernels import ops

WEIGHS, COUNTS, MASKED, SCORED, NOT_GREEDY = (1 << bit for bit in range(5))
"""What the request in a slot requires of a step: see `Kind` and `SamplingNeeds`."""


class Kind(NamedTuple):
    """Which variant of `choose` a step needs; a graph is captured for each.

    weighs: some row's whole vocabulary has to be weighed, for a top-p without a top-k before it. counts: some row has
    penalties. num_top: number of likeliest tokens scored besides the chosen ones, 0 if no log-probabilities are requested.
    greedy: every row takes the largest logit of the unchanged model output.
    """

    weighs: bool = False
    counts: bool = False
    num_top: int = 0
    greedy: bool = False


class SamplingNeeds(NamedTuple):
    """What the rows of a step require. scored: (row, number of likeliest tokens) of rows with log-probabilities; masked: rows
    for which the host has to supply a mask."""

    kind: Kind
    scored: list[tuple[int, int]]
    masked: list[int]


class SampledColumns(NamedTuple):
    """tokens: [R] int64, NO_TOKEN where none can be drawn; scores: [R, W] int64 as of `scores.packed`"""

    tokens: torch.Tensor
    scores: torch.Tensor | None


def weighs(sampling: SamplingParams, vocab_size: int) -> bool:
    """Whether the whole vocabulary has to be weighed. A top-k that leaves nothing out counts as none."""
    return not is_greedy(sampling) and not _has_top_k(sampling.top_k, vocab_size) and sampling.top_p < 1.0


def _has_top_k(top_k: int, vocab_size: int) -> bool:
    return 0 < top_k < vocab_size


def _bias_of(sampling: SamplingParams) -> dict[int, float]:
    """The amounts added to logits, by token. A bad word of one token is forbidden, even if the bias names it."""
    if not sampling.logit_bias and not sampling.bad_words_token_ids:
        return {}
    forbidden = [word[0] for word in sampling.bad_words_token_ids or () if len(word) == 1]
    return {**(sampling.logit_bias or {}), **dict.fromkeys(forbidden, FORBIDDEN)}


def _suppressed_ids(request: Request) -> list[int]:
    """The end tokens that the sampling kernel leaves out before `min_tokens`, padded with -1; none where they are so many that
    the request needs a mask."""
    ids = sorted(request.stop_ids) if request.sampling.min_tokens > 0 else []
    if len(ids) > ops.SUPPRESSED_IDS_MAX:
        ids = []
    return ids + [-1] * (ops.SUPPRESSED_IDS_MAX - len(ids))


class ColumnSampler:
    """Columns for `num_slots` slots of one engine. One thread makes all calls."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        *,
        max_draft_tokens: int = 0,
        num_biases: int | None = None,
        dtype: torch.dtype | None = None,
        make_words: Callable[[ops.Pieces, torch.device], ops.DeviceWords] = ops.DeviceWords,
    ) -> None:
        """`max_draft_tokens`: rows of a step beyond one per slot. `num_biases`: biases held at a time; None: as many as the
        memory plan counts. `dtype`: the format of logits, None if it is not known. `make_words`: see `SamplingColumns`."""
        num_biases = bias_rows(num_slots, vocab_size) if num_biases is None else num_biases
        self.columns = ops.SamplingColumns.empty(num_slots, vocab_size, num_biases, device, make_words=make_words)
        self._device = device
        self._ops = ops.operations(device, dtype)
        self._workspace = self._ops.sampling_workspace(num_slots + max_draft_tokens, vocab_size, device)
        self.vocab_size = vocab_size
        self._bias_row_of: dict[Request, int] = {}
        self._prompt_ids: WeakKeyDictionary[Request, np.ndarray] = WeakKeyDictionary()  # of the first answer of each request
        self._biases: list[dict[int, float]] = [{} for _ in range(num_biases)]
        self._flags = np.zeros(num_slots, dtype=np.uint8)  # the constants above, combined
        self._num_scored = np.zeros(num_slots, dtype=np.int64)  # likeliest tokens

    def refusal(self, request: Request) -> PlainReason | None:
        """Why this request cannot be sampled from a slot (it has a bias, and no row for biases is free); None if it can."""
        bias = _bias_of(request.sampling)
        return PlainReason.LOGIT_BIAS if bias and not self._reserve(request, bias) else None

    def _reserve(self, request: Request, bias: dict[int, float]) -> bool:
        """Reserve a row for the request's bias while the request exists, shared with equal biases. Returns whether there is
        one."""
        if request not in self._bias_row_of:
            self._bias_row_of = {owner: row for owner, row in self._bias_row_of.items() if not owner.is_finished}
            used = set(self._bias_row_of.values())
            row = next((row for row in used if self._biases[row] == bias), None)
            if row is None:
                row = next((row for row in range(len(self._biases)) if row not in used), None)
            if row is None:
                return False
            self._bias_row_of[request], self._biases[row] = row, bias
        return True

    def assign(self, slots: Sequence[int], requests: Sequence[Request]) -> ops.Words:
        """Assign the slots to these requests; call `restart` to count their tokens. Returns the parameters to write to the
        words of the columns."""
        packed = []
        for slot, request in zip(slots, requests, strict=True):
            p = request.sampling
            filters = (scale_of(p), p.top_p, neg_log2_min_p_of(p), p.typical_p)
            penalties = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
            ints = (p.top_k if _has_top_k(p.top_k, self.vocab_size) else 0, self._bias_row_of.get(request, -1))
            longs = (signed(stream(p.seed or 0)), request.num_prompt_tokens + p.min_tokens)
            packed.append(ops.SLOT_WORDS.pack(*filters, *penalties, *ints, *longs, *_suppressed_ids(request)))
            is_scored = p.logprobs is not None
            self._flags[slot] = (
                WEIGHS * weighs(p, self.vocab_size)
                | COUNTS * p.has_penalties
                | MASKED * needs_masks(request)
                | SCORED * is_scored
                | NOT_GREEDY * (not is_greedy(p) or changes_logits(p) or is_scored)
            )
            self._num_scored[slot] = p.logprobs or 0
        for row in {self._bias_row_of[request] for request in requests if request in self._bias_row_of}:
            self._write_bias(row)
        return self.columns.to_write(slots, b"".join(packed))

    def restart(self, slot: int, request: Request, num_tokens: int) -> None:
        """Count the first `num_tokens` tokens of the slot's request again, because the device's counts may be wrong."""
        if not self._flags[slot] & COUNTS:
            return
        prompt, output = self._ids_of_prompt(request), request.token_ids[request.num_prompt_tokens : num_tokens]
        ids, inverse = np.unique(np.concatenate((prompt, np.array(output, dtype=np.int64))), return_inverse=True)
        in_output = np.bincount(inverse[len(prompt) :], minlength=len(ids))
        ids_and_counts = ops.send(np.stack((ids, 2 * in_output + 1)), torch.int64, self._device)
        self.columns.counts[slot].zero_().index_copy_(0, ids_and_counts[0], ids_and_counts[1].int())

    def _ids_of_prompt(self, request: Request) -> np.ndarray:
        """The distinct ids of the prompt: [U] int64. Kept for the other answers while the first one exists."""
        first = request if request.forked_from is None else request.forked_from
        ids = self._prompt_ids.get(first)
        if ids is None:
            ids = np.unique(np.array(request.token_ids[: request.num_prompt_tokens], dtype=np.int64))
            if request.sampling.num_answers > 1:
                self._prompt_ids[first] = ids
        return ids

    def _write_bias(self, row: int) -> None:
        dense = torch.zeros(self.vocab_size, pin_memory=self._device.type == "cuda")
        bias = self._biases[row]
        dense[list(bias)] = torch.tensor(list(bias.values()))
        self.columns.bias[row].copy_(dense, non_blocking=True)

    def needs(self, slots: Sequence[int] | np.ndarray[Any, Any]) -> SamplingNeeds:
        """What a step with these slots, in this order, requires."""
        index = np.asarray(slots, dtype=np.int64)
        flags = self._flags[index]
        any_flags = int(np.bitwise_or.reduce(flags))
        scored, num_top = [], 0
        if any_flags & SCORED:
            scored = [(row, int(self._num_scored[slots[row]])) for row in (flags & SCORED).nonzero()[0].tolist()]
            num_top = scores.num_top([count for _, count in scored], self.vocab_size)
        masked = (flags & MASKED).nonzero()[0].tolist() if any_flags & MASKED else []
        return SamplingNeeds(
            Kind(bool(any_flags & WEIGHS), bool(any_flags & COUNTS), num_top, not any_flags & NOT_GREEDY), scored, masked
        )

    def choose(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        kind: Kind,
        masks: torch.Tensor | None = None,
        *,
        scores_out: torch.Tensor | None = None,
    ) -> SampledColumns:
        """logits: [R, V], not changed; slots: [R] int32, below 0 is padding; positions: [R], index of the chosen token in
        prompt plus output; masks: [R, ceil(V / 32)] int32, the tokens that may be chosen; scores_out: [R, W] int64, for the
        scores. Can be captured in a graph."""
        tokens = self._ops.sample(
            logits, slots, positions, self.columns, masks=masks, workspace=self._workspace, weighs=kind.weighs
        )
        if kind.counts:
            self._ops.count_tokens(slots, tokens, self.columns.counts)
        if not kind.num_top:
            return SampledColumns(tokens, None)
        return SampledColumns(tokens, scores.packed(self._ops, logits, tokens, kind.num_top, out=scores_out))
