"""Swamping probes: how many bits a kernel's accumulator really keeps, and where it drops the rest.

A sum is fed zeros except +M, m and −M. The exact answer is m, which any output dtype can show, so a
bfloat16 output does not hide what happened inside: while the accumulator holds M it can keep m only
if m is not below its last bit. The largest M/m that survives is the accumulator's precision. Where
the three terms stand tells where the rounding happens: inside a block, between tiles, per partial.

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

from seatrial.numerics.trace import Fp64Reference, Reduction, Trace, exact_outputs, linear_slots, replaced

if TYPE_CHECKING:
    from seatrial.model import Value

Call: TypeAlias = "Callable[[Sequence[Value]], tuple[Tensor, ...] | None]"

PATTERNS = ("far", "near", "paired", "disguised")
FLOAT32 = "float32"
BFLOAT16 = "bfloat16"
FLOAT16 = "float16"
FP8_TENSOR_CORE = "14-bit (FP8 tensor core)"
FLOAT64 = "float64"
TF32_OPERANDS = "tf32 operands"
NOT_DETERMINED = "not determined"

_CLOSE = 0.3  # a probe survives when the answer is within 30 % of exact: losing m altogether is 100 %
_NEAR_SPAN = 4  # places within which the three terms of a near probe stand
_FAR_PARTS = ((0.0, 0.25), (0.4, 0.6), (0.75, 1.0))  # of the sum, for the three terms of a far probe
_DISGUISE_PAIRS = 4  # ± pairs of small terms around a disguised probe
_LEAST_TERMS = 3
_LEAST_REACH = 12  # a probe that cannot tell bfloat16 and float16 from more says nothing
_ENOUGH_PLACEMENTS = 6  # without a loss on so many, the order of summation is no excuse
_MOST_ZEROED = 3  # other inputs set to zero one at a time, in search of uncoupled sums
# Distinct numbers, exact in every dtype down to fp8; one for each sum probed side by side in one call.
_MARKS = tuple(m * s for s in (1.0, 2.0, 4.0, 8.0) for m in (1.0, 1.25, 1.5, 1.75))
_ENOUGH_LANES = 6  # more than this is no reason to go on looking
_STAGNATION_COUNTS = (255, 256, 257, 300, 1000, 2049)
_FLOAT64_BITS = 31  # as far as the probes reach; less was lost somewhere
_FLOAT32_BITS = 23  # fp32 keeps 24; one is left for the rounding of a non-dyadic weight
_SLACK_BITS = 3  # further bits that rounding of neighbouring terms may cost an honest fp32 sum
_DISGUISED_BITS = 17  # rounding of the disguise itself costs an honest, truncating fp32 sum this far down
_FLOAT64_REACH = 28  # a probe that reaches this far and loses nothing saw more than fp32
_FIRST_EXPONENT = 3  # M/m = 8: lost already here means that the answer is wrong for another reason


@dataclass(frozen=True)
class ProbeReading:
    """What one pattern of probes read off one sum.

    slot, output   names of the probed input and of the output read
    pattern        "far", "near", "paired", "disguised", "input precision" or "stagnation"
    bits           effective significant bits, minimum over placements; None: no information
    contributions  terms that the probed output element adds up
    calls          calls of the kernel that this slot and output cost in all (on each of its readings)
    where          the conditions in words: neutral fill, index lever
    reach          bits beyond which this probe cannot see, limited by the dtypes of slot and output
    placements     bits of each placement; None where nothing was lost: +M and −M met first, or the
                   accumulator keeps more than `reach`
    stops_at       stagnation only: the number of equal contributions at which the sum stops growing
    note           why there is no reading
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
    stops_at: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Fingerprint:
    """The accumulator behind one output, as the probes saw it.

    accumulator  FLOAT32, BFLOAT16, FLOAT16, FP8_TENSOR_CORE, FLOAT64, TF32_OPERANDS or NOT_DETERMINED
    bits         least effective bits over the patterns; None when nothing was lost or could be read
    at_least     bits that no placement lost, when `bits` is None; None when nothing could be read
    rounds       where bits are dropped: "everywhere", "inside blocks", "between tiles", "per partial",
                 "operands", "when disguised" (bare probes are added up well, disguised ones are
                 not), or "" for an accumulator of full width
    confidence   "high", "medium" or "low"
    unbounded    the error grows with the number of contributions (a running sum is held in few bits)
    """

    output: str
    slot: str
    accumulator: str
    bits: int | None
    at_least: int | None
    rounds: str
    confidence: str
    contributions: int
    unbounded: bool
    stops_at: int | None
    sentence: str
    slot_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Narrowness:
    """The verdict rule on one fingerprint: is this accumulator narrower than the contract allows?

    `verified` is False when nothing could be read: then neither a fault nor its absence is shown.
    """

    verified: bool
    fault: bool
    reference_deficient: bool
    reason: str


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
    where: str

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
    places: tuple[int, int, int]
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
    """One slot feeding one output, with the probes that the oracle confirmed for it."""

    slot: str
    output: str
    setting: _Setting
    batches: _Batches
    operand_batches: _Batches
    largest_exponent: int
    output_dtype: torch.dtype


