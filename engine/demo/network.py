"""The Llama network as it is trained: plain torch, fused projections, nothing about files or text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The architecture. The names are those of a Hugging Face LlamaConfig."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 7
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        kv_size = self.num_key_value_heads * self.head_dim
        return self.hidden_size, kv_size, kv_size


def rotary_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin, each [max positions, head_dim] fp32, for the rotate-half form of RoPE (Su et al., 2021)."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), shape.rope_theta**-steps)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [B, H, T, D], rotated by its position; cos, sin: [T, D]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


class Norm(nn.Module):
    """RMSNorm, computed in fp32 for inputs of any format."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Layer(nn.Module):
    """One decoder layer: grouped-query attention, then a SwiGLU feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.attention_norm = Norm(hidden, shape.rms_norm_eps)
        self.qkv = nn.Linear(hidden, sum(shape.qkv_sizes), bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.feed_norm = Norm(hidden, shape.rms_norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        heads = self.shape.num_attention_heads, self.shape.num_key_value_heads
        q, k, v = self.qkv(x).split(self.shape.qkv_sizes, dim=-1)
        q = rotate(q.view(batch, length, heads[0], -1).transpose(1, 2), cos, sin).to(v.dtype)
        k = rotate(k.view(batch, length, heads[1], -1).transpose(1, 2), cos, sin).to(v.dtype)
        v = v.view(batch, length, heads[1], -1).transpose(1, 2)
        k, v = (t.repeat_interleave(heads[0] // heads[1], dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x), cos, sin)
        gate, up = self.gate_up(self.feed_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Network(nn.Module):
    """Token ids [B, T] to the loss summed over the targets that count; embeddings are tied to the output."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        cos, sin = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init_weights()

    def _init_weights(self) -> None:
        residual_std = 0.02 / (2 * self.shape.num_hidden_layers) ** 0.5 * 2
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=residual_std if name.endswith(("out.weight", "down.weight")) else 0.02)

    def logits(self, ids: Tensor) -> Tensor:
        """ids: [B, T] int64. Returns [B, T, V]."""
        length = ids.shape[1]
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(x), self.embed.weight)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """targets: [B, T] int64, -100 where no loss is computed. Returns the sum of the losses in nats, fp32."""
        logits = self.logits(ids).float().view(-1, self.shape.vocab_size)
        return F.cross_entropy(logits, targets.reshape(-1), ignore_index=-100, reduction="sum")


def num_params(network: nn.Module) -> int:
    return sum(weight.numel() for weight in network.parameters())
