"""Sampling parameters of each request: columns of device tensors, one element per slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np
import torch

from kernels.device_words import ALIGNED_WORDS, DeviceWords, Pieces, Words

SUPPRESSED_IDS_MAX = 8
"""End tokens of a slot that `min_tokens_until` can suppress."""

SLOT_WORDS = Struct(f"<7f2i2q{SUPPRESSED_IDS_MAX}i")
"""A slot's parameters: floats, ints, longs, suppressed_ids, each in the order of `SamplingColumns`."""


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """S slots, V tokens, Q rows of bias. A captured graph keeps the addresses; the values change between its replays.

    scale: [S] float32, log2(e) / temperature; 0 is greedy. streams: [S] int64, derived from the seed; they key the noise
    top_k: [S] int32, 0 is off; top_p: [S] float32, 1 is off; neg_log2_min_p: [S] float32, −log2(min_p), inf is off: min-p
        keeps tokens at most so many binary orders below the likeliest one; typical_p: [S] float32, 1 is off
    repetition, frequency, presence: [S] float32; 1, 0, 0 are off
    min_tokens_until: [S] int64, below this position no token is one of suppressed_ids: [S, SUPPRESSED_IDS_MAX] int32, -1 none
    counts: [S, V] int32, for the three penalties. Bit 0: occurs in prompt or output; bits above: occurrences in the output
    rules: [S] int32, the row of bias that a slot uses, -1 none. bias: [Q, V] float32, added to the logits; -inf forbids
    floats, ints, longs: three tables whose rows are those columns above that have one element per slot. floats: scale,
        top_p, neg_log2_min_p, typical_p, repetition, frequency, presence; ints: top_k, rules; longs: streams, min_tokens_until
    words: the memory of the three tables and suppressed_ids; places: [S, 21] int64 on the host, the indices of each slot's
        words
    """

    scale: torch.Tensor
    streams: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    neg_log2_min_p: torch.Tensor
    typical_p: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    min_tokens_until: torch.Tensor
    suppressed_ids: torch.Tensor
    counts: torch.Tensor
    rules: torch.Tensor
    bias: torch.Tensor
    floats: torch.Tensor
    ints: torch.Tensor
    longs: torch.Tensor
    words: DeviceWords
    places: np.ndarray[Any, Any]

    @classmethod
    def empty(
        cls,
        num_slots: int,
        vocab_size: int,
        num_rules: int,
        device: torch.device,
        *,
        make_words: Callable[[Pieces, torch.device], DeviceWords] = DeviceWords,
    ) -> SamplingColumns:
        """All slots greedy and without rules. 4 · V bytes for each slot and each row of bias. `make_words`: makes words that
        contain these pieces, possibly with others that are written together with them."""
        width = -(-num_slots // ALIGNED_WORDS) * ALIGNED_WORDS  # each column begins at an alignment that kernels accept
        pieces = {name: (dtype, (len(defaults), width)) for name, (dtype, defaults) in _TABLES.items()}
        words = make_words({**pieces, "suppressed_ids": (torch.int32, (num_slots, SUPPRESSED_IDS_MAX))}, device)
        for name, (dtype, defaults) in _TABLES.items():
            words.tensor(name).copy_(torch.tensor(defaults, dtype=dtype)[:, None])
        floats, ints, longs = (words.tensor(name)[:, :num_slots] for name in _TABLES)
        places = [words.places(name).swapaxes(0, 1)[:num_slots] for name in _TABLES] + [words.places("suppressed_ids")]
        scale, top_p, neg_log2_min_p, typical_p, repetition, frequency, presence = floats.unbind(0)
        top_k, rules = ints.unbind(0)
        streams, min_tokens_until = longs.unbind(0)
        return cls(
            scale=scale,
            streams=streams,
            top_k=top_k,
            top_p=top_p,
            neg_log2_min_p=neg_log2_min_p,
            typical_p=typical_p,
            repetition=repetition,
            frequency=frequency,
            presence=presence,
            min_tokens_until=min_tokens_until,
            suppressed_ids=words.tensor("suppressed_ids").fill_(-1),
            counts=_zeros(num_slots, vocab_size, torch.int32, device),
            rules=rules,
            bias=_zeros(max(1, num_rules), vocab_size, torch.float32, device),
            floats=floats,
            ints=ints,
            longs=longs,
            words=words,
            places=np.concatenate([each.reshape(num_slots, -1) for each in places], axis=1),
        )

    def to_write(self, slots: Sequence[int], packed: bytes) -> Words:
        """The arguments of `words.write` for the parameters of slots, all different. packed: `SLOT_WORDS` of each"""
        return self.places[np.array(slots)].reshape(-1), np.frombuffer(packed, np.int32)


_TABLES: dict[str, tuple[torch.dtype, list[float]]] = {
    "floats": (torch.float32, [0.0, 1.0, float("inf"), 1.0, 1.0, 0.0, 0.0]),
    "ints": (torch.int32, [0, -1]),
    "longs": (torch.int64, [0, 0]),
}
"""The tables by name, with a slot's values in each of their rows when everything is off."""


def _zeros(num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[num_rows, vocab_size] of four bytes each. A CPU allocates the memory as it is written; most of it never is."""
    if device.type != "cpu":
        return torch.zeros(num_rows, vocab_size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((num_rows, vocab_size), dtype=np.int32)).view(dtype)
