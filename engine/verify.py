"""`python -m engine.verify PATH`: would this model directory load? Reads it with the engine's own code, holding no weights.

With `--perplexity`, or with a format to try, it is loaded as well and reads a fixed text, beside the unquantised model where
there is one. Prints JSON lines: `{"fraction": …}` while it reads, at the end `{"ok": true, …}` with the facts or
`{"ok": false, "error": …, "code": …}`. Exit status 0 if it would load, 1 if not, 2 for invalid options.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.environment import prepare_environment

prepare_environment()

import torch  # noqa: E402 - torch must see the environment set above

from engine.config.model import load_model_config  # noqa: E402
from engine.errors import EngineConfigError, ModelError, NotAModelDirectory  # noqa: E402
from engine.formats import DECODED_FORMATS, UNQUANTISED, check_quantization  # noqa: E402
from engine.models.decoder import Decoder  # noqa: E402
from engine.offline.perplexity import Comparison, FormatOptions, compare  # noqa: E402
from engine.options import HEAD_QUANTIZATIONS, KV_CACHE_DTYPES, QUANTIZATIONS, EngineOptions  # noqa: E402
from engine.quantization.scheme import weight_scheme  # noqa: E402
from engine.text.chat_template import ChatTemplate, ChatTemplateError, NoChatTemplate  # noqa: E402
from engine.text.tokenizer import Tokenizer  # noqa: E402
from engine.weights import WeightsSize, load_weights, stored_names, weight_files  # noqa: E402

REPORT_FRACTION = 0.05
RATIO_WARNED = 1.1
"""The ratio of two perplexities that is warned of. Formats fit for serving stay within a few hundredths of 1; a broken one is
far beyond."""

OPTIONS = ("quantization", "head_quantization", "kv_cache_dtype", "unquantized")


def verify_model(
    directory: Path, *, progress: Callable[[float], None] = lambda _: None, is_draft: bool = False
) -> dict[str, Any]:
    """Return facts about a model that would load. Raises `ModelError`, naming the file, key or tensor that is wrong.
    `is_draft`: it is to draft for another model, whose tokenizer it shares; its own is not read.

    The tensors of the decoder are on the meta device: every tensor is matched by name, shape and type, none is kept. A
    checkpoint that is decoded while it is read is checked without the option that it needs; the facts name the option's values.
    """
    config = load_model_config(directory)
    decoded = None if config.quantization is None else config.quantization.decoded
    tokenizer_size = None if is_draft else _tokenizer_size(directory, config.vocab_size, _chat_template(directory))
    scheme = weight_scheme(directory, config, None if decoded is None else UNQUANTISED)
    plan = Decoder(config, dtype=torch.float32, device=torch.device("meta")).weight_plan(scheme.storage)
    load_weights(directory, plan, progress=progress)
    return {
        "architecture": config.family.architecture,
        "quantization": scheme.name if decoded is None else str(decoded),
        **({} if decoded is None else {"quantization_options": ", ".join(DECODED_FORMATS)}),
        "tensors": len(stored_names(directory)),
        "parameters": WeightsSize.of(plan).num_parameters,
        "weights_bytes": sum(path.stat().st_size for path in weight_files(directory)),
        "vocab_size": config.vocab_size,
        "tokenizer_size": tokenizer_size,
        "max_position_len": config.max_position_len,
    }


def _tokenizer_size(directory: Path, vocab_size: int, template: str) -> int:
    """A special token beyond the vocabulary is harmless if no conversation has it, like the image token of Gemma 3 1B, which
    reads no images. A prompt with it is refused."""
    tokenizer = Tokenizer(directory)
    size = tokenizer.vocab_size
    harmless = [token for token in tokenizer.special_tokens_from(vocab_size) if token not in template]
    if size - len(harmless) > vocab_size:
        raise NotAModelDirectory(
            f"{directory / 'tokenizer.json'} has {size} tokens, but the model's vocabulary is {vocab_size}: "
            "they belong to different models"
        )
    return size


def _chat_template(directory: Path) -> str:
    """The source of the chat template, which must compile; empty for a base model without one."""
    try:
        return ChatTemplate.load(directory).source
    except NoChatTemplate:
        return ""
    except ChatTemplateError as error:
        raise NotAModelDirectory(str(error)) from error


class _Report:
    """Prints the fraction, at most every REPORT_FRACTION."""

    def __init__(self) -> None:
        self._reported = 0.0

    def __call__(self, fraction: float) -> None:
        if fraction - self._reported >= REPORT_FRACTION:
            self._reported = fraction
            _print({"fraction": round(fraction, 3)})


def _print(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _check_options(directory: Path, formats: FormatOptions, *, is_loaded: bool) -> None:
    """Raises `EngineConfigError`, naming the option, for formats that do not exist or contradict the checkpoint, and where a
    model that is loaded lacks one."""
    if is_loaded:
        check_quantization(load_model_config(directory), formats.quantization, formats.head_quantization)
    EngineOptions(model=directory, **asdict(formats))


def _perplexities(directory: Path, formats: FormatOptions, unquantised: Path | None, *, stored: str) -> dict[str, Any]:
    """Facts of the model with its weights loaded, twice where there is something to compare with. `stored` is the format of
    the checkpoint."""
    comparison = compare(directory, formats, unquantised=unquantised)
    return {
        "perplexity_format": {**asdict(formats), "quantization": formats.quantization or stored},
        "perplexity_unquantized_format": None if comparison.unquantised is None else _as_stored(UNQUANTISED),
        "perplexity_as_stored_format": None if comparison.as_stored is None else _as_stored(stored),
        "perplexity": _rounded(comparison.perplexity, 4),
        "perplexity_unquantized": _rounded(comparison.unquantised, 4),
        "perplexity_ratio": _rounded(comparison.ratio, 5),
        "perplexity_as_stored": _rounded(comparison.as_stored, 4),
        "perplexity_as_stored_ratio": _rounded(comparison.stored_ratio, 5),
        "perplexity_tokens": comparison.num_tokens,
        "warning": _warning(comparison),
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _as_stored(quantization: str) -> dict[str, str | None]:
    return {**asdict(FormatOptions()), "quantization": quantization}


def _warning(comparison: Comparison) -> str | None:
    for ratio, than in ((comparison.ratio, "of the unquantised model"), (comparison.stored_ratio, "of the model as stored")):
        if ratio is not None and ratio > RATIO_WARNED:
            return f"its perplexity is {ratio:.2f} times that {than}, more than {RATIO_WARNED}: answers suffer"
    return None


def _join_or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engine.verify", description="Would a model directory load?", allow_abbrev=False)
    parser.add_argument("path", type=Path, metavar="PATH")
    parser.add_argument("--perplexity", action="store_true", help="of the model on a fixed text")
    parser.add_argument(
        "--quantization", help=f"compare the model in this format with the plain one: {_join_or(QUANTIZATIONS)}"
    )
    parser.add_argument("--head-quantization", help=f"with the output head in this one: {_join_or(HEAD_QUANTIZATIONS)}")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", help=f"with keys and values in this one: {_join_or(KV_CACHE_DTYPES)}"
    )
    parser.add_argument("--draft", action="store_true", help="as a draft model, of which no tokenizer is read")
    parser.add_argument("--unquantized", type=Path, metavar="PATH", help="compare with this model")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Verify one directory and return the exit status."""
    options = _options(arguments)
    formats = FormatOptions(
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        head_quantization=options.head_quantization,
    )
    is_loaded = bool(options.perplexity or options.unquantized or formats != FormatOptions())
    try:
        _check_options(options.path, formats, is_loaded=is_loaded)
        facts = verify_model(options.path, progress=_Report(), is_draft=options.draft)
        if is_loaded:
            facts |= _perplexities(options.path, formats, options.unquantized, stored=facts["quantization"])
    except EngineConfigError as error:
        is_usage = error.option in OPTIONS
        _print({"ok": False, "error": str(error), "code": "invalid_option" if is_usage else "not_a_model"})
        return 2 if is_usage else 1
    except ModelError as error:
        _print({"ok": False, "error": str(error), "code": "not_a_model"})
        return 1
    _print({"ok": True, **facts})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
