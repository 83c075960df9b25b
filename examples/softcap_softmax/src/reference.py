import torch


def run(scores, cap):
    capped = cap * torch.tanh(scores.to(torch.float32) / cap)
    return torch.softmax(capped, dim=-1).to(torch.bfloat16)
