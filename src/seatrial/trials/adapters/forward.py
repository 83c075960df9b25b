"""A kernel that computes a forward operation, made trainable: its own values, the reference's gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from seatrial.model import Problem, Value
from seatrial.trials.adapters.base import Refused
from seatrial.trials.kernels import Kernel, reference_kernel


def trainable(problem: Problem, kernel: Kernel) -> Callable[[Sequence[Value]], tuple[Tensor, ...]]:
    """`kernel` as a differentiable function of its float inputs.

    Going back, the reference runs once more on the same inputs and autograd gives its gradient.
    """
    reference = reference_kernel(problem)

    class ValuesOfKernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Value) -> tuple[Tensor, ...]:
            ctx.inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
            return kernel(ctx.inputs)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            return gradient_of(reference, ctx.inputs, gradients)

    def call(inputs: Sequence[Value]) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = ValuesOfKernel.apply(*inputs)  # type: ignore[no-untyped-call]
        return outputs

    return call


def gradient_of(kernel: Kernel, inputs: Sequence[Value], gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Autograd's gradient of `kernel` for every float input, None for the others. Raises Refused without a graph."""
    with torch.enable_grad():
        floats = {i: x.clone().requires_grad_() for i, x in enumerate(inputs) if _is_float(x)}
        outputs = kernel([floats.get(i, x) for i, x in enumerate(inputs)])
        pairs = [(out, g) for out, g in zip(outputs, gradients, strict=True) if out.requires_grad]
        if not pairs:
            raise Refused("the reference gives autograd nothing to follow, so it cannot lend its gradient")
        graph, upstream = zip(*pairs, strict=True)
        found = torch.autograd.grad(graph, list(floats.values()), upstream, allow_unused=True)
    by_position = dict(zip(floats, found, strict=True))
    return tuple(by_position.get(i) for i in range(len(inputs)))


def check_differentiable(problem: Problem, inputs: Sequence[Value]) -> None:
    """Raises Refused when autograd cannot follow the reference."""
    reference = reference_kernel(problem)
    gradient_of(reference, inputs, [torch.ones_like(out) for out in reference(inputs)])


def _is_float(value: Value) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point()
