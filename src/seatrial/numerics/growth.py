"""Error against the number of contributions: the curve that shows what a narrow accumulator does.

An honest kernel's relative error does not depend on how many terms an element adds up; that of a
narrow carry grows with them until the sum stands still. For a scatter reduction the indices decide
how many terms fall on a row, so one call holds rows with 1, 8, 64, … contributions and a second one
puts all of them on one row. Otherwise the reduction is made longer through a size of the problem.

The terms share a sign and fill their mantissa: sums of few small numbers are exact in every format
and would show a slope that means nothing. The exponent explains and extrapolates; it is no gate,
because truncating tensor cores legitimately grow linearly from a far lower level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from seatrial.model import Growth, GrowthPoint
from seatrial.numerics.trace import REFUSALS, Fp64Reference, Trace, exact_outputs, trace

if TYPE_CHECKING:
    from seatrial.model import Value

Call: TypeAlias = "Callable[[Sequence[Value]], tuple[Tensor, ...] | None]"
Draw: TypeAlias = "Callable[[int], Sequence[Value] | None]"
Sigma: TypeAlias = "Callable[[Sequence[Value]], Sequence[Tensor] | None]"

_ROWS_PER_COUNT = 64  # rows of one count beyond which its error is known well enough
_LEAST_FOR_SLOPE = 3


@dataclass(frozen=True)
class GrowthCase:
    """One call of the curve.

    inputs  positional inputs of the problem
    counts  output position -> contributions per element: one number for all, or an int64 tensor that
            broadcasts to the output, 0 where the element is not to be looked at
    lever   what was repeated or lengthened, in words
    """

    inputs: tuple[Value, ...]
    counts: Mapping[int, Tensor | int]
    lever: str


def repeat_cases(
    inputs: Sequence[Value],
    *,
    trace: Trace,
    input_names: Sequence[str],
    output_shapes: Sequence[Sequence[int]],
    slots: Mapping[int, Sequence[int]],
    points: int = 5,
    seed: int = 0,
) -> tuple[GrowthCase, ...]:
    """Cases that move the number of contributions per row from one to all, two calls per lever.

    `slots` is what `linear_slots` found; those inputs become positive with a full mantissa. Outputs in
    which no axis is as long as the lever's index range are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for name, outputs in trace.levers.items():
        if name in trace.structural:
            continue
        place, rows = input_names.index(name), trace.index_ranges[name]
        axes = {o: list(output_shapes[o]).index(rows) for o in outputs if rows in output_shapes[o]}
        drawn = inputs[place]
        if not axes or not isinstance(drawn, Tensor) or drawn.numel() < 2:
            continue
        linear = {slot for slot, reached in slots.items() if set(reached) & set(axes)}
        for indices, counts in _repeated(drawn, rows, points, generator):
            changed = _positive(inputs, linear, generator)
            changed[place] = indices
            shaped = {o: _along(counts, axis, len(output_shapes[o])) for o, axis in axes.items()}
            cases.append(GrowthCase(tuple(changed), shaped, f"repeats of one row in {name}"))
    return tuple(cases)


def length_cases(
    reference: Callable[..., Any],
    draw_at: Draw,
    sizes: Sequence[int],
    *,
    input_names: Sequence[str],
    output_names: Sequence[str],
    axis: str = "size",
    seed: int = 0,
) -> tuple[GrowthCase, ...]:
    """Cases at several sizes of a var axis, for the outputs behind a reduction whose length follows it.

    `draw_at(size)` gives the inputs at that size, or None where the problem cannot be drawn there; sizes
    at which the reference refuses to run are left out. All float inputs are made positive.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: list[tuple[tuple[Value, ...], dict[int, int]]] = []
    for size in sorted(set(sizes)):
        given = draw_at(size)
        if given is None:
            continue
        inputs = _positive(given, set(range(len(given))), generator)
        try:
            seen = trace(reference, inputs, input_names, output_names=output_names)
        except REFUSALS:
            continue
        drawn.append((tuple(inputs), _longest_per_output(seen, len(output_names))))
    growing = [o for o in range(len(output_names)) if len({lengths.get(o) for _, lengths in drawn}) > 1]
    return tuple(
        GrowthCase(inputs, {o: lengths[o] for o in growing if o in lengths}, f"reduction length, through {axis}")
        for inputs, lengths in drawn
        if growing
    )


def measure_growth(
    oracle: Fp64Reference,
    cases: Sequence[GrowthCase],
    call: Call,
    *,
    output_names: Sequence[str],
    output_dtypes: Sequence[torch.dtype],
    sigma: Sigma | None = None,
) -> tuple[Growth, ...]:
    """Relative rms error per number of contributions, per output and lever; one kernel call per case.

    The floor is the same measure for the exact result rounded once to the output dtype, plus the honest
    accumulation noise where `sigma` gives it (absolute, one tensor per output). Cases that the oracle or
    the kernel refuses give no point; an output without a point gives no curve.
    """
    gathered: dict[tuple[int, str], dict[int, list[_Sums]]] = {}
    for case in cases:
        exact = exact_outputs(oracle, case.inputs)
        got = None if exact is None else call([_fresh(v) for v in case.inputs])
        if exact is None or got is None:
            continue
        noise = sigma(case.inputs) if sigma is not None else None
        for output, counts in case.counts.items():
            dtype = output_dtypes[output]
            sums = _errors(exact[output], got[output], counts, dtype, None if noise is None else noise[output])
            for count, part in sums.items():
                gathered.setdefault((output, case.lever), {}).setdefault(count, []).append(part)
    return tuple(_curve(output_names[output], lever, points) for (output, lever), points in gathered.items() if points)


# ---------------------------------------------------------------------------------------------------
# Inputs


def _ladder(most: int, points: int) -> list[int]:
    """Counts from one to all, evenly spaced on a logarithmic axis."""
    steps = max(2, points) - 1
    return sorted({round(most ** (step / steps)) for step in range(steps + 1)})


def _repeated(drawn: Tensor, rows: int, points: int, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Index tensors like `drawn` with their counts per row: a ladder of counts, and all on one row."""
    total = drawn.numel()
    *lower, most = _ladder(total, points)
    order = torch.randperm(rows, generator=generator)
    mixed = torch.repeat_interleave(order[: len(sizes := _row_sizes(lower, total, rows))], torch.tensor(sizes))
    single = torch.full((most,), int(order[0]))
    cases = []
    for indices, wanted in ((mixed, set(lower)), (single, {most})):
        indices = indices[torch.randperm(indices.numel(), generator=generator)]
        counts = torch.bincount(indices, minlength=rows)
        counts = counts * torch.isin(counts, torch.tensor(sorted(wanted)))
        cases.append((indices.reshape(drawn.shape).to(drawn.dtype).to(drawn.device), counts))
    return cases


