"""Residual add fused with RMSNorm, forward: the kernel sits between attention and MLP of the first block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seatrial.model import Problem
from seatrial.trials.adapters.base import Match, Refused, arguments, epsilon_of, is_close
from seatrial.trials.adapters.forward import check_differentiable, trainable
from seatrial.trials.adapters.norm_forward import norm_roles
from seatrial.trials.adapters.norms import NORMS, starts_at_zero
from seatrial.trials.decoder import Block, Decoder, Slots
from seatrial.trials.kernels import Kernel, reference_kernel

NAME = "add and norm forward"


def matches(problem: Problem) -> Match | None:
    """Roles: x (…, H), residual (…, H), weight (H,) -> normed (…, H), and perhaps the sum (…, H)."""
    found = norm_roles(problem, activations=("x", "residual"))
    return found if found is not None and len(found.outputs) <= 2 else None


def fit(problem: Problem, match: Match, kernel: Kernel) -> Slots:
    """`kernel` as add-and-norm. Which output is the sum is found by trying. Raises Refused when neither fits."""
    width, eps = match.sizes.get("width", 32), epsilon_of(problem, match)
    draw = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 16, width, generator=draw), torch.randn(2, 16, width, generator=draw)
    weight = 1.0 + 0.5 * torch.randn(width, generator=draw)
    inputs = arguments(problem, match, {"x": x, "residual": residual, "weight": weight})
    outputs = reference_kernel(problem)(inputs)
    total = [i for i in match.outputs.values() if is_close(outputs[i], x + residual)]
    normed = [i for i in match.outputs.values() if i not in total]
    if len(normed) != 1:
        raise Refused("no output of the reference, or more than one, could be the normed sum")
    known = [norm for norm in NORMS.values() if is_close(outputs[normed[0]], norm(x + residual, weight, eps))]
    if not known:
        raise Refused(f"the reference is the sum followed by none of: {', '.join(NORMS)}")
    check_differentiable(problem, inputs)
    call, offset = trainable(problem, kernel), starts_at_zero(known[0])

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        out = call(arguments(problem, match, {"x": x, "residual": residual, "weight": weight - offset}))
        summed = out[total[0]].view_as(x).to(x.dtype) if total else x + residual
        return out[normed[0]].view_as(x).to(x.dtype), summed

    return Slots(add_norm=add_norm)


def watched(model: Decoder) -> nn.Parameter:
    """The weight of the first block's second norm."""
    block = model.blocks[0]
    assert isinstance(block, Block)
    return block.norm2
