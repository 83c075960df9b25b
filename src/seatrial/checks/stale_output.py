"""Output that was there before the kernel ran.

What it shows      the candidate writes every element it must write
Why it matters     in production the buffer holds the last request's data; `torch.empty` may even hand back the previous
                   correct output, so the fault hides in every test that repeats a call
How                the same inputs are computed on memory filled with NaN and with a finite pattern: outputs, freed
                   blocks, and what the kernel allocates for itself; an element that shows its poison both times was never written
What it misses     a kernel that copies a right answer from somewhere else: see replayed-result
Cost               two calls per audited workload, at most three workloads
"""

from __future__ import annotations

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
from seatrial.model import CallRecord, Finding
from seatrial.poison import FINITE, NAN, allocator_fills
from seatrial.study import Case, Study

if TYPE_CHECKING:
    from torch import Tensor

NAME = "stale-output"
TITLE = "every output element is written"


def plan(study: Study) -> Sequence[Job] | NotApplicable:
    """Up to three audited workloads, each computed twice on other poison."""
    return tuple(Job(f"poison, workload {w.uuid}", (study.case(w),)) for w in study.audited[:3])


def observe(bench: Bench, job: Job) -> Evidence:
    """The same inputs on NaN and on a finite pattern."""
    case = job.cases[0]
    return Evidence(job, (bench.call(case, poison=NAN), bench.call(case, poison=FINITE)))


def judge(study: Study, evidence: Sequence[Evidence]) -> Conclusion:
    """An element that carries the poison of its own call twice is unwritten."""
    findings: list[Finding] = []
    for e in evidence:
        findings += _judge_pair(study, e.job.cases[0], *e.records)
    bad = [f for f in findings if f.outcome.value == "failed"]
    return Conclusion(bad[:2] or findings or [held(NAME, "every element was written on both kinds of poison")])


def _judge_pair(study: Study, case: Case, nan: CallRecord, finite: CallRecord) -> list[Finding]:
    for record in (nan, finite):
        if not record.usable:
            return [not_verified(NAME, unusable(record), where=where(case))]
    out = []
    for spec, a, b in zip(study.problem.outputs, nan.outputs, finite.outputs, strict=True):
        stale = unwritten(a, b)
        if bool(stale.any()):
            index = stale.nonzero()[0].tolist()
            out.append(
                failed(
                    NAME,
                    f"`{spec.name}` keeps what was in memory before the call in {int(stale.sum())} of "
                    f"{stale.numel()} elements, first at {index}",
                    output=spec.name,
                    cause="unwritten",
                    measured=float(stale.sum()),
                    allowed=0.0,
                    unit="elements",
                    where=where(case, index=index),
                    advice="Write every element, or clear the buffer first; check masks and grid size at the tail.",
                )
            )
    return out


def unwritten(on_nan: Tensor, on_finite: Tensor) -> Tensor:
    """Mask of the elements that show the poison of their own run in both runs.

    Integers have no NaN; there an element is unwritten when it differs between the two runs.
    """
    import torch

    if not on_nan.is_floating_point():
        return on_nan != on_finite
    first = torch.isnan(on_nan.to(torch.float64)) | _holds(on_nan, allocator_fills(NAN))
    second = (on_finite.to(torch.float64) == FINITE) | _holds(on_finite, allocator_fills(FINITE))
    return first & second


def _holds(values: Tensor, fills: Sequence[int]) -> Tensor:
    """Mask of the elements all of whose bytes are one of the fills."""
    import torch

    if values.numel() == 0:
        return torch.zeros(values.shape, dtype=torch.bool)
    raw = values.contiguous().reshape(-1).view(torch.uint8).reshape(-1, values.element_size())
    found = torch.stack([(raw == fill).all(-1) for fill in fills]).any(0)
    return found.reshape(values.shape)


_REFERENCE = "def run(x):\n    return x * 2\n"
_INPUTS = "import torch\n\ndef make(seed):\n    return {'x': torch.randn(64, 33, generator=torch.Generator().manual_seed(seed))}\n"
_CANDIDATE = """import torch

def run(x):
    y = torch.empty_like(x)
    n = {}
    y[:, :n] = x[:, :n] * 2
    return y
"""

ACCEPTS: Example | None = Example(_REFERENCE, _INPUTS, _CANDIDATE.format("x.shape[1]"))
REJECTS: Example | None = Example(
    _REFERENCE,
    _INPUTS,
    _CANDIDATE.format("x.shape[1] // 32 * 32"),
    because="keeps what was in memory",
    also=("wrong-values", "fitted-inputs", "replayed-result", "narrow-accumulator"),
)
