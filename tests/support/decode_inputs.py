"""State of decode slots, and the inputs of a decode step that kernels prepare from it in guarded outputs."""

from __future__ import annotations

from types import ModuleType

import torch

from tests.support.kernel_cases import Guarded

NUM_SLOTS, COLUMNS = 7, 6
OUTPUTS = {
    "token_ids": torch.int64, "positions": torch.int64, "slot_mapping": torch.int64, "context_lens": torch.int32,
}  # fmt: skip


def state(lengths: list[int], device: torch.device, *, columns: int = COLUMNS) -> tuple[torch.Tensor, ...]:
    """last_tokens, num_tokens, slot_tables of slots of these lengths; entries beyond a context are ids that no pool has."""
    tables = torch.full((len(lengths), columns), 2**30, dtype=torch.int32)
    generator = torch.Generator().manual_seed(4)
    for slot, length in enumerate(lengths):
        used = min(columns, -(-length // 16))
        tables[slot, :used] = torch.randint(0, 1000, (used,), generator=generator, dtype=torch.int32)
    tokens = torch.randint(0, 150_000, (len(lengths),), generator=generator)
    return tokens.to(device), torch.tensor(lengths, dtype=torch.int32, device=device), tables.to(device)


def prepared(
    kernels: ModuleType, slots: torch.Tensor, held: tuple[torch.Tensor, ...], block_size: int = 16
) -> dict[str, torch.Tensor]:
    """Return what `kernels` prepare for `slots` from the state `held`, in guarded outputs."""
    rows, columns = slots.shape[0], held[2].shape[1]
    outputs = {name: Guarded((rows,), dtype, slots.device) for name, dtype in OUTPUTS.items()}
    outputs["block_tables"] = Guarded((rows, columns + 2), torch.int32, slots.device)
    outputs["block_tables"].tensor.fill_(-5)
    arguments = {name: output.tensor for name, output in outputs.items()}
    arguments["block_tables"] = arguments["block_tables"][:, :columns]
    kernels.prepare_decode(slots, *held, block_size=block_size, **arguments)
    return {name: output.check() for name, output in outputs.items()}
