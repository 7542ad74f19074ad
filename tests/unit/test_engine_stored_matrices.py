"""Fused modules of quantised checkpoints, in random sizes and mixtures, equal matrices decoded by the writers of the tests."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.config.quantization import parse_quantization
from engine.config.stored_weights import Fp8BlockWeights, MultipliedWeights, StoredWeights
from engine.errors import WeightsError
from engine.quantization.checkpoint import CheckpointStorage
from engine.quantization.decoding import DecodedCheckpoint
from engine.quantization.on_the_fly import OnTheFlyStorage
from engine.quantization.products import StaticFp8Product, StaticFp8Products
from engine.weights import LinearStorage, StoredLinear, WeightPlan, load_weights
from kernels import ops
from tests.support import hub_checkpoints as hub
from tests.support import quantised_checkpoints as layouts

SEEDS = range(6)


def random_layout(kind: str, draw: random.Random, *, activations: str) -> layouts.Layout:
    """A layout of this kind with options drawn from those that its method has."""
    group_size, symmetric = draw.choice([-1, 32, 64, 128]), draw.random() < 0.5
    seed = draw.choice([None, 1, 2])
    match kind:
        case "awq":
            return layouts.awq(group_size=group_size)
        case "gptq":
            version, signed = draw.choice(["gptq", "gptq_v2"]), symmetric and draw.random() < 0.5
            ordered, same = draw.random() < 0.5, draw.random() < 0.5
            return layouts.gptq(
                group_size=group_size,
                symmetric=symmetric,
                version=version,
                desc_act=ordered,
                same_order=same,
                signed_scales=signed,
            )
        case "gptq 8":
            return hub.gptq_8_bits(desc_act=draw.random() < 0.5)
        case "packed 4":
            return hub.packed_4_bits(group_size=group_size, symmetric=symmetric, order_seed=None if group_size == -1 else seed)
        case "packed 8":
            return hub.packed_8_bits()
        case "packed 8 groups":
            return hub.packed_8_bit_groups(group_size=draw.choice([32, 64, 128]), symmetric=symmetric)
        case "int8":
            return hub.int8(per_row=symmetric, activations=activations)
        case "fp8":
            return layouts.fp8(per_row=symmetric, activations=activations, compressed=symmetric or activations == "none")
        case _:
            block = draw.choice([(128, 128), (48, 40), (16, 256), (1, 1)])
            return hub.fp8_blocks(block=block, compressed=symmetric, dtype=draw.choice([torch.float32, torch.bfloat16]))


KINDS = ("awq", "gptq", "gptq 8", "packed 4", "packed 8", "packed 8 groups", "int8", "fp8", "fp8 blocks")


def storage_of(weights: StoredWeights, names: set[str], *, row_invariant: bool) -> LinearStorage:
    if isinstance(weights, MultipliedWeights):
        return CheckpointStorage(weights, names, row_invariant=row_invariant)
    return OnTheFlyStorage(ops.pack_linear, ops.pack_linear, DecodedCheckpoint(weights, names))


def weights_of(layout: layouts.Layout) -> StoredWeights:
    quantization = parse_quantization({"quantization_config": layout.settings})
    assert quantization is not None
    return quantization.weights


def plan_of(
    storage: LinearStorage,
    modules: list[tuple[str, int]],
    columns: int,
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[StoredLinear, WeightPlan]:
    """A fused module, and what must be read for it."""
    linear = storage.linear(modules, columns, bias=bias, dtype=dtype, device=torch.device("cpu"))
    assert linear is not None
    plan = WeightPlan(storage=storage)
    linear.plan(plan)
    return linear, plan


def read(
    tensors: dict[str, torch.Tensor],
    weights: StoredWeights,
    modules: list[tuple[str, int]],
    columns: int,
    directory: Path,
    *,
    bias: bool = False,
    row_invariant: bool = False,
) -> StoredLinear:
    """A fused module, read from a file of these tensors."""
    save_file(tensors, directory / "model.safetensors")
    linear, plan = plan_of(storage_of(weights, set(tensors), row_invariant=row_invariant), modules, columns, bias=bias)
    load_weights(directory, plan, progress=lambda _: None)
    return linear


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_module_multiplies_by_the_matrices_that_its_parts_stand_for(kind: str, seed: int, tmp_path: Path) -> None:
    draw = random.Random(f"{kind} {seed}")
    torch.manual_seed(seed)
    layout = random_layout(kind, draw, activations=("none", "dynamic", "static")[seed % 3])
    columns = draw.choice([128, 256, 384])
    modules = [(f"{i}.{draw.choice(['k_proj', 'v_proj'])}", draw.choice([8, 16, 72, 136])) for i in range(draw.randint(1, 4))]
    plain = {name for name, _ in modules[1:] if draw.random() < 0.3}
    has_bias = draw.random() < 0.5
    biased = {name for name, _ in modules if has_bias or draw.random() < 0.3}
    tensors: dict[str, torch.Tensor] = {}
    expected = []
    for name, rows in modules:
        stored, meaning = {"weight": torch.randn(rows, columns)}, torch.empty(0)
        if name in plain:
            meaning = stored["weight"]
        else:
            stored, meaning = layout.store(name, torch.randn(rows, columns))
        bias = torch.randn(rows) if name in biased else torch.zeros(rows)
        if name in biased:
            stored["bias"] = bias
        if draw.random() < 0.5:
            stored = {last: each.float() if last.endswith(("scale", "scales")) else each for last, each in stored.items()}
        tensors |= {f"{name}.{last}": each.contiguous() for last, each in stored.items()}
        x = torch.eye(columns)
        if layout.rounds_input is not None and name not in plain:
            x = layout.rounds_input(name, x)
        expected.append(torch.cat([x @ meaning.T, bias[None]]))
    options = {"bias": has_bias, "row_invariant": draw.random() < 0.3}
    linear = read(tensors, weights_of(layout), modules, columns, tmp_path, **options)
    x = torch.cat([torch.eye(columns), torch.zeros(1, columns)])
    found = linear.pack(ops.pack_linear)(x)
    bias_row = found[-1:]
    torch.testing.assert_close(torch.cat([found[:-1] - bias_row, bias_row]), torch.cat(expected, dim=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "rows", "columns", "bits", "multiple"),
    [
        (layouts.awq(group_size=-1), 12, 64, 4, 8),
        (layouts.gptq(group_size=-1), 12, 64, 4, 8),
        (layouts.gptq(group_size=-1), 16, 100, 4, 8),
        (hub.packed_4_bits(), 12, 64, 4, 8),
        (hub.packed_4_bits(group_size=-1), 16, 100, 4, 8),
        (hub.gptq_8_bits(), 16, 102, 8, 4),
        (hub.packed_8_bit_groups(), 16, 102, 8, 4),
    ],
)
def test_matrices_whose_codes_do_not_fill_their_words_are_refused_by_name(
    layout: layouts.Layout, rows: int, columns: int, bits: int, multiple: int
) -> None:
    weights = weights_of(layout)
    storage = storage_of(weights, {f"layer.{weights.marker}"}, row_invariant=False)
    message = f"layer has {rows} outputs and {columns} inputs: with {bits} bits, multiples of {multiple} are supported"
    with pytest.raises(WeightsError, match=message):
        plan_of(storage, [("layer", rows)], columns)


@pytest.mark.parametrize(("last", "product"), [("k_proj", StaticFp8Product), ("v_proj", StaticFp8Products)])
def test_neighbours_with_equal_input_scales_are_one_product(last: str, product: type, tmp_path: Path) -> None:
    layout = layouts.fp8(per_row=False, activations="static", compressed=False)
    modules = [("0.q_proj", 16), (f"0.{last}", 8)]
    tensors: dict[str, torch.Tensor] = {}
    for name, rows in modules:
        stored, _ = layout.store(name, torch.randn(rows, 64))
        tensors |= {f"{name}.{last_part}": each for last_part, each in stored.items()}
    assert type(read(tensors, weights_of(layout), modules, 64, tmp_path).pack(ops.pack_linear)) is product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoded_matrices_are_packed_in_the_format_of_the_computation(dtype: torch.dtype, tmp_path: Path) -> None:
    layout = hub.fp8_blocks()
    packed: list[torch.Tensor] = []

    def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> ops.LinearKernel:
        packed.append(weight)
        return ops.pack_linear(weight, bias)

    stored, meaning = layout.store("layer", torch.randn(8, 64))
    tensors = {f"layer.{last}": each for last, each in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = weights_of(layout)
    assert isinstance(weights, Fp8BlockWeights)
    storage = OnTheFlyStorage(pack, ops.pack_linear, DecodedCheckpoint(weights, set(tensors)))
    _, plan = plan_of(storage, [("layer", 8)], 64, dtype=dtype)
    load_weights(tmp_path, plan, progress=lambda _: None)
    assert torch.equal(packed[0], meaning.to(dtype))
