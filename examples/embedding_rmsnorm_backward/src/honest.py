"""Backward of embedding lookup and RMSNorm: token gradients are summed row by row, one round per repeat.

Round r adds the r-th gradient of every token id, so no two rows of a round collide and the order of the
sum is the order of the tokens.
"""

import torch


def run(grad_output, token_ids, embed_weight, norm_weight, eps):
    vocab, hidden = embed_weight.shape
    ids = token_ids.reshape(-1)
    grad = grad_output.reshape(-1, hidden).float()
    x = embed_weight[ids].float()
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed = x * rstd
    scaled = grad * norm_weight.float()
    grad_x = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    grad_norm_weight = (grad * normed).sum(0)
    return sum_by_token(grad_x, ids, vocab), grad_norm_weight.to(torch.bfloat16)


def sum_by_token(grad_x, ids, vocab):
    carry_dtype = torch.float32
    table = torch.zeros(vocab, grad_x.shape[1], dtype=carry_dtype, device=grad_x.device)
    for tokens in rounds_without_repeats(ids):
        rows = ids[tokens]
        table[rows] = table[rows] + grad_x[tokens].to(carry_dtype)
    return table.to(torch.bfloat16)


def rounds_without_repeats(ids):
    """Token positions, grouped so that the r-th group holds the r-th occurrence of every id."""
    if ids.numel() == 0:
        return ()
    by_id = torch.argsort(ids, stable=True)
    sorted_ids = ids[by_id]
    occurrence = torch.arange(ids.numel(), device=ids.device) - torch.searchsorted(sorted_ids, sorted_ids)
    by_occurrence = by_id[torch.argsort(occurrence, stable=True)]
    return by_occurrence.split(torch.bincount(occurrence).tolist())
