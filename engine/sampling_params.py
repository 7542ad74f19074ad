"""How tokens are chosen and when an answer ends: the parameters of a request, their limits and their checks. Knows no torch.

Every value is checked where the parameters are made, by type and by limit, so that no later code has to.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from engine.number_checks import is_integer, is_number

N_MAX = 128
TOP_LOGPROBS_MAX = 20
STOP_STRINGS_MAX = 16
STOP_CHARS_MAX = 16_000  # of all stop strings together
STOP_TOKEN_IDS_MAX = 1024
LOGIT_BIAS_MAX = 1024
BAD_WORDS_MAX = 1024
BAD_WORDS_CHARS_MAX = 16_384  # of all bad words together
BAD_WORDS_TOKENS_MAX = 8 * BAD_WORDS_CHARS_MAX  # twice (with and without a space) up to four bytes for each character
GUIDED_CHARS_MAX = 256 * 1024
GUIDED_BYTES_MAX = {
    "guided_json": 256 * 1024,
    "guided_regex": 16 * 1024,
    "guided_choice": 64 * 1024,
    "guided_grammar": 256 * 1024,
}
"""Bytes of a grammar's text in UTF-8, and of choices as a JSON list; checked by the caller that has it compiled."""
GUIDED_CHOICES_MAX = 1024
SEED_MAX = 2**63 - 1
TOKENS_MAX = 2**31 - 1  # as a count and as an id: more than any context and any vocabulary
TOP_K_MAX = 2**31 - 1  # more than any vocabulary; what does not fit an int64 would fail inside the sampler


class Range(NamedTuple):
    """The limits of a number. `above`: the lower limit itself is excluded."""

    low: float
    high: float
    above: bool = False


RANGES = {
    "temperature": Range(0.0, 2.0),
    "top_p": Range(0.0, 1.0, above=True),
    "top_k": Range(-1, TOP_K_MAX),
    "min_p": Range(0.0, 1.0),
    "typical_p": Range(0.0, 1.0, above=True),
    "repetition_penalty": Range(0.01, 10.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "logit_bias": Range(-100.0, 100.0),
    "seed": Range(0, SEED_MAX),
    "n": Range(1, N_MAX),
    "best_of": Range(1, N_MAX),
    "max_tokens": Range(1, TOKENS_MAX),
    "min_tokens": Range(0, TOKENS_MAX),
    "logprobs": Range(0, TOP_LOGPROBS_MAX),
    "prompt_logprobs": Range(0, TOP_LOGPROBS_MAX),
}
"""The range of every number of a request, and of the amounts in `logit_bias`."""
FLOAT_PARAMS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
GUIDED_PARAMS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class InvalidOption(ValueError):
    """A field has a value that cannot be accepted. `param` names the field; the message states the limit."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedOption(InvalidOption):
    """A known field has a value that this version does not support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Field names are those of vLLM's offline interface.

    A `temperature` below 1e-5 is greedy, as 0 is. `top_k == 0` (or -1) is off. `seed is None` lets the caller's side choose
    one; on the wire a seed is always set, because randomness is a function of (seed, position). `best_of` answers are
    generated, and the owner of the text keeps the `n` with the highest cumulative log-probability.

    `stop` holds strings (one string is a list of one) and is applied by the owner of the text (gateway or `LLM`), never by the
    engine loop, which knows token ids only; so is `echo`, an answer that begins with its prompt. `bad_words` are text:
    the engine uses `bad_words_token_ids`, which the owner of the tokenizer fills (`sampling.bad_words`). `guided_json` takes
    a schema as JSON text or as a mapping and holds it as text; at most one `guided_…` may be set. Integers where floats are
    meant become floats.

    Raises `InvalidOption` on construction, naming the field.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def __post_init__(self) -> None:
        _normalise(self)
        _check_numbers(self)
        _check_lengths(self)
        _check_ends(self)
        _check_bias(self)
        _check_bad_words(self)
        _check_guided(self)
        _make_floats(self)

    def with_checked(self, **fields: Any) -> SamplingParams:
        """A copy with these fields, which the caller has checked: nothing is checked again."""
        other = copy(self)
        for name, value in fields.items():
            object.__setattr__(other, name, value)
        return other

    @property
    def num_answers(self) -> int:
        """How many answers are generated: `best_of`, or `n` when it is not set."""
        return self.n if self.best_of is None else self.best_of

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens are in prompt or output."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def guided_param(self) -> str | None:
        """The one `guided_…` field that is set."""
        return next((param for param in GUIDED_PARAMS if getattr(self, param) is not None), None)

    @property
    def is_guided(self) -> bool:
        """Whether a grammar decides which tokens are allowed."""
        return (
            self.guided_json is not None
            or self.guided_regex is not None
            or self.guided_choice is not None
            or self.guided_grammar is not None
        )

    @property
    def stops_at_eos(self) -> bool:
        """Whether the model's end-of-sequence token ends an answer. The end of a grammar always does, even with `ignore_eos`:
        nothing could follow it."""
        return self.is_guided or not self.ignore_eos


def _require(ok: bool, param: str, message: str, *values: object) -> None:
    """Refuse the parameter unless `ok`, with `values` in the places {} of the message."""
    if not ok:
        raise InvalidOption(param, f"{param} {message.format(*map(_shown, values))}")


def _shown(value: object) -> str:
    """A value in a message: short, whatever it is."""
    if isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 64):
        return repr(value)
    return f"a number of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__


