"""What a reproducer is made of: the calls that show a fault, and the fault as they show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from seatrial.inputs.layouts import LAYOUTS, laid_out
from seatrial.model import OutputSlot, Problem, Value, Workload

if TYPE_CHECKING:
    from torch import Tensor

    from seatrial.study import Study

KINDS = (
    *("values", "replayed", "overwritten", "mutated", "unwritten", "contract"),
    *("writes-beyond", "reads-beyond", "dies", "load"),
)


@dataclass(frozen=True)
class Situation:
    """Everything that is needed to have the candidate called the way that shows the fault.

    kind    one of KINDS
    axes    sizes of the var axes
    calls   the inputs of each call, in declared order, tensors on the CPU; two calls for replayed and overwritten
    output  position of the output at fault; None where the fault is not one output's
    family  for values: "finite", "nonfinite", "exact" or "shape"; for dies and load: what became of the process
    layout  name of the layout (inputs/layouts.py) that the inputs `relaid` are put into for the call; empty for none
    least   the worst element must be this many times as far off as it may be: a carry that loses its terms leaves
            many roundings, where operands rounded once, which is another fault, leave about one
    """

    kind: str
    axes: dict[str, int]
    calls: tuple[tuple[Value, ...], ...]
    output: int | None = None
    family: str = ""
    least: float = 1.0
    layout: str = ""
    relaid: tuple[str, ...] = ()

    def inputs_of(self, problem: Problem, call: int) -> tuple[Value, ...]:
        """What the candidate is called with: the inputs of this call in the situation's layout."""
        if not self.layout:
            return self.calls[call]
        named = dict(zip((s.name for s in problem.inputs), self.calls[call], strict=True))
        return tuple(laid_out(LAYOUTS[self.layout], named, self.relaid).values())

    @property
    def workload(self) -> Workload:
        """A workload of these sizes; its inputs are the situation's."""
        return Workload("reproducer", self.axes, {})

    def slots(self, study: Study) -> tuple[OutputSlot, ...]:
        """The declared outputs at these sizes."""
        return study.slots(self.workload)


@dataclass(frozen=True)
class Point:
    """One element that is wrong beyond rounding: |got - expected| may be `allowed` and is more, or is not finite."""

    index: tuple[int, ...]
    got: float
    expected: float
    allowed: float

    @property
    def times_allowed(self) -> float:
        """How many times what is allowed it is off; infinite where nothing is."""
        return abs(self.got - self.expected) / self.allowed if self.allowed else float("inf")


@dataclass(frozen=True)
class Statistic:
    """A whole output that is off although no element is far off: "rms" or "signed mean" of got - expected."""

    name: str
    measured: float
    allowed: float
    expected: Tensor  # float64, the output's shape


@dataclass(frozen=True)
class Symptom:
    """The fault as these calls show it."""

    words: str
    family: str = ""
    points: tuple[Point, ...] = ()
    statistic: Statistic | None = None

    @property
    def quality(self) -> int:
        """2: single elements or facts prove it; 1: only a statistic of a whole output does; 0: neither can be said alone."""
        if self.family in ("finite", "nonfinite", "exact"):
            return 2 if self.points else 1 if self.statistic else 0
        return 2


@dataclass(frozen=True)
class Answer:
    """`symptom` is None when the calls do not show the fault; `unable` says why they could not be judged at all."""

    symptom: Symptom | None = None
    unable: str = ""
