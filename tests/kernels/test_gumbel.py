"""Gumbel noise from a seed in the kernels equals the engine's, which computes it without torch."""

from __future__ import annotations

import torch

from engine.sampling import randomness
from kernels import gumbel
from kernels.gumbel import ACCEPT, GUESS, RESIDUAL

SEEDS = (0, 1, 2**63 - 1)
POSITIONS = (0, 1, 4095, 2**31)


def test_kernels_key_a_token_by_the_bits_of_the_engine() -> None:
    """The SplitMix64 constants stand in both: `engine.sampling.randomness` works on integers, `kernels.gumbel` on tensors."""
    for draw in (0, GUESS, ACCEPT, RESIDUAL):
        for seed in SEEDS:
            streams = torch.tensor([randomness.signed(randomness.stream(seed))] * len(POSITIONS))
            made = gumbel.keys(streams, torch.tensor(POSITIONS), draw)
            keys = [randomness.key(seed, position, draw=draw) for position in POSITIONS]
            assert made.tolist() == [randomness.signed(key) for key in keys]
            assert gumbel.uniform(made).tolist() == [(key >> 16) / 2.0**48 for key in keys]
