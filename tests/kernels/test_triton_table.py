"""The operations listed in the log at the start are those of the packages that serve them."""

from __future__ import annotations

import pytest
import torch

from kernels import ops

GPU = torch.device("cuda")
OF_TORCH = {"route", "mix_experts", "cap_logits"}
"""On a GPU: operations on a few values per row, and mixtures whose experts are not matrices of one kind."""


def listed(device: torch.device, dtype: torch.dtype, *, batch_invariant: bool = False) -> dict[str, set[str]]:
    words = ops.operations(device, dtype, batch_invariant=batch_invariant).listed().split()
    return {package: set(names.split(",")) for package, names in (word.split("=") for word in words)}


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_on_a_gpu_only_listed_operations_use_torch(batch_invariant: bool) -> None:
    found = listed(GPU, torch.bfloat16, batch_invariant=batch_invariant)
    assert found["torch"] == OF_TORCH
    assert set(found) == {"triton", "torch", "none"}
    assert {"paged_decode", "paged_prefill", "pack_linear"} <= found["triton"]


def test_operations_that_batch_invariant_engines_lack_are_listed() -> None:
    assert {"linear_add", "normed_linear", "bind_greedy_head"} <= listed(GPU, torch.bfloat16, batch_invariant=True)["none"]


def test_a_cpu_has_no_triton_kernels() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert "triton" not in listed(torch.device("cpu"), dtype)


def test_batch_invariant_engines_and_cpus_attend_row_by_row() -> None:
    shape = ops.AttentionShape(16, 32, 8, 128)
    for device, invariant in ((GPU, True), (torch.device("cpu"), False)):
        table = ops.operations(device, batch_invariant=invariant)
        assert table.max_verify_group(shape, torch.float32, device) == 1
