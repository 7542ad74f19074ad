"""Masks of what typical sampling leaves out of rows of logits, for kernels that draw by columns and know no such filter.

The plain sampler says which tokens it would draw from, top-k, top-p and min-p before it included; the kernel draws from those
with the same noise, so that both choose the very same token. Nothing of the host is needed but the request, though rules that
read its tokens cannot be in it: penalties and bad words.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.grammar.masks import WORD_BITS
from engine.protocol import SamplingParams
from engine.sampling.logits_filters import is_greedy
from engine.sampling.logits_rules import SampledRow, has_penalties
from engine.sampling.sampler import Sampler

ROWS_MAX = 8
"""Rows at a time: each takes some 32 bytes for each word of the vocabulary meanwhile."""


def is_typical(sampling: SamplingParams) -> bool:
    """Whether typical sampling can leave anything out; the likeliest token is taken whatever it says."""
    return sampling.typical_p < 1.0 and not is_greedy(sampling)


def reads_tokens(sampling: SamplingParams) -> bool:
    """Whether rules come before the filter that depend on the tokens so far."""
    return has_penalties(sampling) or bool(sampling.bad_words_token_ids)


class TypicalMasks:
    """Of one engine."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sampler = Sampler(device)
        bits = [1 << bit for bit in range(WORD_BITS - 1)] + [-(1 << (WORD_BITS - 1))]
        self._bits = torch.tensor(bits, dtype=torch.int32, device=device)

    def narrow(self, masks: torch.Tensor, logits: torch.Tensor, rows: Mapping[int, SampledRow]) -> None:
        """Forbid in the masks of those of `rows` that are typical what they leave out.

        masks: [R, ceil(V / 32)] int32, bit b of word w allows token 32 w + b, changed in place; logits: [R, V], left as they
        are; rows: by their index
        """
        typical = [index for index, row in rows.items() if is_typical(row.sampling)]
        for first in range(0, len(typical), ROWS_MAX):
            part = typical[first : first + ROWS_MAX]
            places = torch.tensor(part).to(self._device)
            before = masks[places]
            drawn = self._sampler.distributions(logits[places].float(), [rows[index] for index in part], before) > 0
            masks.index_copy_(0, places, before & self._packed(drawn))

    def _packed(self, allowed: torch.Tensor) -> torch.Tensor:
        """allowed: [R, V] bool → [R, ceil(V / 32)] int32"""
        words = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % WORD_BITS)).view(len(allowed), -1, WORD_BITS)
        packed: torch.Tensor = (words * self._bits).sum(-1, dtype=torch.int32)
        return packed
