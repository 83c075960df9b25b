"""Backward of embedding lookup and RMSNorm: one program per token, atomic adds into the table of its id."""

import torch
import triton
import triton.language as tl


@triton.jit
def token_backward(grad, ids, embed, weight, table, grad_weight, eps, hidden, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + token)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    g = tl.load(grad + token * hidden + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(embed + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)

    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / hidden + eps)
    normed = x * rstd
    scaled = g * w
    grad_x = rstd * (scaled - normed * (tl.sum(scaled * normed, 0) / hidden))

    tl.atomic_add(table + row * hidden + column, grad_x.to(table.dtype.element_ty), mask=inside)
    tl.atomic_add(grad_weight + column, g * normed, mask=inside)


def run(grad_output, token_ids, embed_weight, norm_weight, eps):
    vocab, hidden = embed_weight.shape
    grad, ids = grad_output.contiguous(), token_ids.contiguous()
    embed, weight = embed_weight.contiguous(), norm_weight.contiguous()
    carry_dtype = torch.bfloat16
    table = torch.zeros(vocab, hidden, dtype=carry_dtype, device=grad.device)
    grad_weight = torch.zeros(hidden, dtype=torch.float32, device=grad.device)
    if ids.numel():
        block = triton.next_power_of_2(hidden)
        token_backward[(ids.numel(),)](grad, ids, embed, weight, table, grad_weight, eps, hidden, BLOCK=block)
    return table.to(torch.bfloat16), grad_weight.to(torch.bfloat16)
