"""The options `quantization` and `kv_cache_dtype`: quantisation on the fly, its reporting, and refused combinations."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.config.model import load_model_config
from engine.config.quantization import parse_quantization
from engine.device import format_name
from engine.errors import EngineConfigError, UnsupportedModel, WeightsError
from engine.formats import check_formats
from engine.options import EngineOptions
from engine.quantization import on_the_fly
from engine.quantization.kv_scales import KvScales
from engine.verify import verify_model
from engine.weights import WeightPlan
from kernels import ops
from tests.support import quantised_checkpoints as layouts
from tests.support.checkpoint_logprobs import llm_logprobs
from tests.support.engines import small_engine
from tests.support.tiny_models import make_encoder, make_model, saved_model
from tests.support.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

SMALL: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_cache_bytes": 1_000_000}
PROMPT = [[(11 * i * i + i) % 120 + 3 for i in range(40)]]
INT8_TOLERANCE = 0.5  # logprobs of a random model with wide weights; a forgotten scale moves them by ten


@pytest.fixture(scope="module")
def model() -> Path:
    return saved_model("qwen3_moe", hidden_size=64, intermediate_size=128, tie_word_embeddings=False).directory


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_on_the_fly_quantisation_changes_logprobs_a_little(quantization: str, model: Path) -> None:
    plain, quantised = llm_logprobs(model), llm_logprobs(model, quantization=quantization)
    difference = (plain - quantised).abs()
    assert 0 < float(difference.mean()) < INT8_TOLERANCE


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_batch_invariant_logprobs_do_not_depend_on_the_chunks_of_the_prompt(quantization: str, model: Path) -> None:
    whole = llm_logprobs(model, quantization=quantization, batch_invariant=True)
    assert torch.equal(
        whole, llm_logprobs(model, quantization=quantization, batch_invariant=True, max_num_batched_tokens=7, max_num_seqs=4)
    )


def test_engine_info_names_the_formats_in_use_and_the_smaller_weights(model: Path) -> None:
    plain, quantised = small_engine(model), small_engine(model, quantization="int8", kv_cache_dtype="fp8")
    assert (plain.info.quantization, plain.info.kv_cache_dtype) == ("none", "float32")
    assert (quantised.info.quantization, quantised.info.kv_cache_dtype) == ("int8", "fp8_e4m3")
    assert "int8 weights" in quantised.info.kernels
    assert quantised.info.num_parameters == plain.info.num_parameters
    assert quantised.info.weights_bytes < 0.5 * plain.info.weights_bytes


def test_few_modules_are_unquantised_at_a_time_while_a_model_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unquantised: list[int] = []
    max_unquantised = 0
    load = on_the_fly.PackedOnLoad.load

    def counted(self: Any, start: int, tensor: torch.Tensor) -> None:
        nonlocal max_unquantised
        load(self, start, tensor)
        if self._weight is None:
            if id(self) in unquantised:
                unquantised.remove(id(self))
        elif id(self) not in unquantised:
            unquantised.append(id(self))
        max_unquantised = max(max_unquantised, len(unquantised))

    monkeypatch.setattr(on_the_fly.PackedOnLoad, "load", counted)
    small_engine(model, quantization="int8")
    assert unquantised == []
    assert max_unquantised < 20  # of 50: safetensors orders by name, and an expert's gate and up lie apart


def test_routers_are_not_quantised(model: Path) -> None:
    linear = on_the_fly.OnTheFlyStorage(on_the_fly.int8_packer, lambda weight, bias: lambda x: x @ weight.T)
    router = linear.linear([("model.layers.0.mlp.gate", 4)], 8, bias=False, dtype=torch.float32, device=torch.device("cpu"))
    weight, x = torch.randn(4, 8), torch.randn(2, 8)
    router.load(0, weight)
    assert torch.equal(router.pack(on_the_fly.int8_packer)(x), x @ weight.T)


@pytest.mark.parametrize("names", list(itertools.permutations(["q.weight", "q.bias", "v.weight", "v.bias"])))
def test_bias_and_weights_may_be_read_in_any_order(names: tuple[str, ...]) -> None:
    """At the end of a shard, transformers writes the bias of a module after its weight."""
    storage = on_the_fly.OnTheFlyStorage(on_the_fly.int8_packer, ops.pack_linear)
    linear = storage.linear([("q", 8), ("v", 4)], 16, bias=True, dtype=torch.float32, device=torch.device("cpu"))
    plan = WeightPlan()
    linear.plan(plan)
    tensors = {
        "q.weight": torch.ones(8, 16),
        "q.bias": torch.ones(8),
        "v.weight": torch.ones(4, 16),
        "v.bias": torch.full((4,), 2.0),
    }
    for name in names:
        destination = plan.destinations[name]
        assert not isinstance(destination, torch.Tensor)
        destination.load(tensors[name])
    expected = torch.tensor([16.0 + 1] * 8 + [16.0 + 2] * 4)
    torch.testing.assert_close(linear.pack(ops.pack_linear)(torch.ones(1, 16))[0], expected)


def test_a_quantised_checkpoint_accepts_only_its_own_method(model: Path, tmp_path: Path) -> None:
    plain = saved_model("llama", **layouts.SIZES).directory
    written = layouts.write(plain, tmp_path / "awq", layouts.awq())
    assert small_engine(written.directory, quantization="awq").info.quantization == "awq"
    for other in ("int8", "fp8", "gptq"):
        with pytest.raises(EngineConfigError, match=rf"quantization = '{other}' cannot be applied: .* already \(awq\)"):
            small_engine(written.directory, quantization=other)
    with pytest.raises(
        EngineConfigError, match=r"quantization = 'awq' cannot be applied to an unquantised checkpoint; .* int8, fp8"
    ):
        small_engine(model, quantization="awq")


def test_quantization_is_refused_for_encoders(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    with pytest.raises(EngineConfigError, match="quantization is not supported for encoders"):
        LLM(tmp_path, quantization="int8", **SMALL)


def test_a_quantised_encoder_checkpoint_is_refused(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("{", '{"quantization_config": {"quant_method": "awq"},', 1))
    with pytest.raises(UnsupportedModel, match="quantization_config is not supported for encoders"):
        LLM(tmp_path, **SMALL)


def test_a_quantised_draft_model_keeps_greedy_tokens(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "model", **layouts.SIZES)
    written = layouts.write(tmp_path / "model", tmp_path / "draft", layouts.gptq())
    speculative = {"method": "draft_model", "model": str(written.directory), "num_speculative_tokens": 3}
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = []
    for config in (None, speculative):
        with LLM(tmp_path / "model", speculative_config=config, **SMALL) as llm:
            answers.append(llm.generate(PROMPT, greedy, use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


def with_code(code: int) -> torch.Tensor:
    """A matrix in e4m3 whose last element has the bits of `code`."""
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    codes[-1, -1] = code
    return codes.view(torch.float8_e4m3fn)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, layouts.WrittenCheckpoint]:
    directory = tmp_path_factory.mktemp("damaged")
    plain = saved_model("llama", vocab_size=VOCAB_SIZE, **layouts.SIZES).directory
    fp8 = layouts.fp8(per_row=True, activations="static", compressed=True)
    made = {"fp8": fp8, "awq": layouts.awq(), "gptq": layouts.gptq()}
    return {name: layouts.write(plain, directory / name, layout) for name, layout in made.items()}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "fp8",
            {"weight_scale": None},
            "q_proj.weight is torch.float8_e4m3fn, expected torch.float32; .* scales must describe",
        ),
        ("fp8", {"input_scale": torch.tensor(0.0)}, "q_proj.input_scale is zero"),
        ("fp8", {"input_scale": None}, "1 tensor is missing: .*q_proj.input_scale"),
        ("fp8", {"input_scale": torch.ones(2)}, r"q_proj.input_scale has shape \(2,\), expected one number; blocks are"),
        (
            "fp8",
            {"weight_scale": torch.ones(2, 2)},
            r"q_proj.weight_scale has shape \(2, 2\), expected one number or \[64, 1\]",
        ),
        (
            "fp8",
            {"weight_scale": torch.tensor(float("nan"))},
            "q_proj.weight_scale holds scales that are not finite",
        ),
        ("fp8", {"weight_scale": torch.tensor(-1.0)}, "q_proj.weight_scale holds negative scales"),
        *(
            ("fp8", {"weight_scale": torch.tensor(1.0).to(dtype)}, f"weight_scale is {dtype}, expected a .* of 16 bits or more")
            for dtype in (torch.int32, torch.bool, torch.float8_e4m3fn)
        ),
        ("awq", {"scales": torch.full((2, 64), float("inf"))}, "q_proj.scales holds scales that are not finite"),
        ("fp8", {"weight": torch.ones(64, 64)}, "q_proj.weight is torch.float32, expected torch.float8_e4m3fn"),
        ("fp8", {"weight": torch.ones(64, 64, dtype=torch.int8)}, "q_proj.weight is torch.int8, expected torch.float8_e4m3fn"),
        ("awq", {"qweight": torch.ones(64, 8)}, "q_proj.qweight is torch.float32, expected torch.int32 with eight codes"),
        ("awq", {"qweight": torch.ones(8, 64, dtype=torch.int32)}, r"q_proj.qweight has shape \(8, 64\), expected \(64, 8\)"),
        ("awq", {"qzeros": None}, "1 tensor is missing: .*q_proj.qzeros"),
        ("awq", {"scales": torch.ones(4, 64)}, r"q_proj.scales has shape \(4, 64\), expected \(2, 64\) by group_size"),
        ("gptq", {"g_idx": torch.zeros(64)}, "q_proj.g_idx is torch.float32"),
        (
            "gptq",
            {"g_idx": torch.zeros(64).to(torch.uint32)},
            r"g_idx is torch.uint32 \(64,\), expected int32 or int64 \(64,\)",
        ),
        ("gptq", {"g_idx": torch.zeros(64, dtype=torch.int16)}, "q_proj.g_idx is torch.int16"),
        ("gptq", {"g_idx": torch.full((64,), 2)}, "q_proj.g_idx names groups that do not exist: there are 2"),
        ("gptq", {"g_idx": torch.zeros(64, dtype=torch.int32)}, "q_proj.g_idx does not divide 64 columns into groups of 32"),
        ("gptq", {"scales": torch.full((2, 64), 1 / 3)}, "q_proj.scales has scales of torch.float32 that neither float16 nor"),
        ("fp8", {"weight": with_code(0x7F)}, "q_proj.weight holds codes that are no numbers"),
        ("fp8", {"weight": with_code(0xFF)}, "q_proj.weight holds codes that are no numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_tensors_are_named_by_the_engine_and_by_verification(
    name: str, changes: dict[str, Any], message: str, checkpoints: dict[str, layouts.WrittenCheckpoint], tmp_path: Path
) -> None:
    directory = layouts.damaged_copy(checkpoints[name], tmp_path / "damaged", **changes)
    write_tokenizer(directory)
    with pytest.raises(WeightsError, match=message):
        small_engine(directory)
    with pytest.raises(WeightsError, match=message):
        verify_model(directory)


@pytest.mark.parametrize("shape", [(64, 32), (32, 64)])
def test_a_matrix_of_another_shape_is_named_when_it_is_quantised_on_the_fly(shape: tuple[int, int], tmp_path: Path) -> None:
    plain = saved_model("llama", vocab_size=VOCAB_SIZE, **layouts.SIZES)
    shutil.copytree(plain.directory, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(shape)
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match=rf"q_proj.weight has shape \({shape[0]}, {shape[1]}\), expected \(64, 64\)"):
        small_engine(tmp_path / "model", quantization="int8")


def test_all_finite_fp8_codes_are_accepted(checkpoints: dict[str, layouts.WrittenCheckpoint], tmp_path: Path) -> None:
    codes = torch.arange(64 * 64) % 256
    numbers = torch.where((codes & 0x7F) == 0x7F, 0, codes).to(torch.uint8).view(64, 64).view(torch.float8_e4m3fn)
    directory = layouts.damaged_copy(checkpoints["fp8"], tmp_path / "all", weight=numbers)
    write_tokenizer(directory)
    verify_model(directory)


def test_gptq_without_g_idx_has_consecutive_groups(checkpoints: dict[str, layouts.WrittenCheckpoint], tmp_path: Path) -> None:
    without = layouts.damaged_copy(checkpoints["gptq"], tmp_path / "without", g_idx=None)
    assert torch.equal(llm_logprobs(without), llm_logprobs(checkpoints["gptq"].directory))


@pytest.mark.parametrize(
    ("stored", "values"),
    [({"kv_scale": 0.25}, [0.25, 0.25]), ({"attn.v_scale": 0.5}, [1.0, 0.5]), ({}, [1.0, 1.0])],
    ids=["one for both", "values alone", "none"],
)
def test_scales_of_keys_and_values_that_a_checkpoint_lacks_are_one(stored: dict[str, float], values: list[float]) -> None:
    scales, plan = KvScales(torch.device("cpu")), WeightPlan()
    scales.plan(plan, "layer")
    assert plan.optional == plan.destinations.keys()
    for name, number in stored.items():
        load_scale(plan, name, torch.tensor([number]))
    assert scales.values.tolist() == values
    assert scales.stored == [None if value == 1.0 else value for value in values]


def test_scales_of_single_heads_are_refused_for_keys_and_values() -> None:
    plan = WeightPlan()
    KvScales(torch.device("cpu")).plan(plan, "layer")
    with pytest.raises(WeightsError, match=r"has shape \(8,\), expected one number for all heads"):
        load_scale(plan, "k_scale", torch.ones(8))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_scale_under_two_names_must_be_the_same_number(device: str) -> None:
    plan = WeightPlan()
    KvScales(torch.device(device)).plan(plan, "layer")
    load_scale(plan, "k_scale", torch.tensor(0.25))
    load_scale(plan, "attn.k_scale", torch.tensor([0.25]))
    with pytest.raises(WeightsError, match=r"is 0\.5, but under another name it is 0\.25"):
        load_scale(plan, "kv_scale", torch.tensor(0.5))


def load_scale(plan: WeightPlan, name: str, scale: torch.Tensor) -> None:
    destination = plan.destinations[f"layer.{name}"]
    assert not isinstance(destination, torch.Tensor)
    destination.load(scale)


@pytest.mark.parametrize(
    ("stored", "options", "dtype", "message"),
    [
        (layouts.gptq(), {}, torch.float32, "dtype must be bfloat16 or float16 on a GPU for weights of 4 bits"),
        (None, {}, torch.float32, "dtype must be bfloat16 or float16 on a GPU for a mixture of experts"),
        (layouts.fp8(per_row=True, activations="dynamic", compressed=True), {}, torch.bfloat16, "quantization fp8 needs"),
        (None, {"quantization": "fp8"}, torch.bfloat16, r"quantization fp8 needs .* 8.9 or newer, this one has 8.0; use int8"),
        (None, {"kv_cache_dtype": "fp8"}, torch.bfloat16, "kv_cache_dtype fp8 needs a GPU of compute capability 8.9"),
        (None, {"quantization": "int8"}, torch.bfloat16, None),
        (layouts.awq(), {}, torch.float16, None),
    ],
)
def test_formats_that_a_gpu_cannot_compute_are_refused_before_loading(
    stored: layouts.Layout | None,
    options: dict[str, Any],
    dtype: torch.dtype,
    message: str | None,
    model: Path,
) -> None:
    config = load_model_config(model)
    if stored is not None:
        config = replace(config, quantization=parse_quantization({"quantization_config": stored.settings}))
    given = EngineOptions(model=model, **options)
    expectation = contextlib.nullcontext() if message is None else pytest.raises(EngineConfigError, match=message)
    with expectation:
        check_formats(config, given, format_name(dtype), (8, 0))
    check_formats(config, given, format_name(dtype), None)


@pytest.mark.parametrize("head_dim", [256, 258])
def test_head_dims_without_a_gpu_kernel_are_refused_before_loading(head_dim: int, model: Path) -> None:
    config = replace(load_model_config(model), head_dim=head_dim)
    expectation = (
        contextlib.nullcontext() if head_dim == 256 else pytest.raises(UnsupportedModel, match="at most 256 on a GPU, not 258")
    )
    with expectation:
        check_formats(config, EngineOptions(model=model), "bfloat16", (8, 9))
    check_formats(config, EngineOptions(model=model), "float32", None)
