"""Sizes that a problem does not list: what a kernel tuned to the list gets wrong.

Relations that hold between the listed sizes (one axis is always another plus one, or twice it) are
taken to be meant and kept. Whether the reference accepts a size is for the reference to say.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import count as counting
from itertools import pairwise

from seatrial.errors import ProblemError
from seatrial.model import Problem, Workload

TILE_EDGES = (16, 32, 64, 128, 256)
PRIMES = (2, 3, 5, 7, 13, 31, 61, 97, 127, 251, 509, 1021, 2039, 4093)


@dataclass(frozen=True)
class Relation:
    """`follower` = factor * `leader` + offset in every listed workload."""

    follower: str
    leader: str
    factor: Fraction
    offset: Fraction

    def length(self, leader: int) -> int | None:
        """The follower's length, or None when it would not be a whole number >= 0."""
        value = self.factor * leader + self.offset
        return int(value) if value.denominator == 1 and value >= 0 else None


def other_sizes(problem: Problem, *, count: int, seed: int, ceiling_elements: int) -> tuple[Workload, ...]:
    """Up to `count` workloads with var axes outside the declared list, most revealing first.

    None has more than `ceiling_elements` values in its inputs and outputs together, and `sizes()`
    holds for each. Inputs and tolerance are those of a declared workload. Empty for a problem that is
    not resizable.
    """
    if not problem.resizable or not problem.workloads or not problem.var_axes:
        return ()
    listed = [{axis: w.axes[axis] for axis in problem.var_axes} for w in problem.workloads]
    relations = find_relations(problem.var_axes, listed)
    model = min(problem.workloads, key=lambda w: elements(problem, w.axes))
    found: dict[tuple[int, ...], Workload] = {}
    for axes in _proposals(problem, listed, relations, random.Random(seed)):
        key = tuple(axes[axis] for axis in problem.var_axes)
        if len(found) == count:
            break
        if axes not in listed and key not in found and fits(problem, axes, ceiling_elements):
            found[key] = Workload(_name(axes), axes, model.inputs, model.tolerance)
    return tuple(found.values())


def sizes_beyond(problem: Problem, tried: tuple[Workload, ...], *, ceiling_elements: int) -> tuple[Workload, ...]:
    """For each var axis that no size in `tried` lengthens alone: one more than its largest listed length, or twice it.

    The other axes have the lengths of the listed workload with the fewest values; an axis that follows the lengthened
    one follows it here. Left out where the tensors would hold more than `ceiling_elements` values.
    """
    if not problem.resizable or not problem.workloads:
        return ()
    listed = [{axis: w.axes[axis] for axis in problem.var_axes} for w in problem.workloads]
    relations = find_relations(problem.var_axes, listed)
    most = {axis: max(axes[axis] for axes in listed) for axis in problem.var_axes}
    model = min(problem.workloads, key=lambda w: elements(problem, w.axes))
    found = []
    for axis in (a for a in problem.var_axes if a not in relations):
        rest = [a for a in problem.var_axes if a != axis and a not in relations]
        if any(w.axes[axis] > most[axis] and all(w.axes[a] <= most[a] for a in rest) for w in tried):
            continue
        base = {a: model.axes[a] for a in problem.var_axes}
        longer = (most[axis] + 1, 2 * most[axis])
        proposals = (axes for length in longer for axes in _completed({**base, axis: length}, relations))
        fitting = next((axes for axes in proposals if fits(problem, axes, ceiling_elements)), None)
        if fitting is not None:
            found.append(Workload(_name(fitting), fitting, model.inputs, model.tolerance))
    return tuple(found)


def find_relations(var_axes: tuple[str, ...], listed: list[dict[str, int]]) -> dict[str, Relation]:
    """Followers among the var axes, each with the one earlier axis it depends on.

    Two different points determine a line, so with only two a constant difference or a constant ratio
    is demanded; with one point, equal lengths or a difference of one.
    """
    found: dict[str, Relation] = {}
    for place, follower in enumerate(var_axes):
        for leader in var_axes[:place]:
            relation = None if leader in found else _relation(follower, leader, listed)
            if relation is not None:
                found[follower] = relation
                break
    return found


