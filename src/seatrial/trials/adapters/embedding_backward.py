"""Backward of a token embedding, with or without the norm that follows it.

The problem gives the gradient of the (normed) embeddings and the token ids, and asks for the gradient of
the table, perhaps of the norm weight too. In the decoder the forward is plain PyTorch and the backward
is the kernel. Which forward it is the backward of (none, RMSNorm, RMSNorm with 1 + weight, LayerNorm) is
found by trying: the reference must agree with autograd of that forward, else the trial is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from seatrial.model import Problem, TensorSpec, Value
from seatrial.trials.adapters.base import (
    Match,
    Refused,
    arguments,
    declared_scalar,
    epsilon_at,
    epsilon_of,
    insisted,
    is_close,
    is_float,
    is_tensor,
    named,
    token_axes,
)
from seatrial.trials.adapters.norms import NORMS, Norm, inverse_rms, starts_at_zero
from seatrial.trials.decoder import Decoder, Slots
from seatrial.trials.kernels import Axis, Kernel, reference_kernel

NAME = "embedding backward"

_IDS = "ids|id|indices|index|idx|tokens|token|input"
_GRADIENT = "grad|dy|dout|dx|dh|do|gradient"
FORWARDS: dict[str, Norm] = {**NORMS, "no norm": lambda x, weight, eps: x}


def matches(problem: Problem) -> Match | None:
    """Roles: gradient (…, H), ids (…), table (V, H)?, weight (H,)?, rows (…, H)?, rstd (…)? -> d_table (V, H), d_weight?"""
    ids = _only(problem, lambda s: is_tensor(s) and not is_float(s) and named(s, _IDS))
    gradient = _only(problem, lambda s: is_tensor(s) and is_float(s) and named(s, _GRADIENT))
    if ids is None or gradient is None:
        return None
    tokens, hidden = _shape(problem.inputs[ids]), _shape(problem.inputs[gradient])[-1]
    if tokens != _shape(problem.inputs[gradient])[:-1]:
        return None
    outputs = _output_roles(problem, hidden)
    if outputs is None:
        return None
    rows = _shape(problem.outputs[outputs["d_table"]])[0]
    inputs: dict[str, int] = {}
    constants: dict[int, Value] = {}
    for position, spec in enumerate(problem.inputs):
        role = _tensor_role(spec, tokens, rows, hidden, is_gradient=position == gradient, is_ids=position == ids)
        if role is not None and role not in inputs:
            inputs[role] = position
        elif (value := _constant(problem, spec)) is not None:
            constants[position] = value
        else:
            return None
    by_token = [inputs[role] for role in ("ids", "gradient", "rows", "rstd") if role in inputs]
    return Match(
        inputs,
        outputs,
        constants,
        axes=tuple(Axis({position: dim for position in by_token}) for dim in range(len(tokens))),
        sizes=insisted(problem, width=hidden, vocabulary=rows, **token_axes(tokens)),
    )


def _only(problem: Problem, wanted: Callable[[TensorSpec], bool]) -> int | None:
    found = [i for i, spec in enumerate(problem.inputs) if wanted(spec)]
    return found[0] if len(found) == 1 else None


def _shape(spec: TensorSpec) -> tuple[str, ...]:
    return spec.shape or ()


def _output_roles(problem: Problem, hidden: str) -> dict[str, int] | None:
    roles: dict[str, int] = {}
    for position, spec in enumerate(problem.outputs):
        shape = _shape(spec)
        role = "d_table" if len(shape) == 2 and shape[1] == hidden else "d_weight" if shape == (hidden,) else ""
        if not role or role in roles:
            return None
        roles[role] = position
    return roles if "d_table" in roles else None


def _tensor_role(
    spec: TensorSpec, tokens: tuple[str, ...], rows: str, hidden: str, *, is_gradient: bool, is_ids: bool
) -> str | None:
    if is_gradient or is_ids:
        return "gradient" if is_gradient else "ids"
    shape = _shape(spec)
    if not is_float(spec) or not shape:
        return None
    if shape == (rows, hidden):
        return "table"
    if shape == (hidden,):
        return "weight"
    if shape == (*tokens, hidden):
        return "rows"
    if shape in (tokens, (*tokens, "1")) and named(spec, "rstd|rrms|inv_rms|rsqrt"):
        return "rstd"
    return None


def _constant(problem: Problem, spec: TensorSpec) -> Value | None:
    if spec.shape is not None:
        return None
    if (eps := epsilon_at(problem, spec)) is not None:
        return eps
    value = declared_scalar(problem, spec.name)
    return value if value is not None and named(spec, "padding_idx|pad|num_embeddings|vocab_size|vocab") else None


def fit(problem: Problem, match: Match, kernel: Kernel) -> Slots:
    """`kernel` as the backward of the decoder's embedding. Raises Refused when no known forward fits."""
    forward = FORWARDS[_forward_of(problem, match)]
    table_dtype = getattr(torch, problem.outputs[match.outputs["d_table"]].dtype)
    offset = starts_at_zero(forward)

    def embed(table: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        function = _backward_by(problem, match, kernel, forward)
        # the kernel sees the table in its declared dtype, so the forward uses the same rounded values
        out: Tensor = function.apply(_rounded(table, table_dtype), ids, _rounded(weight - offset, table_dtype))
        return out

    return Slots(embed=embed)


class _RoundedStraightThrough(torch.autograd.Function):
    """Round to a narrower dtype going forward, pass the gradient as it is: fp32 master weights."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(dtype).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    out: Tensor = _RoundedStraightThrough.apply(values, dtype)  # type: ignore[no-untyped-call]
    return out


def _backward_by(problem: Problem, match: Match, kernel: Kernel, forward: Norm) -> Any:
    """An autograd function: plain forward, the table's gradient (and the weight's, when declared) from `kernel`."""
    eps = epsilon_of(problem, match)

    class EmbeddingByKernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, table: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(table, ids, weight)
            return forward(table[ids], weight, eps)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
            table, ids, weight = ctx.saved_tensors
            outputs = kernel(_inputs(problem, match, table, ids, weight, gradient, eps))
            d_table = outputs[match.outputs["d_table"]].to(table.dtype)
            if "d_weight" in match.outputs:
                return d_table, None, outputs[match.outputs["d_weight"]].to(weight.dtype)
            return d_table, None, _weight_gradient(forward, table[ids], weight, gradient, eps)

    return EmbeddingByKernel


def _inputs(
    problem: Problem, match: Match, table: Tensor, ids: Tensor, weight: Tensor, gradient: Tensor, eps: float
) -> list[Value]:
    tensors = {"gradient": gradient, "ids": ids, "table": table, "weight": weight}
    if "rows" in match.inputs:
        tensors["rows"] = table[ids]
    if "rstd" in match.inputs:
        rstd = inverse_rms(table[ids], eps)
        keeps_axis = _shape(problem.inputs[match.inputs["rstd"]])[-1] == "1"
        tensors["rstd"] = rstd if keeps_axis else rstd.squeeze(-1)
    return arguments(problem, match, tensors)


def _weight_gradient(forward: Norm, rows: Tensor, weight: Tensor, gradient: Tensor, eps: float) -> Tensor:
    with torch.enable_grad():
        weight = weight.detach().requires_grad_()
        out = forward(rows.detach(), weight, eps)
        if not out.requires_grad:
            return torch.zeros_like(weight)
        return torch.autograd.grad(out, weight, gradient)[0]


def _forward_of(problem: Problem, match: Match) -> str:
    """The name of the forward whose autograd gradient the reference computes, on one small random case."""
    draw = torch.Generator().manual_seed(0)
    vocabulary, width = match.sizes.get("vocabulary", 64), match.sizes.get("width", 32)
    table = torch.randn(vocabulary, width, generator=draw).requires_grad_()
    weight = (1.0 + 0.5 * torch.randn(width, generator=draw)).requires_grad_()
    ids = torch.randint(0, vocabulary, (2, 16), generator=draw)
    gradient = torch.randn(2, 16, width, generator=draw)
    eps = epsilon_of(problem, match)
    inputs = _inputs(problem, match, table.detach(), ids, weight.detach(), gradient, eps)
    got = reference_kernel(problem)(inputs)[match.outputs["d_table"]]
    for name, forward in FORWARDS.items():
        (want,) = torch.autograd.grad(forward(table[ids], weight, eps), table, gradient)
        if is_close(got, want):
            return name
    raise Refused(f"the reference is not the gradient of an embedding followed by any of: {', '.join(FORWARDS)}")


def watched(model: Decoder) -> nn.Parameter:
    """The embedding table."""
    return model.table
