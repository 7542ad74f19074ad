"""What crosses the socket between gateway and engine, and its limits. Knows no torch, no socket and nothing of the appliance.

Plain frozen dataclasses, so that the engine imports with torch alone; `engine.transport` encodes them as MessagePack.
One `GatewayFrame` goes in and one `EngineFrame` comes out per engine step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

FRAME_BYTES_MAX = 64 * 1024 * 1024
TOP_LOGPROBS_MAX = 20
STOP_STRINGS_MAX = 16
LOGIT_BIAS_MAX = 1024
REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX = 0.01, 10.0
SEED_MAX = 2**63 - 1
WEIGHT_MAX = 1000
TOKENS_MAX = 2**31 - 1  # as a count and as an id: more than any context and any vocabulary
TOP_K_MAX = 2**31 - 1  # more than any vocabulary; what does not fit an int64 would fail inside the sampler


class FinishReason(StrEnum):
    """Why the engine ended a request. `STOP` is an end-of-sequence or stop token; `LENGTH` is max_tokens or the context.

    `DEADLINE` ends a request that waited in the queue for longer than its `queue_deadline_s`; it never had a token.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    ERROR = "error"


class Priority(StrEnum):
    """Classes of service, most urgent first. A lower class gets what no higher one can use, and ages upwards."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


class InvalidOption(ValueError):
    """A field has a value that cannot be accepted. `param` names the field; the message states the limit."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedOption(InvalidOption):
    """A known field asks for something that this version cannot honour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Field names are those of vLLM's offline interface.

    A `temperature` below 1e-5 is greedy, as 0 is. `top_k == 0` (or -1) is off. `seed is None` lets the caller's side choose
    one; on the wire a seed is always set, because randomness is a function of (seed, position). `stop` holds strings and is
    applied by whoever owns the text (gateway or `LLM`), never by the engine loop, which knows token ids only.

    Raises `InvalidOption` / `UnsupportedOption` on construction, naming the field.
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
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided_json: str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_supported(self)


def _require(ok: bool, param: str, message: str) -> None:
    if not ok:
        raise InvalidOption(param, f"{param} {message}")


def _check_ranges(p: SamplingParams) -> None:
    _require(0.0 <= p.temperature <= 2.0, "temperature", f"must be between 0 and 2, not {p.temperature}")
    _require(0.0 < p.top_p <= 1.0, "top_p", f"must be above 0 and at most 1, not {p.top_p}")
    _require(-1 <= p.top_k <= TOP_K_MAX, "top_k", f"must be -1 or 0 (off) or at most {TOP_K_MAX}, not {p.top_k}")
    _require(0.0 <= p.min_p <= 1.0, "min_p", f"must be between 0 and 1, not {p.min_p}")
    _require(
        REPETITION_PENALTY_MIN <= p.repetition_penalty <= REPETITION_PENALTY_MAX,
        "repetition_penalty",
        f"must be between {REPETITION_PENALTY_MIN:g} and {REPETITION_PENALTY_MAX:g}, not {p.repetition_penalty}",
    )
    _require(-2.0 <= p.presence_penalty <= 2.0, "presence_penalty", f"must be between -2 and 2, not {p.presence_penalty}")
    _require(-2.0 <= p.frequency_penalty <= 2.0, "frequency_penalty", f"must be between -2 and 2, not {p.frequency_penalty}")
    _require(p.seed is None or 0 <= p.seed <= SEED_MAX, "seed", f"must be between 0 and {SEED_MAX}, not {p.seed}")
    _require(
        p.max_tokens is None or 1 <= p.max_tokens <= TOKENS_MAX,
        "max_tokens",
        f"must be between 1 and {TOKENS_MAX}, not {p.max_tokens}",
    )
    _require(0 <= p.min_tokens <= TOKENS_MAX, "min_tokens", f"must be between 0 and {TOKENS_MAX}, not {p.min_tokens}")
    _require(
        p.max_tokens is None or p.min_tokens <= p.max_tokens,
        "min_tokens",
        f"must be at most max_tokens ({p.max_tokens}), not {p.min_tokens}",
    )
    _require(
        p.logprobs is None or 0 <= p.logprobs <= TOP_LOGPROBS_MAX,
        "logprobs",
        f"must be between 0 and {TOP_LOGPROBS_MAX}, not {p.logprobs}",
    )
    _require(len(p.stop) <= STOP_STRINGS_MAX, "stop", f"takes at most {STOP_STRINGS_MAX} strings, not {len(p.stop)}")
    _require(all(p.stop), "stop", "must not contain an empty string")
    ids = p.stop_token_ids
    _require(all(0 <= i <= TOKENS_MAX for i in ids), "stop_token_ids", f"must hold ids between 0 and {TOKENS_MAX}")
    bias = p.logit_bias or {}
    _require(len(bias) <= LOGIT_BIAS_MAX, "logit_bias", f"takes at most {LOGIT_BIAS_MAX} tokens, not {len(bias)}")
    _require(all(0 <= i <= TOKENS_MAX for i in bias), "logit_bias", f"must name ids between 0 and {TOKENS_MAX}")
    _require(all(-100.0 <= b <= 100.0 for b in bias.values()), "logit_bias", "values must be between -100 and 100")


def _check_supported(p: SamplingParams) -> None:
    unsupported = {
        "n": p.n != 1,
        "best_of": p.best_of not in (None, 1),
        "typical_p": p.typical_p != 1.0,
        "bad_words": bool(p.bad_words),
        "prompt_logprobs": p.prompt_logprobs is not None,
        "guided_json": p.guided_json is not None,
        "guided_regex": p.guided_regex is not None,
        "guided_choice": p.guided_choice is not None,
        "guided_grammar": p.guided_grammar is not None,
    }
    for param, asked in unsupported.items():
        if asked:
            raise UnsupportedOption(param, f"{param} is not supported by this version of the engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request as the engine gets it: token ids, never text. `sampling.seed` and `sampling.max_tokens` are set.

    Whose request it is decides about fairness and about the salt of its prefix cache; both come from the key that was
    authenticated, never from the request. `weight` is the tenant's share against others, 1 … WEIGHT_MAX.
    `queue_deadline_s` bounds the wait until it is first scheduled; None waits for as long as it takes.
    """

    request_id: str
    tenant_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    weight: int = 1
    priority: Priority = Priority.STANDARD
    queue_deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of the sampled token and of the `top` most likely ones, natural log, before temperature."""

    logprob: float
    top_token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """What one step did to one answer of a request. `index` counts the `n` answers of a request from 0; exactly one event
    of each answer has `finish_reason` set, and it is the answer's last.

    `prompt_logprobs` are those of the prompt tokens that this step computed, in order; the first token of a prompt has none.
    `error_param` names the field of the request that is to blame for `error`; None when it is nobody's fault.

    `num_output_tokens` counts every token generated so far, so the last event carries what is billed; `token_ids` are the
    new ones only (empty when the event tells of an abort or an error). `num_prompt_tokens_computed` reaches
    the prompt length when prefill is done. `queue_s` is the wait until the request was first scheduled.
    """

    request_id: str
    token_ids: list[int]
    num_output_tokens: int
    num_prompt_tokens_computed: int
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queue_s: float = 0.0
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    index: int = 0
    prompt_logprobs: list[TokenLogprob] | None = None
    error_param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    """A live answer as the engine sees it. `state` is queued, prefill or decode; `queue_position` counts from 0."""

    request_id: str
    state: str
    queue_position: int | None
    kv_blocks: int
    num_computed_tokens: int
    num_output_tokens: int
    num_preemptions: int
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantProgress:
    """A tenant with live requests. `service_s` is the predicted device time spent for it since it became active."""

    tenant_id: str
    num_running: int
    num_waiting: int
    kv_blocks: int
    service_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """Gauges and running totals of one engine process since its start. `requests` and `tenants` are filled a few times per
    second. Host blocks are the tier in main memory that evicted KV blocks move to; draft tokens are those of speculative
    decoding, of which the accepted ones became output."""

    num_running: int
    num_waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_blocks_free: int
    step_ms: float
    num_batched_tokens: int
    steps_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    prefix_cache_hit_tokens_total: int
    preemptions_total: int
    requests: list[RequestProgress] | None = None
    tenants: list[TenantProgress] | None = None
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    swapped_in_blocks_total: int = 0
    swapped_out_blocks_total: int = 0
    draft_tokens_total: int = 0
    accepted_draft_tokens_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about a loaded model, sent once when the engine is ready."""

    model: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    block_size: int
    num_kv_blocks: int
    dtype: str
    device: str
    device_name: str
    kernels: str
    num_parameters: int
    weights_bytes: int
    kv_bytes: int
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayFrame:
    """Gateway to engine. `shutdown` asks for an orderly exit: every live request is aborted first.

    `abort` ends all answers of a request, `abort_answers` one each, as (request_id, index), and leaves its others running.
    """

    submit: list[GenerationRequest] = field(default_factory=list)
    abort: list[str] = field(default_factory=list)
    abort_answers: list[tuple[str, int]] = field(default_factory=list)
    shutdown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFrame:
    """Engine to gateway. While loading only `load_fraction` is set; then `ready` once; then `events` and `status`.

    `fatal` is the reason for an exit that follows at once (a model that cannot be loaded, say).
    """

    events: list[TokenEvent] = field(default_factory=list)
    status: EngineStatus | None = None
    ready: EngineInfo | None = None
    load_fraction: float | None = None
    fatal: str | None = None