def _normalise(p: SamplingParams) -> None:
    """Make one stop string a list, none an empty list, a schema its JSON text."""
    stop: Any = p.stop
    stop_token_ids: Any = p.stop_token_ids
    if stop is None or isinstance(stop, str):
        object.__setattr__(p, "stop", [] if stop is None else [stop])
    if stop_token_ids is None:
        object.__setattr__(p, "stop_token_ids", [])
    if isinstance(p.guided_json, Mapping):
        object.__setattr__(p, "guided_json", _schema_text(p.guided_json))


def _schema_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidOption("guided_json", f"guided_json cannot be written as JSON: {error}") from error


def _number(p: SamplingParams, param: str) -> None:
    """Check a float against its limits, which exclude NaN."""
    value, (low, high, above) = getattr(p, param), RANGES[param]
    if is_number(value) and (low < value if above else low <= value) and value <= high:
        return
    limits = f"must be above {low:g} and at most {high:g}" if above else f"must be between {low:g} and {high:g}"
    raise InvalidOption(param, f"{param} {limits}, not {_shown(value)}")


def _integer(p: SamplingParams, param: str, *, optional: bool = False, note: str = "") -> None:
    value, (low, high, _) = getattr(p, param), RANGES[param]
    if (optional and value is None) or (is_integer(value) and low <= value <= high):
        return
    raise InvalidOption(param, f"{param} must be an integer between {low} and {high}{note}, not {_shown(value)}")


def _check_numbers(p: SamplingParams) -> None:
    for param in FLOAT_PARAMS:
        _number(p, param)
    _integer(p, "top_k", note=" (-1 and 0 are off)")
    for param in ("seed", "logprobs", "prompt_logprobs"):
        _integer(p, param, optional=True)
    for param in ("ignore_eos", "echo"):
        value = getattr(p, param)
        _require(isinstance(value, bool), param, "must be True or False, not {}", value)


def _make_floats(p: SamplingParams) -> None:
    """Convert checked numbers to floats."""
    for param in FLOAT_PARAMS:
        value = getattr(p, param)
        if type(value) is not float:
            object.__setattr__(p, param, float(value))
    if p.logit_bias and any(type(value) is not float for value in p.logit_bias.values()):
        object.__setattr__(p, "logit_bias", {token_id: float(value) for token_id, value in p.logit_bias.items()})


def _check_lengths(p: SamplingParams) -> None:
    _integer(p, "n")
    _integer(p, "best_of", optional=True)
    _require(p.best_of is None or p.best_of >= p.n, "best_of", "must be at least n ({}), not {}", p.n, p.best_of)
    _integer(p, "max_tokens", optional=True)
    _integer(p, "min_tokens")
    _require(
        p.max_tokens is None or p.min_tokens <= p.max_tokens,
        "min_tokens",
        "must be at most max_tokens ({}), not {}",
        p.max_tokens,
        p.min_tokens,
    )


