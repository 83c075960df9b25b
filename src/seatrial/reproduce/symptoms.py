"""Do one or two calls still show a fault?

Shrinking and replaying ask the same question of the same judge as the checks do: the honest floor of these very
inputs for values (wrong_values.py), bytes for changed inputs and unwritten outputs, the record of the call for
everything else. A case on which the native reference itself falls short, or which the reference refuses, shows nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seatrial.checks.base import unusable
from seatrial.checks.mutated_input import changed_elements
from seatrial.checks.out_of_bounds import BETWEEN, changed_by_the_bands
from seatrial.checks.stale_output import unwritten
from seatrial.errors import InfrastructureError
from seatrial.model import CallRecord, Ran
from seatrial.poison import FINITE, NAN
from seatrial.reproduce.nouns import Answer, Point, Situation, Symptom
from seatrial.reproduce.wrong_values import judge_values
from seatrial.study import Case

if TYPE_CHECKING:
    from torch import Tensor

    from seatrial.bench import Bench
    from seatrial.study import Study

FATAL = (Ran.RAISED, Ran.CRASHED, Ran.EXITED, Ran.TIMED_OUT, Ran.OUT_OF_MEMORY)
SHOULD_CHANGE = 0.5  # share of exact elements that differ between two calls whose results may not be the same


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
            "reads-beyond": _reads_beyond,
        }.get(situation.kind, _record)
        return look(study, bench, case, situation)
    except InfrastructureError as error:
        return Answer(unable=str(error))


def _values(study: Study, bench: Bench, case: Case, situation: Situation) -> Answer:
    record = bench.call(case, inputs=situation.inputs_of(study.problem, 0))
    if not record.usable:
        return Answer(unable=unusable(record))
    return judge_values(study, situation, record.outputs)


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


def _reads_beyond(study: Study, bench: Bench, case: Case, situation: Situation) -> Answer:
    records = [bench.call(case, inputs=situation.calls[0], guard=byte) for byte in BETWEEN]
    for record in records:
        if not record.usable:
            return Answer(unable=unusable(record))
    for spec, *outputs in zip(study.problem.outputs, *(r.outputs for r in records), strict=True):
        if share := changed_by_the_bands(*outputs):
            return Answer(Symptom(f"{share:.2%} of `{spec.name}` changes with what lies beyond the ends of the inputs"))
    return Answer()


def _record(study: Study, bench: Bench, case: Case, situation: Situation) -> Answer:
    bench.fresh()
    record = bench.call(case, inputs=situation.inputs_of(study.problem, 0))
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
