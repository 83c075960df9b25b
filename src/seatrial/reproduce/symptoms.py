"""What a fault looks like in one or two calls, and whether these calls still show it.

Shrinking and replaying ask the same question of the same judge as the checks do: the honest floor of these very
inputs for values, bytes for changed inputs and unwritten outputs, the record of the call for everything else.
A case on which the native reference itself falls short, or which the reference refuses, shows nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seatrial.checks.base import unusable
from seatrial.checks.mutated_input import changed_elements
from seatrial.checks.stale_output import unwritten
from seatrial.errors import InfrastructureError
from seatrial.inputs.layouts import LAYOUTS, laid_out
from seatrial.model import CallRecord, OutputSlot, Ran, Value, Workload
from seatrial.poison import FINITE, NAN
from seatrial.study import Case

if TYPE_CHECKING:
    from torch import Tensor

    from seatrial.bench import Bench
    from seatrial.numerics.compare import OutputReport, Yardstick
    from seatrial.numerics.envelope import Envelope
    from seatrial.study import Study

KINDS = ("values", "replayed", "overwritten", "mutated", "unwritten", "contract", "out-of-bounds", "dies", "load")
MOST_POINTS = 8
FATAL = (Ran.RAISED, Ran.CRASHED, Ran.EXITED, Ran.TIMED_OUT, Ran.OUT_OF_MEMORY)
STATISTIC_OVER_HONEST = 2.0  # a whole output differs when its statistic is this many times the worst honest sample's
SHOULD_CHANGE = 0.5  # share of exact elements that differ between two calls whose results may not be the same


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

    def inputs_of(self, names: Sequence[str], call: int) -> tuple[Value, ...]:
        """What the candidate is called with: the inputs (of these names) of this call in the situation's layout."""
        if not self.layout:
            return self.calls[call]
        named = dict(zip(names, self.calls[call], strict=True))
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


def examine(study: Study, bench: Bench, situation: Situation) -> Answer:
    """Have the candidate called and judge what came. Never raises for what candidate or reference do."""
    if situation.kind == "load":
        return _load(bench, situation)
    case = Case(situation.workload, "reproducer", 0)
    try:
        for inputs in situation.calls:
            study.oracle.native(study.placed(inputs))  # what the reference refuses is outside the problem
        look = {
            "values": _values,
            "replayed": _replayed,
            "overwritten": _overwritten,
            "mutated": _mutated,
            "unwritten": _unwritten,
        }.get(situation.kind, _record)
        return look(study, bench, case, situation)
    except InfrastructureError as error:
        return Answer(unable=str(error))


# -- values -------------------------------------------------------------------------------------------


def _values(study: Study, bench: Bench, case: Case, situation: Situation) -> Answer:
    record = bench.call(case, inputs=situation.inputs_of(_names(study), 0))
    if not record.usable:
        return Answer(unable=unusable(record))
    return judge_values(study, situation, record.outputs)


def judge_values(study: Study, situation: Situation, outputs: Sequence[Tensor]) -> Answer:
    """The output at fault against the honest floor of these inputs."""
    assert situation.output is not None
    i = situation.output
    placed = study.placed(situation.inputs_of(_names(study), 0))
    native = study.oracle.native(placed)
    if _same_bits(outputs[i], native[i].cpu()):
        return Answer()  # what the native reference gives is no fault of the candidate, and no envelope is needed
    envelope = _envelope(study, placed, native)
    report = envelope.judge([study.device.to_device(t) for t in outputs])[i]
    if report.passed is None:
        return Answer(unable=report.why)
    if report.passed or envelope.judge(native)[i].passed is False:
        return Answer()
    family = family_of(report)
    if situation.family and family != situation.family:
        return Answer()
    points = _points(envelope, i, report, outputs[i], family)
    if situation.least > 1.0 and not any(p.times_allowed >= situation.least for p in points):
        return Answer()
    statistic = _statistic(envelope, i, outputs[i]) if family == "finite" and not points else None
    failed = max((t for t in report.tests if t.failed), key=lambda t: t.name == "tail")
    return Answer(Symptom(failed.words, family, points, statistic))


def _names(study: Study) -> list[str]:
    return [s.name for s in study.problem.inputs]


