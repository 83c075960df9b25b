"""How SOL-ExecBench makes an input that a workload declares as random.

The rules depend on the tensor's type, name and description; the first that applies wins. The
distributions are the benchmark's, the code and the random stream are our own: a draw is a function of
its seed alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode

from seatrial.errors import ProblemError
from seatrial.formats import sol_names
from seatrial.formats.dtypes import declared_shape, is_packed_fp4, torch_dtype
from seatrial.formats.sol_names import Rule
from seatrial.model import TensorSpec, Value

Make = Callable[[tuple[int, ...], torch.dtype, Generator], Tensor]

INTEGER_RANGES = {
    torch.int8: (-128, 128),
    torch.int16: (-1024, 1024),
    torch.int32: (-1024, 1024),
    torch.int64: (-1024, 1024),
}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Midpoints between neighbours of the E2M1 grid 0, 0.5, 1, 1.5, 2, 3, 4, 6, and whether a magnitude
# exactly on the midpoint goes up to the even code.
FP4_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def draw_random(spec: TensorSpec, sizes: dict[str, int], generator: Generator, *, op_type: str = "") -> Value:
    """One random input, on the generator's device: a tensor of the declared shape and type, or a Python
    scalar when the shape is None. FP4 has half the declared length in its last axis."""
    shape, dtype = declared_shape(spec, sizes), torch_dtype(spec.dtype)
    if shape is None:
        scalar: int | float | bool = _by_type((), dtype, generator).item()
        return scalar
    make = rule_for(spec, shape)
    value = make(shape, dtype, generator)
    if op_type == "sampling" and spec.name == "probs":
        value = torch.softmax(value, dim=-1)
    return value


def rule_for(spec: TensorSpec, shape: tuple[int, ...]) -> Make:
    """The rule that makes a random tensor with this declaration."""
    dtype = torch_dtype(spec.dtype)
    if not dtype.is_floating_point or dtype in FP8 or is_packed_fp4(spec.dtype):
        return _by_type
    return _by_name(spec.name, shape, spec.description) or _by_type


def _by_name(name: str, shape: tuple[int, ...], description: str) -> Make | None:
    rule = sol_names.rule(name, shape, description)
    return None if rule is None else _MAKERS[rule]


# ---------------------------------------------------------------------------------------------------
# The distributions


def _by_type(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
    if dtype in FP8:
        return _normal(shape, torch.float32, generator).clamp_(-2.0, 2.0).to(dtype)
    if dtype == torch.float4_e2m1fn_x2:
        return pack_fp4(_normal(shape, torch.float32, generator))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, device=generator.device, dtype=dtype)
    if dtype in INTEGER_RANGES:
        low, high = INTEGER_RANGES[dtype]
        return torch.randint(low, high, shape, generator=generator, device=generator.device, dtype=dtype)
    return _normal(shape, dtype, generator)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)


def _uniform(low: float, high: float) -> Make:
    def make(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
        return torch.empty(shape, device=generator.device, dtype=dtype).uniform_(low, high, generator=generator)

    return make


def _ones(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
    return torch.ones(shape, device=generator.device, dtype=dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
    return torch.zeros(shape, device=generator.device, dtype=dtype)


def _causal_mask(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
    lowest = torch.full(shape, torch.finfo(dtype).min, device=generator.device, dtype=dtype)
    return lowest.triu(diagonal=1)


def _binary_mask(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator, device=generator.device).to(dtype)


def _angle(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return _normal(shape, torch.float32, generator).clamp_(-math.pi, math.pi)


def _cosine(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
    return torch.cos(_angle(shape, generator)).to(dtype)


def _sine(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
    return torch.sin(_angle(shape, generator)).to(dtype)


def _positive(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
    return _normal(shape, dtype, generator).abs() + 0.1


def _cumulated_decay(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
    return _uniform(-0.1, 0.0)(shape, dtype, generator).cumsum(dim=-1)


def _probabilities(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
    return torch.softmax(_normal(shape, torch.float32, generator), dim=-1).to(dtype)


def _weight_matrix(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
    return _normal(shape, dtype, generator) / math.sqrt(max(shape[-1], 1))


_MAKERS: dict[Rule, Make] = {
    Rule.ONES: _ones,
    Rule.ZEROS: _zeros,
    Rule.CAUSAL_MASK: _causal_mask,
    Rule.BINARY_MASK: _binary_mask,
    Rule.COSINE: _cosine,
    Rule.SINE: _sine,
    Rule.POSITIVE: _positive,
    Rule.CUMULATED_DECAY: _cumulated_decay,
    Rule.LOG_DECAY: _uniform(-5.0, -1.0),
    Rule.DECAY: _uniform(-1.0, -0.001),
    Rule.GATE: _uniform(-5.0, 0.0),
    Rule.PROBABILITIES: _probabilities,
    Rule.WEIGHT_MATRIX: _weight_matrix,
}


def pack_fp4(values: Tensor) -> Tensor:
    """Round float values to the E2M1 grid and pack neighbours of the last axis, low nibble first.

    The result is float4_e2m1fn_x2 with half the last axis; raises ProblemError when that is odd.
    """
    if values.dim() == 0 or values.shape[-1] % 2:
        raise ProblemError(
            f"FP4 values of shape {list(values.shape)} cannot be packed in pairs; make the last axis even"
        )
    magnitude = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for midpoint, goes_up in FP4_MIDPOINTS:
        code += (magnitude >= midpoint) if goes_up else (magnitude > midpoint)
    code += (values < 0).to(torch.uint8) * 8
    return (code[..., 0::2] | code[..., 1::2] << 4).contiguous().view(torch.float4_e2m1fn_x2)


# ---------------------------------------------------------------------------------------------------
# Custom generators: foreign code with its own random stream


@contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Seeds every global random stream for the block and puts the old states back afterwards."""
    import random

    import numpy

    devices = [] if device == "cpu" else [torch.device(device)]
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


class OnDevice(TorchFunctionMode):
    """Within the block, code that names a CUDA device gets `device` instead.

    References and generators write `device="cuda"` into their source; on a machine without one they
    still say what must be computed.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = torch.device(device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "cuda" and args and isinstance(args[0], Tensor):
            return args[0].to(self._device)
        if func is torch.device:
            made = func(*args, **kwargs)
            return self._device if made.type == "cuda" else made
        return func(*map(self._moved, args), **{name: self._moved(value) for name, value in kwargs.items()})

    def _moved(self, value: Any) -> Any:
        named_cuda = (isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value)) or (
            isinstance(value, torch.device) and value.type == "cuda"
        )
        return self._device if named_cuda else value
