"""What a model needs in memory for each of its parts, computed from its shape and the load alone. The formulae are those of
`engine.memory.needs`."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.model import ModelConfig, kv_elements_per_token
from engine.formats import Formats, WeightFormat
from engine.memory.splits import (
    CHUNK_CONTEXT_MIN,
    CHUNK_PARTS_MAX,
    FEW_QUERIES_BYTES_MAX,
    FEW_QUERIES_MAX,
    INVARIANT_QUERIES_MIN,
    invariant_bytes,
    num_splits,
)
from engine.step_sizes import CHUNKS_MANY, chunk_rows_max

LOGITS_ELEMENTS_MAX = 1 << 25
"""The most logits in memory at a time, 128 MiB: the logits of a step's rows are computed in slices of this size."""

SLAB_TOKENS_MIN, SLAB_ELEMENTS_MAX = 513, 1 << 23
"""Weights of 8 and 4 bits on a GPU (`kernels.triton.products.dequantised_slabs`): the fewest rows that are multiplied with
slabs, and the most weights of a slab. A test compares both."""

LAUNCHES_OF_LAYER, LAUNCHES_OF_STEP, LAUNCHES_OF_EXPERTS = 10, 20, 3
LAUNCH_BYTES = 24 << 10
"""Of a captured step: the most kernels of a layer, the most before and after all layers, and how many more a mixture of
experts has than a gated feed-forward part (router, choice, sort, two products, sum); and the bytes that the driver keeps on the
card for one launch. PyTorch's documentation of CUDA graph trees says 64 KiB up to CUDA 12.4 and driver 550, then less; vLLM's
log says 0.21 GiB for 35 sizes of Llama-3.2-1B, which without activations is some 17 to 30 KiB a launch. An estimate until our
own are measured: Llama-3.1-8B's steps come to 8 MiB each."""
SAMPLED_GRAPH_BYTES = LAUNCHES_OF_STEP * LAUNCH_BYTES
"""Of a graph that chooses the tokens of captured steps with chunks: it has no layers."""

CHUNK_TABLES = CHUNKS_MANY + 1
"""Block tables of a captured step with chunks: padding has one, too."""

BIAS_BYTES_MAX = 128 << 20
"""The most memory for the logit biases of requests. One row takes 0.5 MiB for 128k tokens: enough for 256 requests."""


