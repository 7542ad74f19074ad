"""`python -m engine.verify PATH`: would this model directory load? Reads it with the engine's own code, holding no weights.

With `--perplexity`, or with a format to try, it is loaded as well and reads a fixed text, beside the unquantised model where
there is one. Prints JSON lines: `{"fraction": …}` while it reads, at the end `{"ok": true, …}` with the facts or
`{"ok": false, "error": …}`. Exit status 0 when it would load, 1 when not, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.cpu_environment import prepare_cpu
from engine.gpu_environment import prepare_gpu

prepare_cpu()
prepare_gpu()

import torch  # noqa: E402 - torch must see the environment set above

from engine.chat_template import ChatTemplate, ChatTemplateError, NoChatTemplate  # noqa: E402
from engine.config.model import load_model_config  # noqa: E402
from engine.errors import EngineConfigError, ModelError, NotAModelDirectory  # noqa: E402
from engine.models.decoder import Decoder  # noqa: E402
from engine.options import HEAD_QUANTIZATIONS, KV_CACHE_DTYPES, QUANTIZATIONS  # noqa: E402
from engine.quantization.perplexity import Formats, compare  # noqa: E402
from engine.quantization.scheme import UNQUANTISED, weight_scheme  # noqa: E402
from engine.runner.weights import WeightsSize, load_weights, stored_names, weight_files  # noqa: E402
from engine.text import Tokenizer  # noqa: E402

REPORT_FRACTION = 0.05


def verify_model(directory: Path, *, progress: Callable[[float], None] = lambda _: None) -> dict[str, Any]:
    """Return facts about a model that would load. Raises `ModelError`, naming the file, key or tensor that is wrong.

    The places of the decoder are on the meta device: every tensor is matched by name, shape and type, none is kept.
    """
    config = load_model_config(directory)
    tokenizer_size = _tokenizer_size(directory, config.vocab_size)
    _check_chat_template(directory)
    scheme = weight_scheme(directory, config, None)
    plan = Decoder(config, dtype=torch.float32, device=torch.device("meta")).weight_plan(scheme.storage)
    load_weights(directory, plan, progress=progress)
    return {
        "architecture": config.family.architecture,
        "quantization": scheme.name,
        "tensors": len(stored_names(directory)),
        "parameters": WeightsSize.of(plan).num_parameters,
        "weights_bytes": sum(path.stat().st_size for path in weight_files(directory)),
        "vocab_size": config.vocab_size,
        "tokenizer_size": tokenizer_size,
        "max_position_len": config.max_position_len,
    }


def _tokenizer_size(directory: Path, vocab_size: int) -> int:
    size = Tokenizer(directory).vocab_size
    if size > vocab_size:
        raise NotAModelDirectory(
            f"{directory / 'tokenizer.json'} has {size} tokens, but the model's vocabulary is {vocab_size}"
        )
    return size


def _check_chat_template(directory: Path) -> None:
    """A base model has none; one that is there must compile."""
    try:
        ChatTemplate.load(directory)
    except NoChatTemplate:
        return
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


def _perplexities(directory: Path, formats: Formats, unquantised: Path | None, *, is_plain: bool) -> dict[str, Any]:
    """Facts of the model with its weights loaded, twice where there is something to compare with."""
    found = compare(directory, formats, is_plain=is_plain, unquantised=unquantised)
    return {
        "perplexity": round(found.perplexity, 4),
        "perplexity_unquantized": None if found.unquantised is None else round(found.unquantised, 4),
        "perplexity_ratio": None if found.ratio is None else round(found.ratio, 5),
        "perplexity_as_stored": None if found.as_stored is None else round(found.as_stored, 4),
        "perplexity_as_stored_ratio": None if found.stored_ratio is None else round(found.stored_ratio, 5),
        "perplexity_tokens": found.num_tokens,
    }


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engine.verify", description="Would a model directory load?", allow_abbrev=False)
    parser.add_argument("path", type=Path, metavar="PATH")
    parser.add_argument("--perplexity", action="store_true", help="of the model on a fixed text")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="compare the model in this format with the plain one")
    parser.add_argument("--head-quantization", choices=HEAD_QUANTIZATIONS, help="with the output head in this one")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="with keys and values in this one")
    parser.add_argument("--unquantized", type=Path, metavar="PATH", help="compare with this model")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Verify one directory and return the exit status."""
    options = _options(arguments)
    formats = Formats(
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        head_quantization=options.head_quantization,
    )
    try:
        facts = verify_model(options.path, progress=_Report())
        if options.perplexity or options.unquantized or formats != Formats():
            facts |= _perplexities(options.path, formats, options.unquantized, is_plain=facts["quantization"] == UNQUANTISED)
    except (ModelError, EngineConfigError) as error:
        _print({"ok": False, "error": str(error)})
        return 1
    _print({"ok": True, **facts})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
