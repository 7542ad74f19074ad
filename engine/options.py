"""How one engine is to run, and the defaults of what was left open. Knows no torch.

None means: chosen when the model and the device are known; `EngineInfo` tells what was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.cpu_environment import num_cores
from engine.errors import EngineConfigError
from engine.scheduling.limits import STEP_GUESSES_MAX
from engine.speculation.options import SpeculativeOptions

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
POLICIES = ("fair", "fcfs")
QUANTIZATIONS = ("int8", "fp8", "awq", "gptq", "compressed-tensors")
HEAD_QUANTIZATIONS = ("none", "int8")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
SWAP_SPACE_GIB_MAX = 4096.0
INTER_TOKEN_TARGET_MS_MAX = 60_000.0
SHARED_PREFIXES_MAX = 256
THREADS_PER_CORE_MAX = 16

CPU_KV_CACHE_BYTES = 256 * 1024 * 1024
CPU_BATCHED_TOKENS = 512
CUDA_BATCHED_TOKENS = 8192
SEATS = {"cpu": 64, "cuda": 256}
"""Requests that run at a time where nobody says how many. A GPU reads the weights once for all of a step, so that 256 requests
cost little more time than 64; a CPU of 64 rows multiplies and waits for no weights, and more seats only share its speed out."""

SEATS_MAX = 1024
"""With 64 guesses so many requests of a step are at most 2048, in powers of two: the most among which decodes search in the
registers that they are granted on an H200 (`kernels.triton.gate`). Among 4096 two programs take the room of three and spill."""
BLOCK_SIZE_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of one engine process. Raises `EngineConfigError`, naming the option.

    `block_size` is a power of two: kernels of GPUs read the cache in tiles that hold whole blocks, or lie within one.
    `swap_space` is the size in GiB of the tier in main memory that evicted KV blocks move to. `batch_invariant`: a request
    gives the same logits alone and in any batch, at the cost of speed. `enforce_eager`: no step is captured or recorded, and
    none is launched before the tokens of the one before it are known. `inter_token_target_ms`: how long a step may make running
    requests wait for their next token. `shared_prefixes`: text files with prompts that all tenants may share.
    `quantization`: int8 or fp8 quantises the weights while they are read, another one must be what the checkpoint is in.
    `head_quantization`: of the output head, where it is not to be kept as `quantization` or the checkpoint says.
    `kv_cache_dtype`: auto keeps keys and values as they are computed, fp8 and fp8_e4m3 in 8 bits.
    """

    model: Path
    name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    kv_cache_bytes: int | None = None
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    threads: int | None = None
    swap_space: float = 0.0
    speculative_config: SpeculativeOptions | None = None
    batch_invariant: bool = False
    enforce_eager: bool = False
    scheduling_policy: str = "fair"
    inter_token_target_ms: float | None = None
    shared_prefixes: tuple[Path, ...] = ()
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    head_quantization: str | None = None

    def __post_init__(self) -> None:
        self._check_scheduling()
        if self.device not in DEVICES:
            raise EngineConfigError("device", f"must be one of {', '.join(DEVICES)}, not {self.device!r}")
        if self.dtype not in DTYPES:
            raise EngineConfigError("dtype", f"must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise EngineConfigError("quantization", f"must be one of {', '.join(QUANTIZATIONS)}, not {self.quantization!r}")
        head = self.head_quantization
        if head is not None and head not in HEAD_QUANTIZATIONS:
            raise EngineConfigError("head_quantization", f"must be one of {', '.join(HEAD_QUANTIZATIONS)}, not {head!r}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise EngineConfigError(
                "kv_cache_dtype", f"must be one of {', '.join(KV_CACHE_DTYPES)}, not {self.kv_cache_dtype!r}"
            )
        share = self.gpu_memory_utilization
        if not _is_number(share) or not 0.0 < share <= 1.0:
            raise EngineConfigError("gpu_memory_utilization", f"must be above 0 and at most 1, not {share!r}")
        if not isinstance(self.enable_prefix_caching, bool):
            raise EngineConfigError("enable_prefix_caching", f"must be True or False, not {self.enable_prefix_caching!r}")
        counts = "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes", "num_kv_blocks", "threads"
        for option in counts:
            self._check_count(option)
        self._check_block_size()
        if self.max_num_seqs is not None and self.max_num_seqs > SEATS_MAX:
            raise EngineConfigError("max_num_seqs", f"must be at most {SEATS_MAX}, not {self.max_num_seqs}")
        threads_max = THREADS_PER_CORE_MAX * num_cores()
        if self.threads is not None and self.threads > threads_max:
            raise EngineConfigError(
                "threads", f"must be at most {threads_max}, {THREADS_PER_CORE_MAX} for each usable core, not {self.threads}"
            )

    def _check_count(self, option: str) -> None:
        value = getattr(self, option)
        if value is not None and not _is_count(value):
            raise EngineConfigError(option, f"must be at least 1, and an integer, not {value!r}")

    def _check_block_size(self) -> None:
        size = self.block_size
        if not _is_count(size) or size > BLOCK_SIZE_MAX or size & (size - 1):
            raise EngineConfigError("block_size", f"must be a power of two from 1 to {BLOCK_SIZE_MAX}, not {size!r}")

    def _check_scheduling(self) -> None:
        if self.scheduling_policy not in POLICIES:
            raise EngineConfigError(
                "scheduling_policy", f"must be one of {', '.join(POLICIES)}, not {self.scheduling_policy!r}"
            )
        if not _is_number(self.swap_space) or not 0.0 <= self.swap_space <= SWAP_SPACE_GIB_MAX:
            raise EngineConfigError(
                "swap_space", f"must be a number of GiB between 0 and {SWAP_SPACE_GIB_MAX:g}, not {self.swap_space!r}"
            )
        if not isinstance(self.batch_invariant, bool):
            raise EngineConfigError("batch_invariant", f"must be True or False, not {self.batch_invariant!r}")
        if not isinstance(self.enforce_eager, bool):
            raise EngineConfigError("enforce_eager", f"must be True or False, not {self.enforce_eager!r}")
        target_ms = self.inter_token_target_ms
        if target_ms is not None and not (_is_number(target_ms) and 0.0 < target_ms <= INTER_TOKEN_TARGET_MS_MAX):
            raise EngineConfigError(
                "inter_token_target_ms", f"must be above 0 and at most {INTER_TOKEN_TARGET_MS_MAX:g}, not {target_ms!r}"
            )
        prefixes = self.shared_prefixes
        if not isinstance(prefixes, tuple) or not all(isinstance(path, Path) for path in prefixes):
            raise EngineConfigError("shared_prefixes", f"must be a list of files, not {prefixes!r}")
        if len(prefixes) > SHARED_PREFIXES_MAX:
            raise EngineConfigError("shared_prefixes", f"takes at most {SHARED_PREFIXES_MAX} files")

    @property
    def draft_model(self) -> Path | None:
        """The directory of the model that guesses, where one does."""
        return None if self.speculative_config is None else self.speculative_config.model

    @property
    def max_guesses(self) -> int:
        """Rows of a step over slots beyond one for each request."""
        return 0 if self.speculative_config is None else STEP_GUESSES_MAX

    def seats(self, device_type: str) -> int:
        """Requests that run at a time: as asked, else what suits the device, one for each token of a step at most."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return min(SEATS[device_type], self.max_num_batched_tokens or SEATS[device_type])

    def batched_tokens(self, device_type: str) -> int:
        """The token budget of a step: as asked, else what suits the device and lets every seat decode."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(self.seats(device_type), CUDA_BATCHED_TOKENS if device_type == "cuda" else CPU_BATCHED_TOKENS)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
