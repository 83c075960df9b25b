"""The smallest case that still shows a fault: sizes first, then values.

Every trial is one call (two for faults of call sequences) judged by the judge of the audit on the shrunk inputs
themselves. A trial counts when the same output differs in the same way; nothing smaller found means that the
original case stays. Sizes of var axes are tried from one upwards; values become a constant, powers of two or
numbers of few digits, and then, delta debugging, ever smaller blocks are set to the constant. A value never leaves
the range of the tensor that the audit drew, an index never its table, and scalars and integers whose meaning is
not known stay as they were.

The search is greedy and without chance. A property-based search would have to find the fault anew from random
draws before it could shrink; here the failing case is given, and every trial costs a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from seatrial.errors import InfrastructureError, ProblemError
from seatrial.model import Value
from seatrial.reproduce.nouns import Situation, Symptom
from seatrial.reproduce.symptoms import examine

if TYPE_CHECKING:
    from torch import Tensor

    from seatrial.bench import Bench
    from seatrial.study import Study

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 384, 512, 768, 1024, 2048, 4096)
COARSE = (1, 2, 4, 16, 64, 256, 1024)  # before the values: a plain constant often allows a shorter axis
FEW_DIGITS = 4  # significant bits of a rounded value


@dataclass
class Budget:
    """How much one search may cost."""

    calls: int
    seconds: float
    started: float = field(default_factory=time.monotonic)
    spent: int = 0

    @property
    def over(self) -> bool:
        """True when nothing more may be tried."""
        return self.spent >= self.calls or time.monotonic() - self.started >= self.seconds


def weight(situation: Situation) -> int:
    """Input elements that differ from the commonest value of their tensor: what a person has to look at."""
    from torch import Tensor

    return sum(_weight_of(v) for inputs in situation.calls for v in inputs if isinstance(v, Tensor))


def numel(situation: Situation) -> int:
    """Elements of all input tensors of all calls."""
    return sum(v.numel() for inputs in situation.calls for v in inputs if hasattr(v, "numel"))


def shrink(
    study: Study,
    bench: Bench,
    situation: Situation,
    symptom: Symptom,
    budget: Budget,
    *,
    listed_sizes_only: bool = False,
) -> tuple[Situation, Symptom]:
    """The smallest situation found that shows the fault of `situation`, and what it shows.

    `listed_sizes_only` keeps to declared workloads' sizes, for a candidate that has another fault outside them.
    """
    search = _Search(study, bench, situation, symptom, budget, listed_sizes_only=listed_sizes_only)
    if situation.kind != "load":
        search.sizes(COARSE)
        search.values()
        search.sizes(SIZES)
    return search.best, search.shows


@dataclass
class _Search:
    study: Study
    bench: Bench
    best: Situation
    shows: Symptom
    budget: Budget
    listed_sizes_only: bool = False
    ranges: dict[int, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from torch import Tensor

        for position, value in enumerate(self.best.calls[0] if self.best.calls else ()):
            if isinstance(value, Tensor) and value.is_floating_point() and (span := _span(value)):
                self.ranges[position] = span

    def attempt(self, trial: Situation) -> bool:
        """Call it; keep it when it shows the same fault at least as clearly."""
        if self.budget.over:
            return False
        self.budget.spent += len(trial.calls)
        found = examine(self.study, self.bench, trial).symptom
        if found is None or found.quality < self.shows.quality:
            return False
        self.best, self.shows = trial, found
        return True

    # -- sizes ----------------------------------------------------------------------------------------

    def sizes(self, ladder: Sequence[int]) -> None:
        """Every var axis as short as it goes on this ladder and among the listed sizes, one after the other."""
        if not self.study.problem.resizable or self.best.kind in ("dies", "load"):
            return  # a size outside the list may be refused, which is no fault
        for axis in self.study.problem.var_axes:
            for size in self._shorter(axis, ladder):
                trial = self._resized({**self.best.axes, axis: size})
                if trial is not None and self.attempt(trial):
                    break

    def _shorter(self, axis: str, ladder: Sequence[int]) -> Iterator[int]:
        now = self.best.axes.get(axis, 0)
        listed = {w.axes.get(axis) for w in self.study.problem.workloads}
        for size in sorted({*ladder, *(s for s in listed if s)}):
            if size < now and (not self.listed_sizes_only or self._is_listed({**self.best.axes, axis: size})):
                yield size

    def _is_listed(self, axes: dict[str, int]) -> bool:
        return any(dict(w.axes) == axes for w in self.study.problem.workloads)

    def _resized(self, axes: dict[str, int]) -> Situation | None:
        """The leading part of every input; None where sizes or integers of unknown meaning forbid it."""
        from seatrial.formats.dtypes import is_packed_fp4, stored_shape

        if self._has_structure():
            return None
        try:
            sizes = self.study.problem.sizes(axes)
            shapes = [stored_shape(spec, sizes) for spec in self.study.problem.inputs]
            self.study.slots(replace(self.best, axes=axes).workload)
        except (ProblemError, InfrastructureError):
            return None
        if any(is_packed_fp4(spec.dtype) for spec in self.study.problem.inputs):
            return None
        calls = []
        for inputs in self.best.calls:
            cut = [_leading(v, shape) for v, shape in zip(inputs, shapes, strict=True)]
            if any(v is None for v in cut):
                return None
            calls.append(tuple(v for v in cut if v is not None))
        trial = replace(self.best, axes=axes, calls=tuple(calls))
        return trial if self._indices_fit(trial) else None

    def _has_structure(self) -> bool:
        from torch import Tensor

        trace = self.study.trace
        return any(
            isinstance(v, Tensor)
            and not v.is_floating_point()
            and str(v.dtype) != "torch.bool"
            and (spec.name not in trace.index_ranges or spec.name in trace.structural)
            for spec, v in zip(self.study.problem.inputs, self.best.calls[0], strict=True)
        )

    def _indices_fit(self, trial: Situation) -> bool:
        """No index may point behind a table that has become shorter."""
        from torch import Tensor

        shortened = {
            old
            for a, b in zip(self.best.calls[0], trial.calls[0], strict=True)
            for old, new in zip(getattr(a, "shape", ()), getattr(b, "shape", ()), strict=True)
            if old != new
        }
        names = self.study.trace.index_ranges
        least = min((n for v in trial.calls[0] if isinstance(v, Tensor) for n in v.shape), default=0)
        for inputs in trial.calls:
            for spec, v in zip(self.study.problem.inputs, inputs, strict=True):
                bound = names.get(spec.name)
                if bound in shortened and isinstance(v, Tensor) and v.numel() and int(v.max()) >= least:
                    return False
        return True

    # -- values ---------------------------------------------------------------------------------------

    def values(self) -> None:
        """Every tensor as plain as it goes, the largest first; in the last call first."""
        places = [(c, p) for c in reversed(range(len(self.best.calls))) for p in range(len(self.best.calls[c]))]
        for call, position in sorted(places, key=lambda place: -_weight_of(self.best.calls[place[0]][place[1]])):
            for fill in self._fills(call, position):
                if self._replace(call, position, lambda v, fill=fill: _full(v, fill)):  # type: ignore[misc]
                    break
            else:
                self._plain(call, position)

    def _plain(self, call: int, position: int) -> None:
        if self._is_float(call, position):
            _ = self._replace(call, position, lambda v: self._rounded(position, v, 1)) or self._replace(
                call, position, lambda v: self._rounded(position, v, FEW_DIGITS)
            )
        for fill in list(self._fills(call, position))[:2]:
            self._blocks(call, position, fill)

    def _replace(self, call: int, position: int, change: Callable[[Tensor], Tensor]) -> bool:
        from torch import Tensor, equal

        value = self.best.calls[call][position]
        if not isinstance(value, Tensor) or value.numel() == 0:
            return False
        changed = change(value)
        if equal(_bits(changed), _bits(value)):
            return False
        inputs = list(self.best.calls[call])
        inputs[position] = changed
        calls = list(self.best.calls)
        calls[call] = tuple(inputs)
        return self.attempt(replace(self.best, calls=tuple(calls)))

    def _is_float(self, call: int, position: int) -> bool:
        value = self.best.calls[call][position]
        return bool(getattr(value, "is_floating_point", lambda: False)()) and position in self.ranges

    def _fills(self, call: int, position: int) -> list[float]:
        """Constants that this tensor may hold, the plainest first."""
        from torch import Tensor

        value = self.best.calls[call][position]
        if not isinstance(value, Tensor) or value.numel() == 0:
            return []
        if self._is_float(call, position):
            low, high = self.ranges[position]
            middle = float(value.double().reshape(-1).median())
            return [f for f in (0.0, 1.0, _near(middle, 1), middle) if low <= f <= high]
        name = self.study.problem.inputs[position].name
        if str(value.dtype) == "torch.bool":
            return [0.0, 1.0]
        if name in self.study.trace.index_ranges and name not in self.study.trace.structural:
            return [0.0]
        return []

    def _rounded(self, position: int, value: Tensor, bits: int) -> Tensor:
        import torch

        low, high = self.ranges[position]
        wide = value.double()
        mantissa, exponent = torch.frexp(wide)
        near = torch.ldexp((mantissa * 2.0**bits).round() / 2.0**bits, exponent)
        return torch.where(torch.isfinite(wide), near.clamp(low, high), wide).to(value.dtype)

    def _blocks(self, call: int, position: int, fill: float) -> None:
        """Delta debugging: ever smaller blocks of what still differs become the constant."""
        from torch import Tensor

        value = self.best.calls[call][position]
        assert isinstance(value, Tensor)
        active = (value.double() != fill).reshape(-1).nonzero()[:, 0]
        size = max(1, active.numel() // 2)
        while active.numel() and not self.budget.over:
            start = 0
            while start < active.numel() and not self.budget.over:
                block = active[start : start + size]
                if self._replace(call, position, lambda v, block=block: _filled_at(v, block, fill)):  # type: ignore[misc]
                    keep = active != active  # all False
                    keep[:start] = True
                    keep[start + size :] = True
                    active = active[keep]
                else:
                    start += size
            if size == 1:
                return
            size = max(1, min(size // 2, active.numel() // 2))


def _leading(value: Value, shape: Sequence[int] | None) -> Value | None:
    from torch import Tensor

    if not isinstance(value, Tensor) or shape is None:
        return value
    if value.dim() != len(shape) or any(new > old for new, old in zip(shape, value.shape, strict=True)):
        return None
    return value[tuple(slice(0, n) for n in shape)].clone().contiguous()


def _full(value: Tensor, fill: float) -> Tensor:
    import torch

    return torch.full(value.shape, fill, dtype=torch.float64).to(value.dtype)


def _filled_at(value: Tensor, flat: Tensor, fill: float) -> Tensor:
    wide = value.double() if value.is_floating_point() else value.clone()
    changed = wide.reshape(-1).clone()
    changed[flat] = fill
    return changed.reshape(value.shape).to(value.dtype)


def _near(number: float, bits: int) -> float:
    import math

    if number == 0 or not math.isfinite(number):
        return 0.0
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 2**bits) / 2**bits, exponent)


def _span(value: Tensor) -> tuple[float, float] | None:
    import torch

    if value.element_size() < 1 or str(value.dtype) == "torch.float4_e2m1fn_x2":
        return None
    wide = value.double()
    finite = wide[torch.isfinite(wide)]
    return (float(finite.min()), float(finite.max())) if finite.numel() else None


def _bits(value: Tensor) -> Tensor:
    import torch

    return value.contiguous().reshape(-1).view(torch.uint8)


def _weight_of(value: Value) -> int:
    import torch

    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return 0
    raw = _bits(value).reshape(value.numel(), -1)
    if raw.shape[1] not in (1, 2, 4, 8):
        return value.numel()
    whole = raw.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[raw.shape[1]])
    _, counts = whole.reshape(-1).unique(return_counts=True)  # type: ignore[no-untyped-call]
    return value.numel() - int(counts.max())
