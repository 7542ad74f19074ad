"""What crosses the socket between gateway and engine, and its limits. Knows no torch, no socket and nothing of the appliance.

Plain frozen dataclasses, so that the engine imports with torch alone; `engine.transport` encodes them as MessagePack.
One `GatewayFrame` goes in and one `EngineFrame` comes out per engine step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from engine.sampling_params import InvalidOption as InvalidOption
from engine.sampling_params import SamplingParams as SamplingParams
from engine.sampling_params import UnsupportedOption as UnsupportedOption

FRAME_BYTES_MAX = 64 * 1024 * 1024
WEIGHT_MAX = 1000


class FinishReason(StrEnum):
    """Why the engine ended a request. `STOP` is an end-of-sequence or stop token; `LENGTH` is max_tokens or the context.

    `DEADLINE` ends a request that waited in the queue for longer than its `queue_deadline_s`, `OVERLOADED` one that the engine
    cannot take on now; neither ever had a token.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    OVERLOADED = "overloaded"
    ERROR = "error"


class Priority(StrEnum):
    """Classes of service, most urgent first. A lower class gets what no higher one can use, and ages upwards."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


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
    """Log-probability of the sampled token and of the `top` most likely ones, natural log, before temperature.

    `rank` of the sampled token counts from 1: one more than the number of tokens that were likelier.
    """

    logprob: float
    top_token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)
    rank: int | None = None


@dataclass(slots=True)
class TokenEvent:  # neither frozen nor of keywords only: a step may make hundreds, and both cost more than the rest
    """What one step did to one answer of a request. `index` counts the `n` answers of a request from 0; exactly one event
    of each answer has `finish_reason` set, and it is the answer's last.

    `prompt_logprobs` are those of the prompt tokens that this step computed, in order; the first token of a prompt has none.
    `error_param` names the field of the request that is to blame for `error`; None when it is nobody's fault.

    `num_output_tokens` counts every token generated so far, so the last event carries what is billed; `token_ids` are the
    new ones only (empty when the event tells of an abort or an error). `num_prompt_tokens_computed` reaches
    the prompt length when prefill is done. `queue_s` is the wait until the request was first scheduled.
    `num_rejected_draft_tokens` counts, like the output, the guesses of speculative decoding so far that were computed and
    thrown away. `decode_s` is the time from the first token to the last, told with the last token: who reads events has it only
    as far as he reads them when they come.
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
    num_rejected_draft_tokens: int = 0
    decode_s: float = 0.0


DecodedToken = tuple[str, int, int]
"""One more token of an answer that goes on: request_id, index, token id. Its count is one more, and all else is as the last
event of the answer had it, but for preemptions since then. A step in which nobody comes or goes has hundreds and no event."""


@dataclass(slots=True, kw_only=True)  # not frozen: there are hundreds at a time, and to make a frozen one takes twice as long
class RequestProgress:
    """A live answer as the engine sees it. `state` is queued, prefill or decode. `queue_position` counts, from 0, the requests
    of its own tenant that wait before it; between tenants the shares decide, in no order that would hold."""

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


class PlainReason(StrEnum):
    """What a request asks for that takes the steps it is in out of the fast way, with all who are in them."""

    PROMPT_LOGPROBS = "prompt_logprobs"
    LOGIT_BIAS = "logit_bias"


@dataclass(slots=True, kw_only=True)  # not frozen: one is made in each step, and a frozen one takes three times as long
class EngineStatus:
    """Gauges and running totals of one engine process since its start. `requests` and `tenants` are filled a few times per
    second. Host blocks are the tier in main memory that evicted KV blocks move to; draft tokens are those of speculative
    decoding, of which the accepted ones became output. Fall-back steps are those that were computed in the plain, slow way
    because the fast one failed; `fallback_reason` says why the last one was. Plain steps are computed so because of
    what a request in them asks for, by `PlainReason`."""

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
    fallback_steps_total: int = 0
    fallback_reason: str | None = None
    plain_steps_total: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """What one part of an engine takes of its device. `name`: weights, activations, graphs, slots, rotary_tables,
    device_context or kv_cache. `measured_bytes` is None where the device does not tell, or where nothing was taken yet.
    `num_predicted` graphs may be kept, and `num_measured` had been captured when that was measured; None of other parts."""

    name: str
    predicted_bytes: int
    measured_bytes: int | None = None
    num_predicted: int | None = None
    num_measured: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about a loaded model, sent once when the engine is ready. `quantization` is how its weights are kept, as the option
    of that name calls it, or none. `kv_scales` of keys and values in 8 bits: unit, or from the checkpoint. `switched_off`: the
    variables of `engine.switches` that say 0."""

    model: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    dtype: str
    device: str
    device_name: str
    kernels: str
    num_parameters: int
    weights_bytes: int
    kv_bytes: int
    load_s: float
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    kv_scales: str = "none"
    memory: list[MemoryPart] = field(default_factory=list)
    memory_note: str | None = None
    switched_off: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayFrame:
    """Gateway to engine. `shutdown` asks for an orderly exit: every live request is aborted first.

    `abort` ends all answers of a request, `abort_answers` one each, as (request_id, index), and leaves its others running.
    """

    submit: list[GenerationRequest] = field(default_factory=list)
    abort: list[str] = field(default_factory=list)
    abort_answers: list[tuple[str, int]] = field(default_factory=list)
    shutdown: bool = False


@dataclass(slots=True, kw_only=True)  # not frozen, as its status
class EngineFrame:
    """Engine to gateway. While loading only `load_fraction` is set; then `ready` once; then `events`, what is `decoded` behind
    them, and `status`.

    `fatal` is the reason for an exit that follows at once (a model that cannot be loaded, say).
    """

    events: list[TokenEvent] = field(default_factory=list)
    decoded: list[DecodedToken] = field(default_factory=list)
    status: EngineStatus | None = None
    ready: EngineInfo | None = None
    load_fraction: float | None = None
    fatal: str | None = None
