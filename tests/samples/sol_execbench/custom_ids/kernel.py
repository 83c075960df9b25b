import torch


def run(ids, grad_output, scale):
    table = torch.zeros(256, grad_output.shape[-1], device=grad_output.device)
    return table.index_add_(0, ids, grad_output * scale)