def fits(problem: Problem, axes: Mapping[str, int], ceiling: int) -> bool:
    """True when every axis comes out and the tensors together stay below the ceiling."""
    try:
        return elements(problem, axes) <= ceiling
    except ProblemError:
        return False


def elements(problem: Problem, axes: Mapping[str, int]) -> int:
    """Number of values in all inputs and outputs at these sizes; raises ProblemError as `sizes()` does."""
    sizes = problem.sizes(axes)
    shapes = [spec.shape or () for spec in (*problem.inputs, *problem.outputs)]
    return sum(math.prod(int(axis) if axis.isdigit() else sizes[axis] for axis in shape) for shape in shapes)


def _relation(follower: str, leader: str, listed: list[dict[str, int]]) -> Relation | None:
    points = sorted({(axes[leader], axes[follower]) for axes in listed})
    leaders = [x for x, _ in points]
    if len(set(leaders)) < len(points):
        return None  # one leader length with two follower lengths
    if len(points) == 1:
        x, y = points[0]
        return Relation(follower, leader, Fraction(1), Fraction(y - x)) if abs(y - x) <= 1 else None
    (x0, y0), (x1, y1) = points[:2]
    factor = Fraction(y1 - y0, x1 - x0)
    offset = y0 - factor * x0
    if factor == 0 or any(factor * x + offset != y for x, y in points):
        return None
    simple = factor == 1 or offset == 0
    return Relation(follower, leader, factor, offset) if simple or len(points) > 2 else None


# ---------------------------------------------------------------------------------------------------
# What to try


def _proposals(
    problem: Problem, listed: list[dict[str, int]], relations: Mapping[str, Relation], rng: random.Random
) -> Iterator[dict[str, int]]:
    """Sizes to try, in order: one axis at a time in turns, then all axes at once."""
    free = [axis for axis in problem.var_axes if axis not in relations]
    bases = sorted(listed, key=lambda axes: elements(problem, axes))
    # An axis that varies in the list is meant to vary; one that never does comes last.
    free.sort(key=lambda axis: len({axes[axis] for axes in listed}) == 1)
    ladders = {axis: list(_ladder(sorted({axes[axis] for axes in listed}), rng)) for axis in free}
    for rung in range(max((len(ladder) for ladder in ladders.values()), default=0)):
        for axis in free:
            if rung < len(ladders[axis]):
                base = bases[min(rung, len(bases) - 1) if rung % 2 else 0]
                yield from _completed({**base, axis: ladders[axis][rung]}, relations)
        if len(free) > 1:
            yield from _completed(
                {**bases[0], **{a: ladder[rng.randrange(len(ladder))] for a, ladder in ladders.items()}}, relations
            )


def _ladder(listed: list[int], rng: random.Random) -> Iterator[int]:
    """Lengths of one axis that the list does not hold, most revealing first."""
    smallest, largest = listed[0], listed[-1]
    between = [(a + b) // 2 for a, b in pairwise(listed) if b - a > 1]
    primes = [p for p in PRIMES if p <= max(largest, 16)]
    edges = [edge + step for edge in TILE_EDGES if edge <= 2 * largest for step in (1, -1)]
    tried: dict[int, None] = {}
    for length in (
        next(n for n in counting(smallest + 1) if n not in listed),
        1,
        4 * largest + 3,
        largest + 1,
        primes[-1],
        *rng.sample(between, min(1, len(between))),
        3 * largest // 2 + 1,
        largest - 1,
        smallest - 1,
        *rng.sample(edges, len(edges)),
        *rng.sample(primes, len(primes)),
    ):
        if length >= 1 and length not in listed:
            tried[length] = None
    yield from tried


def _completed(axes: dict[str, int], relations: Mapping[str, Relation]) -> Iterator[dict[str, int]]:
    """The proposal with every follower set from its leader, unless that gives no length."""
    for follower, relation in relations.items():
        length = relation.length(axes[relation.leader])
        if length is None:
            return
        axes[follower] = length
    yield axes


def _name(axes: Mapping[str, int]) -> str:
    return "size " + ", ".join(f"{axis}={length}" for axis, length in axes.items())
