"""The formats that an engine computes in and keeps its numbers in: defaults by device, groups of 4-bit weights, cards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.config.stored_weights import GroupLayout, Int4Weights
from engine.errors import EngineConfigError
from engine.formats import UNQUANTISED, check_formats, check_quantization, computed_dtype, formats_of, has_fp8
from engine.options import EngineOptions


def config(weights: Any = None, **fields: Any) -> Any:
    quantization = None if weights is None else SimpleNamespace(weights=weights, decoded=None, method="awq")
    return SimpleNamespace(
        **{"quantization": quantization, "hidden_size": 96, "head_dim": 64, "has_head": True, "experts": None, **fields}
    )


def options(**fields: Any) -> EngineOptions:
    return EngineOptions(model=cast("Any", "m"), **fields)


@pytest.mark.parametrize(
    ("requested", "stored", "device_type", "computed"),
    [
        ("auto", "bfloat16", "cuda", "bfloat16"),
        ("auto", "float16", "cuda", "float16"),
        ("auto", "float32", "cuda", "bfloat16"),
        ("auto", "float8_e4m3fn", "cuda", "bfloat16"),
        ("auto", "bfloat16", "cpu", "float32"),
        ("float16", "bfloat16", "cuda", "float16"),
        ("float32", "float32", "cuda", "float32"),
        ("bfloat16", "float32", "cpu", "bfloat16"),
    ],
)
def test_the_computed_format_has_16_bits_on_a_gpu_unless_another_is_requested(
    requested: str, stored: str, device_type: str, computed: str
) -> None:
    assert computed_dtype(requested, stored, device_type) == computed


def test_fp8_needs_compute_capability_8_9_on_a_gpu() -> None:
    assert [has_fp8(capability) for capability in (None, (9, 0), (8, 9), (8, 6), (7, 5))] == [True, True, True, False, False]
    for given in (options(quantization="fp8"), options(kv_cache_dtype="fp8")):
        check_formats(config(), given, "bfloat16", (8, 9))
        with pytest.raises(EngineConfigError, match=r"needs a GPU of compute capability 8\.9 or newer, this one has 8\.6"):
            check_formats(config(), given, "bfloat16", (8, 6))


@pytest.mark.parametrize(("group_size", "group"), [(32, 32), (None, 96)], ids=["groups", "whole rows"])
def test_4_bit_weights_without_groups_have_one_scale_for_each_row(group_size: int | None, group: int) -> None:
    weights = Int4Weights(layout=GroupLayout.COMPRESSED, group_size=group_size, zero_offset=0)
    assert formats_of(config(weights), options(), "bfloat16").weights.group == group


@pytest.mark.parametrize(
    ("layers", "head", "bits"),
    [(None, "int8", (16, 8)), ("int8", "none", (8, 0)), ("int8", None, (8, 8)), (None, None, (16, 0))],
)
def test_the_output_head_is_kept_as_its_option_says_or_like_the_layers(
    layers: str | None, head: str | None, bits: tuple[int, int]
) -> None:
    weights = formats_of(config(), options(quantization=layers, head_quantization=head), "bfloat16").weights
    assert (weights.bits, weights.head_bits) == bits


def test_options_that_contradict_the_checkpoint_are_refused_by_name() -> None:
    stored = config(SimpleNamespace())
    check_quantization(stored, "awq", "int8")
    check_quantization(config(), UNQUANTISED, "none")
    check_quantization(config(has_head=False), "int8", None)
    for refused, quantization, head, param in (
        (stored, "int8", None, "quantization"),
        (config(), "awq", None, "quantization"),
        (config(has_head=False), "int8", "int8", "head_quantization"),
    ):
        with pytest.raises(EngineConfigError) as caught:
            check_quantization(refused, quantization, head)
        assert caught.value.option == param
