"""Checkpoint formats from other tools: those multiplied as stored, and those decoded while they are read (`quantization`)."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, verify
from engine.config.model import load_model_config
from engine.config.quantization import parse_quantization
from engine.config.stored_weights import Int8GroupWeights
from engine.errors import EngineConfigError, WeightsError
from engine.formats import check_formats
from engine.offline.perplexity import FormatOptions, compare
from engine.options import EngineOptions
from engine.quantization import group_tensors
from engine.quantization.group_tensors import GroupTensors
from engine.simulator.models import find_gpu
from engine.speculation.options import SpeculativeOptions
from engine.verify import verify_model
from kernels import ops
from tests.support import hub_checkpoints as hub
from tests.support import quantised_checkpoints as layouts
from tests.support.engines import generation_request, run_to_end, small_engine, tokens
from tests.support.planning import memory_fit
from tests.support.tiny_models import make_model, saved_model
from tests.support.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

MULTIPLIED = {
    "packed-4": hub.packed_4_bits(symmetric=False, order_seed=3),
    "packed-4-channel": hub.packed_4_bits(group_size=-1),
    "packed-8": hub.packed_8_bits(),
    "int8": hub.int8(activations="static"),
    "modelopt": hub.modelopt_fp8(),
}
DECODED = {
    "blocks": hub.fp8_blocks(),
    "blocks-compressed": hub.fp8_blocks(compressed=True),
    "packed-8-groups": hub.packed_8_bit_groups(),
    "gptq-8": hub.gptq_8_bits(desc_act=True),
}
STORED_AS = {
    "blocks": "fp8 in blocks of 48 x 40",
    "blocks-compressed": "fp8 in blocks of 48 x 40",
    "packed-8-groups": "int8 in groups of 32",
    "gptq-8": "int8 in groups of 32",
}
KEYS = {
    "blocks": r"weight_block_size \[48, 40\]",
    "blocks-compressed": r"config_groups\.group_0\.weights\.strategy 'block'",
    "packed-8-groups": r"config_groups\.group_0\.weights\.num_bits 8 in groups",
    "gptq-8": "bits 8",
}
FAMILIES = {"llama": {}, "phi3": {}, "mixtral": {"num_local_experts": 4}, "qwen3_moe": {"moe_intermediate_size": 32}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, layouts.WrittenCheckpoint]:
    directory = tmp_path_factory.mktemp("written")
    make_model("llama", directory / "plain", **{**layouts.SIZES, "initializer_range": 0.1, "vocab_size": VOCAB_SIZE})
    write_tokenizer(directory / "plain")
    return {
        name: layouts.write(directory / "plain", directory / name, layout) for name, layout in {**MULTIPLIED, **DECODED}.items()
    }


@pytest.mark.parametrize("name", DECODED)
def test_a_decoded_checkpoint_needs_a_choice_of_quantization(
    name: str, checkpoints: dict[str, layouts.WrittenCheckpoint]
) -> None:
    directory = checkpoints[name].directory
    message = (
        rf"quantization must be chosen: the checkpoint is {STORED_AS[name]} \(config\.json: quantization_config\.{KEYS[name]}\)"
        r".* int8 rounds .* \(usually closest\), fp8 .*, none .* "
        r"\(in gatehouse\.toml: quantization = \"int8\"; of gatehouse plan, simulate and models verify: --quantization int8\)"
    )
    with pytest.raises(EngineConfigError, match=message):
        small_engine(directory)
    config = load_model_config(directory)
    with pytest.raises(EngineConfigError, match=message):
        check_formats(config, EngineOptions(model=directory), "bfloat16", (8, 0))
    assert config.quantization is not None
    with pytest.raises(EngineConfigError, match="quantization = 'awq' cannot be applied: the checkpoint is"):
        small_engine(directory, quantization="awq")


def test_a_checkpoint_that_is_multiplied_as_stored_cannot_be_requantised(
    checkpoints: dict[str, layouts.WrittenCheckpoint],
) -> None:
    for name in MULTIPLIED:
        for quantization in ("none", "int8"):
            with pytest.raises(EngineConfigError, match=f"quantization = '{quantization}' cannot be applied: .* already"):
                small_engine(checkpoints[name].directory, quantization=quantization)


def test_quantization_none_is_accepted_for_an_unquantised_checkpoint(checkpoints: dict[str, layouts.WrittenCheckpoint]) -> None:
    assert small_engine(checkpoints["blocks"].twin, quantization="none").info.quantization == "none"


@pytest.mark.parametrize("quantization", ["int8", "fp8", "none"])
@pytest.mark.parametrize("name", DECODED)
def test_engine_info_and_log_name_the_stored_and_the_kept_format(
    name: str, quantization: str, checkpoints: dict[str, layouts.WrittenCheckpoint], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="gatehouse.engine"):
        info = small_engine(checkpoints[name].directory, quantization=quantization).info
    assert info.quantization == f"{quantization} (stored as {STORED_AS[name]})"
    assert ("weights" in info.kernels) is (quantization != "none")
    kept = "unquantised" if quantization == "none" else f"in {quantization}"
    message = f"weights were stored as {STORED_AS[name]}, decoded while they were read, and are kept {kept}"
    assert message in [record.getMessage() for record in caplog.records]
    twin = small_engine(checkpoints[name].twin, quantization=quantization).info
    assert (info.num_parameters, info.weights_bytes) == (twin.num_parameters, twin.weights_bytes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [*MULTIPLIED, *DECODED])
def test_weights_are_predicted(name: str, family: str, tmp_path: Path) -> None:
    plain = saved_model(family, **{**layouts.SIZES, "head_dim": 16, **FAMILIES[family]}).directory
    directory = layouts.write(plain, tmp_path / "made", {**MULTIPLIED, **DECODED}[name]).directory
    for quantization in ("int8", "fp8", "none") if name in DECODED else (None,):
        engine = small_engine(directory, num_kv_blocks=8, quantization=quantization)
        (weights,) = (part for part in engine.info.memory if part.name == "weights")
        assert weights.predicted_bytes == pytest.approx(weights.measured_bytes, rel=0.05)


@pytest.mark.parametrize("name", DECODED)
def test_a_plan_counts_weights_in_the_kept_format(name: str, checkpoints: dict[str, layouts.WrittenCheckpoint]) -> None:
    with pytest.raises(EngineConfigError, match="quantization must be chosen"):
        memory_fit(str(checkpoints[name].directory), find_gpu("h200"))
    for quantization in ("int8", "fp8", "none"):
        found, expected = (
            memory_fit(str(folder), find_gpu("h200"), quantization=quantization).needs.weights_bytes
            for folder in (checkpoints[name].directory, checkpoints[name].twin)
        )
        assert found == expected


@pytest.mark.parametrize("name", [*MULTIPLIED, *DECODED])
def test_verification_reports_method_options_and_parameters(
    name: str, checkpoints: dict[str, layouts.WrittenCheckpoint]
) -> None:
    facts = verify_model(checkpoints[name].directory)
    assert facts["quantization"] == STORED_AS.get(name, "modelopt" if name == "modelopt" else "compressed-tensors")
    assert facts.get("quantization_options") == ("int8, fp8, none" if name in DECODED else None)
    assert facts["parameters"] == verify_model(checkpoints[name].twin)["parameters"]


def test_verification_with_perplexity_needs_the_option(
    checkpoints: dict[str, layouts.WrittenCheckpoint], capsys: pytest.CaptureFixture[str]
) -> None:
    def run_verify(*options: str) -> tuple[int, dict[str, Any]]:
        status = verify.main([str(checkpoints["blocks"].directory), *options])
        return status, json.loads(capsys.readouterr().out.splitlines()[-1])

    assert run_verify()[0] == 0
    status, refused = run_verify("--perplexity")
    assert (status, refused["code"]) == (2, "invalid_option")
    assert "quantization must be chosen" in refused["error"]
    status, facts = run_verify("--quantization", "int8")
    assert status == 0
    assert facts["perplexity_as_stored_ratio"] == pytest.approx(1.0, abs=0.05)
    assert facts["perplexity_as_stored_format"]["quantization"] == STORED_AS["blocks"]


def test_perplexity_as_stored_is_that_of_the_decoded_weights(checkpoints: dict[str, layouts.WrittenCheckpoint]) -> None:
    directory = checkpoints["blocks"].directory
    decoded = compare(directory, FormatOptions(quantization="none"))
    assert decoded.stored_ratio is None
    rounded = compare(directory, FormatOptions(quantization="int8"))
    assert rounded.as_stored == decoded.perplexity


def test_a_decoded_checkpoint_is_refused_as_draft_model(checkpoints: dict[str, layouts.WrittenCheckpoint]) -> None:
    draft = {"method": "draft_model", "model": str(checkpoints["blocks"].directory), "num_speculative_tokens": 2}
    with pytest.raises(EngineConfigError, match="speculative_config field model cannot be served: it is fp8 in blocks of 48"):
        small_engine(checkpoints["blocks"].twin, speculative_config=SpeculativeOptions.parse(draft))


def test_encoded_tensors_are_freed_once_they_are_decoded(
    checkpoints: dict[str, layouts.WrittenCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.quantization.decoding import DecodedRows, Fp8BlockMatrix

    num_held: list[int] = []
    load = DecodedRows.load

    def recording_load(self: Any, place: Any, tensor: torch.Tensor) -> None:
        load(self, place, tensor)
        assert isinstance(self._encoded, Fp8BlockMatrix)
        num_held.append(sum(each.tensor.numel() for each in (self._encoded._codes, self._encoded._scales)))

    monkeypatch.setattr(DecodedRows, "load", recording_load)
    small_engine(checkpoints["blocks"].directory, quantization="int8")
    assert num_held[1::2] == [0] * (len(num_held) // 2)
    assert all(num_held[0::2])


def test_tensors_may_be_read_in_any_order(checkpoints: dict[str, layouts.WrittenCheckpoint], tmp_path: Path) -> None:
    """Codes and scales may lie in different shards."""
    for name in ("blocks", "gptq-8"):
        expected = greedy_tokens(checkpoints[name].directory)
        folder = tmp_path / name
        shutil.copytree(checkpoints[name].directory, folder)
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        codes = {each for each in tensors if each.endswith(("_proj.weight", ".qweight"))}
        shards = {"a.safetensors": tensors.keys() - codes, "b.safetensors": codes}
        for shard, names in shards.items():
            save_file({each: tensors[each] for each in names}, folder / shard, {"format": "pt"})
        index = {"weight_map": {each: shard for shard, names in shards.items() for each in names}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert greedy_tokens(folder) == expected


def greedy_tokens(directory: Path) -> list[int]:
    events = run_to_end(small_engine(directory, quantization="int8"), [generation_request("a", [5, 6, 7, 8], max_tokens=12)])
    return tokens(events["a"])


@pytest.mark.parametrize("quantization", [None, "int8", "none"])
def test_decoders_for_embeddings_are_decoded(quantization: str | None, tmp_path: Path) -> None:
    """The tensor names in their checkpoints have no prefix."""
    make_model("qwen3", tmp_path / "plain", **{**layouts.SIZES, "head_dim": 16, "vocab_size": VOCAB_SIZE})
    write_tokenizer(tmp_path / "plain")
    made = layouts.write(tmp_path / "plain", tmp_path / "made", DECODED["blocks"])
    for folder in (made.directory, made.twin):
        tensors = {name.removeprefix("model."): each for name, each in load_file(folder / "model.safetensors").items()}
        tensors.pop("lm_head.weight", None)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3Model"]}))
    if quantization is None:
        with pytest.raises(EngineConfigError, match="quantization must be chosen"):
            LLM(made.directory, device="cpu", threads=1)
        return
    found, expected = (
        LLM(folder, device="cpu", threads=1, quantization=quantization).embed(["a text"], use_tqdm=False)[0].outputs.embedding
        for folder in (made.directory, made.twin)
    )
    assert found == expected


WEIGHTS: dict[str, Callable[[tuple[int, int]], torch.Tensor]] = {
    "normal": torch.randn,
    "with outliers": lambda shape: torch.randn(shape) * torch.where(torch.arange(shape[1]) % 100 == 0, 10.0, 1.0),
}


@pytest.mark.parametrize(("weights", "int8_adds", "fp8_adds"), [("normal", 0.11, 0.98), ("with outliers", 2.2, 0.95)])
def test_requantisation_of_decoded_blocks_has_the_documented_error(weights: str, int8_adds: float, fp8_adds: float) -> None:
    """Added errors are given relative to the variance of the error of block-wise E4M3."""
    torch.manual_seed(0)
    original = WEIGHTS[weights]((256, 4096))
    _, decoded = hub.fp8_blocks(block=(128, 128)).store("", original)
    variance = (decoded - original).square().mean()
    for packed, adds in ((ops.pack_int8(decoded), int8_adds), (ops.pack_fp8(decoded), fp8_adds)):
        again = packed.values.float() * packed.scales[:, None]
        assert float((again - decoded).square().mean() / variance) == pytest.approx(adds, rel=0.1)


NAN_CODES = torch.full((64, 64), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
INFINITE = torch.full((64, 2), float("inf"), dtype=torch.float16)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("packed-4", {"weight_packed": torch.ones(64, 8)}, "q_proj.weight_packed is torch.float32, expected torch.int32"),
        (
            "packed-4",
            {"weight_packed": torch.ones(8, 64).int()},
            r"weight_packed has shape \(8, 64\), expected \(64, 8\)",
        ),
        ("packed-4", {"weight_zero_point": None}, "1 tensor is missing: .*q_proj.weight_zero_point"),
        ("packed-4", {"weight_zero_point": torch.ones(64, 2).int()}, r"zero_point has shape \(64, 2\), expected \(8, 2\)"),
        (
            "packed-4-channel",
            {"weight_zero_point": torch.ones(8, 1).int()},
            "1 tensor belongs to no part of this model: .*zero_point",
        ),
        ("packed-4", {"weight_scale": INFINITE}, "q_proj.weight_scale holds scales that are not finite"),
        (
            "packed-4",
            {"weight_scale": torch.ones(64, 1)},
            r"q_proj.weight_scale has shape \(64, 1\), expected \(64, 2\) by group_size",
        ),
        ("packed-4", {"weight_scale": torch.full((64, 2), 1 / 3)}, "weight_scale has scales of torch.float32 that neither"),
        ("packed-4", {"weight_shape": None}, "1 tensor is missing: .*q_proj.weight_shape"),
        ("packed-4", {"weight_shape": torch.tensor([64, 60])}, r"q_proj.weight_shape is \[64, 60\], expected \[64, 64\]"),
        ("packed-4", {"weight_g_idx": torch.zeros(64).int()}, "weight_g_idx does not divide 64 columns into groups of 32"),
        ("packed-4", {"weight_g_idx": torch.full((64,), -1)}, "weight_g_idx names groups that do not exist: there are 2"),
        ("packed-4", {"weight_g_idx": None}, "1 tensor is missing: .*q_proj.weight_g_idx"),
        ("packed-8", {"weight_packed": torch.ones(64, 64).int()}, r"weight_packed has shape \(64, 64\), expected \(64, 16\)"),
        ("packed-8", {"weight_packed": torch.ones(64, 16)}, "expected torch.int32 with four codes in each"),
        ("packed-8", {"weight_scale": torch.tensor(float("nan"))}, "q_proj.weight_scale holds scales that are not finite"),
        ("int8", {"weight": torch.ones(64, 64)}, "q_proj.weight is torch.float32, expected torch.int8"),
        ("int8", {"weight": torch.ones(64, 64).to(torch.uint8)}, "q_proj.weight is torch.uint8, expected torch.int8"),
        (
            "int8",
            {"weight_scale": torch.ones(64, 2)},
            r"weight_scale has shape \(64, 2\), expected one number or \[64, 1\]",
        ),
        ("int8", {"weight_scale": torch.tensor(-1.0)}, "q_proj.weight_scale holds negative scales"),
        (
            "int8",
            {"weight_zero_point": torch.ones(64, 1).to(torch.int8)},
            "1 tensor belongs to no part of this model: .*zero_point",
        ),
        ("modelopt", {"input_scale": None}, "1 tensor is missing: .*q_proj.input_scale"),
        ("modelopt", {"weight": NAN_CODES}, "q_proj.weight holds codes that are no numbers"),
        ("modelopt", {"pre_quant_scale": torch.ones(64)}, "1 tensor belongs to no part of this model: .*pre_quant_scale"),
        ("blocks", {"weight": NAN_CODES}, "q_proj.weight holds codes that are no numbers"),
        ("blocks", {"weight": torch.ones(64, 64)}, "q_proj.weight is torch.float32, expected torch.float8_e4m3fn"),
        ("blocks", {"weight": NAN_CODES[:, :32].clone()}, r"q_proj.weight has shape \(64, 32\), expected \(64, 64\)"),
        ("blocks", {"weight": None}, "1 tensor is missing: .*q_proj.weight"),
        ("blocks", {"weight_scale_inv": None}, "q_proj.weight is torch.float8_e4m3fn, expected torch.float32; .* scales must"),
        ("blocks", {"weight_scale_inv": torch.ones(64, 1)}, r"weight_scale_inv has shape \(64, 1\), expected \(2, 2\)"),
        ("blocks", {"weight_scale_inv": torch.full((2, 2), float("nan"))}, "weight_scale_inv holds scales that are not finite"),
        ("blocks", {"weight_scale_inv": torch.full((2, 2), float("inf"))}, "weight_scale_inv holds scales that are not finite"),
        ("blocks", {"weight_scale_inv": torch.full((2, 2), -1.0)}, "weight_scale_inv holds negative scales"),
        ("blocks", {"weight_scale_inv": torch.ones(2, 2).int()}, "weight_scale_inv is torch.int32, expected torch.float32"),
        (
            "blocks",
            {"weight_scale_inv": torch.ones(2, 2).to(torch.float8_e8m0fnu)},
            "weight_scale_inv is torch.float8_e8m0fnu, expected torch.float32",
        ),
        ("gptq-8", {"qweight": torch.ones(8, 64).int()}, r"q_proj.qweight has shape \(8, 64\), expected \(16, 64\)"),
        ("gptq-8", {"qzeros": None}, "1 tensor is missing: .*q_proj.qzeros"),
        ("gptq-8", {"scales": torch.full((2, 64), float("nan"))}, "q_proj.scales holds scales that are not finite"),
        ("gptq-8", {"g_idx": torch.zeros(64)}, "q_proj.g_idx is torch.float32"),
        ("gptq-8", {"g_idx": None}, "1 tensor is missing: .*q_proj.g_idx"),
        ("packed-8-groups", {"weight_scale": torch.ones(64, 3)}, r"weight_scale has shape \(64, 3\), expected \(64, 2\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_tensors_are_named_by_the_engine_and_by_verification(
    name: str, changes: dict[str, Any], message: str, checkpoints: dict[str, layouts.WrittenCheckpoint], tmp_path: Path
) -> None:
    directory = layouts.damaged_copy(checkpoints[name], tmp_path / "damaged", **changes)
    with pytest.raises(WeightsError, match=message):
        small_engine(directory, quantization="int8" if name in DECODED else None)
    with pytest.raises(WeightsError, match=message):
        verify_model(directory)


def assert_decoded(layout: layouts.Layout, rows: int) -> None:
    """That a matrix of so many rows, stored in groups of 8-bit codes, is decoded to the numbers it stands for."""
    tensors, meaning = layout.store("", torch.randn(rows, 64, generator=torch.Generator().manual_seed(3)))
    quantization = parse_quantization({"quantization_config": layout.settings})
    assert quantization is not None
    assert isinstance(quantization.weights, Int8GroupWeights)
    matrix = GroupTensors("", rows, 64, quantization.weights, device=torch.device("cpu"))
    destinations = matrix.destinations()
    for last, tensor in tensors.items():
        destinations[last].load(tensor)
    decoded = torch.empty(rows, 64)
    matrix.decode_into(decoded)
    torch.testing.assert_close(decoded, meaning)


@pytest.mark.parametrize("name", ["packed-8-groups", "gptq-8"])
def test_a_matrix_is_decoded_a_part_of_its_rows_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_tensors, "ROWS_DECODED", 24)
    assert_decoded(DECODED[name], 64)


@pytest.mark.parametrize("rows", [1, 66])
def test_symmetric_matrices_are_decoded_whose_zero_points_would_not_fill_their_words(rows: int) -> None:
    assert_decoded(hub.packed_8_bit_groups(symmetric=True), rows)
