"""Columns of sampling settings, one slot for each request."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kernels.sampling_columns import SamplingColumns

CPU = torch.device("cpu")


def columns_of(
    settings: Sequence[Mapping[str, Any]], vocab_size: int, device: torch.device = CPU, *, num_rules: int = 1
) -> SamplingColumns:
    """Return columns with the temperature and filters of `settings`, a random stream for each slot, and no rules."""
    columns = SamplingColumns.empty(len(settings), vocab_size, num_rules, device)
    for slot, each in enumerate(settings):
        temperature = each.get("temperature", 1.0)
        columns.scale[slot] = math.log2(math.e) / temperature if temperature else 0.0
        columns.streams[slot] = random.Random(slot + 1).getrandbits(63) - 2**62
        columns.top_k[slot] = int(each.get("top_k", 0))
        columns.top_p[slot] = each.get("top_p", 1.0)
        columns.neg_log2_min_p[slot] = -math.log2(each["min_p"]) if "min_p" in each else math.inf
        columns.typical_p[slot] = each.get("typical_p", 1.0)
    return columns
