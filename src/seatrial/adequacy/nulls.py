"""Candidates that compute nothing. An audit whose inputs let one of them live says nothing at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from seatrial.study import Case, Study


def null_outputs(study: Study, case: Case) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """What each null candidate returns on this case, as CPU tensors of the declared shapes and dtypes.

    Zeros, the mean of the right answer everywhere, the first input that has an output's shape, and the right answer to
    another draw of the inputs. One that happens to be the right answer is left out.
    """
    right = study.native(case)
    candidates: list[tuple[str, tuple[Tensor, ...]]] = [
        ("zeros", tuple(torch.zeros_like(t) for t in right)),
        ("a constant", tuple(_mean_everywhere(t) for t in right)),
    ]
    copies = _copies(study, case, right)
    if copies is not None:
        candidates.append(("a copy of an input", copies))
    other = study.native(study.case(case.workload, draw=71))
    if [t.shape for t in other] == [t.shape for t in right]:
        candidates.append(("the answer to other inputs", other))
    for words, outputs in candidates:
        if not all(torch.equal(a, b) for a, b in zip(outputs, right, strict=True)):
            yield words, outputs


def _mean_everywhere(right: Tensor) -> Tensor:
    if not right.is_floating_point():
        return torch.full_like(right, 1)
    mean = right.float().nan_to_num(0.0, 0.0, 0.0).mean() if right.numel() else torch.zeros(())
    return mean.to(right.dtype).expand(right.shape).clone()


def _copies(study: Study, case: Case, right: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    inputs = [v for v in study.inputs(case) if isinstance(v, Tensor)]
    found = [next((v.to(t.dtype) for v in inputs if v.shape == t.shape), None) for t in right]
    if all(f is None for f in found):
        return None
    return tuple(t.clone() if f is None else f.clone() for f, t in zip(found, right, strict=True))
