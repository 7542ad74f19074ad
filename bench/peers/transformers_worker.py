"""transformers' continuous batching as a worker of the peer bench, tuned: small pages, a cache no larger than needed.

By default it sizes the cache by the machine's memory and attends over far more of it than requests fill, which was measured to
be four times slower. The manager lives as long as the worker, so no run includes its start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.peers.protocol import Run, leave_repository, serve_commands

RESULT_TIMEOUT_S = 300.0


def load(folder: Path, threads: int, settings: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=1, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**settings),
    )
    manager.start()

    def run(prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        names = [
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
            for prompt, length in zip(prompts, output_lens, strict=True)
        ]
        answers: dict[str, list[int]] = {}
        while len(answers) < len(names):
            result = manager.get_result(timeout=RESULT_TIMEOUT_S)
            if result is None:
                raise RuntimeError(f"no result within {RESULT_TIMEOUT_S:.0f} s")
            if result.is_finished():
                answers[result.request_id] = list(result.generated_tokens)
        return [answers[name] for name in names]

    return run, {"transformers": transformers.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    leave_repository()
    serve_commands(load)
