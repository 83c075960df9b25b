"""Softmax over soft-capped attention scores: one program per row."""

import torch
import triton
import triton.language as tl


@triton.jit
def softcapped(logits, cap):
    return cap * (2.0 * tl.sigmoid(2.0 * logits / cap) - 1.0)


@triton.jit
def row_softmax(scores, out, cap, keys, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < keys
    logits = tl.load(scores + row * keys + column, mask=inside, other=0.0).to(tl.float32)
    capped = logits
    capped = tl.where(inside, capped, -float("inf"))
    weights = tl.exp(capped - tl.max(capped, 0))
    tl.store(out + row * keys + column, (weights / tl.sum(weights, 0)).to(out.dtype.element_ty), mask=inside)


def run(scores, cap):
    scores = scores.contiguous()
    out = torch.empty_like(scores)
    keys = scores.shape[-1]
    if scores.numel():
        row_softmax[(scores.numel() // keys,)](scores, out, cap, keys, BLOCK=triton.next_power_of_2(keys))
    return out
