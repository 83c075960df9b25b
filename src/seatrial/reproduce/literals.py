"""Tensors as Python literals that a person can read, and back.

A tensor is a constant with a few exceptions, a short list of values, or raw bytes kept beside: inputs that were
changed or shrunk are no longer what a generator draws. Numbers that JSON and `ast.literal_eval` lack are the words "nan", "inf" and "-inf".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from seatrial.errors import UsageError
from seatrial.model import Value

if TYPE_CHECKING:
    from torch import Tensor, dtype

MOST_EXCEPTIONS = 96
MOST_VALUES = 256
MOST_OFFSET = 4096  # elements; an offset keeps its alignment when it is cut by a multiple of this
BEHIND = 64  # elements after the last one of a strided tensor


def literal_of(value: Value, blobs: dict[str, Tensor], key: str) -> Any:
    """The value as literals; what is too much for them goes into `blobs` under `key`, as uint8."""
    import torch

    if not isinstance(value, torch.Tensor):
        return _number(value)
    about = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), **_layout(value)}
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
    if value.dtype == getattr(torch, "float4_e2m1fn_x2", None) or value.is_complex():
        blobs[key] = raw.clone()
        return {**about, "bytes": key}
    for short in (_constant_but_few(value), _list(value)):
        if short is not None and torch.equal(_bits(tensor_of({**about, **short}, {})), raw):
            return {**about, **short}
    blobs[key] = raw.clone()
    return {**about, "bytes": key}


def tensor_of(literal: Any, blobs: Mapping[str, Tensor]) -> Any:
    """The value back; raises UsageError when the literal or its bytes are not what `literal_of` makes."""
    import torch

    if not isinstance(literal, dict):
        return float(literal) if isinstance(literal, str) else literal
    if "strides" in literal:
        return _in_place(
            tensor_of({k: v for k, v in literal.items() if k not in ("strides", "offset")}, blobs), literal
        )
    try:
        dtype, shape = getattr(torch, literal["dtype"]), tuple(literal["shape"])
        if "bytes" in literal:
            return blobs[literal["bytes"]].clone().view(dtype).reshape(shape)
        if "values" in literal:
            return _tensor(literal["values"], dtype).reshape(shape)
        made = torch.full((math.prod(shape),), 0, dtype=torch.float64 if dtype.is_floating_point else torch.int64)
        made.fill_(float(literal["fill"]) if dtype.is_floating_point else literal["fill"])
        if literal.get("at"):
            made[torch.tensor(literal["at"])] = _tensor(literal["then"], made.dtype)
        return made.to(dtype).reshape(shape)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as fault:
        raise UsageError(f"a tensor of this file cannot be read ({type(fault).__name__}: {fault})") from fault


def _layout(value: Tensor) -> dict[str, Any]:
    """Strides and offset where they are not those of a dense tensor, in elements."""
    if value.is_contiguous() and value.storage_offset() == 0:
        return {}
    return {"strides": list(value.stride()), "offset": int(value.storage_offset()) % MOST_OFFSET}


def _in_place(dense: Tensor, literal: dict[str, Any]) -> Tensor:
    """The values where strides and offset put them, in memory that is NaN in every float format."""
    import torch

    from seatrial.workers.tensors import same_bits

    strides, offset = literal["strides"], literal["offset"]
    reach = 1 + sum((n - 1) * s for n, s in zip(dense.shape, strides, strict=True)) if dense.numel() else 0
    base = torch.full(((offset + reach + BEHIND) * dense.element_size(),), 255, dtype=torch.uint8).view(dense.dtype)
    view = base.as_strided(dense.shape, strides, offset)
    single = tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)
    same_bits(view[single]).copy_(same_bits(dense[single]))
    return view


def _tensor(values: list[Any], dtype: dtype) -> Tensor:
    import torch

    wide = torch.float64 if dtype.is_floating_point else torch.int64
    return torch.tensor([float(v) if dtype.is_floating_point else int(v) for v in values], dtype=wide).to(dtype)


def _constant_but_few(value: Tensor) -> dict[str, Any] | None:
    import torch

    if value.numel() == 0:
        return {"fill": 0}
    wide = (value.double() if value.is_floating_point() else value.to(torch.int64)).reshape(-1)
    values, counts = wide.unique(return_counts=True)  # type: ignore[no-untyped-call]
    fill = values[counts.argmax()]
    other = (wide != fill).nonzero()[:, 0]
    if other.numel() > MOST_EXCEPTIONS:
        return None
    short: dict[str, Any] = {"fill": _number(fill.item())}
    if other.numel():
        short |= {"at": other.tolist(), "then": [_number(v) for v in wide[other].tolist()]}
    return short


def _list(value: Tensor) -> dict[str, Any] | None:
    if value.numel() > MOST_VALUES:
        return None
    wide = value.double() if value.is_floating_point() else value.long()
    return {"values": [_number(v) for v in wide.reshape(-1).tolist()]}


def _number(number: Any) -> Any:
    if isinstance(number, float) and not math.isfinite(number):
        return str(number)
    return number


def _bits(value: Tensor) -> Tensor:
    import torch

    return value.contiguous().reshape(-1).view(torch.uint8)
