"""The parts of steps over slots, made once for all of them.

SlotState, DecodeInputBuffers   the state of each request on the device, and the inputs of a decode step
DecodeSteps                     steps of one token for each request, and those that verify drafts
ChunkSteps                      steps with chunks of prompts, and the choice of their tokens
DraftSteps                      the small steps of a draft model
Staging, TokenReturn            transfers to the device and back
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.runner.chunk_step import ChunkStep, ChunkSteps
from engine.runner.cuda_graphs import Calls
from engine.runner.decode_input_buffers import DecodeInputBuffers
from engine.runner.decode_step import DecodeStep, DecodeSteps
from engine.runner.draft_steps import DraftSteps
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.slots import SlotState
from engine.runner.staging import Staging
from engine.runner.token_return import Fetch, ImmediateFetch, TokenReturn
from engine.sampling import scores
from engine.sampling.columns import ColumnSampler, Kind
from engine.sampling_params import TOP_LOGPROBS_MAX
from engine.scheduling.limits import SchedulerLimits
from kernels import ops


class SlotSteps:
    """What an engine launches over its slots, one for each seat, and the buffers that these steps share."""

    def __init__(
        self,
        target: PagedDecoder,
        sampler: ColumnSampler,
        calls: Calls,
        limits: SchedulerLimits,
        *,
        max_draft_tokens: int,
        chunk_rows: int,
        is_synchronous: bool = False,
        draft: PagedDecoder | None = None,
    ) -> None:
        """`sampler` keeps its columns in the buffer of `slot_words`. `max_draft_tokens`: the most of a step, 0 without
        any. `chunk_rows`: rows of the largest captured step with chunks, 0 if there is none. `is_synchronous`: a launch
        returns when its step is over, and steps are recorded instead of rounded up to one of the sizes of graphs. `draft`: the
        draft model; without one the host drafts."""
        self.target = target
        self.decoders = [target] if draft is None else [draft, target]
        self.sampler = sampler
        self.calls = calls
        self.limits = limits
        self.has_drafts = max_draft_tokens > 0
        self.is_synchronous = is_synchronous
        self.device = device = target.device
        max_num_seqs, block_size = limits.max_num_seqs, limits.block_size
        self.state = SlotState(sampler.columns.words, dtype=target.dtype)
        max_rows = max_num_seqs + max_draft_tokens
        self.inputs = DecodeInputBuffers(self.state, target, max_rows=max_rows, block_size=block_size)
        self.token_return = TokenReturn(max_rows, scores.width(TOP_LOGPROBS_MAX), device=device)
        self.draft_steps: DraftSteps | None = None
        if draft is not None:
            self.draft_steps = DraftSteps(self._make_steps("draft", [draft]), self.inputs, sampler)
        self.decodes = self._make_steps("decode", self.decoders, host=self.token_return.host)
        self.chunks: ChunkSteps | None = None
        if chunk_rows:
            sizes = {"max_tokens": chunk_rows, "block_size": block_size}
            chunk_step = ChunkStep(self.decoders, self.state, sampler, host=self.token_return.host, **sizes)
            self.chunks = ChunkSteps(chunk_step, calls)
        self.staging = Staging(device)
        self._last_sampled = self.decodes.step.sampled  # of as many rows as the last step had, which mostly the next one has

    def _make_steps(self, name: str, decoders: Sequence[PagedDecoder], *, host: ops.HostTokens | None = None) -> DecodeSteps:
        is_synchronous, max_num_seqs = self.is_synchronous, self.limits.max_num_seqs
        step = DecodeStep(decoders, self.inputs, self.state, self.sampler, should_record=is_synchronous, host=host)
        return DecodeSteps(name, step, self.inputs, self.calls, max_num_seqs=max_num_seqs, is_synchronous=is_synchronous)

    def fetch_decodes(self, num_rows: int, kind: Kind, *, sends_inputs: bool) -> Fetch:
        """The tokens of the decode step just launched, with their scores, and with its inputs if only the device has them."""
        step = self.decodes.step
        if step.host_sampled is not None and not kind.num_top and not sends_inputs:
            return ImmediateFetch(step.host_sampled[:num_rows].tolist())
        table = step.scores[:num_rows, : scores.width(kind.num_top)] if kind.num_top else None
        inputs = self.inputs.token_ids[:num_rows] if sends_inputs else None
        if len(self._last_sampled) != num_rows:
            self._last_sampled = step.sampled[:num_rows]
        return self.token_return.fetch(self._last_sampled, table, inputs=inputs)
