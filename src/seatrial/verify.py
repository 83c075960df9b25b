"""The whole flow on one screen: load → plan → run → judge → report. The only file that knows all stages."""

from __future__ import annotations

import platform
import secrets
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import seatrial
from seatrial import benchmark_rule
from seatrial.bench import Bench
from seatrial.checks import CHECKS
from seatrial.checks.base import Check, Conclusion, NotApplicable, not_verified
from seatrial.errors import InfrastructureError, UsageError
from seatrial.formats.plain import SEED_IGNORED
from seatrial.judge import conclude, demote_where_control_fails, headline, in_reading_order
from seatrial.model import Adequacy, BenchmarkRule, Candidate, CheckRow, Finding, Outcome, Problem, Ran, Report, Verdict
from seatrial.policy import Policy
from seatrial.study import Clock, Study, reference_boundary

if TYPE_CHECKING:
    from seatrial.devices.base import Device
    from seatrial.workers.process import ForkServer

CONTROL = "the reference, as a control"
PLANTING = "faults planted in the reference"
NOT_MEASURED = "how strong the inputs are was not measured"
Progress = Callable[[str, str, float], None]  # (candidate, what is being done, share done of this candidate)


def silent(candidate: str, words: str, share: float) -> None:
    """A progress sink that shows nothing."""


def fresh_seed() -> int:
    """A master seed from the operating system's entropy."""
    return secrets.randbelow(2**31)


@dataclass(frozen=True)
class Options:
    """How one audit is to be run; the knobs of thoroughness are in the policy."""

    policy: Policy
    device: Device
    seed: int = field(default_factory=fresh_seed)
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    fail_fast: bool = False
    strict: bool = False  # changes the exit code alone, so it is kept only to be said again
    command: str = "check"  # the verb of the command line: "check" or "train"
    progress: Progress = silent
    reproducers: Path | None = None  # folder for a file per objection; nothing is written without one


@dataclass
class Audit:
    """What has been gathered about one candidate so far."""

    conclusions: list[tuple[str, Conclusion]] = field(default_factory=list)
    rows: list[CheckRow] = field(default_factory=list)
    rule: BenchmarkRule | None = None
    ran: int = 0  # checks that were carried out, whatever they concluded

    @property
    def findings(self) -> list[Finding]:
        """All findings in the order of the checks."""
        return [f for _, c in self.conclusions for f in c.findings]

    @property
    def rejected(self) -> bool:
        """True once a fault is proven."""
        return any(f.outcome is Outcome.FAILED for f in self.findings)


def verify(problem: Problem, candidates: Sequence[Candidate], options: Options) -> list[Report]:
    """Judge every candidate against the problem; one report each, in order.

    Raises UsageError for an unknown check name. A candidate can do nothing that raises here.
    """
    from seatrial.workers.process import ForkServer

    checks = selected(options.only, options.skip)
    study = Study(problem, options.policy, options.device, options.seed)
    with ForkServer() as server:
        control = _run_control(study, server, checks, options.progress)
        adequacy = measured_adequacy(study, checks, options)  # after the control: the cases are then worked out
        return [_verify_one(study, server, c, checks, control, adequacy, options) for c in candidates]


def measured_adequacy(study: Study, checks: Sequence[Check], options: Options) -> Adequacy:
    """How strong this audit's inputs are; `study` gets the inputs that expose what its own do not."""
    from seatrial.adequacy.score import measure

    if not study.policy.mutants or study.policy.adequacy_s <= 0:
        return Adequacy(sentence=f"{NOT_MEASURED}: policy {study.policy.name} plants no faults in the reference")
    if not any(check.NAME == "fitted-inputs" for check in checks):
        return Adequacy(sentence=f"{NOT_MEASURED}: fitted-inputs, which uses the inputs that it finds, was not run")
    options.progress(PLANTING, "", 0.0)
    try:
        # A fault in the reference may make it raise whatever it likes: that costs the measure, never the audit.
        return reference_boundary(
            lambda: measure(study, study.policy.adequacy_s, mutants=study.policy.mutants), "planting faults"
        )
    except InfrastructureError as error:
        return Adequacy(sentence=f"{NOT_MEASURED}: {error}")
    finally:
        options.progress(PLANTING, "", 1.0)


