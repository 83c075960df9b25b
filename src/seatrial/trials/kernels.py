"""Kernels as the trial sees them: the reference, its honest variants, and how to call any of them.

A kernel maps a problem's declared inputs, in order, to its declared outputs. The honest controls are
what the band of a trial is made of: they compute the same thing as the reference and differ only where
two correct kernels may differ, in the order of summation and in the last bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from seatrial.model import OutputSlot, Problem, Value

Kernel: TypeAlias = Callable[[Sequence[Value]], tuple[Tensor, ...]]


class KernelFailed(Exception):
    """A kernel could not be called to the end; the message says why, in its own words.

    Not a SeatrialError: it is what the caller's candidate callable raises, and it always becomes a cell
    that was not verified.
    """


def reference_kernel(problem: Problem) -> Kernel:
    """The problem's reference, its outputs as a tuple in declared order."""
    names = [spec.name for spec in problem.outputs]

    def reference(inputs: Sequence[Value]) -> tuple[Tensor, ...]:
        return as_outputs(problem.reference(*inputs), names)

    return reference


def as_outputs(returned: object, names: Sequence[str]) -> tuple[Tensor, ...]:
    """A tensor, a sequence or a dict by output name -> a tuple of tensors in the order of `names`."""
    if isinstance(returned, Mapping):
        returned = [returned[name] for name in names]
    items = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if len(items) != len(names):
        raise KernelFailed(f"{len(items)} outputs came back, {len(names)} are declared ({', '.join(names)})")
    return tuple(item if isinstance(item, Tensor) else torch.as_tensor(item) for item in items)


def output_slots(problem: Problem, inputs: Sequence[Value]) -> list[OutputSlot]:
    """What a kernel must return for `inputs`: the shapes that the reference gives, the dtypes that are declared.

    A scalar output is a 0-D tensor in a trial.
    """
    outputs = reference_kernel(problem)(inputs)
    return [
        OutputSlot(spec.name, tuple(out.shape), spec.dtype) for spec, out in zip(problem.outputs, outputs, strict=True)
    ]


def watched_for_shape(kernel: Kernel, problem: Problem) -> Kernel:
    """`kernel`, raising KernelFailed when its outputs differ from the reference's in number or shape."""
    shapes: dict[tuple[object, ...], list[tuple[int, ...] | None]] = {}

    def checked(inputs: Sequence[Value]) -> tuple[Tensor, ...]:
        case = tuple(tuple(x.shape) if isinstance(x, Tensor) else x for x in inputs)
        if case not in shapes:
            shapes[case] = [slot.shape for slot in output_slots(problem, inputs)]
        outputs = kernel(inputs)
        got = [tuple(out.shape) for out in outputs]
        if got != shapes[case]:
            raise KernelFailed(f"outputs of shape {got} came back where {shapes[case]} are due")
        return outputs

    return checked


def through_the_cpu(kernel: Kernel) -> Kernel:
    """`kernel` given CPU copies of tensors that live on another device, its outputs brought back there."""

    def moved(inputs: Sequence[Value]) -> tuple[Tensor, ...]:
        homes = [x.device for x in inputs if isinstance(x, Tensor)]
        outputs = kernel([x.cpu() if isinstance(x, Tensor) else x for x in inputs])
        return tuple(out.to(homes[0]) for out in outputs)

    return moved


@dataclass(frozen=True)
class Axis:
    """One axis that may be visited in any order, and where it lies: argument position -> dimension."""

    inputs: Mapping[int, int] = field(default_factory=dict)
    outputs: Mapping[int, int] = field(default_factory=dict)


def in_another_order(kernel: Kernel, axes: Sequence[Axis], *, seed: int) -> Kernel:
    """`kernel` on inputs shuffled along each of `axes`, its outputs put back in place.

    Sums along those axes, and sums of what shares a row, are then taken in another order.
    """

    def reordered(inputs: Sequence[Value]) -> tuple[Tensor, ...]:
        draw = torch.Generator().manual_seed(seed)
        values, undo = list(inputs), []
        for axis in axes:
            order: Tensor | None = None
            for position, dim in axis.inputs.items():
                value = values[position]
                assert isinstance(value, Tensor), "an axis lies on tensors only"
                if order is None:
                    order = torch.randperm(value.shape[dim], generator=draw).to(value.device)
                values[position] = value.index_select(dim, order)
            if order is not None:
                undo.append((axis.outputs, order.argsort()))
        outputs = list(kernel(values))
        for places, back in undo:
            for position, dim in places.items():
                outputs[position] = outputs[position].index_select(dim, back)
        return tuple(outputs)

    return reordered


def with_another_last_bit(kernel: Kernel, *, seed: int) -> Kernel:
    """`kernel` with one non-zero float in ONE_IN of its outputs moved to a neighbouring representable value.

    Up and down are equally likely, so the mean is kept. Two honest kernels that sum in fp32 and round once
    to 16 bits differ only where a sum lies within fp32 rounding of a tie, which is rarer than this. Drawn
    from `seed` and the values, so no state is kept.
    """

    def jittered(inputs: Sequence[Value]) -> tuple[Tensor, ...]:
        return tuple(_jitter(out, seed) if out.is_floating_point() else out for out in kernel(inputs))

    return jittered


ONE_IN = 128
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _jitter(values: Tensor, seed: int) -> Tensor:
    bits = values.contiguous().view(_BITS[values.element_size()])
    draw = torch.Generator().manual_seed((seed + int(bits.sum(dtype=torch.int64))) % 2**63)
    # sign-magnitude: one bit pattern up is one step away from zero, one down is one step towards it
    step = torch.randint(0, 2 * ONE_IN, values.shape, generator=draw, dtype=torch.int16).to(values.device)
    step = torch.where(step == 0, -1, torch.where(step == 1, 1, 0)).to(bits.dtype)
    moved = (bits + step).view(values.dtype)
    return torch.where((values != 0) & moved.isfinite(), moved, values)
