"""How the supported decoder families differ from one another, as a table. Knows no torch.

Sources: Llama (arXiv 2302.13971, 2407.21783), Mistral 7B (arXiv 2310.06825), Qwen2 (arXiv 2407.10671), Qwen3
(arXiv 2505.09388).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. `reads_*`: the key of config.json by that name changes the computation, elsewhere it is ignored."""

    architecture: str
    rope_theta: float = 10000.0
    always_qkv_bias: bool = False
    qk_norm: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    reads_sliding_window: bool = False


FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family(architecture="LlamaForCausalLM", reads_attention_bias=True, reads_mlp_bias=True),
        Family(architecture="MistralForCausalLM", reads_sliding_window=True),
        Family(architecture="Qwen2ForCausalLM", always_qkv_bias=True),
        Family(architecture="Qwen3ForCausalLM", qk_norm=True, reads_attention_bias=True),
    )
}
