"""The messages between gateway and engine, and their limits. Knows no torch, no socket and nothing of the appliance.

Plain frozen dataclasses, so that the engine imports with torch alone; `engine.transport` encodes them as MessagePack.
One `GatewayFrame` goes in and one `EngineFrame` comes out per engine step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from engine.sampling_params import BAD_WORDS_CHARS_MAX as BAD_WORDS_CHARS_MAX
from engine.sampling_params import BAD_WORDS_MAX as BAD_WORDS_MAX
from engine.sampling_params import GUIDED_BYTES_MAX as GUIDED_BYTES_MAX
from engine.sampling_params import GUIDED_CHOICES_MAX as GUIDED_CHOICES_MAX
from engine.sampling_params import LOGIT_BIAS_MAX as LOGIT_BIAS_MAX
from engine.sampling_params import RANGES as RANGES
from engine.sampling_params import STOP_STRINGS_MAX as STOP_STRINGS_MAX
from engine.sampling_params import InvalidOption as InvalidOption
from engine.sampling_params import SamplingParams as SamplingParams
from engine.sampling_params import UnsupportedOption as UnsupportedOption

FRAME_BYTES_MAX = 64 * 1024 * 1024
WEIGHT_MAX = 1000


class FinishReason(StrEnum):
    """Why the engine ended a request. `STOP` is an end-of-sequence or stop token; `LENGTH` is max_tokens or the context.

    `DEADLINE` ends a request that waited in the queue for longer than its `queue_deadline_s`, `OVERLOADED` one that the engine
    cannot accept now; neither ever had a token.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    OVERLOADED = "overloaded"
    ERROR = "error"


class Priority(StrEnum):
    """Classes of service, most urgent first. A lower class gets what no higher one can use, and moves up with age."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request as the engine receives it: token ids, never text. `sampling.seed` and `sampling.max_tokens` are set.

    The tenant determines fairness and the salt of the prefix cache; its id comes from the authenticated key, never from the
    request. `weight` is the tenant's share compared with others, 1 … WEIGHT_MAX. `queue_deadline_s` bounds the wait until the
    request is first scheduled; None is no bound.
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

    `rank` of the sampled token counts from 1: one more than the number of likelier tokens.
    """

    logprob: float
    top_token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)
    rank: int | None = None


@dataclass(slots=True)
class TokenEvent:  # neither frozen nor keyword-only: a step may create hundreds, and both cost more than the rest
    """What one step did to one answer of a request. `index` counts the `n` answers of a request from 0. Exactly one event of
    each answer has `finish_reason` set, its last.

    `prompt_logprobs` are those of the prompt tokens that this step computed, in order; the first token of a prompt has none.
    `error_param` names the field of the request that caused `error`; None when no field did.

    `num_output_tokens` counts every token generated so far, so the last event carries what is billed; `token_ids` are the new
    ones only (empty when the event reports an abort or an error). `num_prompt_tokens_computed` reaches the prompt length when
    prefill is done. `queue_s` is the wait until the request was first scheduled. `num_rejected_draft_tokens` counts the
    draft tokens so far that were verified and rejected. `decode_s` is the time from the first token to the last, sent with the
    last token: a reader of events can only measure it by reading each one as it arrives.
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
"""One more token of an answer that goes on: request_id, index, token id. Its count is one higher; all else is as in the
answer's last event, except preemptions since. A step in which no request comes or goes has hundreds of these and no event."""


@dataclass(slots=True, kw_only=True)  # not frozen: there are hundreds at a time, and creating a frozen one takes twice as long
class RequestProgress:
    """A live answer as the engine sees it. `state` is queued, prefill or decode. `queue_position` counts, from 0, the requests
    of its own tenant that wait before it. There is no fixed order between tenants: the shares decide."""

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
    """A feature of a request for which a step must be computed in the plain, slower way, with all requests in it."""

    PROMPT_LOGPROBS = "prompt_logprobs"
    LOGIT_BIAS = "logit_bias"


@dataclass(slots=True, kw_only=True)  # not frozen: one is created in each step, and a frozen one takes three times as long
class EngineStatus:
    """Gauges and running totals of one engine process since its start. `requests` and `tenants` are filled a few times per
    second. Host blocks are the tier in main memory that evicted KV blocks move to. Draft tokens are those of speculative
    decoding; accepted ones became output. Fall-back steps were computed in the plain, slow way because the fast one failed;
    `fallback_reason` is the reason of the last one. Plain steps, by `PlainReason`, were computed in the plain way because of
    a feature that a request in them uses."""

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
    """Memory that one part of an engine takes on its device. `name`: weights, activations, graphs, slots, rotary_tables,
    device_context, kv_cache or, where other models have a part of the GPU, other_models. `measured_bytes` is None if the device
    does not report it, or nothing was allocated yet. `num_predicted`: graphs that may be kept; `num_measured`: those captured
    when memory was measured; None for other parts."""

    name: str
    predicted_bytes: int
    measured_bytes: int | None = None
    num_predicted: int | None = None
    num_measured: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """Which of several kernels serves, chosen by time. `us`: microseconds of a decode step with each of them, the default
    first. `refused`: those that must not serve, and why."""

    name: str
    serves: str
    us: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about a loaded model, sent once when the engine is ready. `quantization`: the form in which weights are kept, as in
    the option of that name, or none. `kv_scales` of keys and values in 8 bits: unit, or from the checkpoint. `switched_off`:
    the variables of `engine.switches` that are set to 0. `device_note`: why an engine on the CPU uses no NVIDIA GPU."""

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
    device_note: str | None = None
    switched_off: list[str] = field(default_factory=list)
    kernel_choices: list[KernelChoice] = field(default_factory=list)

    @property
    def refused_kernels(self) -> list[str]:
        """Return the kernels that must not serve, and why: `8-bit products of one row by GEMV: wrong results`."""
        return [f"{each.name} by {name}: {why}" for each in self.kernel_choices for name, why in each.refused.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayFrame:
    """Gateway to engine. `shutdown` requests an orderly exit: every live request is aborted first.

    `abort` ends all answers of a request. `abort_answers` ends single ones, as (request_id, index), and leaves the others
    running.
    """

    submit: list[GenerationRequest] = field(default_factory=list)
    abort: list[str] = field(default_factory=list)
    abort_answers: list[tuple[str, int]] = field(default_factory=list)
    shutdown: bool = False


@dataclass(slots=True, kw_only=True)  # not frozen, for the same reason as its status
class EngineFrame:
    """Engine to gateway. While loading only `load_fraction` is set; then `ready` once; then `events`, after them `decoded`, and
    `status`.

    `fatal` is the reason for an exit that follows at once (for example, a model that cannot be loaded). `may_pass`: with the
    same model and options another start may succeed. `is_bug`: the reason is an error in Python of neither memory,
    device nor files; if it ended the last start too, another one is unlikely to succeed.
    """

    events: list[TokenEvent] = field(default_factory=list)
    decoded: list[DecodedToken] = field(default_factory=list)
    status: EngineStatus | None = None
    ready: EngineInfo | None = None
    load_fraction: float | None = None
    fatal: str | None = None
    may_pass: bool = False
    is_bug: bool = False
