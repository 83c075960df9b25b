"""Sums carried in a narrow format, spelled out term by term and vectorised over the results.

Never the native narrow sum: PyTorch adds bfloat16 in fp32, so asking it for a narrow sum plants nothing.
A sum is carried term by term or, with `tile`, over partial sums of so many terms, each in the given dtype; a long one
over at most `STEPS` of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from seatrial.numerics.dtypes import round_to

STEPS = 256
TILE = 32  # terms that a kernel adds up exactly before it carries on
LEAST_TERMS = 64  # a shorter sum in bf16 is no worse than the store that follows it


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values rounded to nearest in `dtype`, in their own dtype again, whatever run we are inside of."""
    with _disable_current_modes():
        if values.dtype == torch.float64:
            return round_to(values, dtype)
        return values.to(dtype).to(values.dtype)


def toward_zero(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values cut off to the 16-bit float `dtype`, as a bit mask does it, in their own dtype again."""
    with _disable_current_modes():
        nearest = values.to(dtype)
        beyond = nearest.to(values.dtype).abs() > values.abs()
        bits = nearest.contiguous().view(torch.int16)
        return torch.where(beyond & nearest.isfinite(), bits - 1, bits).view(dtype).to(values.dtype)


def _parts(length: int, tile: int) -> Iterator[tuple[int, int]]:
    step = max(tile, -(-length // STEPS))
    for start in range(0, length, step):
        yield start, min(step, length - start)


def carried_sum(terms: Tensor, dtype: torch.dtype, tile: int = 1) -> Tensor:
    """Sum over the last axis of `terms` (fp32 or fp64), the running sum rounded to `dtype` after every part."""
    total = torch.zeros(terms.shape[:-1], dtype=terms.dtype, device=terms.device)
    for start, count in _parts(terms.shape[-1], tile):
        total = rounded(total + terms.narrow(-1, start, count).sum(-1), dtype)
    return total


def carried_matmul(left: Tensor, right: Tensor, dtype: torch.dtype, tile: int = 1) -> Tensor:
    """left @ right (fp32 or fp64, [..., m, k] and [..., k, n]) with the running sum rounded after every part of k."""
    shape = (*left.shape[:-1], right.shape[-1])
    total = torch.zeros(shape, dtype=left.dtype, device=left.device)
    for start, count in _parts(left.shape[-1], tile):
        total = rounded(total + left.narrow(-1, start, count) @ right.narrow(-2, start, count), dtype)
    return total


def carried_scatter(base: Tensor, index: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """base[index[i]] += rows[i], in order, each row's running sum rounded to `dtype` after every part.

    `index` [n] holds rows of `base` [v, ...]; `rows` is [n, ...]. Returns a new tensor.
    """
    total = base.clone()
    order = index.argsort(stable=True)
    index, rows = index[order], rows[order]
    counts = torch.bincount(index, minlength=base.shape[0])
    starts = counts.cumsum(0) - counts
    rank = torch.arange(index.numel(), device=index.device) - starts[index]
    step = max(1, -(-int(counts.max()) // STEPS)) if index.numel() else 1
    part = rank // step
    for number in range(int(part.max()) + 1 if index.numel() else 0):
        chosen = part == number
        touched, place = torch.unique(index[chosen], return_inverse=True)
        partial = torch.zeros((touched.numel(), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        partial.index_add_(0, place, rows[chosen])
        total[touched] = rounded(total[touched] + partial, dtype)
    return total
