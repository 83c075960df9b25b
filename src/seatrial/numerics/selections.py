"""Indices that a reference selects by value: among equals, any choice is right.

topk, sort, argmax and their like promise no order among equal values, so their indices are judged by the
values they point at. A `Selection` is what one such op of the float64 run saw and chose; `equally_right`
finds the one behind an integer output by its content, so that casts and views on the way do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PLACE_OF_DIM = {"topk": 2, "sort": 1, "argsort": 1, "argmax": 1, "argmin": 1, "max": 1, "min": 1, "kthvalue": 2}
_DEFAULT_DIM = {"topk": -1, "sort": -1, "argsort": -1, "kthvalue": -1}


@dataclass(frozen=True)
class Selection:
    """`chosen` (int64) points along `dim` into `values`; both as the op saw and gave them, dim kept."""

    values: Tensor
    chosen: Tensor
    dim: int


def selection_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Selection | None:
    """What this call of an aten op selected; None for an op that selects nothing along a dimension."""
    if name not in _PLACE_OF_DIM or not args or not isinstance(args[0], Tensor) or not args[0].dim():
        return None
    values = args[0]
    place = _PLACE_OF_DIM[name]
    dim = args[place] if len(args) > place else kwargs.get("dim", _DEFAULT_DIM.get(name))
    if isinstance(dim, Tensor):
        return None  # max of two tensors
    indices = result[1] if isinstance(result, tuple) and len(result) == 2 else result
    if not isinstance(indices, Tensor) or indices.dtype != torch.int64:
        return None
    if dim is None:  # over everything
        return Selection(values.detach().reshape(-1), indices.detach().reshape(1), 0)
    chosen = indices.detach()
    if chosen.dim() < values.dim():
        chosen = chosen.unsqueeze(dim)
    return Selection(values.detach(), chosen, dim % values.dim())


def equally_right(selections: Sequence[Selection], expected: Tensor, got: Tensor) -> Tensor | None:
    """Where `got` points at values equal to those `expected` points at, without naming one twice along the dimension.

    Both are integer tensors of one shape. None when no selection stands behind `expected`.
    """
    for selection in selections:
        form = _form_of(selection, expected)
        if form is not None:
            return _equal(selection, expected.reshape(form).long(), got.reshape(form).long()).reshape(expected.shape)
    return None


def _form_of(selection: Selection, expected: Tensor) -> torch.Size | None:
    """The shape, with the dimension kept, in which `expected` is what was chosen, or the first of it."""
    chosen, dim = selection.chosen, selection.dim
    taken = expected.numel() * chosen.shape[dim] // max(1, chosen.numel())
    if expected.numel() == 0 or not 0 < taken <= chosen.shape[dim]:
        return None
    first = chosen.narrow(dim, 0, taken)
    same = first.numel() == expected.numel() and torch.equal(first.reshape(-1), expected.reshape(-1).long())
    return first.shape if same else None


def _equal(selection: Selection, expected: Tensor, got: Tensor) -> Tensor:
    values, dim = selection.values, selection.dim
    legal = (got >= 0) & (got < values.shape[dim])
    pointed, meant = (values.gather(dim, i) for i in (got.clamp(0, values.shape[dim] - 1), expected))
    same = (pointed == meant) | (pointed.isnan() & meant.isnan() if values.is_floating_point() else False)
    ordered = got.sort(dim).values
    twice = (ordered.diff(dim=dim) == 0).any(dim, keepdim=True) if got.shape[dim] > 1 else torch.zeros_like(same)
    return legal & same & ~twice
