"""vLLM's CPU build as a worker of the peer bench. The setting `enforce_eager` chooses between its two modes.

Its engine runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0): no second process polls, and CPU time is counted here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.peers.protocol import Run, leave_repository, serve_commands


def load(folder: Path, threads: int, settings: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    import torch
    import vllm  # type: ignore[import-not-found]

    torch.set_num_threads(threads)
    llm = vllm.LLM(
        str(folder), dtype="float32", skip_tokenizer_init=True, enable_prefix_caching=False, disable_log_stats=True, **settings
    )

    def run(prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        params = [
            vllm.SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False) for length in output_lens
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(inputs, params, use_tqdm=False)]

    return run, {"vllm": vllm.__version__, "torch": torch.__version__, "threads_seen": torch.get_num_threads()}


if __name__ == "__main__":
    leave_repository()
    serve_commands(load)
