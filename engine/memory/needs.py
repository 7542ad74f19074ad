"""What a model needs in memory, predicted from its shape before anything is read.

Integers only; knows no torch and no device. With L layers of P_layer weights in matrices, V words of d numbers, b_w, b and
b_kv bytes per weight, per number computed with and per stored key or value, T tokens and R sampled rows in a step:

    weights      W = b_w·L·P_layer + b·V·d·(1 if tied, else 2) + norms and biases; groups of g add 4/g for scale and zero; a
                     head in other bits than b is kept beside the embedding, tied or not
    activations  A = max(T·w·b, R·V·4·2), w numbers of a token where a layer holds most: 3f + 6d with gates of width f; of a
                     mixture of k experts (k + 2)·f + (k + 6)·d; 2(H + K)·D + 5d in attention
                     On a GPU at least t·w·b + 2^16·(D + 1)·4 with t = min(T, 2^15 / H): with so few tokens after a long
                     context keys are cut into splits, whose results are kept too
                     Chunks of at most 8 tokens each that are more rows than R leave their splits in memory of their own:
                     at least t·w·b + min(t·splits·H·(D + 1)·4, 256 MiB) with t = min(T, 8 · requests)
                     On a GPU with weights of 8 or 4 bits and b = 2, steps of more than 512 rows: 2^23·b for the weights that
                     are dequantised at a time; not batch-invariant
    graphs       G = A of the largest captured step, and for each that is kept 24 KiB for each of its 10·L + 20 launches;
                     13 in a layer that is a mixture; 20 for one that chooses the tokens after chunks. Steps over slots
                     hold the logits of all rows at once, so that both their A are at least R·V·b. Captured steps with
                     chunks have at most 128 MiB / (w·b) tokens, no more than a request, and room for 2^16·(D + 1)·4 that
                     splits leave and for (R + 32)·(context / block_size)·4 of block tables. Not batch-invariant, 32 MiB
                     more for cuBLAS, and with weights of 8 or 4 bits and b = 2, for each step of more than 512 rows,
                     24 KiB for each of 2·L·P_layer / 2^23 launches, experts left out
    slots        S = R·(splits of the context·H·(D + 1)·4 for each window + V·(4 + b)) + min(R·V·4, 128 MiB)
                     + (2·R + 32)·(context / block_size)·4, on a GPU: what decodes leave between two kernels, counts of tokens,
                     logits that wait for masks, biases; block tables of slots, of rows and of 32 chunks. Draft tokens add
                     to R, once to its tables and not to counts and biases. Batch-invariant decodes leave
                     max(R, 64)·(context / 256)·H·(D + 2)·4 for each window, at most 256 MiB, and b is 4
    rotary tables  2·context·D_rotary·b for each rotation of the model: cosines and sines of all positions
    context      C = the driver's context, the libraries' workspaces, the kernels' code
    KV blocks      = floor((share·memory − W − A − G − S − rotary tables − C) / (block_size·2·L·K·D·b_kv))

W, A, S and the rotary tables are methods of `MemoryShape`, G is `MemoryNeeds._graphs`, C comes from the device.

The division is that of paged caches, Kwon et al., arXiv 2309.06180, section 4; the constants are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.formats import Formats, unquantised
from engine.memory.shape import SAMPLED_GRAPH_BYTES, SLAB_TOKENS_MIN, Load, MemoryShape
from engine.step_sizes import draft_graphs_kept, graphs_kept, sampled_shapes

GIB = 1 << 30
CONTEXT_BYTES = 600 << 20
"""What a process takes of an NVIDIA GPU for its context, code, and the matrix library's workspace: an estimate for when
there is no device to measure."""

CAPTURE_WORKSPACE_BYTES = 32 << 20
"""What cuBLAS takes on Hopper for the stream of captures, in the memory of graphs; less on other cards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """Predicted bytes of an engine: six parts that are fixed, and one block of keys and values. `num_graphs`: captured steps
    that are kept, those of a draft model by itself among them."""

    weights_bytes: int
    activations_bytes: int
    graphs_bytes: int
    slots_bytes: int
    rotary_bytes: int
    context_bytes: int
    block_bytes: int
    block_size: int
    num_graphs: int

    @classmethod
    def of(
        cls,
        model: MemoryShape,
        formats: Formats,
        load: Load,
        *,
        context_bytes: int,
        context_len: int = 0,
        draft: MemoryShape | None = None,
    ) -> MemoryNeeds:
        """`context_len` is that of the longest request; `draft` a second model, unquantised, with blocks of the same ids: the
        two compute one after the other."""
        models = [model] if draft is None else [model, draft]
        size = formats.element_bytes
        drafts_bytes = 0 if draft is None else draft.weights_bytes(unquantised(size), size)
        logit_bytes = 4 if load.batch_invariant else size
        logits_bytes = load.num_rows * model.vocab_size * logit_bytes if load.has_slots else 0
        recorded_bytes = sum(shape.recorded_bytes(load.recorded_rows, size) for shape in models)
        largest_step_bytes = max(logits_bytes, *(shape.step_bytes(load, context_len, formats) for shape in models))
        num_graphs = graphs_bytes = 0
        if load.has_slots:
            num_graphs, graphs_bytes = cls._graphs(model, draft, load, context_len, formats, logits_bytes)
        return cls(
            weights_bytes=model.weights_bytes(formats.weights, size) + drafts_bytes,
            activations_bytes=largest_step_bytes + recorded_bytes,
            graphs_bytes=graphs_bytes,
            slots_bytes=cls._slots_bytes(models, load, context_len, formats.kv_element_bytes, logit_bytes),
            rotary_bytes=sum(shape.rotary_bytes(context_len, size) for shape in models),
            context_bytes=context_bytes,
            block_bytes=sum(shape.kv_token for shape in models) * formats.kv_element_bytes * load.block_size,
            block_size=load.block_size,
            num_graphs=num_graphs,
        )

    @staticmethod
    def _slots_bytes(
        models: Sequence[MemoryShape], load: Load, context_len: int, kv_element_bytes: int, logit_bytes: int
    ) -> int:
        """Splits of decodes, block tables, and what sampling keeps for the model that is served. Without slots the models take
        turns with one piece of memory for their splits, and block tables last for a step."""
        splits: list[int] = []
        if load.on_gpu:
            sizes = load.num_rows, context_len, kv_element_bytes
            splits = [shape.splits_bytes(*sizes, batch_invariant=load.batch_invariant) for shape in models]
        if not load.has_slots:
            return max(splits, default=0)
        columns_bytes = models[0].columns_bytes(load.num_seqs, logit_bytes, num_draft_tokens=load.num_draft_tokens)
        return sum(splits) + load.slot_tables_bytes(context_len) + columns_bytes

    @staticmethod
    def _graphs(
        model: MemoryShape, draft: MemoryShape | None, load: Load, context_len: int, formats: Formats, logits_bytes: int
    ) -> tuple[int, int]:
        """How many captured steps are kept, and what they take. They share one pool of activations, at least `logits_bytes`.
        Those of a draft model are a part of all, and there are some of its own."""
        element_bytes = formats.element_bytes
        chunk_rows = model.chunk_rows(load, context_len, element_bytes)
        num_graphs = graphs_kept(load.num_seqs, load.num_draft_tokens, chunk_rows=chunk_rows)
        num_sampled = len(sampled_shapes(min(chunk_rows, load.num_seqs)))
        decodes_bytes = model.activations_bytes(load.num_rows, load.num_rows, element_bytes)
        tables_bytes = load.chunk_tables_bytes(context_len)
        chunks_bytes = model.captured_chunks_bytes(chunk_rows, element_bytes, tables_bytes)
        graphs_bytes = num_graphs * model.graph_bytes + num_sampled * SAMPLED_GRAPH_BYTES
        graphs_bytes += max(logits_bytes, decodes_bytes, chunks_bytes)
        if not load.batch_invariant:  # whose products are neither cuBLAS's nor of slabs
            num_large = graphs_kept(load.num_seqs, load.num_draft_tokens, chunk_rows=chunk_rows, fewest=SLAB_TOKENS_MIN)
            slab_bytes = model.slab_bytes(max(load.num_rows, chunk_rows), formats)
            graphs_bytes += CAPTURE_WORKSPACE_BYTES + slab_bytes + num_large * model.slab_launches_bytes(formats)
        if draft is None:
            return num_graphs + num_sampled, graphs_bytes
        num_drafts = num_graphs + draft_graphs_kept(load.num_seqs)
        return num_drafts + num_sampled, graphs_bytes + num_drafts * draft.graph_bytes

    @property
    def fixed_bytes(self) -> int:
        """Everything but keys and values."""
        held_bytes = self.weights_bytes + self.activations_bytes + self.graphs_bytes + self.slots_bytes + self.rotary_bytes
        return held_bytes + self.context_bytes

    def num_blocks(self, usable_bytes: int) -> int:
        """KV blocks beside the fixed parts."""
        return max(0, usable_bytes - self.fixed_bytes) // self.block_bytes

    def kv_bytes(self, num_tokens: int) -> int:
        """Keys and values of one request, in whole blocks."""
        return -(-num_tokens // self.block_size) * self.block_bytes
