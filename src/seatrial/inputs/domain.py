"""What the declared values of a tensor promise, and how to keep the promise when they are changed.

A recipe may make values larger, skewed or tied; it may not leave the set that the problem is defined
on. The set is read off the declared draw: non-negative stays non-negative, probabilities stay
probabilities, and what looks like a mask, a count or a running sum is not touched at all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SHORTEST_RUN = 8  # a shorter row is in order by chance too often
SURE = 20.0  # nats: a pattern that chance makes less often than exp(-20) is meant
EXPECTED_COLLISIONS = 8.0  # chance leaves none with a probability of exp(-8)


def is_structured(values: Tensor) -> bool:
    """True for float values that mean something in themselves: constant, whole numbers, or running sums."""
    finite = _finite(values)
    if finite.numel() == 0 or bool((finite == finite[0]).all()):
        return True
    if finite.numel() >= 4 and bool((finite == finite.round()).all()):
        return True
    return _every_row_monotone(values)


def keep_domain(changed: Tensor, declared: Tensor) -> Tensor:
    """`changed` (fp32 or fp64, same shape) brought back to what `declared` promises, in declared's type.

    Non-finite declared elements stay as they are; the result is contiguous and finite elsewhere.
    """
    original = declared.to(changed.dtype)
    finite = _finite(declared).to(changed.dtype)
    if finite.numel() and bool((finite >= 0).all()):
        changed = changed.abs()
        if _sums_to_one(original):
            changed = changed / changed.sum(-1, keepdim=True).clamp(min=torch.finfo(changed.dtype).tiny)
        elif bool((finite <= 1).all()):
            changed = changed.clamp(max=1.0)
    elif finite.numel() and bool((finite <= 0).all()):
        changed = changed.log_softmax(-1) if _are_log_probabilities(original) else -changed.abs()
    limits = torch.finfo(declared.dtype)
    kept = torch.where(original.isfinite(), changed.clamp(limits.min, limits.max), original)
    return kept.to(declared.dtype).contiguous()


def are_free_ids(ids: Tensor, bound: int) -> bool:
    """True when integer values look like independent draws from [0, bound): neither sorted nor all different."""
    if ids.numel() < 2:
        return ids.numel() == 1
    rows = ids.reshape(-1, ids.shape[-1])
    tables = (rows, ids.reshape(1, -1))
    return not any(_is_sorted(table) or _is_without_repeats(table, bound) for table in tables)


def are_choices(ids: Tensor, bound: int) -> bool:
    """True when every row holds different ids in no order, as a top-k gives, and the rows share ids."""
    if ids.dim() < 2 or ids.numel() < 2 or ids.shape[-1] > bound or int(ids.min()) < 0:
        return False
    rows = ids.reshape(-1, ids.shape[-1])
    repeats = bool((rows.sort(dim=-1).values.diff(dim=-1) == 0).any())
    return not repeats and not _is_sorted(rows) and not _is_without_repeats(ids.reshape(1, -1), bound)


def _is_sorted(rows: Tensor) -> bool:
    count, length = rows.shape
    surprise = count * math.lgamma(length + 1)
    return surprise > SURE and bool((rows.diff(dim=-1) >= 0).all())


def _is_without_repeats(rows: Tensor, bound: int) -> bool:
    count, length = rows.shape
    expected = count * length * (length - 1) / (2 * max(bound, 1))
    return expected > EXPECTED_COLLISIONS and not bool((rows.sort(dim=-1).values.diff(dim=-1) == 0).any())


def _finite(values: Tensor) -> Tensor:
    flat = values.reshape(-1).to(torch.float64 if values.dtype == torch.float64 else torch.float32)
    return flat[flat.isfinite()]


def _every_row_monotone(values: Tensor) -> bool:
    if values.dim() == 0 or values.shape[-1] < SHORTEST_RUN:
        return False
    steps = values.reshape(-1, values.shape[-1]).to(torch.float32).diff(dim=-1)
    return bool((steps >= 0).all() or (steps <= 0).all())


def _are_log_probabilities(values: Tensor) -> bool:
    return values.dim() > 0 and values.shape[-1] >= 2 and _sums_to_one(values.exp())


def _sums_to_one(values: Tensor) -> bool:
    if values.dim() == 0 or values.shape[-1] < 2:
        return False
    return bool(((values.sum(-1) - 1).abs() < 0.02).all())
