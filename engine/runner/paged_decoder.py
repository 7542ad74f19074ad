"""A decoder with its paged cache and the tables it needs: spans of tokens in, hidden states and logits out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.layers.attention import attention_shapes
from engine.layers.forward_inputs import ForwardInputs
from engine.layers.rotary import RotaryTable
from engine.memory.kv_plan import MemoryPlan
from engine.memory.shape import Load, MemoryShape
from engine.models.decoder import Decoder
from engine.runner.embedder import TextModel
from engine.runner.kv_cache import allocate_kv_cache
from engine.runner.token_spans import TokenSpan, make_forward_inputs
from kernels.ops import (
    AnyPlanner,
    PagedPlan,
    PagedPlanner,
    RecordedOperations,
    attention_planner,
    operations,
)

PlacedTokens = tuple[torch.Tensor, torch.Tensor]
"""Indices into the tokens of a pass, and the tokens to put there: [N] int64 each."""


class PagedDecoder:
    """One model of an engine: the one that is served, or the draft model beside it. Both use the same block ids.

    `text_model` is for work beside the steps: whole texts, without the cache.
    """

    def __init__(self, decoder: Decoder, plan: MemoryPlan, *, kv_dtype: torch.dtype, text_tokens: int | None) -> None:
        """`kv_dtype`: the format of keys and values. `text_tokens`: the most tokens of a pass over whole texts, None where
        memory does not limit them."""
        config, dtype, device = decoder.config, decoder.dtype, decoder.device
        self.dtype, self.device = dtype, device
        self._ops = operations(device, dtype, batch_invariant=decoder.batch_invariant)
        self.batch_invariant = decoder.batch_invariant
        self.vocab_size = config.vocab_size
        self.has_experts = config.experts is not None
        self.kv_caches = allocate_kv_cache(config, plan.num_blocks, plan.block_size, dtype=kv_dtype, device=device)
        self.kv_scales = "none"
        if kv_dtype is not dtype:
            self.kv_scales = "checkpoint" if decoder.scale_kv() else "unit"
        self.greedy_head = decoder.greedy_head
        self.rotaries = [RotaryTable(rope, plan.max_model_len, dtype=dtype, device=device) for rope in config.ropes]
        self.attention_shapes = shapes = attention_shapes(config, plan.block_size)
        self.text_model = TextModel.of_decoder(decoder, self.rotaries, shapes, plan.max_model_len, batch_tokens=text_tokens)
        self._decoder = decoder
        self._plan = plan
        self._planners: list[AnyPlanner] = [
            attention_planner(shape, dtype=dtype, device=device, kv_dtype=kv_dtype, batch_invariant=decoder.batch_invariant)
            for shape in shapes
        ]
        self._workspaces: list[Any] = [None] * len(shapes)
        self._recorded: RecordedOperations | None = None

    def allocate_workspaces(self, num_rows: int, max_blocks: int) -> None:
        """Allocate the workspace between the two kernels of decode attention, for each of `attention_shapes`, in steps of up to
        so many rows and blocks. Steps run one after another, so all of them share it from now on."""
        make, kv_dtype = self._ops.decode_workspace, self.kv_caches[0].dtype
        self._workspaces = [make(shape, num_rows, max_blocks, kv_dtype, self.device) for shape in self.attention_shapes]
        for planner, workspace in zip(self._planners, self._workspaces, strict=True):
            if isinstance(planner, PagedPlanner):
                planner.workspace = workspace

    def device_inputs(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        plan: Callable[..., PagedPlan],
        *,
        sampled_rows: torch.Tensor | None = None,
    ) -> ForwardInputs:
        """Inputs of a pass, from tensors on the device; `plan` makes the plan of each of `attention_shapes`."""
        return ForwardInputs(
            token_ids=token_ids,
            positions=positions,
            rotations=tuple(rotary.at(positions) for rotary in self.rotaries),
            slot_mapping=slot_mapping,
            sampled_rows=sampled_rows,
            attention=tuple(
                plan(shape=shape, workspace=workspace)
                for shape, workspace in zip(self.attention_shapes, self._workspaces, strict=True)
            ),
        )

    @property
    def has_host_sync(self) -> bool:
        """Whether a step waits for the host somewhere between its layers, so that it cannot be captured."""
        return self._decoder.has_host_sync

    def chunk_rows(self, max_tokens: int, max_seqs: int) -> int:
        """Rows of the largest captured step with chunks, of steps of up to `max_tokens` and `max_seqs` requests. 0 where layers
        wait for the host: such a step cannot be captured, and experts would be computed for its padding."""
        if self.has_host_sync:
            return 0
        plan, is_invariant = self._plan, self.batch_invariant
        load = Load(num_tokens=max_tokens, num_seqs=max_seqs, block_size=plan.block_size, batch_invariant=is_invariant)
        return MemoryShape.of(self._decoder.config).chunk_rows(load, plan.max_model_len, self.dtype.itemsize)

    @property
    def max_verify_group(self) -> int:
        """The most consecutive tokens of a request, each a row of a step, that attention can take as one group of queries."""
        kv_dtype = self.kv_caches[0].dtype
        return min(self._ops.max_verify_group(shape, kv_dtype, self.device) for shape in self.attention_shapes)

    def prepare(self, spans: Sequence[TokenSpan]) -> ForwardInputs:
        """Tensors of one pass over `spans`."""
        return make_forward_inputs(
            spans, block_size=self._plan.block_size, rotaries=self.rotaries, planners=self._planners, device=self.device
        )

    def forward_spans(self, spans: Sequence[TokenSpan], unknown: PlacedTokens | None = None) -> torch.Tensor:
        """Hidden states of a forward pass over `spans`: [R, hidden]. `unknown`: tokens known only on the device."""
        inputs = self.prepare(spans)
        if unknown is not None:
            inputs.token_ids.index_copy_(0, *unknown)
        return self.forward(inputs)

    def new_record(self, max_rows: int) -> RecordedOperations:
        """Begin a record of a step of up to so many rows. All records share their memory, so that only one may run at a
        time."""
        make = self._ops.sequence
        assert make is not None, "operations of this device are not recorded"
        recorded = make(max_rows) if self._recorded is None else self._recorded.sharing_buffers(max_rows)
        self._recorded = recorded
        return recorded

    def forward(self, inputs: ForwardInputs, before_layer: Callable[[], None] | None = None) -> torch.Tensor:
        """Hidden states of the rows that the inputs select: [R, hidden]; all keys and values go to the cache.

        `before_layer`: called before each layer of a step that is being recorded."""
        return self._decoder(inputs, self.kv_caches, before_layer)

    def logits(self, hidden: torch.Tensor, *, wide: bool = True) -> torch.Tensor:
        """hidden: [R, hidden] → [R, V] float32, or, unless `wide`, perhaps narrower with the same values. Of batch-invariant
        engines always float32: log-probabilities of narrower ones are summed by another kernel, perhaps in another order."""
        return self._decoder.logits(hidden, wide=wide or self.batch_invariant)
