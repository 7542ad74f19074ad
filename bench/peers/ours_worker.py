"""Our engine as a worker of the peer bench: the offline entry point with a server's settings, except for prefix caching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.peers.protocol import Run, serve_commands
from engine import LLM, SamplingParams


def load(folder: Path, threads: int, settings: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    llm = LLM(folder, dtype="float32", device="cpu", threads=threads, enable_prefix_caching=False, **settings)

    def run(prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in output_lens]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    import torch

    info = llm._generating_engine().info
    return run, {"torch": torch.__version__, "kernels": info.kernels}


if __name__ == "__main__":
    serve_commands(load)
