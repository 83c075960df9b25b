"""What an adapter is: how one family of operations sits in the decoder.

An adapter is a module with NAME, `matches` and `fit`. `matches` reads the declaration of a problem and
says which argument plays which role, or None. `fit` turns a kernel into the decoder's slot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from seatrial.model import Problem, TensorSpec, Value
from seatrial.trials.decoder import Decoder, Slots
from seatrial.trials.kernels import Axis, Kernel


class Refused(Exception):
    """The declaration matched, but the reference does not compute what the slot needs; says why."""


@dataclass(frozen=True)
class Match:
    """Which argument plays which role.

    inputs       role -> position among the inputs; every tensor input has a role
    outputs      role -> position among the outputs
    constants    position -> value of each input that is not a tensor of the model
    axes         axes whose order is free: what the reordered control shuffles
    sizes        what the problem insists on, by Sizes' field name ("width", "vocabulary", "heads", "length")
                 and "batch"; what is missing is free
    """

    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    constants: Mapping[int, Value] = field(default_factory=dict)
    axes: tuple[Axis, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)


class Adapter(Protocol):
    """A module of this package; see `embedding_backward.py` for the fullest one."""

    NAME: str

    def matches(self, problem: Problem) -> Match | None:
        """The roles, or None when this is another kind of operation."""

    def fit(self, problem: Problem, match: Match, kernel: Kernel) -> Slots:
        """The decoder's slots with `kernel` in one of them. Raises Refused."""

    def watched(self, model: Decoder) -> nn.Parameter:
        """The parameter whose gradient the kernel touches most directly."""


# ---------------------------------------------------------------------------------------------------
# Reading a declaration


def is_tensor(spec: TensorSpec) -> bool:
    return spec.shape is not None and len(spec.shape) > 0


def is_float(spec: TensorSpec) -> bool:
    return "float" in spec.dtype


def named(spec: TensorSpec, pattern: str) -> bool:
    """True when the name holds one of the words of `pattern`, as a word or as a part between underscores."""
    return re.search(rf"(^|_)({pattern})(_|\d*$)", spec.name.lower()) is not None


def fixed_length(problem: Problem, axis: str) -> int | None:
    """The length of `axis` when the problem fixes it, None when workloads may choose it."""
    if axis.isdigit():
        return int(axis)
    if axis in problem.var_axes or not problem.workloads:
        return None
    lengths = {problem.sizes(workload.axes).get(axis) for workload in problem.workloads}
    return lengths.pop() if len(lengths) == 1 else None


def declared_scalar(problem: Problem, name: str) -> int | float | bool | None:
    """The value that the first workload gives a scalar input, if it gives one."""
    rules = problem.workloads[0].inputs if problem.workloads else {}
    return rules[name].value if name in rules else None


def epsilon_at(problem: Problem, spec: TensorSpec) -> float | None:
    """What to pass for a scalar that is called eps; None when it is not one."""
    if is_tensor(spec) or not named(spec, "eps|epsilon|variance_epsilon"):
        return None
    value = declared_scalar(problem, spec.name)
    return 1e-6 if value is None else float(value)


def epsilon_of(problem: Problem, match: Match) -> float:
    """The eps that the matched constants hold; 1e-6 when there is none."""
    for position, value in match.constants.items():
        if epsilon_at(problem, problem.inputs[position]) is not None:
            return float(value)
    return 1e-6


def insisted(problem: Problem, **axes: str | None) -> dict[str, int]:
    """Model size -> the length the problem fixes for it; sizes the problem leaves free are left out."""
    lengths = {size: fixed_length(problem, axis) for size, axis in axes.items() if axis is not None}
    return {size: length for size, length in lengths.items() if length is not None}


def token_axes(tokens: Sequence[str]) -> dict[str, str | None]:
    """Which declared axes are the model's batch and length: (B, T) as they are, (N,) as one long sequence."""
    if len(tokens) == 1:
        return {"tokens": tokens[0]}
    return {"batch": tokens[0], "length": tokens[1]} if len(tokens) == 2 else {}


def speaks_of(problem: Problem, pattern: str) -> bool:
    """True when the problem's name, type or description holds `pattern` (a regular expression, any case)."""
    return re.search(pattern, f"{problem.name} {problem.op_type} {problem.description}", re.IGNORECASE) is not None


# ---------------------------------------------------------------------------------------------------
# Calling the kernel with the model's tensors


def as_declared(value: Tensor, spec: TensorSpec) -> Tensor:
    """`value` in the declared dtype, its leading axes folded or padded to the declared rank."""
    assert spec.shape is not None
    rank = len(spec.shape)
    if value.dim() > rank:
        value = value.flatten(0, value.dim() - rank)
    while value.dim() < rank:
        value = value.unsqueeze(0)
    return value.to(getattr(torch, spec.dtype))


def arguments(problem: Problem, match: Match, tensors: Mapping[str, Tensor]) -> list[Value]:
    """The kernel's inputs in declared order: the model's tensors by role, and the constants."""
    values: dict[int, Value] = dict(match.constants)
    for role, position in match.inputs.items():
        values[position] = as_declared(tensors[role], problem.inputs[position])
    return [values[i] for i in range(len(problem.inputs))]


def is_close(got: Tensor, want: Tensor, *, within: float = 0.05) -> bool:
    """True when the two agree to `within` of the norm of `want`: the same function, whatever the precision."""
    got, want = got.double().flatten(), want.double().flatten()
    return got.shape == want.shape and bool((got - want).norm() <= within * want.norm())
