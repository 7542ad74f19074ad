"""What a step wants from the forward pass: for each item the rows that choose tokens, and the prompt rows that are scored.

Hidden states come back item by item, those that choose before those that are scored:

    item 0: known tokens … last │ guesses        item 1: a chunk of a prompt with log-probabilities
            ······        0       1   2                  3 4 5 6 (scored)      7 (chooses, if the prompt ends here)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.runner.batch_inputs import InputRow
from engine.sampling.logits_rules import SampledRow
from engine.scheduling.scheduled_batch import ScheduledRequest

FIRST = (0,)
NONE = range(0)


@dataclass(slots=True)
class StepRows:
    """Rows of one step. `places` are their indices into the hidden states; `choosing[i]` are item i's indices into `sampled`,
    `scored[i]` the indices of its scored rows into the hidden states, the first of which predicts token `scored_from[i]`."""

    inputs: list[InputRow] = field(default_factory=list)
    sampled: list[SampledRow] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    choosing: list[range] = field(default_factory=list)
    scored: list[range] = field(default_factory=list)
    scored_from: list[int] = field(default_factory=list)
    num_outputs: int = 0

    @classmethod
    def of(cls, items: Sequence[ScheduledRequest]) -> StepRows:
        rows = cls()
        for item in items:
            if item.num_tokens == 1 and item.samples and item.request.sampling.prompt_logprobs is None:
                rows._add_token(item)
            else:
                rows._add(item)
        return rows

    def _add_token(self, item: ScheduledRequest) -> None:
        """A plain decode, of which a batch may have hundreds: what `_add` does, without what it does not need."""
        request, start, row = item.request, item.start, len(self.sampled)
        token_ids = request.token_ids
        self.inputs.append(InputRow((token_ids[start],), start, request.block_table, FIRST))
        self.sampled.append(SampledRow(request, len(token_ids)))
        self.places.append(self.num_outputs)
        self.choosing.append(range(row, row + 1))
        self.scored.append(NONE)
        self.scored_from.append(start + 1)
        self.num_outputs += 1

    def _add(self, item: ScheduledRequest) -> None:
        request, num_known = item.request, item.num_tokens - item.num_draft_tokens
        token_ids = request.token_ids[item.start : item.start + num_known] + item.draft_token_ids
        assert len(token_ids) == item.num_tokens, f"request {request.request_id} has {len(item.draft_token_ids)} guesses"
        chooses = range(num_known - 1, item.num_tokens) if item.samples else NONE
        positions = scored_positions(item)
        outputs = [*chooses, *(position - item.start for position in positions)]
        self.inputs.append(InputRow(token_ids, item.start, request.block_table, outputs))
        first, num_sampled = self.num_outputs, len(self.sampled)
        self.sampled += [SampledRow(request, request.num_tokens + depth) for depth in range(len(chooses))]
        self.places += range(first, first + len(chooses))
        self.choosing.append(range(num_sampled, len(self.sampled)))
        self.scored.append(range(first + len(chooses), first + len(outputs)))
        self.scored_from.append(positions.start + 1)
        self.num_outputs += len(outputs)


def scored_positions(item: ScheduledRequest) -> range:
    """Positions of this chunk whose next token is a prompt token that was not scored yet, if the request wants scores.

    Each row scores the token behind it, and the last prompt token's row chooses the first token of the output instead. A
    request that is computed again after preemption is not scored again. Answers beside the first share its prompt.
    """
    request = item.request
    if request.sampling.prompt_logprobs is None or request.index:
        return NONE
    first = max(item.start, request.num_prompt_tokens_computed)
    return range(first, max(first, min(item.start + item.num_tokens, request.num_prompt_tokens - 1)))
