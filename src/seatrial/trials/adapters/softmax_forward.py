"""Softmax and soft-cap, forward: attention probabilities of the first block, or the capped logits.

A problem whose rows come out as probabilities takes the place of the attention softmax; one that only
caps takes the place of the (otherwise absent) cap on the decoder's logits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from seatrial.model import Problem, TensorSpec, Value
from seatrial.trials.adapters.base import (
    Match,
    Refused,
    arguments,
    declared_scalar,
    fixed_length,
    insisted,
    is_float,
    is_tensor,
    named,
    speaks_of,
    token_axes,
)
from seatrial.trials.adapters.forward import check_differentiable, trainable
from seatrial.trials.decoder import Block, Decoder, Slots
from seatrial.trials.kernels import Axis, Kernel, reference_kernel

NAME = "softmax forward"
CAP = 30.0  # a usual cap on attention scores, for a problem that declares none
_DEFAULTS = {"cap|soft_cap|softcap|logit_cap": CAP, "scale|sm_scale|temperature": 1.0, "dim|axis": -1}


def matches(problem: Problem) -> Match | None:
    """Roles: scores (…, K) -> out, of the same shape; other inputs are scalars called cap, scale or dim."""
    if not speaks_of(problem, "soft_?-?max|soft_?-?cap|logit_?-?cap") or speaks_of(problem, "backward|gradient|_bwd"):
        return None
    tensors = [i for i, spec in enumerate(problem.inputs) if is_tensor(spec)]
    if len(tensors) != 1 or len(problem.outputs) != 1 or not is_float(problem.inputs[tensors[0]]):
        return None
    scores = problem.inputs[tensors[0]]
    shape = scores.shape or ()
    if problem.outputs[0].shape != shape or len(shape) not in (2, 3, 4):
        return None
    constants: dict[int, Value] = {}
    for i, spec in enumerate(problem.inputs):
        if i in tensors:
            continue
        if (value := _constant(problem, spec)) is None:
            return None
        constants[i] = value
    last = len(shape) - 1
    found = Match({"scores": tensors[0]}, {"out": 0}, constants, axes=(Axis({tensors[0]: last}, {0: last}),))
    return replace(found, sizes=_sizes(problem, shape, probabilities=_gives_probabilities(problem, found)))


def _sizes(problem: Problem, shape: tuple[str, ...], *, probabilities: bool) -> dict[str, int]:
    if not probabilities:
        return insisted(problem, vocabulary=shape[-1], **token_axes(shape[:-1]))
    heads = {"batch": shape[0], "heads": shape[1]} if len(shape) == 4 else {}
    return insisted(problem, length=shape[-1], **heads)


def _gives_probabilities(problem: Problem, match: Match) -> bool:
    """True when the reference's rows sum to one on a small random case."""
    out = _try(problem, match)[1].double()
    return bool(((out.sum(-1) - 1).abs() < 0.02).all())


def _try(problem: Problem, match: Match) -> tuple[list[Value], Tensor]:
    spec = problem.inputs[match.inputs["scores"]]
    assert spec.shape is not None
    last = fixed_length(problem, spec.shape[-1]) or 32
    scores = 3 * torch.randn(1, 1, 4, last, generator=torch.Generator().manual_seed(0))
    inputs = arguments(problem, match, {"scores": scores})
    return inputs, reference_kernel(problem)(inputs)[0]


def _constant(problem: Problem, spec: TensorSpec) -> Value | None:
    for pattern, default in _DEFAULTS.items():
        if named(spec, pattern):
            value = declared_scalar(problem, spec.name)
            return default if value is None else value
    return None


def fit(problem: Problem, match: Match, kernel: Kernel) -> Slots:
    """`kernel` as the attention softmax or as the cap on logits, by what the reference does. Raises Refused."""
    inputs, out = _try(problem, match)
    scores = inputs[match.inputs["scores"]]
    if not isinstance(scores, Tensor) or out.shape != scores.shape:
        raise Refused(f"the reference returns shape {tuple(out.shape)} for scores of another shape")
    check_differentiable(problem, inputs)
    call = trainable(problem, kernel)

    def in_model(scores: Tensor) -> Tensor:
        return call(arguments(problem, match, {"scores": scores}))[0].view_as(scores).to(scores.dtype)

    return Slots(weights=in_model) if _gives_probabilities(problem, match) else Slots(cap=in_model)


def watched(model: Decoder) -> nn.Parameter:
    """The first block's projection to queries, keys and values."""
    block = model.blocks[0]
    assert isinstance(block, Block)
    return block.qkv
