"""RMSNorm over the last dimension, in float32 with one rounding at the end."""

import torch


def run(x, norm_weight, eps):
    wide = x.float()
    mean_square = wide.square().mean(-1, keepdim=True)
    rstd = torch.rsqrt(mean_square)
    return (wide * rstd * norm_weight.float()).to(torch.bfloat16)