@dataclass(frozen=True)
class ProbePlan:
    """Probes for every linear slot of a problem; made once, read on any number of kernels.

    `unprobed` says, per output name, why nothing can be read there: not applicable, never a fault.
    """

    sums: tuple[Sum, ...]
    unprobed: dict[str, str]


def probe_accumulators(
    oracle: Fp64Reference,
    inputs: Sequence[Value],
    call: Call,
    *,
    trace: Trace,
    output_names: Sequence[str],
    input_names: Sequence[str],
    output_dtypes: Sequence[torch.dtype],
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
    placements: int = 3,
    seed: int = 0,
) -> ProbePlan:
    """Find every probe-able sum of the reference and confirm its probes in fp64. Calls no kernel.

    `placements` is the number of random positions per pattern. `inputs` gives sizes and dtypes;
    longer reductions read more. An output behind a nonlinearity goes to `unprobed`.
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
                found += _plan_sum(oracle, setting, input_names[slot], name, output_dtypes[output], placements, rng)
        sums += found
        if not mine:
            unprobed[name] = "no input acts linearly on it"
        elif not found:
            unprobed[name] = "no input feeds it through a plain sum of three or more equal-weight terms"
    return ProbePlan(tuple(sums), unprobed)


def read_probes(plan: ProbePlan, call: Call) -> tuple[ProbeReading, ...]:
    """Put the planned probes to one kernel. `call` returns None where the kernel crashed or refused."""
    return tuple(reading for planned in plan.sums for reading in _read_sum(planned, call))


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
            return _Setting(tuple(inputs), slot, output, lanes, "")
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
    if setting.tensor.dtype == torch.float32:
        operands = _confirmed_operands(oracle, setting, _fill_batches(setting, ["operands"] * placements, rng))
    return [Sum(slot, output, setting, batches, operands, largest, dtype)]


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


def _three_places(pattern: str, n: int, rng: random.Random) -> tuple[int, int, int]:
    """Places of +M, m, −M. In memory order the small term stands between the large ones."""
    if pattern == "near":
        start = rng.randrange(max(1, n - _NEAR_SPAN + 1))
        near = sorted(rng.sample(range(start, min(n, start + _NEAR_SPAN)), 3))
        return near[0], near[1], near[2]
    if pattern == "paired":
        first = rng.randrange(max(1, n // 2))
        return first, first + 1, rng.randrange(min(n - 1, first + 1 + max(1, n // 3)), n)
    return tuple(min(n - 1, int(n * rng.uniform(*part))) for part in _FAR_PARTS)  # type: ignore[return-value]


def _disguise(n: int, taken: set[int], rng: random.Random) -> tuple[tuple[int, int, int], ...]:
    """± pairs of small multiples of m: exact wherever m itself is, and they cancel."""
    free = [p for p in range(n) if p not in taken]
    pairs = min(_DISGUISE_PAIRS, len(free) // 8)
    places = rng.sample(free, 2 * pairs)
    return tuple((a, b, rng.choice((1, 2, 3))) for a, b in zip(places[::2], places[1::2], strict=True))


def _probe_values(setting: _Setting, batch: Iterable[_Probe], k: int) -> Tensor:
    """The slot's tensor (fp64, CPU) with every probe of the batch at M/m = 2ᵏ.

    One k for all: where the reference mixes neighbours, each answer then stays the same multiple of m.
    """
    x = torch.zeros(setting.tensor.numel(), dtype=torch.float64)
    large, small = _large_and_small(k)
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


def _confirmed(oracle: Fp64Reference, setting: _Setting, batches: _Batches, largest: int) -> _Batches:
    """Only the probes whose answer the oracle shows to be about m at the hardest exponent."""
    kept = []
    small = _large_and_small(largest)[1]
    for batch in batches:
        answers = _ask(oracle, setting.inputs, setting.slot, _probe_values(setting, batch, largest), setting.output)
        if answers is None:
            continue
        exact = [float(answers[p.lane.element]) / small for p in batch]
        kept.append(
            tuple(replace(p, exact=e) for p, e in zip(batch, exact, strict=True) if 0.5 < e / p.lane.weight < 1.5)
        )
    return tuple(b for b in kept if b)


def _confirmed_operands(oracle: Fp64Reference, setting: _Setting, batches: _Batches) -> _Batches:
    """The same for probes of the operands, in units of 2⁻ᵏ."""
    kept = []
    for batch in batches:
        answers = _ask(oracle, setting.inputs, setting.slot, _operand_values(setting, batch, 20), setting.output)
        if answers is not None:
            exact = [float(answers[p.lane.element]) * 2.0**20 for p in batch]
            kept.append(
                tuple(replace(p, exact=e) for p, e in zip(batch, exact, strict=True) if 0.5 < e / p.lane.weight < 1.5)
            )
    return tuple(b for b in kept if b)


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


def _read_sum(planned: Sum, call: Call) -> list[ProbeReading]:
    kernel = _Kernel(call, planned.setting)
    by_pattern: dict[str, list[int | None]] = {}
    notes: dict[str, str] = {}
    for batch in planned.batches:
        for probe, (bits, note) in zip(batch, _bisect(planned, batch, kernel), strict=True):
            by_pattern.setdefault(probe.placement.pattern, []).append(bits)
            if note:
                notes[probe.placement.pattern] = note
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
    )
    readings = [
        replace(blank, pattern=p, bits=_least(bits), placements=tuple(bits), note=notes.get(p, ""))
        for p, bits in by_pattern.items()
    ]
    if planned.operand_batches:
        readings.append(_read_operands(planned, kernel, blank))
    readings.append(_read_stagnation(planned, kernel, blank))
    return [replace(r, calls=kernel.calls) for r in readings]


def _least(bits: Iterable[int | None]) -> int | None:
    return min((b for b in bits if b is not None), default=None)


def _bisect(planned: Sum, batch: _Batch, kernel: _Kernel) -> list[tuple[int | None, str]]:
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
            return [(None, "the kernel gave no answer to this probe")] * len(batch)
        for number, probe in enumerate(batch):
            if abs(float(answers[probe.lane.element]) / (probe.exact * _large_and_small(k)[1]) - 1) < _CLOSE:
                survived[number].add(k)
            else:
                lost[number] = min(lost[number], k)
        kept = [max(k for k in ks if k < end) for ks, end in zip(survived, lost, strict=True)]
        undecided = [(s, n) for s, n in zip(kept, lost, strict=True) if n - s > 1 and n > first]
        if not undecided:
            return [_bits_or_why(s, n, first, largest) for s, n in zip(kept, lost, strict=True)]
        k = sum(undecided[0]) // 2


def _bits_or_why(kept: int, lost: int, first: int, largest: int) -> tuple[int | None, str]:
    if lost <= first:
        return None, "the answer is wrong even without swamping"
    return (None if lost > largest else kept + 1), ""


def _read_operands(planned: Sum, kernel: _Kernel, blank: ProbeReading) -> ProbeReading:
    """Precision of the operands themselves: 1 + 2⁻ᵏ and −1, whose sum shows whether 2⁻ᵏ was kept."""
    blank = replace(blank, pattern="input precision")
    kept = []
    for batch in planned.operand_batches:
        low, high = 0, 24
        while high - low > 1:
            k = (low + high) // 2
            answers = kernel.answer(_operand_values(planned.setting, batch, k))
            if answers is None:
                return replace(blank, note="the kernel gave no answer to this probe")
            survives = all(abs(float(answers[p.lane.element]) / (p.exact * 2.0**-k) - 1) < _CLOSE for p in batch)
            low, high = (k, high) if survives else (low, k)
        kept.append(low + 1 if low else None)
    return replace(blank, bits=_least(kept), placements=tuple(kept))


def _operand_values(setting: _Setting, batch: _Batch, k: int) -> Tensor:
    x = torch.zeros(setting.tensor.numel(), dtype=torch.float64)
    for probe in batch:
        x[probe.lane.positions[probe.placement.places[0]]] = 1.0 + 2.0**-k
        x[probe.lane.positions[probe.placement.places[1]]] = -1.0
    return x.reshape(setting.tensor.shape)


def _read_stagnation(planned: Sum, kernel: _Kernel, blank: ProbeReading) -> ProbeReading:
    """Equal terms, ever more of them: where does the sum stop growing?"""
    n, lane = planned.setting.contributions, planned.setting.lanes[0]
    counts = [c for c in (*_STAGNATION_COUNTS, n) if c <= n]
    previous, stops_at = 0.0, None
    for count in sorted(set(counts)):
        x = torch.zeros(planned.setting.tensor.numel(), dtype=torch.float64)
        x[lane.positions[:count]] = 1.0
        answers = kernel.answer(x.reshape(planned.setting.tensor.shape))
        if answers is None:
            return replace(blank, pattern="stagnation", note="the kernel gave no answer to this probe")
        got = float(answers[lane.element]) / lane.weight
        if got < 0.9 * count and got <= 1.05 * max(previous, 1.0) and previous > 0:
            stops_at = round(got)
            break
        previous = got
    return replace(blank, pattern="stagnation", stops_at=stops_at)


# ---------------------------------------------------------------------------------------------------
# Reading the readings


def fingerprints(readings: Sequence[ProbeReading]) -> tuple[Fingerprint, ...]:
    """One fingerprint per output, from the slot that reads fewest bits."""
    outputs = dict.fromkeys(r.output for r in readings)
    return tuple(_fingerprint_of_output([r for r in readings if r.output == o]) for o in outputs)


def _fingerprint_of_output(readings: Sequence[ProbeReading]) -> Fingerprint:
    slots = dict.fromkeys(r.slot for r in readings)
    candidates = [_fingerprint([r for r in readings if r.slot == s]) for s in slots]
    return min(candidates, key=lambda f: (f.bits is None, f.bits or 0))


def _fingerprint(readings: Sequence[ProbeReading]) -> Fingerprint:
    some = readings[0]
    patterns = {r.pattern: r for r in readings}
    swamped = [r for r in readings if r.pattern in PATTERNS]
    placements = [b for r in swamped for b in r.placements]
    bits = _least(r.bits for r in swamped if r.pattern != "disguised")
    hidden = _hidden_bits(bits, patterns)
    bits = hidden or bits
    lossless = bits is None and len(placements) >= _ENOUGH_PLACEMENTS and not any(r.note for r in swamped)
    at_least = some.reach if lossless else None
    accumulator = _named(bits, at_least)
    rounds = ""
    if bits is not None and accumulator != FLOAT32:
        rounds = "when disguised" if hidden else _rounds(patterns)
    operands = patterns["input precision"].bits if "input precision" in patterns else None
    if accumulator in (FLOAT32, FLOAT64) and operands is not None and operands < _FLOAT32_BITS - _SLACK_BITS:
        accumulator, rounds, bits, at_least = TF32_OPERANDS, "operands", operands, None
    stops_at = patterns["stagnation"].stops_at if "stagnation" in patterns else None
    print_ = Fingerprint(
        output=some.output,
        slot=some.slot,
        accumulator=accumulator,
        bits=bits,
        at_least=at_least,
        rounds=rounds,
        confidence=_confidence(placements),
        contributions=some.contributions,
        unbounded=stops_at is not None or rounds in ("everywhere", "between tiles", "when disguised"),
        stops_at=stops_at,
        sentence="",
        slot_dtype=some.slot_dtype,
    )
    return replace(print_, sentence=_sentence(print_, next((r.note for r in readings if r.note), "")))


def _hidden_bits(bare: int | None, patterns: dict[str, ProbeReading]) -> int | None:
    """Bits that only a disguised probe lost: the kernel knows a bare probe when it sees one."""
    disguised = patterns["disguised"].bits if "disguised" in patterns else None
    if disguised is None or disguised >= _DISGUISED_BITS or (bare is not None and bare < _DISGUISED_BITS):
        return None
    return disguised


def _named(bits: int | None, at_least: int | None) -> str:
    if bits is None:
        return FLOAT64 if at_least is not None and at_least >= _FLOAT64_REACH else NOT_DETERMINED
    for low, high, name in ((7, 9, BFLOAT16), (10, 12, FLOAT16), (13, 15, FP8_TENSOR_CORE), (20, 27, FLOAT32)):
        if low <= bits <= high:
            return name
    return NOT_DETERMINED


def _rounds(patterns: dict[str, ProbeReading]) -> str:
    """Where bits go: from which placements lose the small term."""
    far, near = (_typically_narrow(patterns.get(p)) for p in ("far", "near"))
    if far and near:
        return "everywhere"
    if near:
        return "inside blocks"
    return "between tiles" if far else "per partial"


def _typically_narrow(reading: ProbeReading | None) -> bool:
    """Most placements: a near probe may straddle a border, a far one may fall into one block."""
    if reading is None or not reading.placements:
        return False
    narrow = [b is not None and b < _FLOAT32_BITS - _SLACK_BITS for b in reading.placements]
    return sum(narrow) * 2 > len(narrow)


def _confidence(placements: Sequence[int | None]) -> str:
    informative = sum(b is not None for b in placements)
    return "high" if informative >= 6 else "medium" if informative >= 3 else "low"


def _sentence(seen: Fingerprint, why_not: str) -> str:
    sums = f"`{seen.output}` sums over `{seen.slot}`"
    if seen.accumulator == FLOAT64:
        return f"{sums} without loss on any probe: float64, or an exact order"
    if seen.at_least is not None:
        return f"{sums} with {seen.at_least} significant bits or more, which is all that its inputs can show"
    if seen.bits is None:
        why = why_not or "+M and −M met first on every placement"
        return f"the accumulator of `{seen.output}` over `{seen.slot}` could not be read: {why}"
    kind = {
        "everywhere": "a {} carry",
        "inside blocks": "{} inside blocks, wider between them",
        "between tiles": "a {} carry between tiles, wider inside them",
        "per partial": "{} partial sums, wider inside them",
        "operands": "{}",
        "when disguised": "a {} accumulator that a bare probe does not get to see",
        "": "a {} accumulator",
    }[seen.rounds].format(seen.accumulator if seen.accumulator != NOT_DETERMINED else "narrow")
    stall = f" that stops growing after {seen.stops_at} equal contributions" if seen.stops_at is not None else ""
    return f"{sums} with about {seen.bits} significant bits: {kind}{stall}"


def _is_promoted_fp8(seen: Fingerprint) -> bool:
    """14-bit blocks of fp8 products that are added up in fp32: as wide as the hardware goes."""
    fp8 = seen.slot_dtype is not None and seen.slot_dtype.itemsize == 1
    return fp8 and seen.accumulator == FP8_TENSOR_CORE and seen.rounds == "inside blocks"


def too_narrow(
    fingerprint: Fingerprint, *, native: Fingerprint | None = None, declared: torch.dtype = torch.float32
) -> Narrowness:
    """The verdict rule on one output's accumulator.

    `declared` is the accumulation dtype that the reference's contract states: float32 for sums in
    fp32 and, because PyTorch sums bfloat16 and float16 in fp32, for those too. `native` is the same
    reading on the native reference. Fewer bits than both the contract and the native reference is a
    fault. A native reference that is as narrow is deficient: then a bounded loss is excused, but a
    carry whose error grows with the number of terms is a fault whatever the native reference does.
    14 bits are allowed to fp8 operands as long as blocks of them are added up in wider sums.
    """
    if fingerprint.bits is None:
        return Narrowness(fingerprint.at_least is not None, False, False, fingerprint.sentence)
    contract = _FLOAT64_BITS if declared == torch.float64 else _FLOAT32_BITS
    floor = contract - _SLACK_BITS
    native_bits = native.bits if native is not None and native.bits is not None else contract
    deficient = native_bits < floor
    if fingerprint.bits >= floor:
        return Narrowness(True, False, deficient, fingerprint.sentence)
    if _is_promoted_fp8(fingerprint):
        reason = f"{fingerprint.sentence}; fp8 tensor cores do so, and wider sums outside the blocks bound the loss"
        return Narrowness(True, False, deficient, reason)
    if not deficient or fingerprint.bits < native_bits - 1:
        return Narrowness(True, True, deficient, fingerprint.sentence)
    if fingerprint.unbounded:
        reason = f"{fingerprint.sentence}; the native reference does so too, but such an error has no bound"
        return Narrowness(True, True, True, reason)
    reason = f"{fingerprint.sentence}; the native reference is as narrow, and the loss is bounded"
    return Narrowness(True, False, True, reason)
