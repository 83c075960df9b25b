"""A kernel that reads or writes beyond the ends of its tensors.

What it shows      no byte before the first or behind the last element of any tensor that was given is written in any call of
                   this audit, and no result depends on one, at the smallest declared sizes and at sizes that leave a
                   last tile half full
Why it matters     what lies there is another tensor: it is destroyed, or its values come in, or the page is not
                   mapped and the context dies in whatever kernel runs next
How                every tensor lies between two bands of memory that its storage does not show; a changed byte is a write.
                   The same inputs are computed twice between bands of one pattern and once between bands of
                   another: a result that repeats and differs between the patterns was read from the bands
What it misses     accesses farther off than the bands are wide (64 KiB), memory that the kernel allocates for itself, and
                   reads whose result is thrown away
Cost               three calls for each of up to five sizes
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from seatrial.bench import Bench
from seatrial.checks.base import (
    Conclusion,
    Evidence,
    Example,
    Job,
    NotApplicable,
    failed,
    held,
    not_verified,
    unusable,
    where,
)
from seatrial.model import CallRecord, Finding, Ran
from seatrial.poison import ALL_BITS, OTHER_BITS
from seatrial.study import Case, Study

if TYPE_CHECKING:
    from torch import Tensor

NAME = "out-of-bounds"
TITLE = "stays within its tensors"

MOST_FINDINGS = 3
MOST_SIZES = 4  # beside the smallest declared one
BETWEEN = (ALL_BITS, ALL_BITS, OTHER_BITS)  # what lies beyond the ends in the three calls
PLACE = re.compile(r"(before|behind|around) (input|output) (\d+)")
WORDS = {
    "before": "before the first element",
    "behind": "behind the last element",
    "around": "before the first and behind the last element",
}


def plan(study: Study) -> Sequence[Job] | NotApplicable:
    """The smallest workload and sizes outside the list, those of one element and of half-filled tiles among them."""
    if all(spec.shape in (None, ()) for spec in (*study.problem.inputs, *study.problem.outputs)):
        return NotApplicable("no tensors")
    cases = [study.case(study.smallest, draw=90)]
    if study.problem.var_axes and study.problem.resizable:
        outside = sorted((study.case(w, draw=90) for w in study.outside_sizes()), key=lambda c: _elements(study, c))
        cases += [c for c in outside if study.reference_accepts(c)][:MOST_SIZES]
    return tuple(Job(f"guard bands, {dict(c.workload.axes)}", (c,)) for c in cases)


def _elements(study: Study, case: Case) -> int:
    return study.elements(case.workload)


def observe(bench: Bench, job: Job) -> Evidence:
    """Twice between bands of one pattern, once between bands of another."""
    case = job.cases[0]
    records = tuple(bench.call(case, guard=guard) for guard in BETWEEN)
    return Evidence(job, records, {"overruns": tuple(bench.overruns)})


def judge(study: Study, evidence: Sequence[Evidence]) -> Conclusion:
    """A write in any call of the audit is a fault, and so is a result that depends on what lies beyond the ends."""
    overruns: Sequence[tuple[Case, CallRecord]] = evidence[-1].extra.get("overruns", ())
    own = [e.job.cases[0] for e in evidence]
    findings = _writes(study, sorted(overruns, key=lambda overrun: overrun[0] not in own))
    findings += [f for e in evidence if (f := _reads(study, e.job.cases[0], e.records)) is not None][:2]
    silent = [(c, r) for c, e in zip(own, evidence, strict=True) for r in e.records if r.ran is not Ran.RETURNED]
    silent = [(c, r) for c, r in silent if r.ran is not Ran.RAISED or c is own[0]]  # other sizes may be refused
    if silent and not findings:
        findings.append(not_verified(NAME, unusable(silent[0][1]), where=where(silent[0][0])))
    return Conclusion(findings or [held(NAME, "nothing beyond the ends of a tensor was written, nor read with effect")])


def _writes(study: Study, overruns: Sequence[tuple[Case, CallRecord]]) -> list[Finding]:
    """One finding per tensor, with the first call that shows it."""
    first: dict[str, Case] = {}
    calls: dict[str, int] = {}
    for case, record in overruns:
        for place in map(str, record.facts["guards_broken"]):
            first.setdefault(place, case)
            calls[place] = calls.get(place, 0) + 1
    return [_write(study, place, case, calls[place]) for place, case in list(first.items())[:MOST_FINDINGS]]


def _write(study: Study, place: str, case: Case, calls: int) -> Finding:
    words, output = _in_words(study, place)
    return failed(
        NAME,
        f"writes {words} in {calls} call{'s' if calls > 1 else ''}",
        output=output,
        cause="out-of-bounds:write",
        where=where(case),
        advice="Check the mask of the last tile and every offset at this size.",
    )


def _in_words(study: Study, place: str) -> tuple[str, str | None]:
    """Where that is, and the output that it is beside; what a child says in words of its own stays vague."""
    found = PLACE.fullmatch(place)
    if found is None:
        return "beyond the ends of its tensors", None
    specs = study.problem.inputs if found[2] == "input" else study.problem.outputs
    position = int(found[3])
    name = specs[position].name if position < len(specs) else found[3]
    return f"{WORDS[found[1]]} of {found[2]} `{name}`", name if found[2] == "output" else None


def _reads(study: Study, case: Case, records: Sequence[CallRecord]) -> Finding | None:
    if not all(r.usable for r in records):
        return None
    for spec, *outputs in zip(study.problem.outputs, *(r.outputs for r in records), strict=True):
        if share := changed_by_the_bands(*outputs):
            return _read(case, spec.name, share, outputs[0], outputs[-1])
    return None


def changed_by_the_bands(one: Tensor, again: Tensor, other: Tensor) -> float:
    """Share of the elements that repeat between equal bands and differ between other ones; 0 where they do not repeat."""
    from seatrial.numerics.moved import share_changed

    return share_changed(one, other) if share_changed(one, again) == 0 else 0.0


def _read(case: Case, output: str, share: float, between_nan: Tensor, between_other: Tensor) -> Finding:
    was, now = between_nan.double(), between_other.double()
    index = ((was != now) & ((was == was) | (now == now))).nonzero()[0].tolist()
    nan = bool(was.isnan().any()) and not bool(now.isnan().any())
    return failed(
        NAME,
        f"`{output}` depends on memory beyond the ends of the tensors: {share:.2%} of it, first at {index}, changes "
        "with what lies there" + (", and is NaN where that is" if nan else ""),
        output=output,
        cause="out-of-bounds:read",
        measured=share,
        allowed=0.0,
        unit="of the elements",
        where=where(case, index=index),
        advice="Mask the loads of the last tile, with a value that leaves the result alone.",
    )


_REFERENCE = "def run(x):\n    return x.sum(-1)\n"
_INPUTS = "import torch\n\ndef make(seed):\n    return {'x': torch.randn(6, 20, generator=torch.Generator().manual_seed(seed))}\n"
_CANDIDATE = """import ctypes
import torch

def run(x):
    x = x.contiguous()
    rows, columns = x.shape
    tile = 16
    y = torch.zeros(rows)
    for row in range(rows):
        for start in range(0, columns, tile):
            n = {}
            memory = (ctypes.c_float * n).from_address(x.data_ptr() + 4 * (row * columns + start))
            loaded = torch.frombuffer(memory, dtype=torch.float32)
            y[row] += loaded[: columns - start].sum() if row < rows - 1 else loaded.sum()
    return y
"""

ACCEPTS: Example | None = Example(_REFERENCE, _INPUTS, _CANDIDATE.format("min(tile, columns - start)"))
REJECTS: Example | None = Example(
    _REFERENCE, _INPUTS, _CANDIDATE.format("tile"), because="depends on memory beyond the ends", also=("*",)
)
