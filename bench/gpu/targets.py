"""Every row that a run must have, with its goals: the table follows this list, and the rehearsal is checked against it.

A row has up to two goals, pass and stretch; fractions relate to the bandwidth and matmul rate calibrated in the same run. Rates
and times that depend on the card are goals for one H200 (`card_specific`) and not judged on any other card; fractions, ratios,
errors and the host's times are judged on every card.
"""

from __future__ import annotations

from typing import Any

from bench.gpu.rows import Judged, Target

ERROR_RATIO_MAX = 2.0
PRODUCT_GOALS = {"bf16": (0.85, 0.92), "int8": (0.75, 0.85), "fp8": (0.75, 0.85), "int4": (0.65, 0.78)}
"""Fractions of the bandwidth, by the format of the weights."""
PRODUCT_ROWS = (1, 16)
TILE_CHOICES = {"bf16": (1,), "int8": (1, 8, 16), "fp8": (1, 8, 16), "int4": (1, 8, 16)}
"""Numbers of rows for which tiles of products are compared with others, by the format of the weights."""

LAYER_ROWS = {"Llama-8B": (1, 16, 64, 256), "Qwen3-0.6B": (1,)}
"""Step sizes, in rows, at which a layer is timed both ways: launched early and launched in turn."""

ERROR_CHECKS = (
    "paged decode", "paged decode, head size 64", "paged decode, window and soft-cap", "paged decode, fp8 KV",
    "paged decode with rotation", "paged decode with rotation, one request", "paged decode with rotation, fp8 KV",
    "paged prefill", "paged prefill, small chunks", "paged prefill, window and soft-cap", "paged prefill, fp8 KV",
    "rope, QK-norm and KV write", "rope and KV write, fp8 KV",
    "rms norm", "add + rms norm", "add + rms norm to fp8", "silu·mul", "silu·mul to fp8", "gelu·mul", "quantise rows to fp8",
    "embedding", "log-probabilities", "product bf16", "product int8", "product fp8 weights", "product fp8 rows", "product int4",
    "product + residual + norm", "product fp8 + residual + norm", "product int8 + residual + norm",
    "product int4 + residual + norm", "experts",
)  # fmt: skip
EQUALITY_CHECKS = (
    "sampler, greedy", "sampler, top-k top-p min-p", "sampler, penalties and bitmask", "grammar bitmask", "step inputs",
    "tokens left for the host", "block copy", "block gather and scatter", "rejection sampling", "fused head + argmax",
    "fused head in 8 bits + argmax",
)  # fmt: skip
INVARIANCE_CHECKS = ("paged decode", "product bf16", "product int4", "rms norm", "rope and KV write", "sampler")

SAME_TOKENS = "same tokens: ahead against plain"
CHUNKS_ONE_BY_ONE = "same tokens, chunks one by one: requests that differ at all"
DIFFERING_PERCENT_MAX = 10
"""Maximum percentage of differing requests. On an H200, with all chunks launched one by one, it was 1.3 %."""
TOKEN_FORMATS = ("int8", "int4", "fp8")
"""Formats of weights whose products of few rows have kernels of their own."""


def same_tokens_row(kind: str) -> str:
    return f"same tokens, {kind} weights: requests that differ at all"


def error_row(name: str) -> str:
    return f"numbers: {name}"


def equality_row(name: str) -> str:
    return f"equal to the reference: {name}"


CONVERSATIONS = "Llama-3.1-8B, conversations"
"""Our side of the comparison with peers."""
HOST_CALLS = "host: one call of each kind beside a busy device"
CHUNK_SIZES = (64, 512)


def chunk_row(size: int) -> str:
    """Name of the row that compares a chunk of `size` tokens captured and launched one by one."""
    return f"chunk of {size} tokens: captured over one by one"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def products_row(kind: str, rows: int) -> str:
    """Name of the row for the products of Llama-8B with weights of a format."""
    return f"products of Llama-8B, {kind}, {_rows(rows)}"


def fused_products_row(kind: str) -> str:
    return f"fused products of Llama-8B (norm, gate, residual), {kind}, 1 row"


def product_tiles_row(kind: str, rows: int) -> str:
    return f"fused products of Llama-8B, {kind}, {_rows(rows)}: chosen tiles over others"