def selected(only: Iterable[str], skip: Iterable[str]) -> list[Check]:
    """The checks to run, in table order. Raises UsageError naming an unknown check and the known ones."""
    for name in (*only, *skip):
        if name not in CHECKS:
            raise UsageError(f"there is no check named {name!r}; known are {', '.join(CHECKS)} (see `seatrial checks`)")
    wanted = set(only) or set(CHECKS)
    chosen = [check for name, check in CHECKS.items() if name in wanted - set(skip)]
    if not chosen:
        raise UsageError("--only and --skip leave no check to run; drop one of them")
    return chosen


# -- one candidate ----------------------------------------------------------------------------------


def _verify_one(
    study: Study,
    server: ForkServer,
    candidate: Candidate,
    checks: Sequence[Check],
    control: dict[str, str],
    adequacy: Adequacy,
    options: Options,
) -> Report:
    clock = Clock(options.policy.budget_s)
    audit = Audit()
    obstacle = _obstacle(candidate, study)
    if obstacle:
        conclusion = Conclusion([not_verified("does-not-load", obstacle)])
        audit.conclusions.append(("does-not-load", conclusion))
        audit.rows.append(_row(CHECKS["does-not-load"], conclusion, 0, 0.0))
    else:
        bench = Bench(study, candidate, server, clock)
        try:
            _run_checks(study, bench, checks, audit, options)
            audit.rule = _benchmark_rule(study, bench) if not options.only else None
        finally:
            bench.close()
    report = _report(study, server, candidate, audit, control, adequacy, clock, options)
    if options.reproducers is not None and not obstacle:
        from seatrial.reproduce import write_reproducers

        options.progress(candidate.name, "shrinking what was found", 1.0)
        report = write_reproducers(report, study, candidate, server, options.reproducers)
    return report


def _obstacle(candidate: Candidate, study: Study) -> str:
    if candidate.not_built:
        return candidate.not_built
    if _lacks_cuda(candidate, study):
        languages = ", ".join(candidate.languages)
        return f"a {languages} kernel needs a CUDA device, and this audit ran on {study.device.name}"
    return ""


def _lacks_cuda(candidate: Candidate, study: Study) -> bool:
    return candidate.needs_cuda and not candidate.not_built and not study.device.name.startswith("cuda")


def _run_checks(study: Study, bench: Bench, checks: Sequence[Check], audit: Audit, options: Options) -> None:
    for i, check in enumerate(checks):
        bench.progress = _progress_of(check, i, len(checks), bench.candidate.name, options)
        bench.progress("", 0.0)
        bench.proven_fault = audit.rejected
        before, started = bench.calls, time.monotonic()
        conclusion = _run_check(study, bench, check)
        audit.conclusions.append((check.NAME, conclusion))
        audit.rows.append(_row(check, conclusion, bench.calls - before, time.monotonic() - started))
        audit.ran += 1
        if options.fail_fast and audit.rejected:
            return
        if check.NAME == "does-not-load" and audit.rejected:
            return  # nothing else can be observed, and nothing is claimed of it


def _run_check(study: Study, bench: Bench, check: Check) -> Conclusion:
    try:
        jobs = check.plan(study)
        if isinstance(jobs, NotApplicable):
            return Conclusion([Finding(check=check.NAME, outcome=Outcome.NOT_APPLICABLE, reason=jobs.reason)])
        evidence = []
        for n, job in enumerate(jobs):
            counted = f"{job.words}, {n + 1} of {len(jobs)}" if len(jobs) > 1 else job.words
            bench.progress(counted, n / max(1, len(jobs)))
            evidence.append(check.observe(bench, job))
        return check.judge(study, evidence)
    except InfrastructureError as error:
        return Conclusion([not_verified(check.NAME, str(error))])


def _progress_of(check: Check, i: int, n: int, name: str, options: Options) -> Callable[[str, float], None]:
    return lambda words, share: options.progress(name, f"{check.NAME}  {words}".strip(), (i + share) / n)


def _row(check: Check, conclusion: Conclusion, calls: int, seconds: float) -> CheckRow:
    first = in_reading_order(conclusion.findings)[0]
    return CheckRow(
        check=check.NAME,
        title=check.TITLE,
        outcome=first.outcome,
        calls=calls,
        seconds=round(seconds, 3),
        summary=first.reason,
    )


# -- the control and the benchmark's own rule ---------------------------------------------------------