def bias_rows(num_seqs: int, vocab_size: int) -> int:
    """How many requests of steps over slots may have logit biases at a time: all of them, as far as `BIAS_BYTES_MAX` allows."""
    return max(1, min(num_seqs, BIAS_BYTES_MAX // (4 * vocab_size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The largest load of an engine: steps of up to `num_tokens` tokens, `num_seqs` requests and `num_draft_tokens` more rows.
    `on_gpu`: decode attention is split, by position where it is `batch_invariant`. `has_slots`: steps are launched ahead over
    slots. `recorded_rows`: the most rows of a recorded step on a CPU."""

    num_tokens: int
    num_seqs: int
    block_size: int
    num_draft_tokens: int = 0
    recorded_rows: int = 0
    on_gpu: bool = False
    has_slots: bool = False
    batch_invariant: bool = False

    @property
    def num_rows(self) -> int:
        """The most rows of a step that choose a token."""
        return self.num_seqs + self.num_draft_tokens

    def slot_tables_bytes(self, context_len: int) -> int:
        """Block tables beside steps over slots: of each slot, of each row of a decode step, and of each chunk."""
        return (self.num_seqs + self.num_rows + CHUNK_TABLES) * self._table_bytes(context_len)

    def chunk_tables_bytes(self, context_len: int) -> int:
        """Block tables in a captured step with chunks: of each decode and of each chunk."""
        return (self.num_seqs + CHUNK_TABLES) * self._table_bytes(context_len)

    def _table_bytes(self, context_len: int) -> int:
        return -(-context_len // self.block_size) * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShape:
    """Sizes of a model that decide about memory, as counts of elements.

    matrices         weights in matrices of all layers
    embedding        weights of the embedding
    head             weights of an output head of its own
    others           weights that are never quantised: norms, biases, routers
    kv_token         keys and values of one token in all layers
    layer_width      activations of one token where a layer holds most of them
    vocab_size       words
    num_heads        query heads
    head_dim         size of a head
    windows          sliding windows, each distinct one once; None is full attention
    tied_head        weights of an embedding that is the output head as well
    recorded_width   all activations of one token in a layer whose operations can be recorded
    num_layers       layers
    num_sparse_layers  of these, mixtures of experts
    expert_matrices  of `matrices`, those of experts
    rotary_width     cosines and sines of one position, of all distinct rotations
    """

    matrices: int
    embedding: int
    head: int
    others: int
    kv_token: int
    layer_width: int
    vocab_size: int
    num_heads: int
    head_dim: int
    windows: tuple[int | None, ...] = (None,)
    tied_head: int = 0
    recorded_width: int = 0
    num_layers: int = 0
    num_sparse_layers: int = 0
    expert_matrices: int = 0
    rotary_width: int = 0

    @classmethod
    def of(cls, config: ModelConfig) -> MemoryShape:
        """Every tensor of the checkpoint is counted once."""
        d, qkv = config.hidden_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        attended = qkv + config.num_heads * config.head_dim
        biases = (qkv if config.qkv_bias else 0) + (d if config.o_bias else 0)
        norms = d * sum(name is not None for name in config.family.norms.value) + _qk_norm(config)
        feed_forward = [_feed_forward(config, is_sparse=layer.is_sparse) for layer in config.layers]
        head, is_tied = config.vocab_size * d if config.has_head else 0, config.tie_word_embeddings
        return cls(
            matrices=sum(d * attended + matrices for matrices, _ in feed_forward),
            embedding=config.vocab_size * d,
            head=0 if is_tied else head,
            others=d + sum(biases + norms + others for _, others in feed_forward),
            kv_token=kv_elements_per_token(config.num_layers, config.num_kv_heads, config.head_dim),
            layer_width=_layer_width(config, attended),
            vocab_size=config.vocab_size,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            windows=config.windows,
            tied_head=head if is_tied else 0,
            recorded_width=attended + 6 * d + 3 * config.intermediate_size if config.experts is None else 0,
            num_layers=config.num_layers,
            num_sparse_layers=sum(layer.is_sparse for layer in config.layers),
            expert_matrices=sum(_feed_forward(config, is_sparse=True)[0] for layer in config.layers if layer.is_sparse),
            rotary_width=sum(2 * rope.rotary_dim for rope in config.ropes),
        )

    def weights_bytes(self, weights: WeightFormat, element_bytes: int) -> int:
        """A number of the embedding, norms, biases and routers takes `element_bytes`. A tied embedding is needed as it is, for
        lookups; an output head in fewer bits is kept beside it."""
        head_bits, heads = weights.head_bits, self.head + self.tied_head
        head_bytes = -(-heads * head_bits // 8) if head_bits else self.head * element_bytes
        return weights.num_bytes(self.matrices) + head_bytes + (self.embedding + self.others) * element_bytes

    def activations_bytes(self, num_tokens: int, num_rows: int, element_bytes: int) -> int:
        """What a forward pass of `num_tokens`, of which `num_rows` are sampled, needs besides weights and cache, with logits
        computed in slices."""
        logits = min(num_rows * self.vocab_size, LOGITS_ELEMENTS_MAX) * 4 * 2
        return max(num_tokens * self.layer_width * element_bytes, logits)

    def step_bytes(self, load: Load, context_len: int, formats: Formats) -> int:
        """The most that a step of any kind holds besides weights, cache and slots."""
        size = formats.element_bytes
        largest = self.activations_bytes(load.num_tokens, load.num_rows, size)
        if not load.on_gpu or load.batch_invariant:
            return largest
        chunks = self.split_chunks_bytes(load.num_tokens, context_len, size)
        largest = max(largest, chunks, self.few_queries_bytes(load, context_len, formats))
        return largest + self.slab_bytes(load.num_tokens, formats)

    def slab_bytes(self, num_tokens: int, formats: Formats) -> int:
        """What a product of `num_tokens` rows on a GPU keeps of weights that it dequantises: some rows of one matrix at a time.
        0 for few rows, for unquantised weights and for rows of 32 bits. Products that round their rows to fp8 need none, but
        are planned for alike."""
        is_quantised = formats.weights.bits <= 8 or formats.weights.head_bits > 0
        if num_tokens < SLAB_TOKENS_MIN or not is_quantised or formats.element_bytes != 2:
            return 0
        return min(SLAB_ELEMENTS_MAX, self.matrices) * formats.element_bytes

    def slab_launches_bytes(self, formats: Formats) -> int:
        """Bytes of the launches that dequantise and multiply slabs in one captured step of many rows, beside `graph_bytes`.
        Experts have products of their own."""
        if formats.weights.bits > 8 or formats.element_bytes != 2:
            return 0
        return 2 * -(-(self.matrices - self.expert_matrices) // SLAB_ELEMENTS_MAX) * LAUNCH_BYTES

    def split_chunks_bytes(self, num_tokens: int, context_len: int, element_bytes: int) -> int:
        """What a step of few tokens after a long context needs: activations, and the partial results of two or more splits of
        the keys for each token. 0 where contexts are too short to be split."""
        if context_len < CHUNK_CONTEXT_MIN:
            return 0
        few_tokens = min(num_tokens, CHUNK_PARTS_MAX // (2 * self.num_heads))
        return few_tokens * self.layer_width * element_bytes + CHUNK_PARTS_MAX * (self.head_dim + 1) * 4

    def chunk_rows(self, load: Load, context_len: int, element_bytes: int) -> int:
        """Rows of the largest captured step with chunks, no more than a request of `context_len` tokens has; 0 if there is
        none. Batch-invariant programs share the keys of a chunk where their workspace has room for all rows of a step."""
        num_tokens = min(load.num_tokens, context_len)
        if load.batch_invariant:
            num_tokens = min(num_tokens, max(load.num_seqs, INVARIANT_QUERIES_MIN))
        return chunk_rows_max(num_tokens, self.layer_width * element_bytes)

    def captured_chunks_bytes(self, num_rows: int, element_bytes: int, tables_bytes: int) -> int:
        """What a captured step with chunks needs: activations of so many rows, the partial results of splits, which only a few
        rows have, and block tables."""
        if not num_rows:
            return 0
        return num_rows * self.layer_width * element_bytes + CHUNK_PARTS_MAX * (self.head_dim + 1) * 4 + tables_bytes

    def few_queries_bytes(self, load: Load, context_len: int, formats: Formats) -> int:
        """What a step of short chunks, of FEW_QUERIES_MAX tokens at most, needs if it has more rows than the workspace of
        decodes: activations, and a workspace of its own. 0 where no step has so many rows."""
        num_tokens = min(load.num_tokens, FEW_QUERIES_MAX * load.num_seqs)
        if num_tokens <= load.num_rows:
            return 0
        kv_bytes = formats.kv_element_bytes
        splits = max(num_splits(context_len, self.head_dim, kv_bytes, window) for window in self.windows)
        partials_bytes = min(num_tokens * splits * self.num_heads * (self.head_dim + 1) * 4, FEW_QUERIES_BYTES_MAX)
        return num_tokens * self.layer_width * formats.element_bytes + partials_bytes

    def recorded_bytes(self, num_rows: int, element_bytes: int) -> int:
        """What recorded steps of `num_rows` rows keep, all kinds together: two layers, which take turns, what is computed
        before the first one (embedding, its norm, rotations), and logits."""
        if not self.recorded_width:
            return 0
        before = 2 * (self.embedding // self.vocab_size + len(self.windows) * self.head_dim)
        return num_rows * (2 * self.recorded_width + before + self.vocab_size) * element_bytes

    @property
    def graph_bytes(self) -> int:
        """Bytes of one captured step, beside activations."""
        of_layers = LAUNCHES_OF_LAYER * self.num_layers + LAUNCHES_OF_EXPERTS * self.num_sparse_layers
        return (of_layers + LAUNCHES_OF_STEP) * LAUNCH_BYTES

    def splits_bytes(self, num_seqs: int, context_len: int, kv_element_bytes: int, *, batch_invariant: bool = False) -> int:
        """The partial results of split decode attention: of `num_seqs` decodes of up to `context_len` tokens, until a second
        kernel combines them. The number of splits depends on the request's own length alone, so that results do not depend on
        the batch."""
        if batch_invariant:
            sizes = num_seqs, context_len, self.num_heads, self.head_dim
            return sum(invariant_bytes(*sizes, window) for window in self.windows)
        splits = sum(num_splits(context_len, self.head_dim, kv_element_bytes, window) for window in self.windows)
        return num_seqs * splits * self.num_heads * (self.head_dim + 1) * 4

    def rotary_bytes(self, context_len: int, element_bytes: int) -> int:
        """Cosines and sines of all positions (`layers.rotary.RotaryTable`)."""
        return context_len * self.rotary_width * element_bytes

    def columns_bytes(self, num_seqs: int, element_bytes: int, *, num_draft_tokens: int = 0) -> int:
        """What sampling keeps for `num_seqs` slots, and for as many rows and `num_draft_tokens` more."""
        row_bytes = num_seqs * (4 + element_bytes) + num_draft_tokens * element_bytes + bias_rows(num_seqs, self.vocab_size) * 4
        return self.vocab_size * row_bytes


def _layer_width(config: ModelConfig, attended: int) -> int:
    """The most numbers of one token that a layer holds at a time: five rows of the residual stream (sum and norm at its start,
    sum and norm in its middle, what attention added), and beside them the largest of three: queries, keys, values and result of
    attention (`attended`); gates, products and result of a dense feed-forward part; products and results of the chosen experts,
    and the gates of one."""
    hidden, experts, largest = config.hidden_size, config.experts, attended
    if not all(layer.is_sparse for layer in config.layers):
        largest = max(largest, 3 * config.intermediate_size + hidden)
    if experts is not None:
        mixture = (experts.num_chosen + 2) * experts.intermediate_size + (experts.num_chosen + 1) * hidden
        largest = max(largest, mixture)
    return 5 * hidden + largest


def _feed_forward(config: ModelConfig, *, is_sparse: bool) -> tuple[int, int]:
    """Weights of one layer's feed-forward part: in matrices, and others."""
    d, experts = config.hidden_size, config.experts
    if not is_sparse:
        return 3 * d * config.intermediate_size, (2 * config.intermediate_size + d) if config.mlp_bias else 0
    assert experts is not None
    return 3 * d * experts.intermediate_size * experts.num_experts, d * experts.num_experts


def _qk_norm(config: ModelConfig) -> int:
    if config.family.qk_norm == "head":
        return 2 * config.head_dim
    return (config.num_heads + config.num_kv_heads) * config.head_dim if config.family.qk_norm == "full" else 0
