"""The options of one engine and their defaults. Knows no torch.

None means: chosen when the model and the device are known; `EngineInfo` reports the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from engine import option_limits as limits
from engine.errors import EngineConfigError
from engine.scheduling.limits import STEP_DRAFT_TOKENS_MAX
from engine.speculation.options import SpeculativeOptions

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
POLICIES = ("fair", "fcfs")
QUANTIZATIONS = ("int8", "fp8", "none", "awq", "gptq", "compressed-tensors", "modelopt")
HEAD_QUANTIZATIONS = ("none", "int8")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
SWAP_SPACE_GIB_MAX = 4096.0
INTER_TOKEN_TARGET_MS_MAX = 60_000.0
SHARED_PREFIXES_MAX = 256
NAME_CHARS_MAX = 255  # the default is a folder's name, which has at most 255 bytes

CPU_KV_CACHE_BYTES = 256 * 1024 * 1024
CPU_BATCHED_TOKENS = 512
CUDA_BATCHED_TOKENS = 8192
SEATS = {"cpu": 64, "cuda": 256}
"""The default of `max_num_seqs` by device. A GPU reads the weights once for all requests of a step, so that 256 cost little
more time than 64. A CPU with 64 rows is limited by its arithmetic, and more seats would only divide its speed."""

SEATS_MAX = 1024
"""With 64 draft tokens a step has at most 2048 rows, rounded up to a power of two: the most among which decode attention can
search with the registers that it is granted on an H200 (`kernels.triton.gate`). With 4096 it would spill."""
BLOCK_SIZE_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of one engine process. Raises `EngineConfigError`, naming the option.

    `block_size` is a power of two: GPU kernels read the cache in tiles that hold whole blocks or lie within one.
    `colocated_models`: the options of other engines on the same GPU, as `of` takes them; memory is left to them, unless
    they are refused. `swap_space` is the size in GiB of the tier in main memory that evicted KV blocks move to.
    `batch_invariant`: a request has the same logits alone and in any batch, at the cost of speed. `enforce_eager`: no
    step is captured or recorded as a whole, and none is launched before the tokens of the one before it are known.
    `inter_token_target_ms`: how long a step may make running requests wait for their next token. `shared_prefixes`: text
    files with prompts that all tenants may share. `quantization`: int8 or fp8 quantises the weights while they are read,
    none keeps or decodes them unquantised, another one must be what the checkpoint is in. `head_quantization`: the format
    of the output head, where it is not to be kept as `quantization` or the checkpoint says. `kv_cache_dtype`: auto keeps
    keys and values as they are computed, fp8 and fp8_e4m3 in 8 bits.
    """

    model: Path
    name: Annotated[str | None, limits.text(NAME_CHARS_MAX)] = None
    device: Annotated[str, limits.one_of(*DEVICES)] = "auto"
    dtype: Annotated[str, limits.one_of(*DTYPES)] = "auto"
    max_model_len: Annotated[int | None, limits.COUNT] = None
    max_num_seqs: Annotated[int | None, limits.COUNT, limits.at_most(SEATS_MAX)] = None
    max_num_batched_tokens: Annotated[int | None, limits.COUNT] = None
    block_size: Annotated[int, limits.power_of_two(BLOCK_SIZE_MAX)] = 16
    kv_cache_bytes: Annotated[int | None, limits.COUNT] = None
    num_kv_blocks: Annotated[int | None, limits.COUNT] = None
    gpu_memory_utilization: Annotated[float, limits.above_zero(1.0)] = 0.9
    colocated_models: Annotated[tuple[Mapping[str, Any], ...], limits.MAPPINGS] = ()
    enable_prefix_caching: Annotated[bool, limits.FLAG] = True
    threads: Annotated[int | None, limits.COUNT, limits.threads()] = None
    swap_space: Annotated[float, limits.gib_up_to(SWAP_SPACE_GIB_MAX)] = 0.0
    speculative_config: SpeculativeOptions | None = None
    batch_invariant: Annotated[bool, limits.FLAG] = False
    enforce_eager: Annotated[bool, limits.FLAG] = False
    scheduling_policy: Annotated[str, limits.one_of(*POLICIES)] = "fair"
    inter_token_target_ms: Annotated[float | None, limits.above_zero(INTER_TOKEN_TARGET_MS_MAX)] = None
    shared_prefixes: Annotated[tuple[Path, ...], limits.PATHS, limits.files(SHARED_PREFIXES_MAX)] = ()
    quantization: Annotated[str | None, limits.one_of(*QUANTIZATIONS)] = None
    kv_cache_dtype: Annotated[str, limits.one_of(*KV_CACHE_DTYPES)] = "auto"
    head_quantization: Annotated[str | None, limits.one_of(*HEAD_QUANTIZATIONS)] = None

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if value is None and option.default is None:
                continue
            for limit in LIMITS[option.name]:
                if not limit.allows(value):
                    raise EngineConfigError(option.name, limit.refusal(value))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EngineOptions:
        """From values by option name, as a call or a JSON object has them: paths may be text, `speculative_config` is a
        mapping."""
        unknown = sorted(values.keys() - LIMITS.keys())
        if unknown:
            raise EngineConfigError(unknown[0], "is not an option of this engine")
        speculative = values.get("speculative_config")
        read = {
            "model": _path("model", values.get("model")),
            "speculative_config": None if speculative is None else SpeculativeOptions.parse(speculative),
            "shared_prefixes": _paths("shared_prefixes", values),
            "colocated_models": _as_tuple(values.get("colocated_models", ())),
        }
        return cls(**{**values, **read})

    @property
    def draft_model(self) -> Path | None:
        """The directory of the draft model, None without one."""
        return None if self.speculative_config is None else self.speculative_config.model

    @property
    def max_draft_tokens(self) -> int:
        """Rows of a step over slots beyond one for each request."""
        return 0 if self.speculative_config is None else STEP_DRAFT_TOKENS_MAX

    def seats(self, device_type: str) -> int:
        """Requests that run at a time: as set, else what suits the device, one for each token of a step at most."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return min(SEATS[device_type], self.max_num_batched_tokens or SEATS[device_type])

    def batched_tokens(self, device_type: str) -> int:
        """The token budget of a step: as set, else what suits the device and lets every seat decode."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(self.seats(device_type), CUDA_BATCHED_TOKENS if device_type == "cuda" else CPU_BATCHED_TOKENS)


LIMITS: dict[str, tuple[limits.Limit, ...]] = {
    option: getattr(hint, "__metadata__", ()) for option, hint in get_type_hints(EngineOptions, include_extras=True).items()
}
"""The limits of each option's value, by name, as its type annotation states them."""


def _paths(option: str, values: Mapping[str, Any]) -> tuple[Path, ...]:
    paths = values.get(option, ())
    if not isinstance(paths, list | tuple):
        raise EngineConfigError(option, f"must be a list of paths, not {paths!r}")
    return tuple(_path(option, path) for path in paths)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _path(option: str, value: object) -> Path:
    if not isinstance(value, str | Path):
        raise EngineConfigError(option, f"must be a path, not {value!r}")
    return Path(value)
