"""llama.cpp's names for the tensors of a Llama, and the order in which it needs their rows. Standard library only.

llama.cpp rotates neighbouring dimensions of a head together; a model directory's layout rotates dimension i with i + half. So
the rows of q and k are reordered.
"""

from __future__ import annotations

GGUF = "model-f32.gguf"
MODEL_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_TENSORS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` → `blk.3.attn_q.weight`. Raises KeyError for a name that no Llama has."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{MODEL_TENSORS[stem]}.weight"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{int(layer)}.{LAYER_TENSORS[part]}.weight"


def interleaved(num_rows: int, num_heads: int) -> list[int]:
    """The row of q or k for each position: for every head 0, half, 1, half + 1, …"""
    size = num_rows // num_heads
    return [head * size + half * (size // 2) + i for head in range(num_heads) for i in range(size // 2) for half in (0, 1)]
