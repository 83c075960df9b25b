"""Softmax over soft-capped attention scores: the row maximum is taken off before the exponential."""

import torch


def run(scores, cap):
    logits = scores.float()
    capped = logits
    weights = torch.exp(capped - capped.amax(-1, keepdim=True))
    return (weights / weights.sum(-1, keepdim=True)).to(torch.bfloat16)
