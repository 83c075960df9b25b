"""A kernel that bends or breaks a training run.

What it shows      a small decoder trained with the candidate stays in the band of honest runs, over real text, Zipf and
                   uniform tokens, under SGD with momentum and under AdamW
Why it matters     it is where the damage happens; and the matrix shows which data and which optimizer would have hidden it
How                twin runs: reference, honest controls (same reference, other summation order) and candidate from one
                   start and one stream of batches; the parent owns the loop and sends the candidate only the operation's
                   inputs, step by step
What it misses     drifts that need longer runs or larger models than the policy allows
Cost               the slowest check: some tens of training steps per cell
"""

from __future__ import annotations

from collections.abc import Sequence

from seatrial.bench import Bench
from seatrial.checks.base import Conclusion, Evidence, Example, Job, NotApplicable, failed, held, not_verified
from seatrial.model import Finding, Outcome, Trial, TrialCell, Where
from seatrial.study import Study

NAME = "training-divergence"
TITLE = "a training run stays in the honest band"


def plan(study: Study) -> Sequence[Job] | NotApplicable:
    """One job: the whole matrix."""
    if not study.policy.trial:
        return NotApplicable(f"policy {study.policy.name} runs no training trial")
    from seatrial.trials.matrix import find_adapter

    adapter = find_adapter(study.problem)
    if isinstance(adapter, str):
        return NotApplicable(adapter)
    return (Job("training matrix", ()),)


def observe(bench: Bench, job: Job) -> Evidence:
    """Run the matrix; the candidate's part of each step goes over the wire."""
    from seatrial.trials.matrix import run_matrix

    trial, why = run_matrix(
        bench.study.problem,
        bench.trial_kernel(),
        settings=bench.study.trial_settings,
        honest=bench.study.honest_runs,
        fault_proven=bench.proven_fault,
        device=bench.study.device.name,
        progress=lambda cell, step, total: bench.progress(f"{cell}, step {step} of {total}", step / max(1, total)),
        seed=bench.study.seed_for("trial"),
    )
    return Evidence(job, (), {"trial": trial, "why": why})


def judge(study: Study, evidence: Sequence[Evidence]) -> Conclusion:
    """Leaving the band rejects; masked cells are noted, because they explain why others saw nothing."""
    trial = evidence[0].extra["trial"]
    if not isinstance(trial, Trial):
        return Conclusion([not_verified(NAME, str(evidence[0].extra["why"]))])
    findings = [f for f in (_cell(c, trial) for c in trial.cells) if f is not None]
    if not findings:
        findings = [held(NAME, f"all {len(trial.cells)} cells stay in the band of the honest controls")]
    return Conclusion(findings, trial=trial)


def _cell(cell: TrialCell, trial: Trial) -> Finding | None:
    place = f"{cell.data} tokens × {cell.optimizer}"
    where = Where(inputs=cell.data, note=f"{cell.optimizer}, learning rate {cell.learning_rate:g}, {trial.model}")
    if cell.verdict in ("diverges", "drifts"):
        return failed(
            NAME,
            f"training on {place} {cell.verdict}: {cell.reason}",
            cause=f"training:{cell.verdict}",
            measured=cell.farthest,
            allowed=cell.band,
            unit="nats of loss",
            where=where,
            advice="Do not train with this kernel; the value findings name the operation at fault.",
        )
    if cell.verdict == "masked":
        return Finding(
            check=NAME,
            outcome=Outcome.NOTED,
            cause="training:masked",
            reason=f"training on {place} hides the fault (masked): {cell.reason}",
            measured=cell.farthest,
            allowed=cell.band,
            unit="nats of loss",
            where=where,
        )
    if cell.verdict == "not verified":
        return not_verified(NAME, f"training on {place}: {cell.reason}", where=where)
    return None


ACCEPTS: Example | None = None
REJECTS: Example | None = None