def _row_sizes(ladder: Sequence[int], total: int, rows: int) -> list[int]:
    """How many contributions each row gets: every count of the ladder at least once, small ones often.

    The sizes add up to `total`; what is left over goes to one more row, or to the last one.
    """
    sizes: list[int] = []
    for repeat in range(_ROWS_PER_COUNT):
        for count in reversed(ladder) if repeat == 0 else ladder:
            if len(sizes) < rows - 1 and sum(sizes) + count <= total:
                sizes.append(count)
    left = total - sum(sizes)
    if left and len(sizes) < rows:
        sizes.append(left)
    elif left:
        sizes[-1] += left
    return sizes


def _positive(inputs: Sequence[Value], places: set[int], generator: torch.Generator) -> list[Value]:
    """These float inputs replaced by ½ + ½|normal| times their own scale: one sign, full mantissa."""
    changed = list(inputs)
    for place in places:
        value = changed[place]
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0 and value.numel():
            spread = torch.randn(value.shape, generator=generator).abs()
            scale = float(value.float().square().mean().sqrt()) or 1.0
            changed[place] = ((0.5 + 0.5 * spread) * scale).to(value.dtype).to(value.device)
    return changed


def _along(counts: Tensor, axis: int, dims: int) -> Tensor:
    return counts.reshape([-1 if d == axis else 1 for d in range(dims)])


def _longest_per_output(seen: Trace, outputs: int) -> dict[int, int]:
    lengths = {o: [r.length for r in seen.reductions_into(o) if not r.scatter] for o in range(outputs)}
    return {o: max(found) for o, found in lengths.items() if found}


def _fresh(value: Value) -> Value:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


# ---------------------------------------------------------------------------------------------------
# Errors


@dataclass(frozen=True)
class _Sums:
    """Mean squares over the elements of one count, and how many elements those were."""

    elements: int
    error: float
    floor: float
    size: float


def _errors(
    exact: Tensor, got: Tensor, counts: Tensor | int, dtype: torch.dtype, sigma: Tensor | None
) -> dict[int, _Sums]:
    exact = exact.detach().cpu().to(torch.float64)
    got = got.detach().cpu().to(torch.float64)
    if got.shape != exact.shape:
        return {}
    per_element = torch.as_tensor(counts).expand(exact.shape)
    rounded = exact.to(dtype).to(torch.float64)
    honest = (rounded - exact).square()
    if sigma is not None:
        honest = honest + sigma.detach().cpu().to(torch.float64).square()
    sums = {}
    for count in sorted(set(per_element.reshape(-1).tolist())):
        mine = (per_element == count) & torch.isfinite(rounded)
        if count > 0 and bool(mine.any()) and float(exact[mine].abs().max()) > 0:
            sums[int(count)] = _Sums(
                int(mine.sum()),
                float((got[mine] - exact[mine]).square().nan_to_num(nan=math.inf).mean()),
                float(honest[mine].mean()),
                float(exact[mine].square().mean()),
            )
    return sums


def _curve(output: str, lever: str, points: Mapping[int, Sequence[_Sums]]) -> Growth:
    shown = []
    for count, parts in sorted(points.items()):
        whole = _pooled(parts)
        shown.append(
            GrowthPoint(
                contributions=count,
                error=math.sqrt(whole.error / whole.size),
                floor=math.sqrt(whole.floor / whole.size),
            )
        )
    return Growth(output=output, lever=lever, points=shown, exponent=slope(shown))


def _pooled(parts: Sequence[_Sums]) -> _Sums:
    whole = parts[0]
    for part in parts[1:]:
        n, m = whole.elements, part.elements
        whole = replace(
            whole,
            elements=n + m,
            error=(n * whole.error + m * part.error) / (n + m),
            floor=(n * whole.floor + m * part.floor) / (n + m),
            size=(n * whole.size + m * part.size) / (n + m),
        )
    return whole


def slope(points: Sequence[GrowthPoint]) -> float | None:
    """Least-squares slope of log error on log contributions; None with fewer than three usable points."""
    usable = [(math.log(p.contributions), math.log(p.error)) for p in points if 0 < p.error < math.inf]
    if len(usable) < _LEAST_FOR_SLOPE:
        return None
    mean_x, mean_y = (sum(axis) / len(usable) for axis in zip(*usable, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in usable)
    return sum((x - mean_x) * (y - mean_y) for x, y in usable) / spread if spread > 0 else None
