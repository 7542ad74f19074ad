"""The keys of the noise that kernels draw with equal those of the engine, which computes them without torch."""

from __future__ import annotations

import torch

from engine.sampling import randomness
from kernels import gumbel
from kernels.gumbel import ACCEPT, GUESS, RESIDUAL

SEEDS = (0, 1, 2**63 - 1)
POSITIONS = (0, 1, 4095, 2**31)


def test_kernels_key_a_token_by_the_bits_of_the_engine() -> None:
    """The SplitMix64 constants are in both: `engine.sampling.randomness` works on integers, `kernels.gumbel` on tensors."""
    for draw in (0, GUESS, ACCEPT, RESIDUAL):
        for seed in SEEDS:
            streams = torch.tensor([randomness.signed(randomness.stream(seed))] * len(POSITIONS))
            kernel_keys = gumbel.keys(streams, torch.tensor(POSITIONS), draw)
            engine_keys = [randomness.key(seed, position, draw=draw) for position in POSITIONS]
            assert kernel_keys.tolist() == [randomness.signed(key) for key in engine_keys]
            assert gumbel.uniform(kernel_keys).tolist() == [(key >> 16) / 2.0**48 for key in engine_keys]
