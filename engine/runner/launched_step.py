"""A launched step, and its results on the host when its tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.grammar.spec import GrammarError
from engine.runner.token_return import Fetch
from engine.sampling import scores
from engine.sampling.acceptance import accept_equal
from engine.sampling.sampler import SampledToken
from engine.scheduling.scheduled_batch import RowResult, StepOutput
from kernels.ops import NO_TOKEN

PendingSampling = tuple[Fetch, dict[int, GrammarError]]
"""Where the tokens of a step that waited for masks will arrive, and why a row got no mask, by row."""


@dataclass(slots=True)
class LaunchedStep:
    """Where the tokens of a step will arrive.

    `rows[i]`: the item that sampled token i belongs to; None where each item has one. `scored`: (token index, number of top
    tokens) for each token whose log-probabilities are requested. `depths`: the number of drafts of a request, by the index of
    its first token; it has one token more than drafts. `inputs`: the input token of each row, which may be a draft; None where
    only the device has them. `begin_sampling`: starts the sampling of a step that waits for masks. `errors`: why a row got no
    mask, by row. `lacks_tokens`: whether no token could be drawn for some row, known with the outputs.
    """

    num_items: int
    num_sampled: int
    rows: list[int] | None = None
    scored: list[tuple[int, int]] = field(default_factory=list)
    depths: dict[int, int] = field(default_factory=dict)
    inputs: Sequence[int] | None = None
    fetch: Fetch | None = None
    begin_sampling: Callable[[], PendingSampling] | None = None
    errors: dict[int, GrammarError] = field(default_factory=dict)
    lacks_tokens: bool = False

    def complete(self) -> None:
        """Begin what waited for the tokens of the preceding step. Raises when it cannot."""
        if self.begin_sampling is not None:
            (self.fetch, self.errors), self.begin_sampling = self.begin_sampling(), None

    def outputs(self) -> list[RowResult]:
        """One per item, None where no token could be drawn."""
        assert self.fetch is not None, "the step was not completed"
        results = self._results(self.fetch)
        if self.depths:
            results = self._accept_drafts(results, self.fetch.inputs() if self.inputs is None else self.inputs)
        if self.rows is not None and len(self.rows) < self.num_items:
            for row in sorted(set(range(self.num_items)).difference(self.rows)):
                results.insert(row, StepOutput())
        return results

    def _accept_drafts(self, results: Sequence[RowResult], inputs: Sequence[int]) -> list[RowResult]:
        """One per request; None where the first token could not be drawn."""
        accepted: list[RowResult] = []
        row = 0
        while row < len(results):
            end = row + 1 + self.depths.get(row, 0)
            drawn, draft_ids = results[row:end], inputs[row + 1 : end]
            is_alone = not draft_ids or drawn[0] is None
            accepted.append(drawn[0] if is_alone else accept_equal([_sampled(result) for result in drawn], draft_ids))
            row = end
        return accepted

    def _results(self, fetch: Fetch) -> list[RowResult]:
        """One per token."""
        tokens = fetch.tokens()[: self.num_sampled]
        results: list[RowResult] = [*tokens]
        self.lacks_tokens = NO_TOKEN in tokens
        if self.lacks_tokens:
            results = [None if token == NO_TOKEN else token for token in tokens]
        for index, count in self.scored:
            if results[index] is not None:
                results[index] = StepOutput([tokens[index]], [scores.unpacked(fetch.scores()[index], count)])
        for index, error in self.errors.items():
            results[index] = StepOutput(error=str(error), error_param=error.param)
        return results


def _sampled(result: RowResult) -> SampledToken:
    if isinstance(result, StepOutput):
        return SampledToken(result.token_ids[0], None if result.logprobs is None else result.logprobs[0])
    return SampledToken(result)
