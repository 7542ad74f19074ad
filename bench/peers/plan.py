"""Which engines are compared on which requests, and the goals. Imports no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.gpu.rows import Target
from bench.peers.workers import EngineSetup

MAX_MODEL_LEN = 1024
SEATS = 64
QUIET_VARIABLES = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **QUIET_VARIABLES}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **VLLM}

OURS = EngineSetup("ours", "bench.peers.ours_worker", settings={"max_model_len": MAX_MODEL_LEN, "max_num_seqs": SEATS})
COMPILED, EAGER = (
    EngineSetup(
        f"vLLM {name}", "bench.peers.vllm_worker", "vllm",
        {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": SEATS, "enforce_eager": name == "eager"}, IN_PROCESS,
    )
    for name in ("compiled", "eager")
)  # fmt: skip
VLLM_SETTINGS = (COMPILED, EAGER)
VLLM_SERVED = EngineSetup("vLLM's server", "", "vllm")
CONTINUOUS = EngineSetup(
    "transformers continuous batching", "bench.peers.transformers_worker", "transformers",
    # Otherwise blocks of earlier runs would be shared: no engine here caches prefixes.
    {"page_size": 32, "num_blocks": 512, "max_batch_tokens": 512, "allow_block_sharing": False}, QUIET_VARIABLES,
)  # fmt: skip
LLAMA = EngineSetup(
    "llama.cpp F32", "bench.peers.llama_worker", "llama", {"n_ctx": MAX_MODEL_LEN}, prepare="bench.peers.write_gguf"
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row: `count` requests at once, or one at a time. `rounds` is a share of the requested number of rounds."""

    peer: EngineSetup
    count: int
    pass_at: float | None = None
    stretch_at: float | None = None
    rounds: float = 1.0

    def name(self, model: str) -> str:
        return f"{model}, {f'{self.count} mixed requests' if self.count > 1 else 'one at a time'}, {self.peer.name}"

    def target(self, model: str, *, judged: bool) -> Target:
        goals = (self.pass_at, self.stretch_at) if judged else (None, None)
        return Target(name=self.name(model), part=model, unit="tokens/s", judged="ratio", pass_at=goals[0], stretch_at=goals[1])


def comparisons(model: str) -> list[Comparison]:
    """Comparisons in measuring order. vLLM's faster setting counts: both get the goal, and `slower_vllm_settings` says
    which one drops it."""
    vllm = (1.0, 1.5) if model == "8M" else (1.0, 1.15)
    return [
        Comparison(COMPILED, 16, *vllm),
        Comparison(COMPILED, 48, *vllm, rounds=2 / 3),
        Comparison(COMPILED, 1, *vllm),
        Comparison(EAGER, 16, *vllm, rounds=1 / 3),
        Comparison(EAGER, 48, *vllm, rounds=1 / 3),
        Comparison(EAGER, 1, *vllm, rounds=1 / 3),
        Comparison(CONTINUOUS, 16, 2.0, 3.0, rounds=2 / 3),
        Comparison(LLAMA, 1, 0.6, 1.0),
    ]


def slower_vllm_settings(ratios: Mapping[Comparison, float | None]) -> set[Comparison]:
    """Of vLLM's two settings on the same requests, the slower one, which carries no goal: the one over which our lead is
    larger. Each is compared with our own runs of the same minutes, since rates from different minutes are not comparable. Keys
    are comparisons of one model; values are our rate over the peer's, or None if not measured."""
    found = set()
    for one, ratio in ratios.items():
        rivals = [other for each, other in ratios.items() if each.peer in VLLM_SETTINGS and each.count == one.count]
        if one.peer in VLLM_SETTINGS and any(other is not None and (ratio is None or other < ratio) for other in rivals):
            found.add(one)
    return found


PEERS = {"vllm": ("vLLM compiled", "vLLM eager"), "transformers": (CONTINUOUS.name,), "llama": (LLAMA.name,)}
"""The values that `--peers` accepts."""