def slabs_row(kind: str, rows: int) -> str:
    return f"products of Llama-8B, {kind}, {_rows(rows)}: slabs over tiles"


def layer_row(model: str, rows: int) -> str:
    return f"layer of {model}, {_rows(rows)}: launches as they are over the faster way"


def invariance_row(name: str) -> str:
    return f"same bits in any batch: {name}"


def _targets(
    part: str, unit: str, *rows: tuple[Any, ...], judged: Judged = "value", higher: bool = True, card_specific: bool = False
) -> list[Target]:
    """rows: each is (name), (name, pass) or (name, pass, stretch)."""
    padded = [(*row, None, None)[:3] for row in rows]
    return [
        Target(
            name=name,
            part=part,
            unit=unit,
            judged=judged,
            pass_at=pass_at,
            stretch_at=stretch_at,
            higher=higher,
            card_specific=card_specific and pass_at is not None,
        )
        for name, pass_at, stretch_at in padded
    ]


TARGETS: list[Target] = [
    *_targets("calibrate", "GB/s", *[(f"{kind} {size} GB",) for kind in ("copy", "read") for size in (1, 4, 8)]),
    *_targets("calibrate", "TFLOP/s", ("matmul bf16 8192³",), ("matmul fp8 8192³",)),
    *_targets("calibrate", "µs", ("graph gap per kernel",), higher=False),
    *_targets("checks", "× torch's error", *[(error_row(name), ERROR_RATIO_MAX) for name in ERROR_CHECKS], higher=False),
    *_targets("checks", "differences", *[(equality_row(name), 0) for name in EQUALITY_CHECKS], higher=False),
    *_targets("checks", "differences", *[(invariance_row(name), 0) for name in INVARIANCE_CHECKS], higher=False),
    *_targets("checks", "requests", (SAME_TOKENS, 0), higher=False),
    *_targets(
        "checks", "% of requests",
        *[(name, DIFFERING_PERCENT_MAX) for name in (CHUNKS_ONE_BY_ONE, *map(same_tokens_row, TOKEN_FORMATS))],
        higher=False,
    ),
    *_targets("invariant", "differences", (invariance_row("engine, batch_invariant"), 0), higher=False),
    *_targets(
        "kernels", "GB/s",
        ("decode 32/8 heads of 128, 256 × 1k, 8 GB of KV", 0.85, 0.92),
        ("decode 32/8 heads of 128, 64 × 4k, 8 GB of KV", 0.85, 0.92),
        ("decode 1 × 32k", 0.70, 0.80),
        ("decode 1 × 32k with its rotation",),
        ("decode 32/8 heads of 64, 256 × 1k",),
        ("decode 16/8 heads of 128, 256 × 1k",),
        judged="fraction",
    ),
    *_targets("kernels", "× uniform", ("decode 1 × 128k + 31 × 4k", 1.25, 1.10), higher=False),
    *_targets(
        "kernels", "× bf16 KV",
        *[(f"decode with fp8 KV, {batch}", 1.70, 1.85) for batch in ("256 × 1k", "16 × 8k")],
    ),
    Target(
        name="prefill 8k, head 128, against the best SDPA", part="kernels", unit="TFLOP/s",
        judged="ratio", pass_at=0.75, stretch_at=0.95, stretch_value=550,
    ),
    *_targets("kernels", "TFLOP/s", ("prefill 8k, head 128, against compiled flex_attention", 1.0), judged="ratio"),
    *_targets(
        "kernels", "GB/s",
        *[(products_row(kind, rows), *goals) for kind, goals in PRODUCT_GOALS.items() for rows in PRODUCT_ROWS],
        *[(fused_products_row(kind), *goals) for kind, goals in PRODUCT_GOALS.items()],
        ("add + rms norm, 8k rows", 0.85, 0.92),
        ("rope and KV write, 8k rows", 0.85, 0.92),
        ("silu·mul, 8k rows", 0.85, 0.92),
        ("fused head + argmax, 128k words, 1 row",),
        ("fused head in 8 bits + argmax, 128k words, 1 row",),
        ("experts of Qwen3-30B-A3B, 64 tokens",),
        ("block copy, 4096 blocks",),
        judged="fraction",
    ),
    *_targets("kernels", "TFLOP/s", ("product fp8 rows, 4096 rows",), judged="fraction"),
    *_targets("kernels", "µs", ("sample top-k top-p, 256 × 128k", 150, 80), higher=False, card_specific=True),
    *_targets("kernels", "× torch's sort", ("sample top-k top-p against torch's sort", 10)),
    *_targets("kernels", "µs", (HOST_CALLS,), higher=False),
    *_targets(
        "small models", "tokens/s",
        ("Llama-3.2-1B bf16, batch 1", 1000, 1300),
        ("Qwen3-0.6B bf16, batch 1", 1000, 1500),
        ("Qwen3-0.6B, 256 requests of 100–1024 in and out", 22_000, 27_000),
        card_specific=True,
    ),
    *_targets(
        "llama 8b", "tokens/s",
        ("Llama-3.1-8B bf16, batch 1", 230, 255),
        ("Llama-3.1-8B bf16, batch 64, 1k context",),
        ("Llama-3.1-8B bf16, batch 256, 1k context",),
        ("Llama-3.1-8B, 256 requests of 100–1024 in and out", 9500, 10_600),
        (CONVERSATIONS,),
        card_specific=True,
    ),
    *_targets("llama 8b", "%", ("GPU idle in steady decode, batch 256", 3, 1), higher=False),
    *_targets("llama 8b", "µs", ("host critical path per step, batch 256", 400, 200),
              ("host critical path, a request replaced every second step, batch 256",), higher=False),
    *_targets("llama 8b", "× sooner", *[(chunk_row(size),) for size in CHUNK_SIZES]),
    *_targets("llama 8b", "s", ("start of Llama-3.1-8B beyond reading weights, warm cache", 15), higher=False),
    *_targets("llama 8b", "% off", ("planner: KV blocks", 2, 0.5), ("planner: batch 1", 15, 8), ("planner: 256 mixed", 15, 8),
              higher=False),
    *_targets("latency", "ms", ("32k prompt among 64 decoders: largest gap", 30, 20), higher=False, card_specific=True),
    *_targets("latency", "s", ("32k prompt among 64 decoders: its TTFT", 2.0, 1.5), higher=False, card_specific=True),
    *_targets("latency", "× sooner", ("32k cached prefix + 128 new tokens: TTFT against cold", 25, 40)),
    *_targets("saturated", "tokens/s", ("Llama-3.1-8B, 1000/1000 saturated", 8500, 9700), card_specific=True),
    *_targets("saturated", "%", ("KV slots used at saturation", 96, 98)),
    *_targets(
        "formats", "tokens/s",
        ("Qwen3-8B bf16, batch 1",),
        ("Llama-3.1-8B fp8, batch 1", 400, 470),
        ("Llama-3.1-8B int8, batch 1", 400, 470),
        ("Llama-3.1-8B int4, batch 1", 520, 700),
        card_specific=True,
    ),
    *_targets(
        "formats", "tokens/s",
        *[(f"{model}, prefill of 8k tokens",)
          for model in ("Qwen3-8B bf16", "Llama-3.1-8B fp8", "Llama-3.1-8B int8", "Llama-3.1-8B int4")],
        judged="fraction",
    ),
    *_targets("peers", "tokens/s", ("against transformers continuous batching", 8, 14),
              ("against transformers static generate, batches of 16", 15, 23), judged="ratio"),
    *_targets("kernels", "× the fastest",
              *[(layer_row(model, rows),) for model, row_counts in LAYER_ROWS.items() for rows in row_counts], higher=False),
    *_targets("choices", "tokens/s", ("Llama-3.1-8B int4, head in 8 bits, batch 1",)),
    *_targets(
        "choices", "× the fastest",
        *[(product_tiles_row(kind, rows),) for kind, row_counts in TILE_CHOICES.items() for rows in row_counts],
        *[(f"decode {size} × 1k: chosen splits over others",) for size in (256, 1)],
        *[(f"decode {size} × 1k with its rotation: chosen launches over others",) for size in (256, 1)],
        *[(slabs_row(kind, 600),) for kind in ("int8", "int4")],
        ("layer of Llama-8B, 1 row: launches as served over sooner ones",),
        ("prefill 8k: chosen tile over others",),
        ("100 tokens behind 32k: chosen splits over others",),
        higher=False,
    ),
]  # fmt: skip

BY_NAME = {target.name: target for target in TARGETS}
assert len(BY_NAME) == len(TARGETS), "two rows have one name"