def _run_control(study: Study, server: ForkServer, checks: Sequence[Check], progress: Progress) -> dict[str, str]:
    """Checks that the reference itself fails, with the reason: they cannot speak about a candidate."""
    clock = Clock(study.policy.budget_s)
    bench = Bench(study, study.reference_as_candidate(), server, clock)
    failures: dict[str, str] = {}
    try:
        if bench.load().ran is not Ran.RETURNED:
            return {}  # the reference runs in the parent only (a device literal, say); the oracle still stands
        for i, check in enumerate(checks):
            progress(CONTROL, check.NAME, i / len(checks))
            if check.NAME == "training-divergence":
                continue  # the trial has honest controls of its own
            for finding in _run_check(study, bench, check).findings:
                if finding.outcome is Outcome.FAILED:
                    failures.setdefault(check.NAME, finding.reason)
        progress(CONTROL, checks[-1].NAME, 1.0)
    finally:
        bench.close()
    return failures


def _benchmark_rule(study: Study, bench: Bench) -> BenchmarkRule | None:
    if not study.problem.has_benchmark_rule:
        return None
    rows = []
    for workload in study.problem.workloads if len(study.problem.workloads) <= 16 else study.audited:
        case = study.case(workload, draw=90)
        try:
            record = bench.call(case, poison=None)
            rows.append(benchmark_rule.judge_record(study.problem, workload, record, study.native(case)))
        except InfrastructureError:
            continue  # the native reference does not run here: the benchmark itself could say nothing
    return benchmark_rule.summarise(rows) if rows else None


# -- the report -------------------------------------------------------------------------------------


def _report(
    study: Study,
    server: ForkServer,
    candidate: Candidate,
    audit: Audit,
    control: dict[str, str],
    adequacy: Adequacy,
    clock: Clock,
    options: Options,
) -> Report:
    findings = in_reading_order(demote_where_control_fails(audit.findings, control))
    findings = [f.model_copy(update={"reproducer": reproducer(study, candidate, f, options)}) for f in findings]
    verdict = conclude(findings)
    return Report(
        seatrial=seatrial.__version__,
        problem=study.problem.name,
        problem_path=study.problem.path,
        candidate=candidate.name,
        candidate_path=candidate.path,
        verdict=verdict,
        headline=headline(verdict, findings, ran=audit.ran, known=len(CHECKS)),
        grade=next((c.grade for _, c in audit.conclusions if c.grade), ""),
        findings=findings,
        checks=audit.rows,
        limits=_limits(study, findings, adequacy, options),
        oddities=list(study.problem.oddities),
        benchmark_rule=audit.rule,
        growth=[g for _, c in audit.conclusions for g in c.growth],
        trial=next((c.trial for _, c in audit.conclusions if c.trial), None),
        adequacy=adequacy,
        environment=environment(study.device, server),
        seeds={"master": study.seed},
        policy=study.policy.name,
        device=study.device.name,
        seconds=round(clock.spent, 3),
        replay=_command(study, candidate, options),
    )


def _limits(study: Study, findings: Sequence[Finding], adequacy: Adequacy, options: Options) -> list[str]:
    limits = [f.reason for f in findings if f.outcome is Outcome.LIMITED]
    limits += [f.reason for f in findings if f.outcome is Outcome.NOT_APPLICABLE and f.reason.endswith("not probed")]
    limits += study.oracle_limits()
    left = len(study.problem.workloads) - len(study.audited)
    if left > 0:
        limits.append(
            f"{left} of {len(study.problem.workloads)} declared workloads are not audited under policy {study.policy.name}"
        )
    limits += _constant_inputs(study, findings)
    if not study.problem.resizable and any(f.check == "fitted-sizes" for f in findings):
        limits.append("only the sizes that the inputs are made with were tried")
    untried = _untried_recipes(study, findings)
    if untried:
        limits.append(f"inputs that policy {study.policy.name} leaves untried: {', '.join(untried)}")
    if not adequacy.faults:
        limits.append(adequacy.sentence)
    limits += [f"a fault that was planted in the reference and not exposed: it {words}" for words in adequacy.survivors]
    if SEED_IGNORED in study.problem.oddities:
        limits.append("fresh draws were impossible: every case of the declared inputs holds the same values")
    if options.only or options.skip:
        limits.append("only some checks were run (--only / --skip), so the verdict speaks for those alone")
    if not study.device.name.startswith("cuda"):
        limits.append("audited on the CPU: nothing is said about streams, races or the precision of a GPU's units")
    return limits


