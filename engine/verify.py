"""`python -m engine.verify PATH`: would this model directory load? Reads it with the engine's own code, holding no weights.

Prints JSON lines: `{"fraction": …}` while it reads, at the end `{"ok": true, …}` with the facts or `{"ok": false, "error": …}`.
Exit status 0 when it would load, 1 when not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.chat_template import ChatTemplate, ChatTemplateError, NoChatTemplate
from engine.config.model import load_model_config
from engine.errors import ModelError, NotAModelDirectory
from engine.models.decoder import Decoder
from engine.runner.weights import WeightsSize, load_weights, weight_files
from engine.text import Tokenizer

REPORT_FRACTION = 0.05


def verify_model(directory: Path, *, progress: Callable[[float], None] = lambda _: None) -> dict[str, Any]:
    """Return facts about a model that would load. Raises `ModelError`, naming the file, key or tensor that is wrong.

    The places of the decoder are on the meta device: every tensor is matched by name, shape and type, none is kept.
    """
    config = load_model_config(directory)
    tokenizer_size = _tokenizer_size(directory, config.vocab_size)
    _check_chat_template(directory)
    plan = Decoder(config, dtype=torch.float32, device=torch.device("meta")).weight_plan()
    load_weights(directory, plan, progress=progress)
    return {
        "architecture": config.family.architecture,
        "tensors": len(plan.places),
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


def main(arguments: list[str]) -> int:
    """Verify one directory and return the exit status."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m engine.verify PATH\n")
        return 2
    try:
        facts = verify_model(Path(arguments[0]), progress=_Report())
    except ModelError as error:
        _print({"ok": False, "error": str(error)})
        return 1
    _print({"ok": True, **facts})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
