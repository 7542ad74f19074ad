"""How well a model predicts a fixed text, and how much worse it does with weights, keys and values in fewer bits.

Perplexity is e to the mean of the negative log-probabilities of the tokens, given those before them in their window. The engine
computes it through the paged cache, with everything that serving does to the numbers. Only the ratio of two perplexities on the
same tokens means anything: the text is short, and it is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from engine.config.model import load_model_config
from engine.errors import EngineConfigError, ModelError
from engine.offline.llm import LLM
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("perplexity_text.txt")
WINDOW_TOKENS = 512
CONTEXT_MIN = 3  # a token, the one that it predicts, and the one that the engine generates
LOG_MAX = 700.0  # e to more than 709 is no floating-point number


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatOptions:
    """The formats in which a model is kept: the options of `EngineOptions` by these names."""

    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    head_quantization: str | None = None

    def __str__(self) -> str:
        changed = [
            f"{option.name} {value}" for option in fields(self) if (value := getattr(self, option.name)) != option.default
        ]
        return ", ".join(changed) or "as it is stored"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`unquantised` is None where no unquantised model was at hand, `as_stored` unless a quantised checkpoint was loaded in
    other formats than its own. `num_tokens` were predicted: all but the first of each window."""

    perplexity: float
    unquantised: float | None
    num_tokens: int
    as_stored: float | None = None

    @property
    def ratio(self) -> float | None:
        return None if self.unquantised is None else self.perplexity / self.unquantised

    @property
    def stored_ratio(self) -> float | None:
        return None if self.as_stored is None else self.perplexity / self.as_stored


def compare(directory: Path, formats: FormatOptions, *, unquantised: Path | None = None) -> Comparison:
    """The perplexity of a model in `formats`, and what to compare it with: that of `unquantised`; without it, that of the same
    model in its own format if it is not quantised. A quantised checkpoint whose head or cache is changed is also compared with
    itself as it is stored; one that is decoded while it is read, with its decoded numbers.

    Raises `EngineConfigError` when the two read the text as different tokens, and what building an engine raises.
    """
    stored = load_model_config(directory).quantization
    is_decoded = stored is not None and stored.decoded is not None
    tokens = text_tokens(directory)
    reference = directory if stored is None and unquantised is None and formats != FormatOptions() else unquantised
    if reference is not None and text_tokens(reference) != tokens:
        raise EngineConfigError("unquantized", f"({reference}) has another tokenizer: the perplexities cannot be compared")
    size = min(window_tokens(folder) for folder in (directory, reference) if folder is not None)
    num_scored = sum(len(window) - 1 for window in windows_of(tokens, size))
    measured = perplexity(directory, tokens, formats, size)
    baseline = None if reference is None else perplexity(reference, tokens, FormatOptions(), size)
    own = FormatOptions(quantization="none") if is_decoded else FormatOptions()
    differs_from_stored = stored is not None and (formats if is_decoded else replace(formats, quantization=None)) != own
    as_stored = perplexity(directory, tokens, own, size) if differs_from_stored else None
    return Comparison(measured, baseline, num_scored, as_stored)


def text_tokens(directory: Path) -> list[int]:
    """The fixed text as the model reads it."""
    return Tokenizer(directory).encode(TEXT.read_text("utf-8"))


def window_tokens(directory: Path) -> int:
    """Tokens of a window: as many as the context has, less one position for the token that the engine generates. Raises
    `ModelError` for a context in which no token has one before it."""
    context = load_model_config(directory).max_position_len
    if context < CONTEXT_MIN:
        raise ModelError(f"{directory} has no perplexity: its context is {context}, at least {CONTEXT_MIN} tokens are needed")
    return min(WINDOW_TOKENS, context - 1)


def windows_of(tokens: Sequence[int], size: int) -> list[list[int]]:
    """Cut `tokens` into windows of `size`. A last one of a single token is left out: it would predict nothing."""
    windows = [list(tokens[first : first + size]) for first in range(0, len(tokens), size)]
    return [window for window in windows if len(window) > 1]


def perplexity(directory: Path, tokens: Sequence[int], formats: FormatOptions, size: int) -> float:
    """The perplexity of `tokens`, cut into windows of `size`, each read without those before it. Raises `ModelError` for a
    model that has none: its numbers are not finite, or too large."""
    with LLM(
        directory,
        max_model_len=size + 1,
        quantization=formats.quantization,
        kv_cache_dtype=formats.kv_cache_dtype,
        head_quantization=formats.head_quantization,
        enable_prefix_caching=False,
        max_num_seqs=8,
    ) as llm:
        scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate(windows_of(tokens, size), scored, use_tqdm=False)
    errors = [answer.error for output in outputs for answer in output.outputs if answer.error is not None]
    if errors:
        raise ModelError(f"{directory} has no perplexity ({formats}): {errors[0]}")
    logprobs = [
        entry[token_id].logprob
        for output in outputs
        for token_id, entry in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
        if entry is not None
    ]
    mean = sum(logprobs) / len(logprobs)
    if not -mean < LOG_MAX:
        raise ModelError(f"{directory} has no perplexity ({formats}): the mean log-probability of a token is {mean:.0f}")
    return math.exp(-mean)
