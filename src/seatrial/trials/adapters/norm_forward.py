"""RMSNorm (or LayerNorm without bias) forward: the kernel is the decoder's final norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seatrial.model import Problem, Value
from seatrial.trials.adapters.base import (
    Match,
    Refused,
    arguments,
    epsilon_at,
    epsilon_of,
    insisted,
    is_close,
    is_float,
    is_tensor,
    speaks_of,
    token_axes,
)
from seatrial.trials.adapters.forward import check_differentiable, trainable
from seatrial.trials.adapters.norms import NORMS, starts_at_zero
from seatrial.trials.decoder import Decoder, Slots
from seatrial.trials.kernels import Axis, Kernel, reference_kernel

NAME = "norm forward"


def matches(problem: Problem) -> Match | None:
    """Roles: x (…, H), weight (H,) -> y (…, H), and whatever else comes out (statistics)."""
    found = norm_roles(problem, activations=("x",))
    if found is None or sum(spec.shape == problem.inputs[found.inputs["x"]].shape for spec in problem.outputs) != 1:
        return None
    return found


def norm_roles(problem: Problem, *, activations: tuple[str, ...]) -> Match | None:
    """A match with these activations of one shape (…, H) in declared order, a weight (H,), and eps; else None."""
    if not speaks_of(problem, "norm") or speaks_of(problem, "backward|gradient|_bwd"):
        return None
    tensors = [i for i, spec in enumerate(problem.inputs) if is_tensor(spec) and is_float(spec)]
    weights = [i for i in tensors if len(problem.inputs[i].shape or ()) == 1]
    others = [i for i in tensors if i not in weights]
    shapes = {problem.inputs[i].shape for i in others}
    if len(weights) != 1 or len(others) != len(activations) or len(shapes) != 1:
        return None
    shape = shapes.pop() or ()
    constants: dict[int, Value] = {}
    for i, spec in enumerate(problem.inputs):
        if i in tensors:
            continue
        if (eps := epsilon_at(problem, spec)) is None:
            return None
        constants[i] = eps
    outputs = {f"out{i}": i for i, spec in enumerate(problem.outputs) if spec.shape == shape}
    if problem.inputs[weights[0]].shape != shape[-1:] or not outputs:
        return None
    inputs = {**dict(zip(activations, others, strict=True)), "weight": weights[0]}
    hidden = len(shape) - 1
    across = Axis({**dict.fromkeys(others, hidden), weights[0]: 0}, dict.fromkeys(outputs.values(), hidden))
    sizes = insisted(problem, width=shape[-1], **token_axes(shape[:-1]))
    return Match(inputs, outputs, constants, axes=(across,), sizes=sizes)


def fit(problem: Problem, match: Match, kernel: Kernel) -> Slots:
    """`kernel` as the final norm, with the reference's gradient. Raises Refused when it is no known norm."""
    width, eps = match.sizes.get("width", 32), epsilon_of(problem, match)
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 16, width, generator=draw), 1.0 + 0.5 * torch.randn(width, generator=draw)
    inputs = arguments(problem, match, {"x": x, "weight": weight})
    (position,) = match.outputs.values()
    got = reference_kernel(problem)(inputs)[position]
    known = [norm for norm in NORMS.values() if is_close(got, norm(x, weight, eps))]
    if not known:
        raise Refused(f"the reference is none of: {', '.join(NORMS)}")
    check_differentiable(problem, inputs)
    call, offset = trainable(problem, kernel), starts_at_zero(known[0])

    def final_norm(x: Tensor, weight: Tensor) -> Tensor:
        out = call(arguments(problem, match, {"x": x, "weight": weight - offset}))[position]
        return out.view_as(x).to(x.dtype)

    return Slots(final_norm=final_norm)


def watched(model: Decoder) -> nn.Parameter:
    """The weight of the final norm."""
    return model.final
