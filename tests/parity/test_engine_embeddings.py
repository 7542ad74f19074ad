"""Embeddings equal transformers' hidden states with explicit pooling, for encoders and decoders, in any batch."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine import LLM
from engine.config.pooling import PoolingConfig
from engine.errors import EngineConfigError, EngineError, ModelError, NotAModelDirectory, PromptError, UnsupportedModel
from engine.protocol import UnsupportedOption
from engine.runner.embedder import Embedder
from engine.runner.model_runner import ModelRunner
from tests.support.engines import small_engine
from tests.support.tiny_models import make_encoder, make_model, saved_model
from tests.support.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

LENS = (1, 2, 3, 15, 16, 17, 33, 60, 7, 7, 7, 120)
MINILM = {
    "vocab_size": 1000,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}
TOLERANCE = 1e-5


def make_texts(lens: tuple[int, ...], vocab_size: int) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(5, vocab_size) for _ in range(length)] for length in lens]


def reference(model: Any, texts: list[list[int]], mode: str, *, normalised: bool = True) -> torch.Tensor:
    """Pooled hidden states of transformers, one text at a time: [len(texts), hidden_size]"""
    with torch.inference_mode():
        states = [model(torch.tensor([text])).last_hidden_state[0] for text in texts]
    pooled = torch.stack([{"mean": s.mean(0), "cls": s[0], "last": s[-1]}[mode] for s in states])
    return torch.nn.functional.normalize(pooled, dim=-1) if normalised else pooled


def write_sentence_transformers_files(
    directory: Path, pooling: dict[str, Any], *, normalise: bool = True, limits: dict[str, Any] | None = None
) -> None:
    """Write the configuration files of sentence-transformers beside a model."""
    types = ["Transformer", "Pooling", *(["Normalize"] if normalise else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(types, paths, strict=False))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **pooling}))
    (directory / "sentence_bert_config.json").write_text(json.dumps(limits or {}))


def load(directory: Path, **options: Any) -> LLM:
    return LLM(directory, device="cpu", threads=1, **options)


def assert_near(found: Sequence[Sequence[float]], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=TOLERANCE)


def test_an_encoder_with_the_shape_of_minilm_equals_transformers(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = transformers.BertModel(transformers.BertConfig(**MINILM)).eval()
    model.save_pretrained(tmp_path)
    texts = make_texts((3, 17, 64, 512), 1000)
    assert_near(load(tmp_path).embed(texts), reference(model, texts, "mean"))


@pytest.mark.parametrize("mode", ["mean", "cls", "last"])
@pytest.mark.parametrize("architecture", ["bert", "roberta", "xlm-roberta", "bert-tanh"])
def test_encoders_equal_transformers_with_every_pooling(architecture: str, mode: str, tmp_path: Path) -> None:
    model = make_encoder(architecture, tmp_path)
    texts = make_texts(LENS, 128)
    llm = load(tmp_path)
    assert_near(llm.embed(texts, pooling=mode), reference(model, texts, mode))
    assert_near(llm.embed(texts, pooling=mode, normalize=False), reference(model, texts, mode, normalised=False))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "mistral-window", "qwen3_moe"])
def test_decoders_embed_the_state_of_the_last_token_by_default(family: str) -> None:
    directory, model = saved_model(family)
    texts = make_texts(LENS, 128)
    llm = load(directory, kv_cache_bytes=1_000_000)
    assert_near(llm.embed(texts), reference(model.model, texts, "last"))
    assert_near(llm.embed(texts, pooling="mean"), reference(model.model, texts, "mean"))


def test_embedding_leaves_the_prefix_cache_unchanged() -> None:
    llm = load(saved_model("llama").directory, kv_cache_bytes=1_000_000)
    prompt = [list(range(5, 40))]
    first = llm.generate(prompt)[0].outputs[0].token_ids
    llm.embed(make_texts(LENS, 128))
    again = llm.generate(prompt)[0]
    assert again.num_cached_tokens == 32
    assert len(first) == len(again.outputs[0].token_ids)


def test_an_embedding_is_a_list_of_floats_with_the_attributes_of_vllm(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    (vector,) = load(tmp_path).embed([[5, 6]])
    assert isinstance(vector, list)
    assert len(vector) == 48
    assert vector.outputs.embedding == vector
    assert vector.prompt_token_ids == [5, 6]


def test_an_embedding_does_not_depend_on_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_encoder("bert", tmp_path)
    texts = make_texts(LENS, 128)
    llm = load(tmp_path)
    together = llm.embed(texts)
    monkeypatch.setattr("engine.runner.embedder.CPU_BATCH_TOKENS", 40)
    assert_near(llm.embed(texts), torch.tensor(together))
    assert_near([llm.embed([text])[0] for text in texts], torch.tensor(together))


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({}, "mean"),
    ],
)
@pytest.mark.parametrize("normalise", [True, False])
def test_pooling_and_normalisation_follow_the_files_of_sentence_transformers(
    pooling: dict[str, Any], mode: str, normalise: bool, tmp_path: Path
) -> None:
    model = make_encoder("bert", tmp_path)
    write_sentence_transformers_files(tmp_path, pooling, normalise=normalise)
    texts = make_texts((5, 9), 128)
    assert_near(load(tmp_path).embed(texts), reference(model, texts, mode, normalised=normalise))


def test_default_prompt_and_lower_casing_follow_the_files(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path, vocab_size=VOCAB_SIZE)
    write_tokenizer(tmp_path)
    llm = load(tmp_path)
    plain = llm.embed(["query of: hello", "Hello"])
    write_sentence_transformers_files(tmp_path, {}, limits={"do_lower_case": True})
    (tmp_path / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "Query of: "}, "default_prompt_name": "query"})
    )
    for text in ("HELLO", ["HELLO"], {"prompt": "HELLO"}):
        assert llm.embed(text)[0] == pytest.approx(plain[0], abs=TOLERANCE)
    assert llm.embed([llm.tokenizer.encode("Hello")])[0] == pytest.approx(plain[1], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is not supported; supported: one of mean, cls, lasttoken"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "pooling_mode_mean_tokens with pooling_mode_cls"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
    ],
)
def test_unsupported_pooling_in_the_files_is_refused_by_name(pooling: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    write_sentence_transformers_files(tmp_path, pooling)
    with pytest.raises(UnsupportedModel, match=message):
        load(tmp_path).embed([[5]])


def test_unsupported_modules_are_refused_by_name(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    write_sentence_transformers_files(tmp_path, {})
    modules = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").write_text(json.dumps([*modules[:2], {"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(UnsupportedModel, match="Transformer, Pooling, Dense"):
        load(tmp_path).embed([[5]])
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(NotAModelDirectory, match="list of modules"):
        load(tmp_path).embed([[5]])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([[5], []], "text 1 has no tokens"),
        ([[5] * 129], "text 0 has 129 tokens; at most 128 fit"),
        ([[5, 128]], r"outside of the vocabulary \(0 to 127\)"),
        ([[-1]], "outside of the vocabulary"),
        ([[5], {"prompt": 3}], "text 1: prompt must be text"),
        ([[5], [0.5]], "text 1: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_text_is_named_with_the_limit(texts: list[Any], message: str, tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    with pytest.raises(PromptError, match=message):
        load(tmp_path).embed(texts)


def test_the_longest_text_follows_positions_files_and_option(tmp_path: Path) -> None:
    make_encoder("roberta", tmp_path)
    with pytest.raises(PromptError, match="at most 126 fit"):  # positions begin behind that of the padding token
        load(tmp_path).embed([[5] * 127])
    write_sentence_transformers_files(tmp_path, {}, limits={"max_seq_length": 20})
    with pytest.raises(PromptError, match="at most 20 fit"):
        load(tmp_path).embed([[5] * 21])
    with pytest.raises(PromptError, match="at most 10 fit"):
        load(tmp_path, max_model_len=10).embed([[5] * 11])


def test_the_limit_of_a_text_is_read_from_a_file_named_after_the_architecture(tmp_path: Path) -> None:
    make_encoder("roberta", tmp_path)
    write_sentence_transformers_files(tmp_path, {}, limits={"max_seq_length": 20})
    (tmp_path / "sentence_bert_config.json").rename(tmp_path / "sentence_roberta_config.json")
    with pytest.raises(PromptError, match="at most 20 fit"):
        load(tmp_path).embed([[5] * 21])


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-window", "qwen3"])
def test_decoders_without_an_output_head_are_embedders(family: str, tmp_path: Path) -> None:
    model = copy.deepcopy(saved_model(family).reference.model)
    model.save_pretrained(tmp_path)
    assert not any("lm_head" in name for name in load_file(tmp_path / "model.safetensors"))
    texts = make_texts(LENS, 128)
    assert_near(load(tmp_path).embed(texts), reference(model, texts, "last"))


@pytest.mark.parametrize("kind", ["encoder", "headless"])
def test_an_embedding_model_refuses_to_generate(kind: str, tmp_path: Path) -> None:
    if kind == "encoder":
        make_encoder("bert", tmp_path)
    else:
        copy.deepcopy(saved_model("llama").reference.model).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="gives embeddings"):
        load(tmp_path).generate([[5]])


def test_a_batch_invariant_engine_embeds_equally() -> None:
    directory, model = saved_model("qwen3")
    texts = make_texts((5, 9), 128)
    runner = small_engine(directory, batch_invariant=True).runner
    assert isinstance(runner, ModelRunner)
    embedder = Embedder(runner.target.text_model, PoolingConfig(mode="last"))
    assert_near(embedder.embed(texts), reference(model.model, texts, "last"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_attention_heads": 5}, "multiple of num_attention_heads"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        (
            {"architectures": ["RobertaModel"], "pad_token_id": 65, "max_position_embeddings": 66},
            r"max_position_embeddings \(66\) must be larger than pad_token_id \(65\) \+ 1",
        ),
        ({"architectures": ["RobertaModel"], "pad_token_id": -1}, "pad_token_id must be an integer from 0 on, not -1"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_an_unsupported_encoder_setting_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_invariant": True},
        {"kv_cache_dtype": "fp8"},
        {"swap_space": 1},
        {"speculative_config": {"method": "ngram"}},
    ],
    ids=str,
)
def test_options_without_meaning_for_embeddings_are_refused_by_name(options: dict[str, Any], tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    with pytest.raises(EngineConfigError, match=f"{next(iter(options))} is not supported for a model that gives embeddings"):
        load(tmp_path, **options)


def test_an_unknown_pooling_is_refused(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    with pytest.raises(UnsupportedOption, match="pooling must be one of mean, cls, last"):
        load(tmp_path).embed([[5]], pooling="max")


def test_tensor_names_without_prefix_and_output_head_are_accepted(tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    texts = make_texts((5, 9), 128)
    assert_near(load(tmp_path, kv_cache_bytes=1_000_000).embed(texts), reference(model.model, texts, "last"))
