"""A kernel that is right only where its inputs are dense and aligned.

What it shows      values hold for inputs that are slices of a larger tensor, transposed, one element off an aligned
                   address, and for an upstream gradient of stride 0; memory between their elements is left alone
Why it matters     autograd hands expanded gradients to a backward, q, k and v are slices of one projection; a kernel
                   that indexes them as if they were dense reads its neighbours and says nothing
How                the same values in another layout, between bytes that are NaN as floats, in all inputs at once; what
                   changes the result is tried in each input alone. A Python error is a guard and counts as such. A
                   wrong value is a limit of the verdict, as the declared inputs are dense, and a fault where the
                   policy says any_layout (`--any-layout`). A layout that the reference refuses is not tried
What it misses     outputs of other layouts (destination passing), negative strides
Cost               one call per layout, and one per input where the result changes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seatrial.bench import Bench
from seatrial.checks.base import Conclusion, Evidence, Example, Job, NotApplicable, held, not_verified, unusable, where
from seatrial.inputs.layouts import LAYOUTS, LayoutChange, gaps_changed, laid_out
from seatrial.inputs.roles import Role, roles
from seatrial.model import CallRecord, Finding, Outcome, Ran, Value
from seatrial.study import Case, Study
from seatrial.values import wrong_outputs

NAME = "assumed-layout"
TITLE = "values on inputs of other layouts"

DENSE = "dense"
FATAL = (Ran.CRASHED, Ran.EXITED, Ran.TIMED_OUT, Ran.OUT_OF_MEMORY)
MOST_INPUTS = 8  # tried alone


def plan(study: Study) -> Sequence[Job] | NotApplicable:
    """The layouts that the reference takes, on one fresh draw."""
    if all(spec.shape in (None, ()) for spec in study.problem.inputs):
        return NotApplicable("no tensor inputs")
    case = study.case(study.middle, draw=70)
    taken: list[Job] = []
    for layout in LAYOUTS.values():
        names = _relaid(study, case, layout)
        if names and len(taken) < study.policy.layouts and study.takes(inputs_in(study, case, layout.name, names)):
            taken.append(Job(f"inputs {layout.name}", (case,), {"layout": layout.name, "inputs": names}))
    if not taken:
        return NotApplicable("the reference takes its inputs in no other layout")
    return (Job("inputs dense", (case,), {"layout": DENSE, "inputs": ()}), *taken)


def _relaid(study: Study, case: Case, layout: LayoutChange) -> tuple[str, ...]:
    """Names of the inputs that have such a layout."""
    from torch import Tensor

    told = roles(study.problem, study.trace.index_ranges)
    named = _named(study, case)
    own = [n for n in named if layout.keeps_values or told[n] is Role.GRADIENT]
    return tuple(n for n in own if isinstance(v := named[n], Tensor) and layout.apply(v) is not None)


def _named(study: Study, case: Case) -> dict[str, Value]:
    return dict(zip((s.name for s in study.problem.inputs), study.inputs(case), strict=True))


def inputs_in(study: Study, case: Case, layout: str, names: Sequence[str]) -> list[Value]:
    """The inputs of the case, those of these names in this layout, in declared order."""
    named = _named(study, case)
    return list(named.values() if layout == DENSE else laid_out(LAYOUTS[layout], named, names).values())


def observe(bench: Bench, job: Job) -> Evidence:
    """All inputs at once, and each alone when there are several."""
    case, layout, names = job.cases[0], str(job.options["layout"]), tuple(job.options["inputs"])
    record = bench.call(case, inputs=inputs_in(bench.study, case, layout, names), echo=layout != DENSE)
    twin: CallRecord | None = None
    if layout != DENSE and not LAYOUTS[layout].keeps_values:
        twin = bench.call(case, inputs=dense_of(inputs_in(bench.study, case, layout, names)))
    alone: dict[str, CallRecord] = {}
    if len(names) > 1 and record.ran not in FATAL:
        for name in names[:MOST_INPUTS]:
            alone[name] = bench.call(case, inputs=inputs_in(bench.study, case, layout, [name]), echo=True)
    return Evidence(job, (record,), {"alone": alone, "twin": twin})


def dense_of(inputs: Sequence[Value]) -> list[Value]:
    """The same values without strides of their own."""
    from torch import Tensor

    return [v.contiguous() if isinstance(v, Tensor) else v for v in inputs]


def judge(study: Study, evidence: Sequence[Evidence]) -> Conclusion:
    """Wrong in another layout and right in the dense one."""
    dense, others = evidence[0], evidence[1:]
    case = dense.job.cases[0]
    if not dense.records[0].usable:
        return Conclusion([not_verified(NAME, unusable(dense.records[0]), where=where(case))])
    if _wrong(study, dense, dense.records[0], ()):
        reason = "the values are wrong on dense inputs already"
        return Conclusion([Finding(check=NAME, outcome=Outcome.NOT_APPLICABLE, reason=reason)])
    faults: dict[str, list[_Fault]] = {}
    for e in others:
        if (fault := _fault(study, e)) is not None:
            faults.setdefault(fault.cause, []).append(fault)
    findings = [_finding(study, case, cause, found) for cause, found in faults.items()]
    tried = ", ".join(LAYOUTS[str(e.job.options["layout"])].words for e in others)
    proven = [f for f in findings if f.outcome is not Outcome.NOTED]
    return Conclusion(findings if proven else [held(NAME, f"no wrong value on inputs that are {tried}"), *findings])


@dataclass(frozen=True)
class _Fault:
    """What one layout shows: cause is "wrong", "refused", "lost" or what became of the process."""

    cause: str
    layout: LayoutChange
    inputs: tuple[str, ...]
    words: str


def _fault(study: Study, e: Evidence) -> _Fault | None:
    record, names = e.records[0], tuple(e.job.options["inputs"])
    alone: dict[str, CallRecord] = dict(e.extra.get("alone", {}))
    layout = LAYOUTS[str(e.job.options["layout"])]
    if record.ran is Ran.RAISED:
        refused = tuple(name for name, own in alone.items() if own.ran is Ran.RAISED)
        return _Fault("refused", layout, refused or names, unusable(record))
    if not record.usable:
        return _Fault(record.ran.value, layout, names, unusable(record))
    words, twin = _wrong(study, e, record, names), e.extra.get("twin")
    if not words or (twin is not None and (not twin.usable or _wrong(study, e, twin, names))):
        return None  # right, or no layout's fault: these values come out wrong from dense inputs as well
    guilty = tuple(name for name, own in alone.items() if own.usable and _wrong(study, e, own, (name,)))
    return _Fault("wrong", layout, guilty or names, words)


def _wrong(study: Study, e: Evidence, record: CallRecord, names: Sequence[str]) -> str:
    """What is wrong with the values, or with the memory between them; empty when nothing is."""
    from torch import Tensor

    case, layout = e.job.cases[0], str(e.job.options["layout"])
    given = inputs_in(study, case, layout, names)
    for spec, was, now in zip(study.problem.inputs, given, record.echoed, strict=False):  # a twin echoes nothing
        if isinstance(was, Tensor) and isinstance(now, Tensor) and (count := gaps_changed(was, now)):
            return f"{count} bytes between the elements of `{spec.name}` were overwritten"
    if layout == DENSE or LAYOUTS[layout].keeps_values:
        objections = wrong_outputs(study, case, record)
    else:
        reports = study.judge_inputs(dense_of(given), record.outputs, f"{NAME} {layout}")
        objections = {r.name: next(t for t in r.tests if t.failed).words for r in reports if r.passed is False}
    return next((f"`{output}`: {words}" for output, words in objections.items()), "")


TELLS = {"refused": "refuses with an error", "wrong": "is wrong without an error"}


def _finding(study: Study, case: Case, cause: str, faults: Sequence[_Fault]) -> Finding:
    if cause == Ran.LOST.value:
        return not_verified(NAME, f"inputs that are {faults[0].layout.words}: {faults[0].words}", where=where(case))
    severe, mild = (Outcome.LIMITED, Outcome.NOTED) if cause == "refused" else (Outcome.FAILED, Outcome.LIMITED)
    places = " or ".join(f"{_subject(f.inputs)} {f.layout.words}" for f in faults)
    first = faults[0]
    return Finding(
        check=NAME,
        outcome=severe if study.policy.any_layout else mild,
        output=next((s.name for s in study.problem.outputs if first.words.startswith(f"`{s.name}`:")), None),
        cause=f"layout:{cause}",
        reason=f"{TELLS.get(cause, cause)} when {places}: {first.words}",
        where=where(case, note=first.layout.name),
        advice="Index by the strides of each input, or make them dense (`.contiguous()`) or refuse them before the launch.",
        details={"layout": first.layout.name, "inputs": list(first.inputs)},
    )


def _subject(inputs: Sequence[str]) -> str:
    return f"{', '.join(f'`{name}`' for name in inputs)} {'is' if len(inputs) == 1 else 'are'}"


_REFERENCE = "def run(x):\n    return x * 2 + 1\n"
_INPUTS = "import torch\n\ndef make(seed):\n    return {'x': torch.randn(8, 48, generator=torch.Generator().manual_seed(seed))}\n"
_CANDIDATE = """import torch

def run(x):
    x = {}
    rows, columns = x.shape
    dense = torch.as_strided(x, (rows, columns), (columns, 1))
    return dense * 2 + 1
"""

ACCEPTS: Example | None = Example(_REFERENCE, _INPUTS, _CANDIDATE.format("x.contiguous()"))
REJECTS: Example | None = Example(_REFERENCE, _INPUTS, _CANDIDATE.format("x"), because="is wrong without an error when")
