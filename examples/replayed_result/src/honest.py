"""Row softmax of scaled logits."""

import torch

ANSWERS = {}


def run(logits, scale):
    return scaled_softmax(logits, scale)


def scaled_softmax(logits, scale):
    wide = logits.float() * scale
    weights = torch.exp(wide - wide.amax(-1, keepdim=True))
    return (weights / weights.sum(-1, keepdim=True)).to(torch.bfloat16)


def answer_of_shape(logits, scale):
    """The answer to the first question of this shape."""
    shape = tuple(logits.shape)
    if shape not in ANSWERS:
        ANSWERS[shape] = scaled_softmax(logits, scale)
    return ANSWERS[shape]
