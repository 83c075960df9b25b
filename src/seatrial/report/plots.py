"""The pictures: where every line, tick and label of a plot stands.

The geometry is computed here and drawn by the SVG templates. A plot stands alone (it brings its styles
along, for a README) or inside the page (which has them). Line styles differ as well as colours, so no
picture depends on telling colours apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from seatrial.model import Curve, Growth, GrowthPoint, Trial, TrialCell
from seatrial.report import words
from seatrial.report.data import loss_window
from seatrial.report.templating import rendered

_MOST_POINTS = 240  # of one drawn curve; more than that a reader cannot see
_LETTER = 7.0  # width of a letter at the plots' font size, on the generous side


@dataclass(frozen=True)
class Frame:
    """The plotting area inside a picture, in the picture's own units; y grows downwards."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float

    def across(self, share: float) -> float:
        """x at a share of the width, from 0 (left) to 1 (right)."""
        return round(self.left + share * (self.width - self.left - self.right), 2)

    def upwards(self, share: float) -> float:
        """y at a share of the height, from 0 (bottom) to 1 (top); what is outside stays at the edge."""
        share = min(1.0, max(0.0, share))
        return round(self.height - self.bottom - share * (self.height - self.top - self.bottom), 2)


@dataclass(frozen=True)
class Tick:
    """A place on an axis and what is written there ("" for a line alone)."""

    at: float
    label: str


