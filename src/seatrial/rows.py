"""A case too large for its float64 oracle, judged a few rows at a time.

It is possible where the rows of every output depend on the same rows of the inputs alone, which is tried on the
reference itself, never assumed. A sum over rows (a weight gradient, a scatter) cannot be cut so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from seatrial.errors import InfrastructureError, ProblemError
from seatrial.model import Value, Workload

if TYPE_CHECKING:
    from torch import Tensor

    from seatrial.numerics.compare import OutputReport
    from seatrial.study import Study

TRIED_ROWS = 5
PART = (1, 4)  # of the rows tried: neither the first nor the last
SAME = 1e-9  # relative, in float64


def row_axis(study: Study) -> str | None:
    """The var axis along which the reference works row by row; None where it does not, or nobody can tell."""
    for axis in study.problem.var_axes if study.problem.resizable else ():
        if _leads_everywhere(study, axis) and _works_by_rows(study, axis):
            return axis
    return None


def _leads_everywhere(study: Study, axis: str) -> bool:
    """First dimension of every output and of at least one input, and no other dimension of anything."""
    problem = study.problem
    shapes = [spec.shape or () for spec in problem.inputs]
    outputs = [spec.shape or () for spec in problem.outputs]
    if not all(shape[:1] == (axis,) for shape in outputs) or not any(shape[:1] == (axis,) for shape in shapes):
        return False
    if any(axis in shape[1:] for shape in (*shapes, *outputs)):
        return False
    axes = dict(study.smallest.axes)
    try:
        here, longer = problem.sizes(axes), problem.sizes({**axes, axis: axes[axis] + 1})
    except ProblemError:
        return False
    return {name for name in here if here[name] != longer.get(name)} == {axis}


def _works_by_rows(study: Study, axis: str) -> bool:
    import torch

    tried = Workload(study.smallest.uuid, {**study.smallest.axes, axis: TRIED_ROWS}, study.smallest.inputs)
    try:
        inputs = study.placed(study.inputs(study.case(tried, draw=80)))
        whole = study.oracle.run(inputs).values
        part = study.oracle.run(cut(study, axis, inputs, *PART)).values
    except InfrastructureError:
        return False
    if study.oracle.draws_randomness:
        return False
    pairs = [(a[slice(*PART)], b) for a, b in zip(whole, part, strict=True)]
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=SAME, atol=0.0, equal_nan=True) for a, b in pairs)


def cut(study: Study, axis: str, inputs: Sequence[Value], start: int, stop: int) -> list[Value]:
    """These rows of the inputs that have the axis, the others whole; views."""
    from torch import Tensor

    return [
        value[start:stop] if isinstance(value, Tensor) and (spec.shape or ())[:1] == (axis,) else value
        for spec, value in zip(study.problem.inputs, inputs, strict=True)
    ]


def steps(rows: int, at_most: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most so many rows, as equal as they can be."""
    count = -(-rows // max(1, at_most))
    edges = [rows * i // max(1, count) for i in range(count + 1)]
    yield from pairwise(edges)


def merged(parts: Sequence[tuple[int, OutputReport]]) -> OutputReport:
    """One output's reports, each with its first row, as one: any objection stands, the worst part speaks."""
    worst_start, worst = max(parts, key=lambda part: (part[1].passed is False, _excess(part[1])))
    reports = [report for _, report in parts]
    able = [r for r in reports if r.passed is not None]
    index = worst.worst_index
    return replace(
        worst,
        elements=sum(r.elements for r in reports),
        passed=all(r.passed for r in able) if able else None,
        worst_index=(index[0] + worst_start, *index[1:]) if index else index,
        groups=_largest([r.groups for r in reports]),
        unjudged=sum(r.unjudged if r.passed is not None else r.elements for r in reports),
    )


def _excess(report: OutputReport) -> float:
    return max(
        (
            abs(t.measured) / t.allowed if t.allowed else float(t.failed) * float("inf")
            for t in report.tests
            if t.failed
        ),
        default=0.0,
    )


def _largest(groups: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for one in groups for name in one}
    return {name: max((one[name] for one in groups if name in one), key=abs) for name in sorted(names)}


def joined(parts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """The outputs of consecutive rows, as those of all."""
    import torch

    return tuple(torch.cat(list(output)) for output in zip(*parts, strict=True))
