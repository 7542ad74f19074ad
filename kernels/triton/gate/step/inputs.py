"""Configurations of `kernels.triton.step.inputs` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import Compilation
from kernels.triton.step.inputs import COLUMNS, ROWS, advance_slots_kernel, prepare_decode_kernel


def compilations() -> list[Compilation]:
    """Blocks of 16 and 32 tokens; slots whose tokens the host reads: of decodes, with a copy of the tokens, and after prompt
    chunks, without one; and slots of a draft model, whose tokens the host does not read."""
    state = {"slots": "*i32", "last_tokens": "*i64", "num_tokens": "*i32"}
    outputs = {"token_ids": "*i64", "positions": "*i64", "slot_mapping": "*i64", "context_lens": "*i32", "block_tables": "*i32"}
    sizes = {"columns": "i32", "slot_stride": "i32", "row_stride": "i32"}
    without_copy = {**state, "sampled": "*i64", "num_rows": "i32", "place_size": "i32"}
    with_copy, host_outputs = {**without_copy, "out": "*i64"}, {"places": "*i64", "num_steps": "*i64"}
    return [
        Compilation(
            "advance_slots",
            advance_slots_kernel,
            {**with_copy, **host_outputs},
            {"DEPTH": 4, "ROWS": ROWS},
        ),
        Compilation(
            "advance_slots_chosen",
            advance_slots_kernel,
            {**without_copy, **host_outputs},
            {"out": None, "DEPTH": 4, "ROWS": ROWS},
        ),
        Compilation(
            "advance_slots_draft",
            advance_slots_kernel,
            with_copy,
            {"places": None, "num_steps": None, "DEPTH": 1, "ROWS": ROWS},
        ),
        *(
            Compilation(
                f"prepare_decode_{block_size}",
                prepare_decode_kernel,
                {**state, "slot_tables": "*i32", **outputs, **sizes},
                {"BLOCK_SIZE": block_size, "COLUMNS": COLUMNS},
            )
            for block_size in (16, 32)
        ),
    ]