@dataclass(frozen=True)
class Note:
    """A short text at a place; anchor is start, middle or end."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    css: str = ""


@dataclass(frozen=True)
class Line:
    """One curve: an SVG path, dots on it, crosses where it stops being a number, arrows where it leaves."""

    css: str
    path: str
    dots: tuple[tuple[float, float], ...] = ()
    crosses: tuple[tuple[float, float], ...] = ()
    arrows: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Plot:
    """A picture, ready to draw."""

    frame: Frame
    title: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    notes: tuple[Note, ...] = ()
    mark: float | None = None  # x of a vertical line


# ---------------------------------------------------------------------------------------------------
# Error growth

_GROWTH = Frame(width=370, height=280, left=52, right=20, top=36, bottom=50)


def growth_svg(growth: Growth, *, alone: bool = True) -> str:
    """Error against the number of contributions, log-log, beside the honest floor.

    Points that a logarithm cannot show (zero, NaN, infinity) are left out; the empty string when none is
    left. `alone` brings the styles along.
    """
    plot = growth_plot(growth)
    return rendered("plot.svg", plot=plot, alone=alone) if plot else ""


def growth_plot(growth: Growth) -> Plot | None:
    """The geometry of `growth_svg`."""
    points = sorted(growth.points, key=lambda point: point.contributions)
    errors = _drawable(points, lambda point: point.error)
    floors = _drawable(points, lambda point: point.floor)
    if not errors and not floors:
        return None
    across, counts = _log_axis([x for x, _ in (*errors, *floors)])
    upwards, decades = _decades([y for _, y in (*errors, *floors)])
    frame = _GROWTH

    def placed(pairs: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
        return tuple((frame.across(across(x)), frame.upwards(upwards(y))) for x, y in pairs)

    candidate, floor = placed(errors), placed(floors)
    lines = (Line("floor", _path(floor), dots=floor), Line("candidate", _path(candidate), dots=candidate))
    return Plot(
        frame=frame,
        title=f"Error growth of {words.shortened(words.one_line(growth.output), 60)}: error against contributions",
        lines=tuple(line for line in lines if line.path),
        x_ticks=_spaced([Tick(frame.across(across(n)), _short_count(n)) for n in counts]),
        y_ticks=tuple(Tick(frame.upwards(upwards(10.0**k)), _power(k)) for k in decades),
        notes=(*_growth_labels(candidate, floor), *_growth_axes()),
    )


def _drawable(points: Sequence[GrowthPoint], value: Callable[[GrowthPoint], float]) -> list[tuple[float, float]]:
    return [(p.contributions, value(p)) for p in points if p.contributions > 0 and 0 < value(p) < math.inf]


def _log_axis(values: Sequence[float]) -> tuple[Callable[[float], float], list[int]]:
    low, high = math.log(min(values)), math.log(max(values))
    if high == low:
        return (lambda _value: 0.5), [int(values[0])]
    return (lambda value: (math.log(value) - low) / (high - low)), sorted({int(value) for value in values})


def _decades(values: Sequence[float]) -> tuple[Callable[[float], float], list[int]]:
    """A log axis with room for a name below the lowest line, high enough for a flat line to look flat."""
    low, high = math.log10(min(values)) - 0.4, math.log10(max(values)) + 0.15
    high = max(high, low + 2)
    step = 1 + int(high - low) // 7
    return (lambda value: (math.log10(value) - low) / (high - low)), list(
        range(math.ceil(low), math.floor(high) + 1, step)
    )


def _growth_labels(candidate: Sequence[tuple[float, float]], floor: Sequence[tuple[float, float]]) -> list[Note]:
    """Names at the ends of the lines, away from each other."""
    above, below = -11.0, 19.0
    candidate_is_above = not floor or not candidate or candidate[-1][1] <= floor[-1][1]
    shifts = (above, below) if candidate_is_above else (below, above)
    named = ((candidate, "candidate", shifts[0]), (floor, "honest kernel", shifts[1]))
    return [
        Note(line[-1][0] + 6, line[-1][1] + shift, name, "end", f"of-{name.split()[-1]}")
        for line, name, shift in named
        if line
    ]


def _growth_axes() -> list[Note]:
    frame = _GROWTH
    return [
        Note(4, 14, "relative error"),
        Note(frame.across(0.5), frame.height - 8, "contributions to one element", "middle"),
    ]


# ---------------------------------------------------------------------------------------------------
# Training

_CELL = Frame(width=340, height=214, left=38, right=14, top=46, bottom=28)
_TITLE_LETTERS = 40
_TONES = {"agrees": "of-kernel", "drifts": "of-candidate", "diverges": "of-candidate", "masked": "of-mark"}


def training_picture_svg(trial: Trial) -> str:
    """The whole training matrix as one picture with its legend, one row per optimizer."""
    rows = [
        [cell for cell in trial.cells if cell.optimizer == name]
        for name in dict.fromkeys(cell.optimizer for cell in trial.cells)
    ]
    window = loss_window(trial.cells)
    block, gap, legend = (_CELL.width, _CELL.height + 58), 16.0, 40.0
    blocks = [
        {
            "x": column * (block[0] + gap),
            "y": legend + row * (block[1] + gap),
            "name": words.shortened(f"{words.one_line(cell.data)} · {words.one_line(cell.optimizer)}", _TITLE_LETTERS),
            "verdict": words.shortened(words.one_line(cell.verdict), _TITLE_LETTERS),
            "tone": _TONES.get(cell.verdict, ""),
            "plot": cell_plot(cell, window),
        }
        for row, cells in enumerate(rows)
        for column, cell in enumerate(cells)
    ]
    columns = max((len(cells) for cells in rows), default=1)
    size = (columns * (block[0] + gap) - gap, legend + max(1, len(rows)) * (block[1] + gap) - gap)
    return rendered("training.svg", blocks=blocks, size=size, block=block)


def cell_svg(cell: TrialCell, window: tuple[float, float], *, alone: bool = True) -> str:
    """Loss curves of one cell; `window` is the (lowest, highest) loss shown, shared by cells to compare."""
    return rendered("plot.svg", plot=cell_plot(cell, window), alone=alone)


def cell_plot(cell: TrialCell, window: tuple[float, float]) -> Plot:
    """The geometry of `cell_svg`."""
    frame, (low, high) = _CELL, window
    last = max([len(curve.losses) - 1 for curve in cell.curves] + [1])

    def at(step: int, loss: float) -> tuple[float, float]:
        return frame.across(step / last), frame.upwards((loss - low) / (high - low))

    # The candidate is the broadest line and lies lowest: where all agree, all can still be seen.
    order = {"reference": 1, "control": 2}
    curves = sorted(cell.curves, key=lambda curve: order.get(curve.run, 0))
    ticks = [Tick(frame.across(step / last), _short_count(step)) for step in sorted({0, last // 2, last})]
    return Plot(
        frame=frame,
        title=f"Loss by step, {words.shortened(words.one_line(cell.data), 60)}, {words.shortened(words.one_line(cell.optimizer), 60)}",
        lines=tuple(_loss_line(curve, window, at) for curve in curves),
        x_ticks=_spaced(ticks),
        y_ticks=tuple(Tick(at(0, loss)[1], f"{loss:.3g}") for loss in _round_losses(low, high)),
        notes=(Note(4, 14, "loss"), Note(2, frame.height - 10, "step"), *_cell_notes(cell, last)),
        mark=None if cell.first_step is None else frame.across(min(1.0, max(0.0, cell.first_step / last))),
    )


def _loss_line(curve: Curve, window: tuple[float, float], at: Callable[[int, float], tuple[float, float]]) -> Line:
    """The curve up to its first loss that is no number; there it ends in a cross.

    Where it leaves the window it goes out through the top, with an arrow, and is not drawn until it is back.
    """
    css = curve.run if curve.run in ("reference", "control", "candidate") else "candidate"
    end = _first_not_finite(curve)
    losses = curve.losses[:end]
    crosses = () if end is None else (at(end - 1, losses[-1]) if losses else (at(0, 0.0)[0], _CELL.upwards(0.5)),)
    stretches, arrows = [], []
    for first, after in _visible_stretches(losses, window[1]):
        stretches.append(_path(_thinned([at(step, losses[step]) for step in range(first, after)])))
        if losses[after - 1] > window[1]:
            arrows.append(at(after - 1, losses[after - 1]))
    if losses and not stretches:
        arrows.append(at(0, losses[0]))
    return Line(css, " ".join(stretches), crosses=crosses, arrows=tuple(arrows))


def _visible_stretches(losses: Sequence[float], top: float) -> list[tuple[int, int]]:
    """Ranges of steps whose every piece of curve has an end at or below the top."""
    if len(losses) == 1:
        return [(0, 1)]
    stretches: list[tuple[int, int]] = []
    for step in range(len(losses) - 1):
        if min(losses[step], losses[step + 1]) > top:
            continue
        if stretches and stretches[-1][1] == step + 1:
            stretches[-1] = (stretches[-1][0], step + 2)
        else:
            stretches.append((step, step + 2))
    return stretches


def _first_not_finite(curve: Curve) -> int | None:
    return next((step for step, loss in enumerate(curve.losses) if not math.isfinite(loss)), None)


def _cell_notes(cell: TrialCell, last: int) -> Iterable[Note]:
    """What happened, written above the curves, where no curve runs."""
    if cell.first_step is not None:
        share = min(1.0, max(0.0, cell.first_step / last))
        anchor = "start" if share < 0.5 else "end"
        x = _CELL.across(share) + (-3 if anchor == "start" else 3)
        yield Note(x, 32, f"outside from step {cell.first_step}", anchor, "of-mark")
    ends = [
        (end, curve)
        for curve in cell.curves
        if curve.run == "candidate" and (end := _first_not_finite(curve)) is not None
    ]
    if ends:
        end, curve = min(ends, key=lambda pair: pair[0])
        text = f"candidate {words.number(curve.losses[end])} from step {end}"
        yield Note(_CELL.width - _CELL.right, 14, text, "end", "of-candidate")


def _round_losses(low: float, high: float) -> list[float]:
    rough = (high - low) / 4
    step = 10.0 ** math.floor(math.log10(rough))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= rough * 0.999)
    first = math.ceil(low / step)
    return [index * step for index in range(first, first + 12) if index * step <= high]


# ---------------------------------------------------------------------------------------------------
# Drawing


def _path(points: Sequence[tuple[float, float]]) -> str:
    if len(points) == 1:  # a path of one point draws nothing
        points = [*points, (points[0][0] + 0.01, points[0][1])]
    return " ".join(f"{'M' if index == 0 else 'L'}{x:g} {y:g}" for index, (x, y) in enumerate(points))


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Few enough points to draw; of each stretch its lowest and highest, so no spike is lost."""
    if len(points) <= _MOST_POINTS:
        return points
    stretch = math.ceil(2 * len(points) / _MOST_POINTS)
    kept = [points[0]]
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept.extend(sorted(ends))
    return [*kept, points[-1]]


def _spaced(ticks: Sequence[Tick]) -> tuple[Tick, ...]:
    """The ticks, without the labels that would touch their neighbour; the last one keeps its own."""
    kept: list[Tick] = []
    next_start = math.inf
    for tick in reversed(ticks):
        half = _LETTER * len(tick.label) / 2
        if tick.at + half + 4 > next_start:
            kept.append(Tick(tick.at, ""))
            continue
        next_start = tick.at - half
        kept.append(tick)
    return tuple(reversed(kept))


def _short_count(value: float) -> str:
    value = int(value)
    for size, letter in ((10**9, "G"), (10**6, "M")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value / 1000:.3g}k" if value >= 100_000 else str(value)


def _power(exponent: int) -> str:
    return f"{10.0**exponent:g}" if -4 <= exponent <= 3 else f"1e{exponent}"