def family_of(report: OutputReport) -> str:
    """Which kind of difference a failed report shows; shrinking never changes one into another."""
    failed = {t.name for t in report.tests if t.failed}
    for name in ("shape", "exact", "nonfinite"):
        if name in failed:
            return name
    return "finite"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and changed_elements(a, b) == 0


def _envelope(study: Study, placed: Sequence[Value], native: Sequence[Tensor]) -> Envelope:
    from seatrial.formats.dtypes import torch_dtype
    from seatrial.numerics.envelope import Envelope
    from seatrial.numerics.noise import contract_on

    return Envelope.build(
        study.oracle,
        placed,
        contract=contract_on("TC", study.capability, placed),
        samples=study.policy.samples,
        seed=study.seed_for("reproducer"),
        dtypes=[torch_dtype(s.dtype) for s in study.problem.outputs],
        native=native,
    )


def _points(envelope: Envelope, i: int, report: OutputReport, out: Tensor, family: str) -> tuple[Point, ...]:
    yardstick = envelope.yardsticks[i]
    if family in ("nonfinite", "exact") and report.worst_index is not None:
        allowed = 0.0 if yardstick is None else float(_allowed(yardstick, report)[report.worst_index])
        expected = float(envelope.oracle.values[i][report.worst_index])
        return (Point(report.worst_index, float(out[report.worst_index].double()), expected, allowed),)
    if yardstick is None or out.is_complex() or family != "finite":
        return ()
    return _far_elements(yardstick, report, out)


def _far_elements(yardstick: Yardstick, report: OutputReport, out: Tensor) -> tuple[Point, ...]:
    """The elements beyond what an honest kernel may leave, the farthest first; none when the tail test held."""
    import torch

    if not any(t.name == "tail" and t.failed for t in report.tests):
        return ()
    got = out.double().to(yardstick.y.device)
    allowed = _allowed(yardstick, report)
    over = ((got - yardstick.y).abs() / allowed.clamp(min=1e-300)).nan_to_num_(0.0, 0.0, 0.0).reshape(-1)
    ratios, flat = over.topk(min(MOST_POINTS, over.numel()))
    places = [(int(f), float(r)) for f, r in zip(flat, ratios, strict=True) if float(r) > 1.0]
    return tuple(
        Point(
            tuple(int(x) for x in torch.unravel_index(torch.tensor(f), yardstick.y.shape)),
            float(got.reshape(-1)[f]),
            float(yardstick.y.reshape(-1)[f]),
            float(allowed.reshape(-1)[f]),
        )
        for f, _ in places
    )


def _allowed(yardstick: Yardstick, report: OutputReport) -> Tensor:
    """Per element: the final rounding, plus as many honest deviations as the tail test allows."""
    from seatrial.numerics.compare import TAIL

    sigmas = max((t.allowed for t in report.tests if t.name == "tail"), default=TAIL)
    return yardstick.half * (1 + 2.0**-10) + sigmas * yardstick.sigma + 2.0**-126


def _statistic(envelope: Envelope, i: int, out: Tensor) -> Statistic | None:
    from seatrial.numerics.dtypes import round_to

    yardstick = envelope.yardsticks[i]
    if yardstick is None or out.is_complex():
        return None
    y, got = yardstick.y, out.double().to(yardstick.y.device)
    honest = [round_to(sample, yardstick.stored) for sample in (*envelope.samples[i], y)]
    for name in ("rms", "signed mean"):
        allowed = STATISTIC_OVER_HONEST * max(statistic(name, h, y) for h in honest)
        measured = statistic(name, got, y)
        if measured > STATISTIC_OVER_HONEST * allowed:
            return Statistic(name, measured, allowed, y.cpu())
    return None


def statistic(name: str, got: Tensor, expected: Tensor) -> float:
    """The rms of got - expected, or its mean in the direction of growing size; both in the output's own unit."""
    error = (got - expected).nan_to_num(0.0, 0.0, 0.0)
    if name == "rms":
        return float(error.square().mean().sqrt())
    return abs(float((error * expected.sign()).mean()))


# -- everything else ----------------------------------------------------------------------------------


def _calls(bench: Bench, case: Case, situation: Situation) -> list[CallRecord]:
    bench.fresh()
    return [bench.call(case, inputs=inputs) for inputs in situation.calls]


