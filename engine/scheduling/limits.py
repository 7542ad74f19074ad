"""Bounds of one engine's scheduling, checked before anything is built, and its counters. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import EngineConfigError

STEP_DRAFT_TOKENS_MAX = 64
"""Draft tokens of all requests in one step: its rows beyond one per request. Few cards compute more for free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of one engine. Raises `EngineConfigError` for combinations under which a request could never finish."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int

    def __post_init__(self) -> None:
        for option in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"):
            if getattr(self, option) < 1:
                raise EngineConfigError(option, f"must be at least 1, not {getattr(self, option)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise EngineConfigError(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs ({self.max_num_seqs}), not {self.max_num_batched_tokens}",
            )

    @property
    def max_blocks(self) -> int:
        """KV blocks of the longest request."""
        return -(-self.max_model_len // self.block_size)

    def check_blocks(self, num_blocks: int) -> None:
        """Raise `EngineConfigError` unless the longest request fits into this many KV blocks."""
        if num_blocks * self.block_size < self.max_model_len:
            raise EngineConfigError(
                "max_model_len",
                f"({self.max_model_len}) does not fit into {num_blocks} KV blocks of {self.block_size} tokens",
            )


@dataclass(slots=True)
class SchedulerTotals:
    """Counters since start. A prompt counts once, when its prefill is first complete, however often it is recomputed, and
    not again for further answers to it."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
