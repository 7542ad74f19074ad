"""The accepted content of a model directory, and one clear error for everything else."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.model import load_model_config
from engine.config.stored_weights import GroupLayout, Int4Weights
from engine.errors import EngineConfigError, NotAModelDirectory, UnsupportedModel, WeightsError
from engine.verify import verify_model
from engine.weights import INDEX_FILE, weight_files
from tests.support.engines import generation_request, run_to_end, small_engine, tokens
from tests.support.tiny_models import make_model, saved_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_model("llama").directory, tmp_path / "model"))


def test_engine_info_lists_the_features_that_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEHOUSE_GRAPHS", "0")
    monkeypatch.setenv("GATEHOUSE_OVERLAPPED_PREFILL", "0")
    switched_off = small_engine(saved_model("llama").directory).info.switched_off
    assert switched_off == ["GATEHOUSE_GRAPHS", "GATEHOUSE_OVERLAPPED_PREFILL"]


def change_config(model: Path, **changes: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))


def change_weights(model: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors: dict[str, Any] = {**load_file(model / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})


def test_a_path_that_is_not_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAModelDirectory, match="not a directory"):
        load_model_config(tmp_path / "nowhere")


def test_a_path_that_the_system_refuses_is_named_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(NotAModelDirectory, match=r"xxx cannot be read: File name too long"):
        load_model_config(tmp_path / ("x" * 300))


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAModelDirectory, match=r"config\.json"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "\xff", '{"vocab_size": ' + 5000 * "9" + "}", 100_000 * "["],
    ids=["cut", "list", "bytes", "digits", "deep"],
)
def test_a_config_that_is_not_a_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(NotAModelDirectory, match=r"config\.json"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not supported; supported: Gemma2.*, LlamaFor.* only: BertModel",
        ),
        ({"architectures": ["BertModel"]}, r"BertModel gives embeddings \(LLM.embed\) and generates no text"),
        ({"architectures": ["LlamaModel"]}, r"LlamaModel gives embeddings \(LLM.embed\) and generates no text"),
        ({"architectures": None}, "names no architecture"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope type 'proportional' is not supported; supported: default"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "mrope_section": [2, 2]}}, "mrope_section of the rope"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor .* list of 6",
        ),
        ({"quantization_config": {"quant_method": "aqlm"}}, r"quantization_config.quant_method 'aqlm' .* supported: fp8, "),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types with other than one kind of layer"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types chunked_attention"),
        ({"is_causal": False}, "is_causal"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"vocab_size": 2**31}, "vocab_size must be at most 2147483647, not 2147483648"),
        ({"num_hidden_layers": 1025}, "num_hidden_layers must be at most 1024, not 1025"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}}, "rope_theta must be at most 1e"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 1e20}},
            r"yarn's factor 1e\+20 times \d+ positions must be at most",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unsupported_setting_is_refused_by_name(changes: dict[str, Any], message: str, model: Path) -> None:
    change_config(model, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        load_model_config(model)


def test_the_older_spelling_of_rope_settings_is_equivalent(model: Path) -> None:
    change_config(model, rope_parameters=None, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0})
    rope = load_model_config(model).ropes[0]
    assert (rope.kind, rope.theta, rope.factor) == ("linear", 5e5, 4.0)


def test_quantisation_in_config_json_takes_precedence_over_that_beside_it(model: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    change_config(model, quantization_config=settings)
    (model / "quantize_config.json").write_text(json.dumps({**settings, "group_size": 128}))
    quantization = load_model_config(model).quantization
    assert quantization is not None
    assert quantization.weights == Int4Weights(layout=GroupLayout.GPTQ, group_size=64, zero_offset=1)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"eos_token_id": [2, 9]}, (2, 9)),
        ({"eos_token_id": 7}, (7,)),
        ({"eos_token_id": 0}, (0,)),
        ({}, (2,)),
        ({"eos_token_id": [9, -1, 151_645, 2**40]}, (9,)),
        ({"eos_token_id": 2**40}, ()),
    ],
    ids=str,
)
def test_end_tokens_of_generation_config_take_precedence(
    generation: dict[str, Any], expected: tuple[int, ...], model: Path
) -> None:
    (model / "generation_config.json").write_text(json.dumps(generation))
    assert load_model_config(model).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.norm.weight": None},
            r"1 tensor is missing: model\.norm\.weight; the files do not belong to this config\.json, or",
        ),
        (
            {"model.layers.7.mlp.down_proj.weight": torch.zeros(2, 2)},
            r"1 tensor belongs to no part of this model: model\.layers\.7.*; the files",
        ),
        ({"model.norm.weight": torch.zeros(47)}, r"model\.norm\.weight has shape \(47,\), expected \(48,\) by config\.json"),
        (
            {"model.norm.weight": torch.zeros(48, dtype=torch.int8)},
            r"is torch\.int8, expected torch\.float32; config",
        ),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}, r"q_proj\.bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_missing_unexpected_and_misshapen_tensors_are_refused_by_name(
    changes: dict[str, torch.Tensor | None], message: str, model: Path
) -> None:
    change_weights(model, changes)
    with pytest.raises(WeightsError, match=message):
        small_engine(model)


@pytest.mark.parametrize(("letters", "end"), [("hgfedcba", "h;"), ("jihgfedcba", "h and 2 more;")])
def test_at_most_eight_tensors_are_listed_and_the_others_counted(letters: str, end: str, model: Path) -> None:
    change_weights(model, {f"model.vision.{letter}": torch.zeros(2) for letter in letters})
    message = rf"{len(letters)} tensors belong to no part of this model: model\.vision\.a, .*model\.vision\.{end}"
    with pytest.raises(WeightsError, match=message):
        verify_model(model, is_draft=True)


def test_a_tied_head_that_differs_from_the_embedding_is_refused(model: Path) -> None:
    change_config(model, tie_word_embeddings=True)
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs"):
        small_engine(model)


@pytest.mark.parametrize("added", [0.0, 1.0], ids=["equal", "different"])
def test_a_check_without_weights_compares_a_stored_tied_head_with_the_embedding(added: float, model: Path) -> None:
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    change_config(model, tie_word_embeddings=True)
    change_weights(model, {"lm_head.weight": embedding + added})
    with contextlib.nullcontext() if not added else pytest.raises(WeightsError, match=r"lm_head\.weight differs"):
        assert verify_model(model, is_draft=True)["tensors"] == 21


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_model("llama", tmp_path, sharded=True)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    message = rf"{shard.name} is missing, and model\.safetensors\.index\.json names it: .* fetch it again"
    with pytest.raises(WeightsError, match=message):
        small_engine(tmp_path)


@pytest.mark.parametrize("name", [7, None, "../other/model.safetensors", "/etc/hostname"])
def test_shards_must_be_files_of_the_model_directory(name: object, model: Path) -> None:
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(WeightsError, match="weight_map must name files of its own folder"):
        weight_files(model)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["model.safetensors"]}], ids=str)
def test_an_index_must_say_in_which_files_the_tensors_are(index: dict[str, Any], model: Path) -> None:
    (model / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json has no weight_map"):
        weight_files(model)


def test_a_tensor_in_two_shards_is_refused_by_name(model: Path) -> None:
    save_file({"model.norm.weight": torch.ones(48)}, model / "more.safetensors")
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}))
    with pytest.raises(WeightsError, match=r"more\.safetensors: tensor model\.norm\.weight is in two files"):
        verify_model(model, is_draft=True)


@pytest.mark.parametrize("name", ["x" * 300, "model\0.safetensors"], ids=["long", "null"])
def test_a_shard_whose_name_no_file_can_have_is_missing(name: str, model: Path) -> None:
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(WeightsError, match=f"{name} is missing"):
        weight_files(model)


def test_a_damaged_safetensors_file_is_named(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(
        WeightsError, match=r"model\.safetensors is not a readable safetensors file .*it has 22 bytes; fetch it again"
    ):
        small_engine(model)


@pytest.mark.skipif(sys.platform != "linux", reason="a file that no one can read")
def test_a_file_that_the_system_does_not_read_is_named(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("/proc/self/mem")
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read: Input/output error"):
        small_engine(model)


def test_a_git_lfs_pointer_is_named_as_such(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    with pytest.raises(WeightsError, match=r"model\.safetensors is a pointer of Git LFS .*; fetch it with `git lfs pull`"):
        small_engine(model)


@pytest.mark.parametrize("other", ["pytorch_model.bin", "llama.gguf"])
def test_weights_in_another_format_are_named(model: Path, other: str) -> None:
    (model / "model.safetensors").rename(model / other)
    with pytest.raises(WeightsError, match=rf"has no model\.safetensors, and {other} is not read here: fetch or convert"):
        small_engine(model)


def test_rotary_buffers_of_old_checkpoints_are_ignored(model: Path) -> None:
    change_weights(model, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)})
    assert small_engine(model).info.architecture == "LlamaForCausalLM"


def test_the_loaded_fraction_rises_to_one_whatever_else_the_files_hold(model: Path) -> None:
    change_weights(model, {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.zeros(6) for layer in range(8)})
    fractions: list[float] = []
    verify_model(model, progress=fractions.append, is_draft=True)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_bfloat16_weights_are_computed_in_float32_on_the_cpu(model: Path) -> None:
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    engine = small_engine(model)
    assert engine.info.dtype == "float32"
    assert len(tokens(run_to_end(engine, [generation_request("a", [5, 6], max_tokens=4)])["a"])) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 257}, "max_model_len .* longer than the model's context"),
        ({"num_kv_blocks": 4, "max_model_len": 65}, "max_model_len .* does not fit into the KV cache: it needs 30720 bytes"),
        ({"kv_cache_bytes": 100}, "kv_cache_bytes .* less than one KV block"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens must be at least max_num_seqs"),
        ({"device": "tpu"}, "device must be one of"),
        ({"dtype": "int4"}, "dtype must be one of"),
        ({"block_size": 0}, "block_size must be a power of two from 1 to 1024, not 0"),
        ({"block_size": 24}, "block_size must be a power of two from 1 to 1024, not 24"),
        ({"block_size": 2048}, "block_size must be a power of two from 1 to 1024, not 2048"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_option_is_named_in_the_error(options: dict[str, Any], message: str, model: Path) -> None:
    with pytest.raises(EngineConfigError, match=message):
        small_engine(model, **options)


def test_the_default_context_is_limited_by_the_cache(model: Path) -> None:
    assert small_engine(model, num_kv_blocks=4).info.max_model_len == 64
    assert small_engine(model).info.max_model_len == 256