def _replayed(study: Study, bench: Bench, case: Case, situation: Situation) -> Answer:
    from seatrial.formats.dtypes import torch_dtype
    from seatrial.numerics.moved import share_changed, share_moved

    records = _calls(bench, case, situation)
    for record in records:
        if not record.usable:
            return Answer(unable=unusable(record))
    assert situation.output is not None
    i = situation.output
    exact = [study.oracle.run(study.placed(inputs)).values[i].cpu() for inputs in situation.calls]
    should = share_moved(exact[0], exact[1], torch_dtype(study.problem.outputs[i].dtype))
    did = share_changed(records[0].outputs[i], records[1].outputs[i])
    if should > SHOULD_CHANGE and did == 0.0:
        words = f"call 2 returned call 1's result, although {should:.0%} of it should change"
        return Answer(Symptom(words, points=_unchanged(records[1].outputs[i], *exact)))
    return Answer()


def _unchanged(got: Tensor, before: Tensor, now: Tensor) -> tuple[Point, ...]:
    """The element whose exact value changed most between the calls."""
    import torch

    moved = (now.double() - before.double()).abs().nan_to_num(0.0, 0.0, 0.0)
    index = tuple(int(x) for x in torch.unravel_index(moved.argmax(), moved.shape))
    return (Point(index, float(got[index].double()), float(now[index].double()), 0.0),)


def _overwritten(study: Study, bench: Bench, case: Case, situation: Situation) -> Answer:
    from seatrial.numerics.moved import share_changed

    first, second = _calls(bench, case, situation)
    for record in (first, second):
        if not record.usable:
            return Answer(unable=unusable(record))
    changed = any(share_changed(a, b) for a, b in zip(first.outputs, second.outputs, strict=True))
    if second.facts.get("reuses_output") and changed:
        return Answer(Symptom("call 2 returned its result in the memory of call 1's, which is still in use"))
    return Answer()


def _mutated(study: Study, bench: Bench, case: Case, situation: Situation) -> Answer:
    from torch import Tensor

    record = bench.call(case, inputs=situation.calls[0], echo=True)
    if record.ran is not Ran.RETURNED or len(record.echoed) != len(situation.calls[0]):
        return Answer(unable=unusable(record))
    for spec, was, now in zip(study.problem.inputs, situation.calls[0], record.echoed, strict=True):
        if now is not None and isinstance(was, Tensor) and (count := changed_elements(was, now)):
            return Answer(Symptom(f"input `{spec.name}` changed in {count} of {was.numel()} elements"))
    return Answer()


def _unwritten(study: Study, bench: Bench, case: Case, situation: Situation) -> Answer:
    assert situation.output is not None
    on_nan, on_finite = (bench.call(case, inputs=situation.calls[0], poison=p) for p in (NAN, FINITE))
    for record in (on_nan, on_finite):
        if not record.usable:
            return Answer(unable=unusable(record))
    stale = unwritten(on_nan.outputs[situation.output], on_finite.outputs[situation.output])
    if bool(stale.any()):
        return Answer(Symptom(f"{int(stale.sum())} of {stale.numel()} elements were never written"))
    return Answer()


def _record(study: Study, bench: Bench, case: Case, situation: Situation) -> Answer:
    bench.fresh()
    record = bench.call(case, inputs=situation.inputs_of(_names(study), 0))
    if record.ran is Ran.LOST:
        return Answer(unable=unusable(record))
    if situation.kind == "dies":
        same = record.ran in FATAL and situation.family in ("", record.ran.value)
        return Answer(Symptom(unusable(record), record.ran.value) if same else None)
    if record.ran is not Ran.RETURNED:
        return Answer(unable=unusable(record))
    facts: Any = record.breaches if situation.kind == "contract" else record.facts.get("guards_broken", ())
    return Answer(Symptom(str(facts[0])) if facts else None)


def _load(bench: Bench, situation: Situation) -> Answer:
    record = bench.load()
    if record.ran is Ran.LOST:
        return Answer(unable=unusable(record))
    same = record.ran in FATAL and situation.family in ("", record.ran.value)
    return Answer(Symptom(unusable(record), record.ran.value) if same else None)
