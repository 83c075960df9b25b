"""Swamping probes: how many bits a kernel's accumulator really keeps, and where it drops the rest.

A sum is fed +M, m and −M, and next to nothing else. The exact answer is m, which any output dtype can
show, so a bfloat16 output does not hide what happened inside: while the accumulator holds M it can keep
m only if m is not below its last bit. The largest M/m that survives is the accumulator's precision.
Where the three terms stand tells where the rounding happens (rounding_place.py).

"Next to nothing" is dense noise of random signs, so far below m that it cannot change the answer: a
kernel that counts non-zeros sees none of these inputs as sparse. One pattern adds ± pairs of m's own
size, for a kernel that counts only what is large enough to matter.

Which inputs act linearly, and which of their elements one output adds up with equal weights, is
found on the fp64 oracle by asking, never by annotation. Scatter reductions are probed by pointing
all indices at one row (a repeat-count lever of `trace.py`). Each probe is first put to the oracle;
one whose answer does not come out exact there is not used. Many independent probes ride in one
call, on elements that feed different outputs, so that one output costs a handful of calls.

The masks-of-±M idea is that of FPRev (arXiv 2411.00442), which recovers summation order with it;
probing for precision and for where it is lost needs no summation tree.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from seatrial.numerics.accumulators import (
    CERTAIN,
    FLOAT16,
    LIKELY,
    NARROW_BITS,
    NOT_DETERMINED,
    OPERANDS,
    WHEN_DISGUISED,
    Fingerprint,
    is_unbounded,
    name_of,
    operands_of,
    sentence_of,
)
from seatrial.numerics.rounding_place import NoAnswer, Place, Places, Questions, find_place
from seatrial.numerics.trace import Fp64Reference, Reduction, Trace, exact_outputs, linear_slots, replaced

if TYPE_CHECKING:
    from seatrial.model import Value

Call: TypeAlias = "Callable[[Sequence[Value]], tuple[Tensor, ...] | None]"

PATTERNS = ("far", "near", "paired", "strided", "disguised")

_CLOSE = 0.3  # a probe survives when the answer is within 30 % of exact: losing m altogether is 100 %
_NEAR_SPAN = 4  # places within which the three terms of a near probe stand
_FAR_PARTS = ((0.0, 0.25), (0.4, 0.6), (0.75, 1.0))  # of the sum, for the three terms of a far probe
_DISGUISE_PAIRS = 8  # ± pairs of small terms around a disguised probe
_NOISE_EXPONENT = 24  # noise is m·2⁻²⁴ where the slot's dtype reaches so far down
_NOISE_DRIFT = 0.05  # of m: what a random walk over the noise of one sum may come to
_LEAST_NOISE = 16  # noisy terms of a sum; fewer disguise nothing
_LEAST_TERMS = 3
_LEAST_REACH = 12  # a probe that cannot tell bfloat16 and float16 from more says nothing
_ENOUGH_PLACEMENTS = 6  # without a loss on so many, the order of summation is no excuse
_MOST_ZEROED = 3  # other inputs set to zero one at a time, in search of uncoupled sums
# Distinct numbers, exact in every dtype down to fp8; one for each sum probed side by side in one call.
_MARKS = tuple(m * s for s in (1.0, 2.0, 4.0, 8.0) for m in (1.0, 1.25, 1.5, 1.75))
_ENOUGH_LANES = 6  # more than this is no reason to go on looking
_STAGNATION_COUNTS = (255, 256, 257, 300, 1000, 2049)
_DISGUISED_BITS = 17  # rounding of the disguise itself costs an honest, truncating fp32 sum this far down
_FIRST_EXPONENT = 3  # M/m = 8: lost already here means that the answer is wrong for another reason
_BEYOND = 2  # powers of two beyond what the accumulator keeps, where its place of rounding is asked for
_ROUNDS = 2  # times that a probe is repeated on a narrow kernel, whose order may change from call to call
_RANGE = 2.0**17  # beyond float16's largest number, far within bfloat16's and TF32's
_OPERAND_BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
_IO_ROUNDING_BITS = 3  # that rounding a term to its own dtype may cost an honest kernel whose factor is not dyadic


@dataclass(frozen=True)
class ProbeReading:
    """What one pattern of probes read off one sum.

    slot, output   names of the probed input and of the output read
    pattern        "far", "near", "paired", "strided", "disguised", "input precision", "stagnation" or "place"
    bits           effective significant bits, minimum over placements; None: no information
    contributions  terms that the probed output element adds up
    calls          calls of the kernel that this slot and output cost in all (on each of its readings)
    where          the conditions in words: neutral fill, index lever
    reach          bits beyond which this probe cannot see, limited by the dtypes of slot and output
    placements     bits of each placement; None where nothing was lost: +M and −M met first, or the
                   accumulator keeps more than `reach`
    wrong          placements whose answer is wrong although M/m is so small that nothing can be lost
    stops_at       stagnation only: the number of equal contributions at which the sum stops growing
    short_range    input precision and place only: numbers beyond float16's range are lost (None: not asked)
    place          place only: where the sum rounds, if it is narrow
    note           why there is no reading
    over           the axes that are summed over, in words
    """

    slot: str
    output: str
    pattern: str
    bits: int | None
    contributions: int
    calls: int
    where: str
    reach: int = 0
    placements: tuple[int | None, ...] = ()
    slot_dtype: torch.dtype | None = None
    wrong: int = 0
    stops_at: int | None = None
    short_range: bool | None = None
    place: Place | None = None
    note: str = ""
    over: str = ""


@dataclass(frozen=True)
class _Lane:
    """Elements of the slot that one output element adds up with equal weights, in memory order."""

    positions: Tensor  # (n,) int64, flat positions in the slot
    element: int  # flat position in the output
    weight: float


@dataclass(frozen=True)
class _Setting:
    """Inputs under which a slot feeds an output through a plain sum, and the sums to probe."""

    inputs: tuple[Value, ...]
    slot: int
    output: int
    lanes: tuple[_Lane, ...]
    axes: tuple[int, ...]
    where: str
    noise_seed: int = 0

    @property
    def tensor(self) -> Tensor:
        t = self.inputs[self.slot]
        assert isinstance(t, Tensor)
        return t

    @property
    def contributions(self) -> int:
        return int(self.lanes[0].positions.numel())


@dataclass(frozen=True)
class _Placement:
    """One probe: places (in the lane's order) of +M, m and −M, and of the disguising pairs."""

    pattern: str
    places: Places
    noise: tuple[tuple[int, int, int], ...] = ()  # (place of +s, place of −s, s as a multiple of m)


@dataclass(frozen=True)
class _Probe:
    """A placement on a lane. `exact` is the oracle's answer in units of m."""

    lane: _Lane
    placement: _Placement
    exact: float = 1.0


_Batch: TypeAlias = "tuple[_Probe, ...]"  # the probes that ride in one call
_Batches: TypeAlias = "tuple[_Batch, ...]"


@dataclass(frozen=True)
class Sum:
    """One slot feeding one output, with the probes that the oracle confirmed for it.

    over      the axes that are summed over, in words
    counts    (number of equal terms, the oracle's answer) for the question where the sum stops growing
    seed      for the places that are asked for only when the sum turns out to be narrow
    """

    slot: str
    output: str
    over: str
    setting: _Setting
    batches: _Batches
    operand_batches: _Batches
    counts: tuple[tuple[int, float], ...]
    largest_exponent: int
    output_dtype: torch.dtype
    seed: int


@dataclass(frozen=True)
class ProbePlan:
    """Probes for every linear slot of a problem; made once, read on any number of kernels.

    `unprobed` says, per output name, why nothing can be read there: not applicable, never a fault.
    """

    sums: tuple[Sum, ...]
    unprobed: dict[str, str]


@dataclass(frozen=True)
class WrongSum:
    """Inputs on which a kernel that answered a probe wrongly is to be judged like on any others.

    The probed slot holds a plain probe (M/m = 8) and every other input is as drawn: a kernel that
    relies on what ties its inputs together is not blamed for the neutral fill.
    """

    output: str
    inputs: tuple[Value, ...]


def probe_accumulators(
    oracle: Fp64Reference,
    inputs: Sequence[Value],
    call: Call,
    *,
    trace: Trace,
    output_names: Sequence[str],
    input_names: Sequence[str],
    output_dtypes: Sequence[torch.dtype],
    input_axes: Sequence[Sequence[str] | None] = (),
    placements: int = 3,
    seed: int = 0,
) -> tuple[ProbeReading, ...]:
    """Plan the probes on the oracle and read them on one kernel; see `plan_probes`, `read_probes`."""
    plan = plan_probes(
        oracle,
        inputs,
        trace=trace,
        output_names=output_names,
        input_names=input_names,
        output_dtypes=output_dtypes,
        input_axes=input_axes,
        placements=placements,
        seed=seed,
    )
    return read_probes(plan, call)


def plan_probes(
    oracle: Fp64Reference,
    inputs: Sequence[Value],
    *,
    trace: Trace,
    output_names: Sequence[str],
    input_names: Sequence[str],
    output_dtypes: Sequence[torch.dtype],
    input_axes: Sequence[Sequence[str] | None] = (),
    placements: int = 3,
    seed: int = 0,
) -> ProbePlan:
    """Find every probe-able sum of the reference and confirm its probes in fp64. Calls no kernel.

    `placements` is the number of random positions per pattern. `inputs` gives sizes and dtypes;
    longer reductions read more. `input_axes` names the axes of each input, for the words about it.
    An output behind a nonlinearity goes to `unprobed`.
    """
    rng = random.Random(seed)
    slots = linear_slots(oracle, inputs, seed=rng.randrange(2**31))
    sums: list[Sum] = []
    unprobed: dict[str, str] = {}
    for output, name in enumerate(output_names):
        mine = [slot for slot, outputs in slots.items() if output in outputs]
        found: list[Sum] = []
        for slot in mine:
            if _read_elsewhere(found, input_names[slot], trace, output):
                continue
            setting = _find_setting(oracle, inputs, slot, output, trace, input_names, rng)
            if setting is not None:
                axes = input_axes[slot] if slot < len(input_axes) else None
                over = _axes_in_words(setting, axes, input_names[slot])
                found += _plan_sum(
                    oracle, setting, input_names[slot], name, over, output_dtypes[output], placements, rng
                )
        sums += found
        if not mine:
            unprobed[name] = "no input acts linearly on it"
        elif not found:
            unprobed[name] = "no input feeds it through a plain sum of three or more equal-weight terms"
    return ProbePlan(tuple(sums), unprobed)


def read_probes(plan: ProbePlan, call: Call) -> tuple[ProbeReading, ...]:
    """Put the planned probes to one kernel. `call` returns None where the kernel crashed or refused."""
    return tuple(reading for planned in plan.sums for reading in _read_sum(planned, call))


def wrong_sums(plan: ProbePlan, readings: Sequence[ProbeReading], drawn: Sequence[Value]) -> tuple[WrongSum, ...]:
    """Per output with a wrong answer, inputs to judge the kernel on; `drawn` are the problem's own inputs."""
    found: dict[str, WrongSum] = {}
    for planned in plan.sums:
        if any(r.wrong and r.slot == planned.slot and r.output == planned.output for r in readings):
            setting = planned.setting
            like = setting.tensor
            values = _probe_values(setting, planned.batches[0], _FIRST_EXPONENT).to(like.dtype).to(like.device)
            levered = [
                s if isinstance(s, Tensor) and not _is_float(s) else d
                for s, d in zip(setting.inputs, drawn, strict=True)
            ]
            found.setdefault(planned.output, WrongSum(planned.output, tuple(replaced(levered, setting.slot, values))))
    return tuple(found.values())


# ---------------------------------------------------------------------------------------------------
# Finding sums


def _read_elsewhere(found: Sequence[Sum], slot: str, trace: Trace, output: int) -> bool:
    """Whether every reduction that this slot feeds is one that a sum already found goes through."""

    def covered(r: Reduction) -> bool:
        return any(s.slot in r.fed_by and s.setting.contributions == r.length for s in found)

    mine = [r for r in trace.reductions_into(output) if slot in r.fed_by and r.length >= _LEAST_TERMS]
    return bool(mine) and all(covered(r) for r in mine)


def _find_setting(
    oracle: Fp64Reference,
    inputs: Sequence[Value],
    slot: int,
    output: int,
    trace: Trace,
    names: Sequence[str],
    rng: random.Random,
) -> _Setting | None:
    """The inputs under which the longest equal-weight sum from this slot into this output shows."""
    best: _Setting | None = None
    longest = _as_long_as_it_gets(trace, names[slot], output)
    for lever, levered in _with_levers(inputs, output, trace, names, rng):
        for fill, filled in _fills(levered, slot, names):
            found = _longest_sum(oracle, filled, slot, output, rng)
            if found is not None and (best is None or _worth(found) > _worth(best)):
                best = replace(found, where="; ".join(w for w in (fill, lever) if w))
            if best is not None and _worth(best) >= (longest, min(_ENOUGH_LANES, _sums_beside(best))):
                return best
        if best is not None:
            break  # the indices as drawn put fewer terms on a row
    return best


def _axes_in_words(setting: _Setting, names: Sequence[str] | None, slot: str) -> str:
    """`K`, or `batch` × `seq`; the name of the slot where its axes have no names."""
    summed = [names[a] for a in setting.axes] if names is not None and len(names) == setting.tensor.dim() else []
    named = [n for n in summed if not n.isdigit()]
    return " × ".join(f"`{n}`" for n in named) if named else f"`{slot}`"


def _worth(setting: _Setting) -> tuple[int, int]:
    """Longer sums read more; with more of them side by side they cost fewer calls."""
    return setting.contributions, min(_ENOUGH_LANES, len(setting.lanes))


def _sums_beside(setting: _Setting) -> int:
    return setting.tensor.numel() // setting.contributions


def _as_long_as_it_gets(trace: Trace, slot: str, output: int) -> int:
    lengths = [r.length for r in trace.reductions_into(output) if slot in r.fed_by]
    return max([_LEAST_TERMS, *lengths])


def _with_levers(
    inputs: Sequence[Value], output: int, trace: Trace, names: Sequence[str], rng: random.Random
) -> Iterator[tuple[str, list[Value]]]:
    """All contributions on one row first; the indices as drawn if that shows no sum."""
    levers = [n for n in trace.levers_on(output) if n in names and n not in trace.structural]
    if levers:
        changed = list(inputs)
        for name in levers:
            place, row = names.index(name), rng.randrange(trace.index_ranges[name])
            drawn = changed[place]
            assert isinstance(drawn, Tensor)
            changed[place] = torch.full_like(drawn, row)
        yield f"every element of {' and '.join(levers)} the same", changed
    yield "", list(inputs)


def _fills(inputs: Sequence[Value], slot: int, names: Sequence[str]) -> Iterator[tuple[str, list[Value]]]:
    """Neutral values of the other float inputs, under which terms tend to have equal weights.

    Ones make most weights equal; one input of zeros among ones uncouples neighbours (a normalised row
    of zeros projects nothing out); alternating signs survive the centring of a LayerNorm.
    """
    others = [p for p, v in enumerate(inputs) if p != slot and _is_float(v)]

    def filled(make: Callable[[int, Tensor], Tensor]) -> list[Value]:
        return [make(p, v) if p in others and isinstance(v, Tensor) else v for p, v in enumerate(inputs)]

    yield "other float inputs all ones", filled(lambda p, t: torch.ones_like(t))
    if not others:
        return
    for zero in others[:_MOST_ZEROED] if len(others) > 1 else ():
        words = f"{names[zero]} all zeros, other float inputs all ones"
        yield words, filled(lambda p, t, zero=zero: torch.zeros_like(t) if p == zero else torch.ones_like(t))  # type: ignore[misc]
    yield "other float inputs alternating ±1", filled(lambda p, t: _alternating(t))
    yield "other float inputs all zeros", filled(lambda p, t: torch.zeros_like(t))
    yield "other float inputs as drawn", list(inputs)


def _is_float(value: Value) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0


def _alternating(like: Tensor) -> Tensor:
    signs = torch.ones(like.shape[-1], device=like.device)
    signs[1::2] = -1.0
    return signs.to(like.dtype).expand(like.shape).clone()


def _ask(oracle: Fp64Reference, inputs: Sequence[Value], slot: int, value: Tensor, output: int) -> Tensor | None:
    """One output of the oracle, flat, in fp64 on the CPU; None where the reference refuses."""
    like = inputs[slot]
    assert isinstance(like, Tensor)
    values = exact_outputs(oracle, replaced(inputs, slot, value.to(like.dtype).to(like.device)))
    return None if values is None else values[output].detach().reshape(-1).to("cpu", torch.float64)


def _longest_sum(
    oracle: Fp64Reference, inputs: Sequence[Value], slot: int, output: int, rng: random.Random
) -> _Setting | None:
    """Try which axes of the slot, through a random element, one output adds up with equal weights."""
    like = inputs[slot]
    assert isinstance(like, Tensor)
    start = [rng.randrange(n) for n in like.shape]
    alone = _ask(oracle, inputs, slot, _at(like, [_flat(like, start)], [1.0]), output)
    if alone is None or not bool(torch.isfinite(alone).all()) or float(alone.abs().max()) == 0.0:
        return None
    for axes in _axis_sets(like):
        lane = _as_lane(like, start, axes)
        weights = torch.tensor([rng.randrange(1, 9) for _ in range(lane.numel())], dtype=torch.float64)
        summed = _ask(oracle, inputs, slot, _at(like, lane, weights), output)
        if summed is None:
            continue
        equal = (summed - alone * weights.sum()).abs() <= 1e-9 * alone.abs() * weights.sum()
        equal &= alone.abs() > 0.2 * alone.abs().max()
        elements = equal.nonzero()[:, 0]
        if elements.numel():
            element = int(elements[rng.randrange(elements.numel())])
            first = _Lane(lane, element, float(alone[element]))
            lanes = _lanes_beside(oracle, inputs, slot, output, first, start, axes, rng)
            return _Setting(tuple(inputs), slot, output, lanes, axes, "", rng.randrange(2**31))
    return None


def _axis_sets(like: Tensor) -> list[tuple[int, ...]]:
    """Sets of axes with at least three coordinates in all, longest first."""
    axes = [d for d in range(like.dim()) if like.shape[d] > 1]
    sets = [s for size in range(1, len(axes) + 1) for s in combinations(axes, size)]
    sizes = {s: math.prod(like.shape[d] for d in s) for s in sets}
    return sorted((s for s in sets if sizes[s] >= _LEAST_TERMS), key=lambda s: -sizes[s])


def _flat(like: Tensor, coordinates: Sequence[int]) -> int:
    flat = 0
    for size, coordinate in zip(like.shape, coordinates, strict=True):
        flat = flat * size + coordinate
    return flat


def _as_lane(like: Tensor, start: Sequence[int], axes: Sequence[int]) -> Tensor:
    """Flat positions that run over `axes` and keep the other coordinates of `start`."""
    numbers = torch.arange(like.numel()).reshape(like.shape)
    for axis in reversed(range(like.dim())):
        if axis not in axes:
            numbers = numbers.select(axis, start[axis])
    return numbers.reshape(-1)


def _at(like: Tensor, positions: Tensor | Sequence[int], values: Tensor | Sequence[float]) -> Tensor:
    """Zeros of the slot's shape, in fp64 on the CPU, with these values at these flat positions."""
    out = torch.zeros(like.numel(), dtype=torch.float64)
    out[torch.as_tensor(positions)] = torch.as_tensor(values, dtype=torch.float64)
    return out.reshape(like.shape)


def _lanes_beside(
    oracle: Fp64Reference,
    inputs: Sequence[Value],
    slot: int,
    output: int,
    first: _Lane,
    start: Sequence[int],
    axes: Sequence[int],
    rng: random.Random,
) -> tuple[_Lane, ...]:
    """Sums like the first one that feed other output elements, all found in one oracle run.

    One element of each is marked with its own number, which must come out times the first lane's
    weight and nothing else: where the reference mixes neighbours (the projection inside a
    normalisation's backward pass) no mark comes out clean, and the first lane stays alone.
    """
    like = inputs[slot]
    assert isinstance(like, Tensor)
    starts = _other_starts(like, start, axes, len(_MARKS) - 1, rng)
    if not starts:
        return (first,)
    everyone = [first.positions, *(_as_lane(like, other, axes) for other in starts)]
    marks = _MARKS[: len(everyone)]
    marked = _ask(oracle, inputs, slot, _at(like, [int(p[-1]) for p in everyone], marks), output)
    lanes = [first]
    for positions, mark in list(zip(everyone, marks, strict=True))[1:] if marked is not None else ():
        assert marked is not None
        elements = ((marked / (first.weight * mark) - 1).abs() < 1e-9).nonzero()[:, 0].tolist()
        if elements:
            lanes.append(_Lane(positions, rng.choice(elements), first.weight))
    return tuple(lanes)


def _other_starts(
    like: Tensor, start: Sequence[int], axes: Sequence[int], most: int, rng: random.Random
) -> list[list[int]]:
    free = [d for d in range(like.dim()) if d not in axes]
    others = math.prod(like.shape[d] for d in free)
    seen, starts = {tuple(start)}, []
    for _ in range(4 * most):
        candidate = [rng.randrange(like.shape[d]) if d in free else start[d] for d in range(like.dim())]
        if tuple(candidate) not in seen:
            seen.add(tuple(candidate))
            starts.append(candidate)
        if len(starts) == min(most, others - 1):
            break
    return starts


# ---------------------------------------------------------------------------------------------------
# Placing probes


def _plan_sum(
    oracle: Fp64Reference,
    setting: _Setting,
    slot: str,
    output: str,
    over: str,
    dtype: torch.dtype,
    placements: int,
    rng: random.Random,
) -> list[Sum]:
    largest = _largest_exponent(setting, dtype)
    if largest < _LEAST_REACH:
        return []
    wanted = [pattern for _ in range(placements) for pattern in PATTERNS]
    batches = _confirmed(oracle, setting, _fill_batches(setting, wanted, rng), largest)
    if not batches:
        return []
    sound = tuple(lane for lane in setting.lanes if any(p.lane is lane for b in batches for p in b))
    for probe in (p for b in batches for p in b):
        wanted.remove(probe.placement.pattern)
    again = _fill_batches(replace(setting, lanes=sound), wanted, rng)  # on lanes that have proved sound
    batches += _confirmed(oracle, setting, again, largest)
    operands: _Batches = ()
    if setting.tensor.dtype in _OPERAND_BITS:
        near = _fill_batches(setting, ["near"] * placements, rng)
        operands = _confirmed_operands(oracle, setting, near)
    counts = _confirmed_counts(oracle, setting, dtype)
    sound_setting = replace(setting, lanes=sound)
    return [
        Sum(slot, output, over, sound_setting, batches, operands, counts, largest, dtype, rng.randrange(2**31)),
    ]


def _largest_exponent(setting: _Setting, dtype: torch.dtype) -> int:
    """Largest k = log2(M/m) that slot and output dtypes can carry; beyond 30 nothing is learnt."""
    up, down = _reach(setting.tensor.dtype)
    shown = _reach(dtype)[1] + math.log2(abs(setting.lanes[0].weight))
    return max(0, min(30, 2 * up, 2 * int(min(down, shown)) + 1))


def _reach(dtype: torch.dtype) -> tuple[int, int]:
    """Powers of two above and below one that the dtype carries: normal ones, but all that fp8 has."""
    info = torch.finfo(dtype)
    if dtype.itemsize == 1:
        return int(math.log2(info.max)), -int(math.log2(info.smallest_normal * info.eps))
    return int(math.log2(info.max)) - 1, -int(math.log2(info.smallest_normal))


def _fill_batches(setting: _Setting, wanted: Sequence[str], rng: random.Random) -> _Batches:
    """Deal the wanted patterns out to lanes; within a batch no two probes share a coordinate.

    On disjoint coordinates a probe's large terms meet no other probe's in one row of the reduction,
    so per-term roundings cancel as they do for a probe alone.
    """
    batches: list[list[_Probe]] = [[]]
    taken: set[int] = set()
    for pattern in wanted:
        placement = _place(pattern, setting.contributions, taken, rng)
        if placement is None or len(batches[-1]) == len(setting.lanes):
            batches.append([])
            taken = set()
            placement = _place(pattern, setting.contributions, taken, rng)
        if placement is not None:
            batches[-1].append(_Probe(setting.lanes[len(batches[-1])], placement))
            taken |= {*placement.places, *(p for pair in placement.noise for p in pair[:2])}
    return tuple(tuple(b) for b in batches if b)


def _place(pattern: str, n: int, taken: set[int], rng: random.Random) -> _Placement | None:
    for _ in range(20):
        places = _three_places(pattern, n, rng)
        if len(set(places)) == 3 and not taken & set(places):
            if pattern != "disguised":
                return _Placement(pattern, places)
            return _Placement(pattern, places, _disguise(n, taken | set(places), rng))
    return None


def _three_places(pattern: str, n: int, rng: random.Random) -> Places:
    """Places of +M, m, −M. In memory order the small term stands between the large ones."""
    if pattern == "near":
        start = rng.randrange(max(1, n - _NEAR_SPAN + 1))
        near = sorted(rng.sample(range(start, min(n, start + _NEAR_SPAN)), 3))
        return near[0], near[1], near[2]
    if pattern == "paired":
        first = rng.randrange(max(1, n // 2))
        return first, first + 1, rng.randrange(min(n - 1, first + 1 + max(1, n // 3)), n)
    if pattern == "strided":  # a power of two as large as fits is a multiple of any smaller number of lanes
        stride = 1 << ((n - 1) // 2).bit_length() - 1
        first = rng.randrange(n - 2 * stride)
        return first, first + stride, first + 2 * stride
    return tuple(min(n - 1, int(n * rng.uniform(*part))) for part in _FAR_PARTS)  # type: ignore[return-value]


def _disguise(n: int, taken: set[int], rng: random.Random) -> tuple[tuple[int, int, int], ...]:
    """± pairs of small multiples of m: exact wherever m itself is, and they cancel."""
    free = [p for p in range(n) if p not in taken]
    pairs = min(_DISGUISE_PAIRS, len(free) // 8)
    places = rng.sample(free, 2 * pairs)
    return tuple((a, b, rng.choice((1, 2, 3))) for a, b in zip(places[::2], places[1::2], strict=True))


# -- the values of a probe --------------------------------------------------------------------------


def _probe_values(setting: _Setting, batch: Iterable[_Probe], k: int) -> Tensor:
    """The slot's tensor (fp64, CPU) with every probe of the batch at M/m = 2ᵏ, in noise.

    One k for all: where the reference mixes neighbours, each answer then stays the same multiple of m.
    """
    large, small = _large_and_small(k)
    x = _noise(setting, small)
    for probe in batch:
        positions = probe.lane.positions
        a, b, c = (int(positions[p]) for p in probe.placement.places)
        x[a], x[b], x[c] = large, small, -large
        for plus, minus, times in probe.placement.noise:
            x[positions[plus]], x[positions[minus]] = times * small, -times * small
    return x.reshape(setting.tensor.shape)


def _large_and_small(k: int) -> tuple[float, float]:
    large = 2.0 ** ((k + 1) // 2)
    return large, large * 2.0**-k


def _noise(setting: _Setting, small: float) -> Tensor:
    """Flat values of random signs all over the slot, so small that they do not change an answer of about `small`.

    Where the dtype reaches little further down than `small`, fewer of them; zeros if that leaves too few.
    """
    like = setting.tensor
    lowest = _lowest_exponent(like.dtype)
    exponent = min(_NOISE_EXPONENT, int(math.log2(small)) - lowest)
    terms = setting.contributions
    noisy = min(terms, (_NOISE_DRIFT * 2.0**exponent) ** 2) if exponent > 0 else 0
    if noisy < min(_LEAST_NOISE, terms):
        return torch.zeros(like.numel(), dtype=torch.float64)
    generator = torch.Generator().manual_seed(setting.noise_seed)
    chance = torch.rand(like.numel(), generator=generator, dtype=torch.float64) * (terms / noisy)
    signs = (chance < 0.5).double() - ((chance >= 0.5) & (chance < 1.0)).double()
    return signs * small * 2.0**-exponent


def _lowest_exponent(dtype: torch.dtype) -> int:
    """Power of two down to which every number is exact: subnormal ones where the normal range is short."""
    info = torch.finfo(dtype)
    return int(math.log2(info.smallest_normal * (info.eps if info.smallest_normal > 2.0**-20 else 1.0)))


def _operand_values(setting: _Setting, batch: _Batch, k: int) -> Tensor:
    """1 + 2⁻ᵏ and −1: their sum shows whether 2⁻ᵏ was kept."""
    x = _noise(setting, 2.0**-k)
    for probe in batch:
        x[probe.lane.positions[probe.placement.places[0]]] = 1.0 + 2.0**-k
        x[probe.lane.positions[probe.placement.places[1]]] = -1.0
    return x.reshape(setting.tensor.shape)


def _equal_values(setting: _Setting, count: int, value: float) -> Tensor:
    """So many terms of this value at the head of the first lane."""
    x = _noise(setting, value)
    lane = setting.lanes[0].positions
    x[lane] = 0.0
    x[lane[:count]] = value
    return x.reshape(setting.tensor.shape)


def _between_values(setting: _Setting, plus: int, minus: int, small: float) -> Tensor:
    """One and −1 at these places of the first lane, `small` on all others."""
    x = _noise(setting, small)
    lane = setting.lanes[0].positions
    x[lane] = small
    x[lane[plus]], x[lane[minus]] = 1.0, -1.0
    return x.reshape(setting.tensor.shape)


def _one_value(setting: _Setting, value: float) -> Tensor:
    x = _noise(setting, value)
    x[setting.lanes[0].positions[setting.contributions // 2]] = value
    return x.reshape(setting.tensor.shape)


# -- what the oracle says about them ----------------------------------------------------------------


def _confirmed(oracle: Fp64Reference, setting: _Setting, batches: _Batches, largest: int) -> _Batches:
    """Only the probes whose answer the oracle shows to be about m at the hardest exponent."""
    small = _large_and_small(largest)[1]
    return _exact_ones(oracle, setting, batches, small, lambda batch: _probe_values(setting, batch, largest))


def _confirmed_operands(oracle: Fp64Reference, setting: _Setting, batches: _Batches) -> _Batches:
    """The same for probes of the operands, in units of 2⁻ᵏ."""
    k = _OPERAND_BITS[setting.tensor.dtype] - 1
    return _exact_ones(oracle, setting, batches, 2.0**-k, lambda batch: _operand_values(setting, batch, k))


def _exact_ones(
    oracle: Fp64Reference, setting: _Setting, batches: _Batches, small: float, values: Callable[[_Batch], Tensor]
) -> _Batches:
    kept = []
    for batch in batches:
        answers = _ask(oracle, setting.inputs, setting.slot, values(batch), setting.output)
        if answers is None:
            continue
        exact = [float(answers[p.lane.element]) / small for p in batch]
        kept.append(
            tuple(replace(p, exact=e) for p, e in zip(batch, exact, strict=True) if 0.5 < e / p.lane.weight < 1.5)
        )
    return tuple(b for b in kept if b)


def _confirmed_counts(oracle: Fp64Reference, setting: _Setting, dtype: torch.dtype) -> tuple[tuple[int, float], ...]:
    """Numbers of equal terms whose sum the reference lets grow and the output dtype can hold, with the exact sum.

    A reference that clamps, or an output that overflows, stops growing rightly.
    """
    n, weight = setting.contributions, setting.lanes[0].weight
    most = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    counts = []
    for count in sorted({c for c in (*_STAGNATION_COUNTS, n) if c <= n}):
        answers = _ask(oracle, setting.inputs, setting.slot, _equal_values(setting, count, 1.0), setting.output)
        exact = None if answers is None else float(answers[setting.lanes[0].element])
        if exact is None or abs(exact) > most or abs(exact / (weight * count) - 1) > 1e-3:
            break
        counts.append((count, exact))
    return tuple(counts)


# ---------------------------------------------------------------------------------------------------
# Reading a kernel


class _Kernel:
    """A kernel seen through one slot and one output; counts its calls."""

    def __init__(self, call: Call, setting: _Setting) -> None:
        self._call, self._setting = call, setting
        self._others = [v.cpu() if isinstance(v, Tensor) else v for v in setting.inputs]
        self.calls = 0

    def answer(self, values: Tensor) -> Tensor | None:
        """The output, flat, in fp64; None when the kernel gave none or one of another size."""
        self.calls += 1
        x = values.to(self._setting.tensor.dtype)
        fresh = [v.clone() if isinstance(v, Tensor) else v for v in replaced(self._others, self._setting.slot, x)]
        outputs = self._call(fresh)
        if outputs is None or len(outputs) <= self._setting.output:
            return None
        flat = outputs[self._setting.output].detach().cpu().reshape(-1).to(torch.float64)
        return flat if flat.numel() > max(lane.element for lane in self._setting.lanes) else None

    def must_answer(self, values: Tensor) -> Tensor:
        """The same; raises NoAnswer."""
        answers = self.answer(values)
        if answers is None:
            raise NoAnswer
        return answers


@dataclass(frozen=True)
class _Bits:
    """What a bisection read off one probe."""

    bits: int | None
    note: str = ""
    wrong: bool = False


def _read_sum(planned: Sum, call: Call) -> list[ProbeReading]:
    kernel = _Kernel(call, planned.setting)
    by_pattern: dict[str, list[_Bits]] = {}
    for batch in planned.batches:
        for probe, bits in zip(batch, _bisect(planned, batch, kernel), strict=True):
            by_pattern.setdefault(probe.placement.pattern, []).append(bits)
    blank = ProbeReading(
        planned.slot,
        planned.output,
        "",
        None,
        planned.setting.contributions,
        0,
        planned.setting.where,
        planned.largest_exponent + 1,
        slot_dtype=planned.setting.tensor.dtype,
        over=planned.over,
    )
    readings = [
        replace(
            blank,
            pattern=pattern,
            bits=_least(b.bits for b in found),
            placements=tuple(b.bits for b in found),
            note=next((b.note for b in found if b.note), ""),
            wrong=sum(b.wrong for b in found),
        )
        for pattern, found in by_pattern.items()
    ]
    if planned.operand_batches:
        readings.append(_read_operands(planned, kernel, blank))
    stagnation = _read_stagnation(planned, kernel, blank)
    readings.append(stagnation)
    narrow = _least(r.bits for r in readings if r.pattern in PATTERNS and r.pattern != "disguised")
    if narrow is None or narrow >= NARROW_BITS:
        narrow = _least(r.bits for r in readings if r.pattern == "disguised" and (r.bits or 0) < _DISGUISED_BITS)
    if narrow is not None and narrow < NARROW_BITS:
        readings.append(_read_place(planned, kernel, blank, narrow, stagnation.stops_at))
    return [replace(r, calls=kernel.calls) for r in readings]


def _least(bits: Iterable[int | None]) -> int | None:
    return min((b for b in bits if b is not None), default=None)


def _survives(probe: _Probe, answers: Tensor, k: int) -> bool:
    return abs(float(answers[probe.lane.element]) / (probe.exact * _large_and_small(k)[1]) - 1) < _CLOSE


def _bisect(planned: Sum, batch: _Batch, kernel: _Kernel) -> list[_Bits]:
    """Bits of each probe of the batch; every call tells all of them something.

    The least k that loses m counts: beyond it, what the rounding of a non-dyadic term leaves behind
    can pass for m by chance.
    """
    largest = planned.largest_exponent
    survived: list[set[int]] = [{0} for _ in batch]
    lost = [largest + 1] * len(batch)
    k = first = min(_FIRST_EXPONENT, largest)
    while True:
        answers = kernel.answer(_probe_values(planned.setting, batch, k))
        if answers is None:
            return [_Bits(None, "the kernel gave no answer to this probe")] * len(batch)
        for number, probe in enumerate(batch):
            if _survives(probe, answers, k):
                survived[number].add(k)
            else:
                lost[number] = min(lost[number], k)
        kept = [max(k for k in ks if k < end) for ks, end in zip(survived, lost, strict=True)]
        undecided = [(s, n) for s, n in zip(kept, lost, strict=True) if n - s > 1 and n > first]
        if not undecided:
            return [_bits_or_why(s, n, first, largest) for s, n in zip(kept, lost, strict=True)]
        k = sum(undecided[0]) // 2


def _bits_or_why(kept: int, lost: int, first: int, largest: int) -> _Bits:
    if lost <= first:
        return _Bits(None, "the answer is wrong even without swamping", wrong=True)
    return _Bits(None if lost > largest else kept + 1)


def _read_operands(planned: Sum, kernel: _Kernel, blank: ProbeReading) -> ProbeReading:
    """Precision of the operands themselves, on neighbours, which a narrow sum between blocks leaves alone."""
    blank = replace(blank, pattern="input precision", reach=_OPERAND_BITS[planned.setting.tensor.dtype])
    kept: list[int | None] = []
    for batch in planned.operand_batches:
        low, high = [0] * len(batch), [blank.reach] * len(batch)
        while any(h - low_ > 1 for low_, h in zip(low, high, strict=True)):
            k = next((low_ + h) // 2 for low_, h in zip(low, high, strict=True) if h - low_ > 1)
            answers = kernel.answer(_operand_values(planned.setting, batch, k))
            if answers is None:
                return replace(blank, note="the kernel gave no answer to this probe")
            for i, probe in enumerate(batch):
                if abs(float(answers[probe.lane.element]) / (probe.exact * 2.0**-k) - 1) < _CLOSE:
                    low[i] = max(low[i], k) if k < high[i] else low[i]
                else:
                    high[i] = min(high[i], k)
                    low[i] = min(low[i], high[i] - 1)
        kept += [low_ + 1 if low_ else None for low_ in low]
    bits = max((b for b in kept if b is not None), default=None)
    short = _short_range(planned, kernel) if bits is not None and 10 <= bits <= 12 else None
    return replace(blank, bits=bits, placements=tuple(kept), short_range=short)


def _short_range(planned: Sum, kernel: _Kernel) -> bool | None:
    """Whether a number beyond float16's range is lost; None where slot or output could not carry it anyway."""
    lane = planned.setting.lanes[0]
    if min(_reach(planned.setting.tensor.dtype)[0], _reach(planned.output_dtype)[0]) < 40 or lane.weight > 2.0**20:
        return None
    answers = kernel.answer(_one_value(planned.setting, _RANGE))
    if answers is None:
        return None
    return not abs(float(answers[lane.element]) / (lane.weight * _RANGE) - 1) < _CLOSE


def _read_stagnation(planned: Sum, kernel: _Kernel, blank: ProbeReading) -> ProbeReading:
    """Equal terms, ever more of them: where does the sum stop growing?"""
    blank = replace(blank, pattern="stagnation")
    lane = planned.setting.lanes[0]
    previous = 0.0
    counts = planned.counts
    if counts:
        answers = kernel.answer(_equal_values(planned.setting, counts[-1][0], 1.0))
        if answers is not None and float(answers[lane.element]) / counts[-1][1] >= 0.9:
            return blank  # all of them are there
    for count, exact in counts:
        answers = kernel.answer(_equal_values(planned.setting, count, 1.0))
        if answers is None:
            return replace(blank, note="the kernel gave no answer to this probe")
        got = float(answers[lane.element]) * count / exact
        if got < 0.9 * count and got <= 1.05 * max(previous, 1.0) and previous > 0:
            return _stalled_or_saturated(planned, kernel, blank, count, got)
        previous = got
    return blank


def _stalled_or_saturated(planned: Sum, kernel: _Kernel, blank: ProbeReading, count: int, got: float) -> ProbeReading:
    """A carry stands still at the same count whatever the terms are worth; a clamp stops at a value."""
    lane = planned.setting.lanes[0]
    answers = kernel.answer(_equal_values(planned.setting, count, 0.125))
    scaled = None if answers is None else 8 * float(answers[lane.element]) / lane.weight
    if scaled is not None and abs(scaled - got) <= 0.1 * abs(got):
        return replace(blank, stops_at=round(got))
    return replace(blank, note=f"the sum saturates at {got * lane.weight:.6g}, which no accumulator's width explains")


def _read_place(planned: Sum, kernel: _Kernel, blank: ProbeReading, bits: int, stops_at: int | None) -> ProbeReading:
    """Where the narrow sum rounds, and once more how many bits it keeps: its order may change from call to call."""
    blank = replace(blank, pattern="place")
    try:
        bits = _fewest_bits(planned, kernel, bits)
        k = min(planned.largest_exponent, bits + _BEYOND)
        questions = Questions(
            terms=planned.setting.contributions,
            beside=len(planned.setting.lanes),
            kept=lambda triples: _kept(planned, kernel, triples, k),
            share=lambda plus, minus: _share(planned, kernel, plus, minus, bits),
        )
        stalled = stops_at is not None and stops_at <= 1.5 * 2**bits
        place = find_place(questions, random.Random(planned.seed), stands_still=stalled)
        short = _short_range(planned, kernel) if 10 <= bits <= 12 else None
    except NoAnswer:
        return replace(blank, note="the kernel gave no answer to this probe")
    return replace(blank, bits=bits, place=place, short_range=short)


def _fewest_bits(planned: Sum, kernel: _Kernel, bits: int) -> int:
    """Bits below which no placement loses anything, asked twice."""
    setting = planned.setting
    bare = tuple(tuple(p for p in batch if p.placement.pattern != "disguised") for batch in planned.batches)
    while bits > _FIRST_EXPONENT + 1:
        for batch in [b for b in bare if b] * _ROUNDS:
            answers = kernel.must_answer(_probe_values(setting, batch, bits - 1))
            if not all(_survives(p, answers, bits - 1) or not _survives_at_all(p, answers) for p in batch):
                bits -= 1
                break
        else:
            return bits
    return bits


def _survives_at_all(probe: _Probe, answers: Tensor) -> bool:
    """False for an answer that is no number: a wrong kernel, of which a bit count says nothing."""
    return math.isfinite(float(answers[probe.lane.element]))


def _kept(planned: Sum, kernel: _Kernel, triples: Sequence[Places], k: int) -> list[bool]:
    """Whether m survives with +M, m and −M on these places, as many questions a call as there are lanes."""
    setting, kept = planned.setting, []
    exact = {id(p.lane): p.exact for batch in planned.batches for p in batch}
    for start in range(0, len(triples), len(setting.lanes)):
        batch = tuple(
            _Probe(lane, _Placement("place", places), exact[id(lane)])
            for lane, places in zip(setting.lanes, triples[start : start + len(setting.lanes)], strict=False)
        )
        answers = kernel.must_answer(_probe_values(setting, batch, k))
        kept += [abs(float(answers[p.lane.element]) / (p.exact * _large_and_small(k)[1]) - 1) < 0.5 for p in batch]
    return kept


def _share(planned: Sum, kernel: _Kernel, plus: int, minus: int, bits: int) -> float:
    """What is left of small terms, each three eighths of half the last bit that a sum with M in it has.

    Not nearer to that bit: a weight that is no power of two moves it by up to two.
    """
    small, lane = 1.5 * 2.0 ** -(bits + 2), planned.setting.lanes[0]
    answers = kernel.must_answer(_between_values(planned.setting, plus, minus, small))
    return float(answers[lane.element]) / (lane.weight * small * (planned.setting.contributions - 2))


# ---------------------------------------------------------------------------------------------------
# Reading the readings


def fingerprints(readings: Sequence[ProbeReading]) -> tuple[Fingerprint, ...]:
    """One fingerprint per output, from the slot that reads fewest bits."""
    outputs = dict.fromkeys(r.output for r in readings)
    return tuple(_fingerprint_of_output([r for r in readings if r.output == o]) for o in outputs)


def _fingerprint_of_output(readings: Sequence[ProbeReading]) -> Fingerprint:
    slots = dict.fromkeys(r.slot for r in readings)
    candidates = [_fingerprint([r for r in readings if r.slot == s]) for s in slots]
    seen = min(candidates, key=lambda f: (f.bits is None, f.bits or 0))
    return replace(seen, wrong=any(f.wrong for f in candidates))


def _fingerprint(readings: Sequence[ProbeReading]) -> Fingerprint:
    some = readings[0]
    patterns = {r.pattern: r for r in readings}
    swamped = [r for r in readings if r.pattern in PATTERNS]
    bare = _least(r.bits for r in swamped if r.pattern != "disguised")
    hidden = _hidden_bits(bare, patterns)
    placed = patterns.get("place")
    bits = hidden or (placed.bits if placed is not None and placed.bits is not None else bare)
    lossless = bits is None and sum(len(r.placements) for r in swamped) >= _ENOUGH_PLACEMENTS
    at_least = some.reach if lossless and not any(r.note for r in swamped) else None
    accumulator, rounds, every = name_of(bits, at_least), "", None
    confidence = _confidence([b for r in swamped for b in r.placements if b is not None])
    narrow = bits is not None and bits < NARROW_BITS
    if narrow:
        rounds, every, confidence = _rounds(placed, confidence, hidden=hidden is not None)
        accumulator = _within_range(accumulator, placed)
    operands = patterns.get("input precision")
    if not narrow and operands is not None and _is_narrow_operand(operands):
        assert operands.bits is not None
        accumulator, rounds, bits, at_least = (
            operands_of(operands.bits, short_range=operands.short_range),
            OPERANDS,
            operands.bits,
            None,
        )
        confidence = CERTAIN if len(set(operands.placements)) == 1 else LIKELY
    if accumulator == NOT_DETERMINED:
        confidence = NOT_DETERMINED
    stops_at = patterns["stagnation"].stops_at if "stagnation" in patterns else None
    print_ = Fingerprint(
        output=some.output,
        slot=some.slot,
        over=some.over or f"`{some.slot}`",
        accumulator=accumulator,
        bits=bits,
        at_least=at_least,
        rounds=rounds,
        every=every,
        confidence=confidence,
        contributions=some.contributions,
        unbounded=stops_at is not None or is_unbounded(rounds) or (narrow and not rounds),
        stops_at=stops_at,
        wrong=any(r.wrong for r in readings),
        sentence="",
        slot_dtype=some.slot_dtype,
    )
    why = next((r.note for r in readings if r.wrong), "") or next((r.note for r in readings if r.note), "")
    return replace(print_, sentence=sentence_of(print_, why))


def _hidden_bits(bare: int | None, patterns: dict[str, ProbeReading]) -> int | None:
    """Bits that only a disguised probe lost: the kernel knows a bare probe when it sees one."""
    disguised = patterns["disguised"].bits if "disguised" in patterns else None
    if disguised is None or disguised >= _DISGUISED_BITS or (bare is not None and bare < _DISGUISED_BITS):
        return None
    return disguised


def _rounds(placed: ProbeReading | None, confidence: str, *, hidden: bool) -> tuple[str, int | None, str]:
    if hidden:
        return WHEN_DISGUISED, None, LIKELY
    if placed is None or placed.place is None:
        return "", None, LIKELY
    return placed.place.rounds, placed.place.every, confidence if placed.place.sure else LIKELY


def _within_range(accumulator: str, placed: ProbeReading | None) -> str:
    """11 bits with more than float16's range are no float16, whatever else they are."""
    wide = placed is not None and placed.short_range is False
    return NOT_DETERMINED if wide and accumulator == FLOAT16 else accumulator


def _is_narrow_operand(reading: ProbeReading) -> bool:
    allowed = NARROW_BITS if reading.reach > NARROW_BITS else reading.reach - _IO_ROUNDING_BITS + 1
    return reading.bits is not None and reading.bits < allowed


def _confidence(informative: Sequence[int]) -> str:
    return CERTAIN if len(informative) >= 4 else LIKELY
