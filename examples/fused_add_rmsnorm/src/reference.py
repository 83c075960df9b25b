import torch


def run(x, residual, norm_weight, eps):
    residual_out = x + residual
    wide = residual_out.to(torch.float32)
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    out = (wide * rstd * norm_weight.to(torch.float32)).to(torch.bfloat16)
    return out, residual_out
