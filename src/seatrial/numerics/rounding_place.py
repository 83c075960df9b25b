"""Where a narrow sum rounds: at every contribution, between blocks and of how many terms, or in partial sums.

Everything is asked at one ratio M/m, a little beyond what the accumulator keeps, so that every answer is a
plain "kept" or "lost". Three facts tell the places apart:

* neighbours (M, m, −M within four places) are lost where rounding happens inside blocks, kept where blocks
  are added up wide;
* M with m beside it, and −M moved away step by step: the first place at which m is lost is the border of a
  block, and the distance between two borders is its length;
* one of the three terms in each of three blocks: lost by a running carry, kept by partial sums.

A running carry, a compensated one and a tree are told apart by what is left of many small terms between
+M and −M, and by whether neighbours cancel although m is elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from seatrial.numerics.accumulators import (
    COMPENSATED,
    EVERY_BLOCK,
    EVERY_CONTRIBUTION,
    IN_A_TREE,
    IN_LANES,
    INSIDE_BLOCKS,
    PARTIAL_SUMS,
)

Places: TypeAlias = "tuple[int, int, int]"  # of +M, m and −M in the order of the sum's terms

_ANCHORS = 6
_LEAST = 8  # terms below which there is nothing to place
_NEAR_LOST = 0.34  # a sum in no fixed order loses two of three neighbours
_STRADDLED = 0.3  # neighbours that a border may come between by chance
_STARTS = 3  # where the search for a border begins; the first of them may stand right before one
_FAR_KEPT = 0.75
_STAYS = 0.6  # share of the small terms below which a running carry has dropped them


class NoAnswer(Exception):
    """The kernel gave no answer to a probe; where it rounds stays open."""


@dataclass(frozen=True)
class Place:
    """Where bits are dropped. `sure` is False where answers to the same question differ or do not fit together."""

    rounds: str
    every: int | None
    sure: bool


@dataclass(frozen=True)
class Questions:
    """What can be asked of a kernel. All raise NoAnswer.

    terms   how many terms the sum has
    beside  questions that one call answers
    kept    for each triple of places, whether m survived
    share   share that is left of small terms on all other places, with +M and −M on these two
    """

    terms: int
    beside: int
    kept: Callable[[Sequence[Places]], list[bool]]
    share: Callable[[int, int], float]


def find_place(ask: Questions, rng: random.Random, *, stands_still: bool) -> Place | None:
    """Where this narrow sum rounds; None where it is too short to say or nothing fits.

    `stands_still` says that a sum of equal terms stops growing as early as a carry at every term must.
    """
    n = ask.terms
    if n < _LEAST:
        return None
    if stands_still:
        return Place(EVERY_CONTRIBUTION, 1, True)
    starts = range(0, n - 3, 8)
    neighbours = [(p, p + 1, p + 3) for p in rng.sample(starts, min(len(starts), 2 * _ANCHORS))]
    first, again = ask.kept(neighbours), ask.kept(neighbours)
    steady = first == again
    lost = 1 - sum(first + again) / len(first + again)
    if lost < (_NEAR_LOST if not steady else 0.5):
        return _wide_inside(ask, rng, sure=steady and lost < _STRADDLED)
    far = ask.kept([_thirds(n, rng) for _ in range(2 * _ANCHORS)])
    if sum(far) >= _FAR_KEPT * len(far):
        return _narrow_inside(ask, rng, sure=steady and all(far))
    return _narrow_everywhere(ask, sure=steady and not any(first), steady=steady)


def _thirds(n: int, rng: random.Random) -> Places:
    a, b, c = (min(n - 1, int(n * rng.uniform(*part))) for part in ((0.0, 0.1), (0.45, 0.55), (0.9, 1.0)))
    return a, b, c


# -- blocks that are added up wide ------------------------------------------------------------------


def _wide_inside(ask: Questions, rng: random.Random, *, sure: bool) -> Place | None:
    n = ask.terms
    blocks = _blocks(ask, rng, lambda p, q: [(p, p + 1, q), (p, q - 1, q)], lost_inside=False)
    if blocks is None:
        stride = 1 << ((n - 1) // 2).bit_length() - 1
        lanes = ask.kept([(p, p + stride, p + 2 * stride) for p in range(min(4, n - 2 * stride))])
        return Place(IN_LANES, None, not any(lanes)) if sum(lanes) * 2 < len(lanes) else None
    length, even = blocks
    if -(-n // length) < 3:
        # In the later block M and m are added up wide: kept by a carry, lost by a partial sum that is stored.
        kept = ask.kept([(length + 1, length + 2, p) for p in (1, 2, 3) if length + 2 < n])
        carried = bool(kept) and all(kept)
        return Place(EVERY_BLOCK if carried else PARTIAL_SUMS, length, False)
    triples = [_in_three_blocks(n, length, rng) for _ in range(2 * _ANCHORS)]
    kept, again = ask.kept(triples), ask.kept(triples)
    lost = 1 - sum(kept) / len(kept)
    carried = lost > 0.4 or kept != again  # partial sums have no order that could change from call to call
    return Place(EVERY_BLOCK if carried else PARTIAL_SUMS, length, sure and even and lost in (0.0, 1.0))


def _in_three_blocks(n: int, length: int, rng: random.Random) -> Places:
    a, b, c = sorted(rng.sample(range(-(-n // length)), 3))
    return tuple(min(n - 1, block * length + rng.randrange(length)) for block in (a, b, c))  # type: ignore[return-value]


def _blocks(
    ask: Questions, rng: random.Random, triples: Callable[[int, int], list[Places]], *, lost_inside: bool
) -> tuple[int, bool] | None:
    """Length of a block, and whether the borders found are multiples of it; None where no border shows."""
    n = ask.terms
    starts = range(4, max(5, n // 4), 8)
    found = None
    for start in rng.sample(starts, min(_STARTS, len(starts))):
        first = _border(ask, start, triples, lost_inside=lost_inside)
        if first is None:
            continue
        second = _border(ask, first, triples, lost_inside=lost_inside) if first + 2 < n else None
        if second is not None:
            found = second - first, first % (second - first) == 0
        else:  # the next block is the last one
            found = (first, True) if n - first <= first else (n - first, False)
        if found[1]:
            break
    return found


def _border(
    ask: Questions, start: int, triples: Callable[[int, int], list[Places]], *, lost_inside: bool
) -> int | None:
    """First place beyond `start` that is in another block, by splitting the range as finely as one call allows.

    `triples` are asked together: m beside either of the large terms, because a carry that takes the blocks
    in the other order keeps what stands beside the wrong one.
    """
    low, high = start + 2, ask.terms - 1  # `low` is inside; whether `high` is outside is asked first

    def outside(points: Sequence[int]) -> list[bool]:
        asked = [triples(start, q) for q in points]
        kept = iter(ask.kept([t for ts in asked for t in ts]))
        return [all([next(kept) for _ in ts]) is lost_inside for ts in asked]

    if high - low < 1 or not outside([high])[0]:
        return None
    while high - low > 1:
        parts = min(max(2, ask.beside), high - low)
        points = sorted({low + (high - low) * i // parts for i in range(1, parts)})
        for point, beyond in zip(points, outside(points), strict=True):
            if beyond:
                high = point
                break
            low = point
    return high


# -- blocks that are added up in few bits -----------------------------------------------------------


def _narrow_inside(ask: Questions, rng: random.Random, *, sure: bool) -> Place:
    """M at p, m moved away from it, −M far beyond: m is lost inside M's block and kept outside."""
    n = ask.terms
    blocks = _blocks(ask, rng, lambda p, q: [(p, q, _far_from(p, q, n))], lost_inside=True)
    if blocks is None:
        return Place(INSIDE_BLOCKS, None, False)
    length, even = blocks
    return Place(INSIDE_BLOCKS, length, sure and even)


def _far_from(p: int, q: int, n: int) -> int:
    """The end of the sum that is farther from both, never one of them."""
    return n - 1 if n - 1 - max(p, q) >= min(p, q) else 0


def _narrow_everywhere(ask: Questions, *, sure: bool, steady: bool) -> Place:
    n = ask.terms
    left = [ask.share(p, n - 1 - p) for p in range(min(4, n // 4))]
    steady = steady and ask.share(0, n - 1) == left[0]
    if min(left) < _STAYS or not steady:  # what changes from call to call has no order that would make it a tree
        return Place(EVERY_CONTRIBUTION, 1, min(left) < _STAYS)
    return Place(IN_A_TREE, None, sure) if _is_a_tree(ask) else Place(COMPENSATED, 1, sure and min(left) > 0.9)


def _is_a_tree(ask: Questions) -> bool:
    """In a tree some partners meet before either meets m; a carry that holds m loses it to M, whatever the order."""
    strides = [1 << j for j in range(1, ask.terms.bit_length()) if 1 + (1 << j) < ask.terms]
    return any(ask.kept([(2, 0, 3), *((1, 2, 1 + stride) for stride in strides if stride > 1)]))
