"""How the supported decoder families differ from one another, as a table. Knows no torch.

Sources: Llama (arXiv 2302.13971, 2407.21783), Mistral 7B (arXiv 2310.06825), Mixtral (arXiv 2401.04088), Qwen2 (arXiv
2407.10671), Qwen3 and its mixtures (arXiv 2505.09388), Gemma 2 (arXiv 2408.00118), Gemma 3 (arXiv 2503.19786), Phi-3 (arXiv
2404.14219), Granite (arXiv 2408.13359 for its multipliers), OLMo 2 (arXiv 2501.00656).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum


class NormLayout(Enum):
    """Checkpoint names of a layer's norms: before and after attention, before and after the feed-forward part."""

    PRE = ("input_layernorm", None, "post_attention_layernorm", None)
    SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    POST = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


class Windows(Enum):
    """Which layers have a sliding window, and which keys of config.json decide it.

    EVERY: `sliding_window` in all layers, null is none. SWITCHED: only with `use_sliding_window`, from layer
    `max_window_layers` on or where `layer_types` says. SWITCHED_EVERY: only with `use_sliding_window`, then everywhere.
    PATTERN: all but each n-th layer, n from `sliding_window_pattern` or the family, or where `layer_types` says.
    """

    NONE = "none"
    EVERY = "every"
    SWITCHED = "switched"
    SWITCHED_EVERY = "switched_every"
    PATTERN = "pattern"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """How the checkpoints name the sparse part of a layer and the matrices of one expert; keys of its sizes."""

    block: str
    gate: str
    up: str
    down: str
    size_key: str
    always_normalised: bool  # weights of the chosen experts sum to one; else `norm_topk_prob` decides


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """The decoder in the checkpoint of a model that also reads images. Its configuration is `text_config`, with `defaults` for
    keys that published models omit. `renamed`: prefixes of its tensor names, and those of the decoder alone, in two
    generations of transformers. `ignored`: prefixes of other tensor names."""

    defaults: Mapping[str, int]
    renamed: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. `reads_*`: the key of config.json by that name changes the computation, elsewhere it is ignored.

    The other values are the defaults of transformers for keys that config.json omits.
    """

    architecture: str
    rope_theta: float = 10000.0
    local_rope_theta: float | None = None  # of the layers with a window, when they have a rotation of their own
    original_max_len: int | None = None  # `original_max_position_embeddings` beside the rope settings
    norm_eps: float = 1e-6
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    activation: str = "silu"
    activation_key: str = "hidden_act"
    tied: bool = False
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    norms: NormLayout = NormLayout.PRE
    norm_offset: bool = False  # the stored weight of a norm is its distance from one
    qk_norm: str | None = None  # head: each head by itself; full: all heads of a token together
    windows: Windows = Windows.NONE
    window: int | None = None
    window_pattern: int = 0
    fused_projections: bool = False  # the checkpoint holds qkv_proj and gate_up_proj
    scaled_embedding: bool = False  # embeddings times the root of hidden_size
    always_qkv_bias: bool = False
    experts: ExpertNames | None = None
    text_part: TextPart | None = None
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    reads_partial_rotary: bool = False
    reads_window_pattern: bool = False
    reads_query_scalar: bool = False
    reads_attention_softcap: bool = False
    reads_logits_softcap: bool = False
    reads_multipliers: bool = False


MIXTRAL_EXPERTS = ExpertNames(
    block="block_sparse_moe", gate="w1", up="w3", down="w2", size_key="intermediate_size", always_normalised=True
)
QWEN3_EXPERTS = ExpertNames(
    block="mlp", gate="gate_proj", up="up_proj", down="down_proj", size_key="moe_intermediate_size", always_normalised=False
)

GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    head_dim=256,
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    tied=True,
    attention_softcap=50.0,
    logits_softcap=30.0,
    norms=NormLayout.SANDWICH,
    norm_offset=True,
    windows=Windows.PATTERN,
    window=4096,
    window_pattern=2,
    scaled_embedding=True,
    reads_attention_bias=True,
    reads_query_scalar=True,
    reads_attention_softcap=True,
    reads_logits_softcap=True,
)
# transformers reads `attn_logit_softcapping` for Gemma 3 as well, but caps nothing there; the models were trained without it.
GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    rope_theta=1e6,
    local_rope_theta=10000.0,
    logits_softcap=None,
    qk_norm="head",
    window_pattern=6,
    reads_window_pattern=True,
    reads_attention_softcap=False,
)
GEMMA3_WITH_IMAGES = replace(
    GEMMA3,
    architecture="Gemma3ForConditionalGeneration",
    text_part=TextPart(
        defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
        },
        renamed=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."),
        ),
        ignored=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    ),
)

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family(architecture="LlamaForCausalLM", reads_attention_bias=True, reads_mlp_bias=True),
        Family(architecture="MistralForCausalLM", windows=Windows.EVERY, window=4096),
        Family(architecture="Qwen2ForCausalLM", always_qkv_bias=True, windows=Windows.SWITCHED, window=4096),
        Family(
            architecture="Qwen3ForCausalLM",
            head_dim=128,
            qk_norm="head",
            windows=Windows.SWITCHED,
            window=4096,
            reads_attention_bias=True,
        ),
        GEMMA2,
        GEMMA3,
        GEMMA3_WITH_IMAGES,
        Family(
            architecture="Phi3ForCausalLM",
            original_max_len=4096,
            norm_eps=1e-5,
            windows=Windows.EVERY,
            fused_projections=True,
            reads_partial_rotary=True,
        ),
        Family(architecture="GraniteForCausalLM", reads_attention_bias=True, reads_mlp_bias=True, reads_multipliers=True),
        Family(
            architecture="Olmo2ForCausalLM",
            norm_eps=1e-5,
            norms=NormLayout.POST,
            qk_norm="full",
            reads_attention_bias=True,
        ),
        Family(
            architecture="MixtralForCausalLM",
            rope_theta=1e6,
            norm_eps=1e-5,
            windows=Windows.EVERY,
            experts=MIXTRAL_EXPERTS,
        ),
        Family(
            architecture="Qwen3MoeForCausalLM",
            qk_norm="head",
            windows=Windows.SWITCHED_EVERY,
            window=4096,
            experts=QWEN3_EXPERTS,
            reads_attention_bias=True,
        ),
    )
}
