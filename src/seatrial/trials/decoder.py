"""A small decoder language model with one socket for the operation under trial.

Token embedding and initial RMSNorm, blocks of causal attention and MLP, final RMSNorm, head. Everything
is fp32 PyTorch. The four operations that a kernel may take over are fields of `Slots`; an adapter
replaces one of them, the others stay plain, so two runs differ in the kernel and in nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6
SEQUENCES_AT_A_TIME = 8


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / rms(x) * weight over the last axis."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def embed_and_norm(table: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """(V, H), int64 (B, T), (H,) -> (B, T, H): look up, then RMSNorm."""
    return rms_norm(table[ids], weight)


def add_and_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(normed sum, sum), both (B, T, H)."""
    total = x + residual
    return rms_norm(total, weight), total


def attention_weights(scores: Tensor) -> Tensor:
    """(B, heads, T, T) scores, masked with large negative numbers -> probabilities over the last axis."""
    return scores.softmax(-1)


def no_cap(logits: Tensor) -> Tensor:
    """(B, T, V) logits, left as they are."""
    return logits


@dataclass(frozen=True)
class Slots:
    """The operations a kernel may take over; the defaults are plain PyTorch."""

    embed: Callable[[Tensor, Tensor, Tensor], Tensor] = embed_and_norm
    final_norm: Callable[[Tensor, Tensor], Tensor] = rms_norm
    add_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = add_and_norm
    weights: Callable[[Tensor], Tensor] = attention_weights
    cap: Callable[[Tensor], Tensor] = no_cap


@dataclass(frozen=True)
class Sizes:
    """What a decoder measures. `width` is a multiple of `heads`."""

    vocabulary: int = 2048
    width: int = 64
    layers: int = 1
    heads: int = 4
    length: int = 64

    def parameters(self) -> int:
        """Number of trained values."""
        return (2 * self.vocabulary + self.length) * self.width + 12 * self.layers * self.width**2


class Block(nn.Module):
    """x + attention(norm(x)), then add-and-norm with the residual, then the MLP."""

    def __init__(self, sizes: Sizes, slots: Slots) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.slots = slots
        self.norm1 = nn.Parameter(torch.ones(width))
        self.norm2 = nn.Parameter(torch.ones(width))
        self.qkv = nn.Parameter(nn.Linear(width, 3 * width, bias=False).weight.detach().clone())
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = F.linear(x, self.qkv).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        if self.slots.weights is attention_weights:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.transpose(-2, -1) / math.sqrt(C // self.heads)).masked_fill(future, -1e4)
            y = self.slots.weights(scores) @ v
        return self.out(y.transpose(1, 2).reshape(B, T, C))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        normed, x = self.slots.add_norm(self.attend(rms_norm(x, self.norm1)), x, self.norm2)
        return x + self.down(F.gelu(self.up(normed)))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The model; `slots` act in the embedding, the first block and the final norm, one place each."""

    def __init__(self, sizes: Sizes, slots: Slots | None = None) -> None:
        super().__init__()
        slots = slots or Slots()
        self.slots = slots
        self.table = nn.Parameter(torch.randn(sizes.vocabulary, sizes.width) * 0.02)
        self.positions = nn.Parameter(torch.randn(sizes.length, sizes.width) * 0.02)
        self.norm0 = nn.Parameter(torch.ones(sizes.width))
        self.blocks = nn.ModuleList(Block(sizes, slots if i == 0 else Slots()) for i in range(sizes.layers))
        self.final = nn.Parameter(torch.ones(sizes.width))
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """int64 (B, T) ids and next ids -> 0-D mean cross entropy in nats."""
        x = self.slots.embed(self.table, ids, self.norm0) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.slots.final_norm(x, self.final)
        # logits are by far the largest tensor: a few sequences at a time stay in the cache and in the heap
        at_a_time = len(ids) if self.slots.cap is not no_cap else SEQUENCES_AT_A_TIME
        parts = zip(torch.split(x, at_a_time), torch.split(targets, at_a_time), strict=True)
        return torch.stack([self._loss(*part) for part in parts]).sum() / targets.numel()

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.slots.cap(self.head(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
