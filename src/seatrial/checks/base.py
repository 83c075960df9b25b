"""What a check is, and what it is handed.

A check is a module: its docstring is its page; NAME names the fault; `plan` says which cases it wants,
`observe` has the candidate called, `judge` concludes. All three run in the parent: the child only ever
executes calls, so neither a check's code nor an expected value enters a process with candidate code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from seatrial.model import CallRecord, Finding, Growth, Outcome, Ran, Trial, Where

if TYPE_CHECKING:
    from seatrial.bench import Bench
    from seatrial.study import Case, Study


@dataclass(frozen=True)
class Job:
    """Cases to observe in one go. `words` is what a progress bar shows."""

    words: str
    cases: tuple[Case, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """What observing a job gave: one record per call, and whatever else the check measured."""

    job: Job
    records: tuple[CallRecord, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Conclusion:
    """What a check makes of its evidence. One finding at least."""

    findings: Sequence[Finding]
    growth: Sequence[Growth] = ()
    trial: Trial | None = None
    grade: str = ""


@dataclass(frozen=True)
class NotApplicable:
    """The check has nothing to say about this problem, and why."""

    reason: str


@dataclass(frozen=True)
class Example:
    """The smallest candidate that shows the check at work, as Python sources.

    reference   defines run(*inputs)
    inputs      defines make(seed) -> dict of inputs by name
    candidate   defines run(*inputs)
    because     words that the finding's reason must contain (for an example that is to be rejected)
    also        names of other checks that this candidate fails too, and rightly
    """

    reference: str
    inputs: str
    candidate: str
    because: str = ""
    also: tuple[str, ...] = ()


class Check(Protocol):
    """A check module. TITLE reads well in a table; ACCEPTS and REJECTS differ by one line
    (None only where the smallest example is a whole training run: examples/ has it)."""

    NAME: str
    TITLE: str
    ACCEPTS: Example | None
    REJECTS: Example | None

    def plan(self, study: Study) -> Sequence[Job] | NotApplicable:
        """The jobs of this check on this problem; touches no candidate."""
        ...

    def observe(self, bench: Bench, job: Job) -> Evidence:
        """Have the candidate called; decides nothing."""
        ...

    def judge(self, study: Study, evidence: Sequence[Evidence]) -> Conclusion:
        """Conclude. What could not be verified is never a pass."""
        ...


def held(check: str, reason: str, **more: Any) -> Finding:
    """The check ran and found nothing."""
    return Finding(check=check, outcome=Outcome.HELD, reason=reason, **more)


def failed(check: str, reason: str, **more: Any) -> Finding:
    """The check proves a fault."""
    return Finding(check=check, outcome=Outcome.FAILED, reason=reason, **more)


def not_verified(check: str, reason: str, **more: Any) -> Finding:
    """The check could not say; never a pass."""
    return Finding(check=check, outcome=Outcome.NOT_VERIFIED, reason=reason, **more)


def where(case: Case, *, index: Sequence[int] | None = None, note: str = "") -> Where:
    """The place of a finding in the words of the report."""
    return Where(
        workload=case.workload.uuid,
        axes=dict(case.workload.axes),
        inputs=case.recipe,
        seed=case.seed,
        index=None if index is None else [int(i) for i in index],
        note=note,
    )


def unusable(record: CallRecord) -> str:
    """Why a call gave nothing to judge, in one clause."""
    if record.breaches:
        return record.breaches[0]
    last = record.error.strip().splitlines()[-1] if record.error.strip() else ""
    if record.ran is Ran.LOST and last:
        return last  # no call was made; the words say why
    return f"the call {record.ran.value}" + (f": {last}" if last else "")
