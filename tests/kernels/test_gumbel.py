"""Gumbel noise of the sampling kernels, against integer arithmetic, exact logarithms and the engine's keys."""

from __future__ import annotations

import math

import pytest
import torch

from engine.sampling import randomness
from kernels import gumbel
from kernels.gumbel import ACCEPT, DRAFT, RESIDUAL

SEEDS = (0, 1, 2**63 - 1)
POSITIONS = (0, 1, 4095, 2**31)


def test_kernels_and_engine_derive_the_same_key_for_a_token() -> None:
    """The SplitMix64 constants are in both: `engine.sampling.randomness` works on integers, `kernels.gumbel` on tensors."""
    for draw in (0, DRAFT, ACCEPT, RESIDUAL):
        for seed in SEEDS:
            streams = torch.tensor([randomness.signed(randomness.stream(seed))] * len(POSITIONS))
            kernel_keys = gumbel.keys(streams, torch.tensor(POSITIONS), draw)
            engine_keys = [randomness.key(seed, position, draw=draw) for position in POSITIONS]
            assert kernel_keys.tolist() == [randomness.signed(key) for key in engine_keys]
            assert gumbel.uniform(kernel_keys).tolist() == [(key >> 16) / 2.0**48 for key in engine_keys]


@pytest.mark.parametrize("key", [0, 1, 2**63 - 1, -1, -(2**63), 0x0123456789ABCDEF])
def test_the_hash_of_a_token_equals_that_of_integer_arithmetic(key: int) -> None:
    def by_hand(token_id: int) -> int:
        low, high = key & 0xFFFFFFFF, (key % 2**64) >> 32
        x = (token_id * 0x9E3779B1 + low) % 2**32
        x ^= x >> 16
        x = x * 0x21F0AAAD % 2**32
        x ^= x >> 15
        x = (x + high) * 0xD35A2D97 % 2**32
        return x ^ (x >> 15) | 1

    ids = [0, 1, 2, 31, 4096, 128_255, 2**31 - 1]
    found = gumbel.bits(torch.tensor([key]), torch.tensor([ids]))
    assert found.tolist() == [[by_hand(token_id) for token_id in ids]]


def test_logarithms_and_variates_are_accurate_to_the_last_bits_of_float32() -> None:
    x = torch.tensor([1e-30, 0.1, 0.5, 0.7071, 0.7072, 0.9999, 1.0, 1.4142, 1.4143, 3.0, 1e30])
    assert gumbel.log2(x).tolist() == pytest.approx([math.log2(number) for number in x.tolist()], rel=1e-6, abs=1e-9)
    hashed = torch.tensor([1, 3, 2**16 + 1, 2**30 + 1, 2**31 - 1, 2**31 + 1, 2**32 - 2**8 - 1, 2**32 - 1])
    expected = [-math.log1p(-number / 2**32) / math.log(2) for number in hashed.tolist()]
    assert gumbel.exponential(hashed).tolist() == pytest.approx(expected, rel=1e-6)
    key, ids = torch.tensor([77]), torch.arange(5)[None]
    assert gumbel.noise(key, ids)[0].tolist() == pytest.approx(
        [-math.log2(each) for each in gumbel.exponential(gumbel.bits(key, ids))[0].tolist()], rel=1e-6, abs=1e-6
    )


def test_the_weight_halves_with_each_power_of_two_and_ends_after_thirty() -> None:
    orders = [0.0, 0.25, 0.999, 1.0, 2.5, 17.75, 30.0, 30.9]
    found = gumbel.weights(torch.tensor([*orders, 31.0, 40.0, math.inf])).tolist()
    assert found[: len(orders)] == pytest.approx([2 ** (30 - each) for each in orders], rel=3e-7, abs=1)
    assert found[len(orders) :] == [0, 0, 0]
    assert found[0] == 2**30


def test_the_deviation_is_measured_from_the_mean_surprise() -> None:
    distance, scale = torch.tensor([[0.0, 0.5, 2.0, 9.0], [0.0, 0.0, 1.0, 100.0]]), torch.tensor([[1.4], [0.7]])
    weight = gumbel.weights(distance * scale)
    found = gumbel.deviations(distance, weight, scale)
    for row in range(2):
        weights, distances = weight[row].double(), distance[row].double()
        mean = float((weights * distances).sum() / weights.sum())
        assert found[row].tolist() == pytest.approx([abs(each - mean) for each in distances.tolist()], rel=1e-5)