def _constant_inputs(study: Study, findings: Sequence[Finding]) -> list[str]:
    if not any(f.check == "fitted-inputs" for f in findings):
        return []
    try:
        names, pairs = study.never_varied, study.varied_between_two
    except InfrastructureError:
        return []  # the inputs cannot be drawn here, which is a finding already
    limits = [
        f"`{name}` held only {low:g} and {high:g} in every input tried: a kernel that takes it for a mask passes"
        for name, (low, high) in pairs.items()
    ]
    if names:
        shown = ", ".join(f"`{n}`" for n in names)
        limits.insert(0, f"{shown} held one value in every input tried: a kernel that ignores it passes")
    return limits


def _untried_recipes(study: Study, findings: Sequence[Finding]) -> list[str]:
    if not any(f.check == "fitted-inputs" and f.outcome is not Outcome.NOT_APPLICABLE for f in findings):
        return []
    try:
        return [name for name in study.recipes if name != "declared" and name not in study.tried_recipes]
    except InfrastructureError:
        return []  # the reference does not run here, which is a finding already


def environment(device: Device, server: ForkServer) -> dict[str, str]:
    """Where this ran: versions, device facts, and what confined the candidate."""
    import torch

    return {
        "seatrial": seatrial.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **{f"device {k}": v for k, v in device.facts().items()},
        **{f"isolation {k}": v for k, v in server.isolation().items()},
    }


def reproducer(study: Study, candidate: Candidate, finding: Finding, options: Options) -> str:
    """The command (or Python line) that shows this finding again, with the same inputs.

    Where the candidate could not run for want of CUDA it is the whole run on a CUDA device instead, for there is
    nothing here to show again.
    """
    if finding.outcome in (Outcome.HELD, Outcome.NOT_APPLICABLE):
        return ""
    if _lacks_cuda(candidate, study):
        return _command(study, candidate, options, device="cuda")
    trained = options.command == "train" and finding.check == "training-divergence"
    # `train` runs the matrix under any policy, `check --only training-divergence` only where the policy has it.
    return _command(study, candidate, options if trained else _alone(finding.check, options))


def _alone(check: str, options: Options) -> Options:
    return replace(options, command="check", only=(check,), skip=(), fail_fast=False, strict=False)


def _command(study: Study, candidate: Candidate, options: Options, device: str = "") -> str:
    """What was run, for this candidate alone; `device` when it is to run elsewhere."""
    place = device or study.device.name
    if not candidate.path or candidate.pickled:
        return _python_line(study, candidate, options, place)
    words = ["seatrial", options.command, study.problem.path, candidate.path]
    if candidate.path.endswith(".py"):
        words += ["--entry-point", candidate.entry_point]
    if options.command == "check":
        words += _chosen_part(options)
    words += ["--seed", str(study.seed), "--policy", study.policy.name, "--device", place]
    return shlex.join(words)


def _chosen_part(options: Options) -> list[str]:
    words = [word for check in options.only for word in ("--only", check)]
    words += [word for check in options.skip for word in ("--skip", check)]
    flags = (("--fail-fast", options.fail_fast), ("--strict", options.strict))
    return words + [flag for flag, given in flags if given]


def _python_line(study: Study, candidate: Candidate, options: Options, device: str) -> str:
    chosen = f", only={list(options.only)!r}" if options.only else ""
    chosen += f", skip={list(options.skip)!r}" if options.skip else ""
    chosen += ", fail_fast=True" if options.fail_fast else ""
    return (
        f"seatrial.check({candidate.name}, reference=…, inputs=…, seed={study.seed}, "
        f"policy={study.policy.name!r}, device={device!r}{chosen})"
    )


def worst_of(reports: Sequence[Report]) -> Verdict:
    """The verdict of a batch: rejected, then inconclusive, then limits, then accepted."""
    order = (Verdict.REJECTED, Verdict.INCONCLUSIVE, Verdict.ACCEPTED_WITH_LIMITS, Verdict.ACCEPTED)
    return min((r.verdict for r in reports), key=order.index, default=Verdict.INCONCLUSIVE)
