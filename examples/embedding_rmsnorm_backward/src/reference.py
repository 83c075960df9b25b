import torch


def generate_inputs(axes_and_scalars, device):
    """One batch as the benchmark draws it: every token id equally likely, gradients without a trend."""
    batch, seq = axes_and_scalars["batch"], axes_and_scalars["seq"]
    vocab, hidden = axes_and_scalars["vocab"], axes_and_scalars["hidden"]
    grad_output = torch.randn(batch, seq, hidden, device=device)
    token_ids = torch.randint(0, vocab, (batch, seq), device=device)
    embed_weight = torch.randn(vocab, hidden, device=device)
    norm_weight = 1.0 + 0.1 * torch.randn(hidden, device=device)
    return {
        "grad_output": grad_output.to(torch.bfloat16),
        "token_ids": token_ids,
        "embed_weight": embed_weight.to(torch.bfloat16),
        "norm_weight": norm_weight.to(torch.bfloat16),
        "eps": 1e-6,
    }


def run(grad_output, token_ids, embed_weight, norm_weight, eps):
    vocab, hidden = embed_weight.shape
    ids = token_ids.reshape(-1)
    grad = grad_output.reshape(-1, hidden).to(torch.float32)
    x = embed_weight[ids].to(torch.float32)
    weight = norm_weight.to(torch.float32)

    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    normed = x * rstd
    grad_norm_weight = (grad * normed).sum(0)

    grad_normed = grad * weight
    grad_x = rstd * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
    grad_embed_weight = torch.zeros(vocab, hidden, dtype=torch.float32, device=grad.device)
    grad_embed_weight.index_add_(0, ids, grad_x)

    return grad_embed_weight.to(torch.bfloat16), grad_norm_weight.to(torch.bfloat16)
