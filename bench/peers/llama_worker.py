"""llama.cpp as a worker of the peer bench: one request after another, float32, through its C interface.

The prompt is one batch, followed by one token at a time; llama.cpp's own greedy sampler chooses the tokens, so Python adds two
calls per token and reads no logits.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from bench.peers.gguf_names import GGUF
from bench.peers.protocol import Run, leave_repository, serve_commands

KEPT: list[Any] = []
"""Objects that C code points to, referenced here so that Python does not free them."""


def load(folder: Path, threads: int, settings: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    import llama_cpp as llama  # type: ignore[import-not-found]

    context_len = settings["n_ctx"]
    llama.llama_backend_init()
    path = folder / GGUF
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp could not load {path}")
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = context_len
    params.n_threads = params.n_threads_batch = threads
    params.type_k = params.type_v = llama.GGML_TYPE_F32
    context = llama.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp made no context for {path}")
    greedy = llama.llama_sampler_init_greedy()
    KEPT.append(llama.llama_log_callback(lambda *_: None))  # otherwise its log lines on graphs would cost measured time
    llama.llama_log_set(KEPT[-1], ctypes.c_void_p(0))

    def step(token_ids: list[int]) -> int:
        token_array = (llama.llama_token * len(token_ids))(*token_ids)  # the batch has only its address: keep it alive
        if status := llama.llama_decode(context, llama.llama_batch_get_one(token_array, len(token_ids))):
            raise RuntimeError(f"llama_decode returned {status}")
        return int(llama.llama_sampler_sample(greedy, context, -1))

    def answer_one(prompt: list[int], length: int) -> list[int]:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        answer = [step(prompt)]
        while len(answer) < length:
            answer.append(step(answer[-1:]))
        return answer

    def run(prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        return [answer_one(prompt, length) for prompt, length in zip(prompts, output_lens, strict=True)]

    system = llama.llama_print_system_info().decode().strip()
    return run, {"llama_cpp_python": llama.__version__, "system": system}


if __name__ == "__main__":
    leave_repository()
    serve_commands(load)
