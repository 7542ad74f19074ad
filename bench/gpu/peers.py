"""transformers beside us in the same run: same model, same weights, its continuous batching and `generate`.

Ours was measured on 512 conversations by the part before; a peer has as many as its time allows, in whole batches, and rates
are compared. What is not installed is a row that says so, never a pass.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu import traffic
from bench.gpu.context import Context
from bench.gpu.models import config_of, fill
from bench.gpu.rows import Row
from bench.gpu.timing import synchronize
from bench.gpu.traffic import Asked

CONTINUOUS = "against transformers continuous batching"
STATIC = "against transformers static generate"
NAMES = (CONTINUOUS, STATIC)


def against_transformers(context: Context) -> None:
    if importlib.util.find_spec("transformers") is None:
        for name in NAMES:
            context.emit(Row(name=name, error="transformers is not installed here: no peer, no comparison"))
        return
    if "chats_rate" not in context.facts and not context.rehearsal:
        for name in NAMES:
            context.emit(Row(name=name, error="our own rate is missing: the part `llama 8b` did not give it"))
        return
    made: list[Any] = []
    context.guard(NAMES, lambda: made.append(_model(context)))
    if made:
        longest = context.size(traffic.CHAT_LEN_MAX, 6)
        context.guard(STATIC, lambda: _row(context, STATIC, lambda: _static(context, made[0], longest)))
        context.guard(CONTINUOUS, lambda: _row(context, CONTINUOUS, lambda: _continuous(context, made[0], longest)))


def _model(context: Context) -> Any:
    """Made on the device, then given our weights by name."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = config_of(context, "llama-3.1-8b")
    kind = transformers.LlamaConfig(**{name: value for name, value in config.items() if name not in ("architectures", "dtype")})
    dtype = torch.float32 if context.rehearsal else torch.bfloat16
    with torch.device(context.device):
        model = transformers.AutoModelForCausalLM.from_config(kind, dtype=dtype).eval()
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            fill(name, parameter)
    return model


def _row(context: Context, name: str, run: Callable[[], tuple[int, int, float, str]]) -> None:
    asked, returned, wall_s, note = run()
    ours = float(context.facts.get("chats_rate", 1.0))
    row = Row(name=name, value=ours, peer=returned / wall_s, peer_name="transformers", counted=asked, returned=returned)
    row.facts = {"peer_wall_s": wall_s, "peer_tokens": returned}
    row.note = f"peer: {note}, {wall_s:.1f} s"
    context.emit(row)


@torch.inference_mode()
def _static(context: Context, model: Any, longest: int) -> tuple[int, int, float, str]:
    """`generate` over left-padded batches in order of arrival: each runs until its longest output is done."""
    batch = context.size(64, 2)
    vocab = model.config.vocab_size
    work = traffic.chats(context.size(128, 4), longest, vocab)
    _generate(model, [Asked(asked.prompt[:8], 2) for asked in work[:batch]], context)  # warms up
    wall_s, returned, done = 0.0, 0, 0
    limit_s = context.size(40, 20)
    for first in range(0, len(work), batch):
        requests = work[first : first + batch]
        started_s = time.perf_counter()
        returned += _generate(model, requests, context)
        wall_s += time.perf_counter() - started_s
        done += len(requests)
        if wall_s > limit_s:
            break
    return sum(asked.num_outputs for asked in work[:done]), returned, wall_s, f"{done} conversations in batches of {batch}"


def _generate(model: Any, requests: list[Asked], context: Context) -> int:
    width, longest = max(len(asked.prompt) for asked in requests), max(asked.num_outputs for asked in requests)
    rows = [[0] * (width - len(asked.prompt)) + list(asked.prompt) for asked in requests]
    mask = [[0] * (width - len(asked.prompt)) + [1] * len(asked.prompt) for asked in requests]
    out = model.generate(
        torch.tensor(rows, device=context.device),
        attention_mask=torch.tensor(mask, device=context.device),
        max_new_tokens=longest, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    synchronize(context.device)
    answers = out[:, width:].tolist()
    return sum(len(answer[: asked.num_outputs]) for answer, asked in zip(answers, requests, strict=True))


def _continuous(context: Context, model: Any, longest: int) -> tuple[int, int, float, str]:
    """With its own choice of sizes; where that fails, with sizes that are smaller."""
    work = traffic.chats(context.size(128, 4), longest, model.config.vocab_size)
    attempts: list[dict[str, int]] = [{}, {"max_batch_tokens": 4096, "num_blocks": 1024}]
    if context.rehearsal:
        attempts = [{"num_blocks": 16, "max_batch_tokens": 64, "max_requests_per_batch": 4}]
    failed = ""
    for sizes in attempts:
        try:
            returned, wall_s = _managed(context, model, work, sizes)
        except (RuntimeError, ValueError) as error:
            failed = f"{failed}with {sizes or 'its own sizes'}: {type(error).__name__}: {str(error)[:150]}; "
        else:
            note = f"{len(work)} conversations at once, {sizes or 'its own sizes'}{failed and f'; failed {failed}'}"
            return sum(asked.num_outputs for asked in work), returned, wall_s, note
    raise RuntimeError(f"continuous batching of transformers did not run {failed}")


def _managed(context: Context, model: Any, work: list[Asked], sizes: dict[str, int]) -> tuple[int, float]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    generation = GenerationConfig(do_sample=False, max_new_tokens=1, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(**sizes), warmup=False
    ) as manager:
        _through(manager, [Asked(asked.prompt[:8], 2) for asked in work[:4]], "w", context)
        started_s = time.perf_counter()
        returned = _through(manager, work, "r", context)
        return returned, time.perf_counter() - started_s


def _through(manager: Any, work: list[Asked], label: str, context: Context) -> int:
    answers: dict[str, int] = {}
    for number, asked in enumerate(work):
        manager.add_request(
            list(asked.prompt), request_id=f"{label}{number}", max_new_tokens=asked.num_outputs, eos_token_id=-1
        )
    while len(answers) < len(work):
        if context.left_s < 2:
            raise RuntimeError(f"no time left: {len(answers)} of {len(work)} conversations were done")
        result = manager.get_result(timeout=2)
        if result is None and not manager.is_running():
            raise RuntimeError("its loop has ended")
        if result is not None and result.is_finished():
            answers[result.request_id] = len(result.generated_tokens)
    return sum(answers.values())
