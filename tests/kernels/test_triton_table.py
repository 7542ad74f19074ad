"""The operations logged at the start are the ones in use."""

from __future__ import annotations

import pytest
import torch

from kernels import ops

GPU = torch.device("cuda")
OF_TORCH = {"route", "mix_experts", "cap_logits"}
"""On a GPU: of some numbers in a row, and the way of experts that are no matrices of one kind."""


def listed(device: torch.device, dtype: torch.dtype, *, batch_invariant: bool = False) -> dict[str, set[str]]:
    words = ops.listed(dtype, device, batch_invariant=batch_invariant).split()
    return {package: set(names.split(",")) for package, names in (word.split("=") for word in words)}


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_on_a_gpu_torch_computes_what_is_named_here_and_nothing_else(batch_invariant: bool) -> None:
    found = listed(GPU, torch.bfloat16, batch_invariant=batch_invariant)
    assert found["torch"] == OF_TORCH
    assert set(found) == {"triton", "torch", "none"}
    assert {"paged_decode", "paged_prefill", "pack_linear"} <= found["triton"]


def test_operations_that_batch_invariant_engines_do_without_are_told() -> None:
    assert {"linear_add", "normed_linear", "bind_greedy_head"} <= listed(GPU, torch.bfloat16, batch_invariant=True)["none"]


def test_a_cpu_has_no_kernels_of_triton() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert "triton" not in listed(torch.device("cpu"), dtype)


def test_rows_of_batch_invariant_engines_and_of_cpus_are_attended_one_by_one() -> None:
    shape = ops.AttentionShape(16, 32, 8, 128)
    for device, invariant in ((GPU, True), (torch.device("cpu"), False)):
        table = ops.operations(device, batch_invariant=invariant)
        assert table.max_verify_group(shape, torch.float32, device) == 1
