"""Perplexity of `models verify`: computed as by transformers, and compared between formats and with an unquantised model."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import verify
from engine.errors import EngineConfigError
from engine.offline.perplexity import Comparison, FormatOptions, compare, perplexity, text_tokens, window_tokens
from engine.verify import main
from tests.support import quantised_checkpoints as layouts
from tests.support.tiny_models import make_model
from tests.support.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

RATIO_TOLERANCE = 0.05  # of a random model's two perplexities; a forgotten scale changes them by orders of magnitude


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("perplexity") / "model"
    make_model("llama", directory, **{**layouts.SIZES, "initializer_range": 0.1, "vocab_size": VOCAB_SIZE})
    write_tokenizer(directory)
    return directory


def test_perplexity_equals_that_of_transformers_on_the_same_windows(model: Path) -> None:
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens, size = text_tokens(model), window_tokens(model)
    assert size == 255
    losses = []
    for first in range(0, len(tokens), size):
        window = torch.tensor([tokens[first : first + size]])
        with torch.inference_mode():
            logprobs = reference(window).logits[0, :-1].log_softmax(-1)
        losses += (-logprobs.gather(1, window[0, 1:, None])[:, 0]).tolist()
    expected = math.exp(sum(losses) / len(losses))
    assert perplexity(model, tokens, FormatOptions(), size) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "formats",
    [
        FormatOptions(quantization="int8"),
        FormatOptions(quantization="fp8"),
        FormatOptions(kv_cache_dtype="fp8"),
        FormatOptions(head_quantization="int8"),
    ],
)
def test_an_unquantised_model_is_compared_with_itself(formats: FormatOptions, model: Path) -> None:
    found = compare(model, formats)
    assert found.unquantised is not None
    assert found.ratio == pytest.approx(1.0, abs=RATIO_TOLERANCE)
    assert found.ratio != 1.0


def test_a_quantised_checkpoint_is_compared_with_the_given_unquantised_model(model: Path, tmp_path: Path) -> None:
    written = layouts.write(model, tmp_path / "awq", layouts.awq())
    alone = compare(written.directory, FormatOptions())
    assert (alone.unquantised, alone.ratio) == (None, None)
    beside = compare(written.directory, FormatOptions(), unquantised=written.twin)
    assert beside.perplexity == alone.perplexity
    assert beside.ratio == pytest.approx(1.0, abs=1e-5)


def test_a_quantised_checkpoint_with_another_head_or_cache_format_is_compared_with_itself_as_stored(
    model: Path, tmp_path: Path
) -> None:
    written = layouts.write(model, tmp_path / "awq", layouts.awq())
    for formats in (FormatOptions(head_quantization="int8"), FormatOptions(kv_cache_dtype="fp8")):
        found = compare(written.directory, formats)
        assert found.ratio is None
        assert found.stored_ratio == pytest.approx(1.0, abs=RATIO_TOLERANCE)
        assert found.stored_ratio != 1.0
    assert compare(written.directory, FormatOptions(quantization="awq")).as_stored is None


def test_models_with_different_tokenizers_are_not_compared(model: Path, tmp_path: Path) -> None:
    make_model("llama", tmp_path, vocab_size=VOCAB_SIZE)
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(EngineConfigError, match=r"unquantized .* has another tokenizer"):
        compare(model, FormatOptions(), unquantised=tmp_path)


def printed_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_verify_prints_both_perplexities_and_their_ratio(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model), "--quantization", "int8"]) == 0
    facts = printed_json(capsys)
    assert facts["ok"]
    assert facts["perplexity_ratio"] == pytest.approx(facts["perplexity"] / facts["perplexity_unquantized"], abs=1e-4)
    windows = -(-len(text_tokens(model)) // window_tokens(model))
    assert facts["perplexity_tokens"] == len(text_tokens(model)) - windows, "the first of a window has nothing before it"
    assert facts["quantization"] == "none"
    assert facts["perplexity_format"] == {"quantization": "int8", "head_quantization": None, "kv_cache_dtype": "auto"}
    assert facts["perplexity_unquantized_format"] == {**facts["perplexity_format"], "quantization": "none"}
    assert facts["perplexity_as_stored_format"] is None
    assert facts["warning"] is None


def test_verify_warns_of_a_format_with_a_high_perplexity_ratio(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "compare", lambda *_, **__: Comparison(62.0, 1.0, 988))
    assert main([str(model), "--kv-cache-dtype", "fp8"]) == 0
    assert (
        printed_json(capsys)["warning"]
        == "its perplexity is 62.00 times that of the unquantised model, more than 1.1: answers suffer"
    )
    monkeypatch.setattr(verify, "compare", lambda *_, **__: Comparison(1.1, 1.0, 988, as_stored=0.9))
    assert main([str(model), "--kv-cache-dtype", "fp8"]) == 0
    assert (
        printed_json(capsys)["warning"]
        == "its perplexity is 1.22 times that of the model as stored, more than 1.1: answers suffer"
    )


@pytest.mark.parametrize(
    ("factor", "reason"),
    [(math.nan, "the model computed logits that are not finite"), (1e5, r"the mean log-probability of a token is -\d{4}")],
)
def test_verify_refuses_a_model_without_a_perplexity_and_says_why(
    factor: float, reason: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "model"))
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] *= factor
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    assert main([str(directory), "--quantization", "int8"]) == 1
    answer = printed_json(capsys)
    assert answer["code"] == "not_a_model"
    assert re.search(rf"model has no perplexity \(quantization int8\): {reason}", answer["error"])


@pytest.mark.parametrize("context", [1, 2])
def test_verify_says_how_long_a_context_a_perplexity_needs(
    context: int, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
    assert main([str(directory), "--perplexity"]) == 1
    assert printed_json(capsys)["error"].endswith(f"has no perplexity: its context is {context}, at least 3 tokens are needed")


def test_verify_compares_a_quantised_checkpoint_with_the_unquantised_model_that_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = layouts.write(model, tmp_path / "awq", layouts.awq())
    assert main([str(written.directory), "--unquantized", str(written.twin)]) == 0
    facts = printed_json(capsys)
    assert facts["perplexity_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert (facts["perplexity_format"]["quantization"], facts["perplexity_as_stored"]) == ("awq", None)


def test_verify_reads_quantised_checkpoints_without_loading_them(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = []
    for name, layout in {
        "plain": None,
        "awq": layouts.awq(),
        "fp8": layouts.fp8(per_row=True, activations="none", compressed=True),
    }.items():
        directory = model if layout is None else layouts.write(model, tmp_path / name, layout).directory
        assert main([str(directory)]) == 0
        facts = printed_json(capsys)
        assert "perplexity" not in facts
        parameters.append(facts["parameters"])
    assert len(set(parameters)) == 1


def test_verify_refuses_an_option_that_contradicts_the_checkpoint(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = layouts.write(model, tmp_path / "gptq", layouts.gptq())
    assert main([str(written.directory), "--quantization", "int8"]) == 2
    assert "already (gptq)" in printed_json(capsys)["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--quantization", "int4"),
            "quantization = 'int4' cannot be applied to an unquantised checkpoint; .*: int8, fp8, none$",
        ),
        (
            ("--quantization", "awq"),
            "quantization = 'awq' cannot be applied to an unquantised checkpoint; .*: int8, fp8, none$",
        ),
        (("--head-quantization", "int3"), "head_quantization must be one of none, int8, not 'int3'"),
        (("--kv-cache-dtype", "int8"), "kv_cache_dtype must be one of auto, fp8, fp8_e4m3, not 'int8'"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_verify_refuses_an_invalid_format_and_lists_the_valid_ones(
    options: tuple[str, str], message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(model), *options]) == 2
    answer = printed_json(capsys)
    assert re.search(message, answer["error"])
    assert answer["code"] == "invalid_option"
