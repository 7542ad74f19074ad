"""A layer of a decode step, kernel by kernel: the number of launches, and that fusion does not change results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from kernels.residual_stream import Stream
from kernels.triton.attention.rope_and_cache import rope_and_cache
from kernels.triton.products.fused_linear import linear_add, normed_linear
from kernels.triton.products.linear import linear
from kernels.triton.rows.activation import silu_mul
from kernels.triton.rows.norm import add_rms_norm, rms_norm
from tests.support.kernel_cases import normal, poisoned
from tests.support.kernel_tolerances import assert_near

HIDDEN, HEADS, KV_HEADS, SIZE, INNER, EPS = 64, 4, 2, 16, 96, 1e-6
LAUNCHES_MAX = 8
ATTENTION_LAUNCHES = 2  # parts of a context, then their sum


class Layer:
    """Random weights of one layer, without attention: its output is taken to be the queries."""

    def __init__(self, seed: int, device: torch.device) -> None:
        def matrix(rows: int, columns: int, place: int) -> torch.Tensor:
            drawn = normal(rows, columns, dtype=torch.float32, device=device, seed=10 * seed + place)
            return drawn / math.sqrt(columns)

        self.qkv, self.out = matrix((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN, 1), matrix(HIDDEN, HEADS * SIZE, 2)
        self.gate_up, self.down = matrix(2 * INNER, HIDDEN, 3), matrix(HIDDEN, INNER, 4)
        self.norms = [normal(HIDDEN, dtype=torch.float32, device=device, seed=10 * seed + place) for place in (5, 6)]


@dataclass
class Step:
    """Inputs that the layers of a step share."""

    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    cache: torch.Tensor

    @classmethod
    def of(cls, rows: int, device: torch.device) -> Step:
        angles = normal(rows, 1, SIZE // 2, dtype=torch.float32, device=device, seed=3)
        cos, sin = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
        cache = poisoned(2, 16, 2, KV_HEADS, SIZE, dtype=torch.float32, device=device)
        return cls(cos, sin, torch.arange(rows, device=device) * 3, cache)

    def attended(self, qkv: torch.Tensor) -> torch.Tensor:
        heads = qkv.view(-1, HEADS + 2 * KV_HEADS, SIZE)
        rope_and_cache(heads, self.cos, self.sin, self.cache, self.slots, num_kv_heads=KV_HEADS, rotary_dim=SIZE)
        return heads[:, :HEADS].reshape(-1, HEADS * SIZE)


def unfused(layers: list[Layer], x: torch.Tensor, step: Step) -> torch.Tensor:
    normed, residual = rms_norm(x, layers[0].norms[0], EPS), x
    for index, layer in enumerate(layers):
        branch = linear(step.attended(linear(normed, layer.qkv)), layer.out)
        normed, residual = add_rms_norm(branch, residual, layer.norms[1], EPS)
        branch = linear(silu_mul(linear(normed, layer.gate_up)), layer.down)
        normed, residual = add_rms_norm(branch, residual, layers[(index + 1) % len(layers)].norms[0], EPS)
    return residual


def fused(layers: list[Layer], x: torch.Tensor, step: Step) -> torch.Tensor:
    stream: Stream | None = None
    for index, layer in enumerate(layers):
        # Nobody has squared the embeddings: the first norm stands alone.
        qkv = normed_linear(stream, layer.qkv, EPS) if stream else linear(rms_norm(x, layer.norms[0], EPS), layer.qkv)
        stream = linear_add(step.attended(qkv), layer.out, stream.total if stream else x, layer.norms[1])
        activated = normed_linear(stream, layer.gate_up, EPS, gate="silu")
        stream = linear_add(activated, layer.down, stream.total, layers[(index + 1) % len(layers)].norms[0])
    assert stream is not None
    return stream.total


@pytest.mark.parametrize("rows", [1, 5])
def test_a_fused_layer_gives_the_same_result_with_three_launches_fewer(
    rows: int, launches: Callable[[], int], device: torch.device
) -> None:
    layers = [Layer(seed, device) for seed in (1, 2)]
    x = normal(rows, HIDDEN, dtype=torch.float32, device=device)
    steps = Step.of(rows, device), Step.of(rows, device)
    expected, plain = unfused(layers, x, steps[0]), launches()
    made, fewer = fused(layers, x, steps[1]), launches()
    assert_near(made, expected, "matmul", scale=4)
    written = ~steps[0].cache.isnan()
    assert_near(steps[1].cache[written], steps[0].cache[written], "matmul", scale=4)
    assert (plain - 1, fewer - 1) == (2 * 8, 2 * 5)  # the first layer's norm stands before all
    assert fewer // 2 + ATTENTION_LAUNCHES <= LAUNCHES_MAX
