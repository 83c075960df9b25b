"""Tensors as declared bytes: the layout travels as JSON, the storage window as raw bytes.

A strided, expanded or offset view keeps its sizes, strides and offset: the receiver gets a storage in which
the view sits exactly as it did, but only the part that the view can reach is sent. Works for every dtype
with a whole number of bytes per element, because bytes are only ever seen through uint8.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from seatrial.poison import ALL_BITS
from seatrial.workers.guards import Guarded
from seatrial.workers.wire import Buffer

# Offsets beyond this many elements are shortened by multiples of it, so that the alignment of the view's
# first element survives but a small slice of a huge tensor stays small.
_KEPT_OFFSET = 4096

_BEHIND = 64  # elements

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def dtype_named(name: str) -> torch.dtype:
    """`"bfloat16"` -> torch.bfloat16. Raises ValueError for what is no torch dtype of whole bytes."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize not in _SAME_SIZE:
        raise ValueError(f"{name!r} is no dtype that can be sent; see torch.dtype for the names")
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Layout:
    """Where a view's elements lie. Sizes, strides and offset count elements; `span` too: from the view's
    first element to its last, both included."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        offset = int(tensor.storage_offset())
        if offset > _KEPT_OFFSET:
            offset = _KEPT_OFFSET + offset % _KEPT_OFFSET
        return cls(name_of(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), offset)

    @property
    def span(self) -> int:
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        return self.span * dtype_named(self.dtype).itemsize

    def to_json(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "shape": self.shape, "strides": self.strides, "offset": self.offset}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Layout:
        return cls(raw["dtype"], tuple(raw["shape"]), tuple(raw["strides"]), raw["offset"])

    def guarded(self, device: str, byte: int) -> tuple[Tensor, Guarded]:
        """The same between two guard bands, which hold `byte` as does whatever of its storage lies beside the view."""
        dtype = dtype_named(self.dtype)
        lead, tail = (n * dtype.itemsize for n in (self.offset, _BEHIND if self.offset else 0))
        guarded = Guarded.make(lead + self.nbytes + tail, device, byte, lead=lead, tail=tail)
        return guarded.tensor(dtype, self.shape, self.strides, self.offset), guarded

    def empty(self, device: str | torch.device = "cpu") -> Tensor:
        """A tensor of this layout in a storage of its own, contents undefined."""
        dtype = dtype_named(self.dtype)
        if self.offset == 0:
            return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)
        base = torch.empty(self.offset + self.span + _BEHIND, dtype=dtype, device=device)
        all_bytes(base).fill_(ALL_BITS)
        return base.as_strided(self.shape, self.strides, self.offset)


def all_bytes(tensor: Tensor) -> Tensor:
    """The whole storage under `tensor` as a flat uint8 tensor."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def window(tensor: Tensor) -> Tensor:
    """The bytes of the storage that the view can reach, as a flat uint8 tensor sharing memory."""
    size = tensor.dtype.itemsize
    start = int(tensor.storage_offset()) * size
    reach = Layout(name_of(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), 0)
    return all_bytes(tensor)[start : start + reach.nbytes]


def buffer(flat: Tensor) -> memoryview:
    """A flat uint8 CPU tensor as a writable buffer without a copy."""
    return memoryview(cast(Buffer, flat.numpy())).cast("B") if flat.numel() else memoryview(bytearray())


def plain_cpu(tensor: Tensor) -> Tensor:
    """The tensor as it will be sent: on the CPU, without autograd, conjugate or negative bit."""
    if type(tensor) is not Tensor or tensor.requires_grad:
        tensor = tensor.detach().as_subclass(Tensor)
    tensor = tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
    if tensor.device.type == "cpu":
        return tensor
    here = Layout.of(tensor).empty()
    window(here).copy_(window(tensor))
    return here


def moved(tensor: Tensor, device: str) -> Tensor:
    """The tensor on another device, in the layout that it has here (`Tensor.to` would pack an expanded one)."""
    here = plain_cpu(tensor)
    there = Layout.of(here).empty(device)
    window(there).copy_(window(here))
    return there


def same_bits(tensor: Tensor) -> Tensor:
    """The same elements as integers of the same width, so that any dtype can be copied."""
    return tensor.view(_SAME_SIZE[tensor.dtype.itemsize])


def fill_with(tensor: Tensor, poison: float | None) -> None:
    """Fills a contiguous tensor with poison: NaN or a finite number in float formats, a byte pattern elsewhere.

    The pattern of integers differs between NaN and finite poison, so that two different poisons always
    differ. None means zeros. A float format without NaN gets the byte pattern too.
    """
    if tensor.numel() == 0:
        return
    same_bits(tensor).copy_(same_bits(_pattern(tensor.dtype, poison).to(tensor.device)))


def _pattern(dtype: torch.dtype, poison: float | None) -> Tensor:
    if poison is None:
        return torch.zeros(1, dtype=torch.uint8).expand(dtype.itemsize).contiguous().view(dtype)
    odd = poison != poison
    if dtype is torch.bool:
        return torch.tensor([odd])
    if dtype.is_floating_point or dtype.is_complex:
        try:
            value = torch.full((1,), poison, dtype=torch.float64).to(dtype)
        except (RuntimeError, NotImplementedError):  # float4 has no conversion
            value = None
        if value is not None and bool(torch.isnan(value.to(torch.complex128)).all()) == odd:
            return value
    return torch.full((dtype.itemsize,), 0xA5 if odd else 0x5A, dtype=torch.uint8).view(dtype)


def count_of(shape: tuple[int, ...]) -> int:
    """Elements of a dense tensor of that shape."""
    return prod(shape)
