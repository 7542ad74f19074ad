"""Embedding lookup by token and position: the Triton kernels and the torch operations against loops."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from kernels.reference import embedding as reference
from kernels.torch import embedding as cpu_embedding
from kernels.triton.step import embedding as triton_embedding
from tests.support.kernel_cases import FLOATS, Guarded, normal, poisoned
from tests.support.kernel_tolerances import assert_near, assert_same

BOTH = pytest.mark.parametrize("kernels", [triton_embedding, cpu_embedding], ids=["triton", "torch"])


@BOTH
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (17, 96), (3, 1031), (2, 2304)])
def test_embeddings_are_rows_of_the_table(
    kernels: ModuleType, tokens: int, hidden: int, ids_dtype: torch.dtype, device: torch.device
) -> None:
    table = poisoned(50, hidden, dtype=torch.float32, device=device)
    ids = torch.randperm(50, generator=torch.Generator().manual_seed(1))[:tokens].to(ids_dtype).to(device)
    table[ids] = normal(tokens, hidden, dtype=torch.float32, device=device)
    assert_same(kernels.embed(ids, table), reference.embed(ids, table))


@BOTH
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_multiplier_is_rounded_once(kernels: ModuleType, dtype: torch.dtype, device: torch.device) -> None:
    table, ids = normal(9, 96, dtype=dtype, device=device), torch.tensor([8, 0, 8], device=device)
    assert_near(kernels.embed(ids, table, multiplier=48.0), reference.embed(ids, table, multiplier=48.0), "pointwise")


def test_only_the_output_is_written(device: torch.device) -> None:
    table, ids = normal(9, 130, dtype=torch.bfloat16, device=device), torch.tensor([8, 0, 8], device=device)
    out = Guarded((3, 130), torch.bfloat16, device)
    triton_embedding.embed(ids, table, out=out.tensor)
    assert_same(out.check(), table[ids])
    cosines, sines = Guarded((3, 1, 24), torch.float32, device), Guarded((3, 1, 24), torch.float32, device)
    cos, sin = (normal(9, 1, 24, dtype=torch.float32, device=device, seed=seed) for seed in (1, 2))
    triton_embedding.rotation_rows(cos, sin, ids, out=(cosines.tensor, sines.tensor))
    assert_same(cosines.check(), cos[ids])
    assert_same(sines.check(), sin[ids])


@BOTH
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (5, 96), (33, 128), (3, 512)])
def test_rotary_rows_are_rows_of_their_tables(
    kernels: ModuleType, tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    cos, sin = (normal(40, 1, width, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    positions = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:tokens].to(device)
    for made, expected in zip(
        kernels.rotation_rows(cos, sin, positions), reference.rotation_rows(cos, sin, positions), strict=True
    ):
        assert_same(made, expected)


@BOTH
def test_an_empty_batch_gives_an_empty_result(kernels: ModuleType, device: torch.device) -> None:
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    table = normal(3, 1, 16, dtype=torch.float32, device=device)
    assert kernels.embed(nothing, table[:, 0]).shape == (0, 16)
    assert kernels.rotation_rows(table, table, nothing)[1].shape == (0, 1, 16)