def _check_ends(p: SamplingParams) -> None:
    _strings(p.stop, "stop", STOP_STRINGS_MAX, STOP_CHARS_MAX)
    _text(p.stop, "stop")
    ids = p.stop_token_ids
    _require(isinstance(ids, list | tuple), "stop_token_ids", "must be a list of token ids, not {}", ids)
    _require(len(ids) <= STOP_TOKEN_IDS_MAX, "stop_token_ids", "takes at most {} ids, not {}", STOP_TOKEN_IDS_MAX, len(ids))
    _token_ids(ids, "stop_token_ids")


def _strings(values: Any, param: str, count_max: int, chars_max: int) -> None:
    """A list of up to `count_max` strings, none empty, with at most `chars_max` characters in all."""
    is_list = isinstance(values, list | tuple)
    _require(is_list and all(isinstance(value, str) for value in values), param, "must be a list of strings")
    _require(len(values) <= count_max, param, "takes at most {} strings, not {}", count_max, len(values))
    _require(all(values), param, "must not contain an empty string")
    num_chars = sum(map(len, values))
    _require(num_chars <= chars_max, param, "takes at most {} characters in all, not {}", chars_max, num_chars)


def _text(values: Sequence[str], param: str) -> None:
    """Strings that can be written as UTF-8."""
    try:
        "".join(values).encode()
    except UnicodeEncodeError as error:
        raise InvalidOption(param, f"{param} holds half of a surrogate pair, which is not text") from error


def _token_ids(ids: Collection[Any], param: str) -> None:
    """Check up to BAD_WORDS_TOKENS_MAX ids, one by one only if some are of another type than int."""
    are_plain = set(map(type, ids)) <= {int}
    ok = are_plain or all(map(is_integer, ids))
    ok = ok and (not ids or (min(ids) >= 0 and max(ids) <= TOKENS_MAX))
    _require(ok, param, "must hold token ids: integers from 0 to {}", TOKENS_MAX)


def _check_bias(p: SamplingParams) -> None:
    bias = p.logit_bias
    if bias is None:
        return
    _require(isinstance(bias, Mapping), "logit_bias", "must map token ids to numbers, not be {}", bias)
    _require(len(bias) <= LOGIT_BIAS_MAX, "logit_bias", "takes at most {} tokens, not {}", LOGIT_BIAS_MAX, len(bias))
    _token_ids(bias, "logit_bias")
    low, high, _ = RANGES["logit_bias"]
    ok = all(is_number(value) and low <= value <= high for value in bias.values())
    _require(ok, "logit_bias", f"values must be numbers between {low:g} and {high:g}")


def _check_bad_words(p: SamplingParams) -> None:
    if p.bad_words is not None:
        _strings(p.bad_words, "bad_words", BAD_WORDS_MAX, BAD_WORDS_CHARS_MAX)
        _text(p.bad_words, "bad_words")
        _require(all(map(str.strip, p.bad_words)), "bad_words", "must not contain a word of spaces alone")
    words = p.bad_words_token_ids
    if words is None:
        return
    param = "bad_words_token_ids"
    is_list = isinstance(words, list | tuple) and all(isinstance(word, list | tuple) and word for word in words)
    _require(is_list, param, "must be a list of lists of token ids, none empty")
    _require(len(words) <= 2 * BAD_WORDS_MAX, param, "takes at most {} words, not {}", 2 * BAD_WORDS_MAX, len(words))
    num_ids = sum(map(len, words))
    _require(num_ids <= BAD_WORDS_TOKENS_MAX, param, "takes at most {} ids in all, not {}", BAD_WORDS_TOKENS_MAX, num_ids)
    _token_ids(list(chain.from_iterable(words)), param)


def _check_guided(p: SamplingParams) -> None:
    """Check types and sizes; whether a grammar is valid is found when it is compiled."""
    given = [param for param in GUIDED_PARAMS if getattr(p, param) is not None]
    if not given:
        return
    _require(len(given) == 1, given[-1], f"cannot be combined with {given[0]}: a request takes one grammar")
    (param,) = given
    value = getattr(p, param)
    if param == "guided_choice":
        _strings(value, param, GUIDED_CHOICES_MAX, GUIDED_CHARS_MAX)
        _require(bool(value), param, "needs at least one string")
        return
    _require(isinstance(value, str), param, "must be text, not {}", value)
    _require(len(value) <= GUIDED_CHARS_MAX, param, "takes at most {} characters, not {}", GUIDED_CHARS_MAX, len(value))
