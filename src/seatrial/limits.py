"""What an audit did not look at: limits of the verdict, and gaps of the policy that another policy closes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from seatrial.errors import InfrastructureError
from seatrial.formats.plain import SEED_IGNORED
from seatrial.model import Adequacy, Finding, Outcome
from seatrial.policy import LADDER, STANDARD, Policy

if TYPE_CHECKING:
    from seatrial.study import Study


def verdict_limits(study: Study, findings: Sequence[Finding], adequacy: Adequacy, *, partial: bool) -> list[str]:
    """What this verdict does not cover under any policy: of the candidate, the problem, the machine or the request.

    `partial` says that the user chose some checks.
    """
    limits = [f.reason for f in findings if f.outcome is Outcome.LIMITED]
    limits += [f.reason for f in findings if f.outcome is Outcome.NOT_APPLICABLE and f.reason.endswith("not probed")]
    limits += study.oracle_limits()
    limits += _constant_inputs(study, findings)
    if not study.problem.resizable and any(f.check == "fitted-sizes" for f in findings):
        limits.append("only the sizes that the inputs are made with were tried")
    if not adequacy.faults and _plants_faults(study.policy):
        limits.append(adequacy.sentence)
    limits += [f"a fault that was planted in the reference and not exposed: it {words}" for words in adequacy.survivors]
    if SEED_IGNORED in study.problem.oddities:
        limits.append("fresh draws were impossible: every case of the declared inputs holds the same values")
    if partial:
        limits.append("only some checks were run (--only / --skip), so the verdict speaks for those alone")
    if not study.device.name.startswith("cuda"):
        limits.append("audited on the CPU: nothing is said about streams, races or the precision of a GPU's units")
    return limits


def policy_limits(study: Study, findings: Sequence[Finding]) -> list[str]:
    """What this policy does not look at, each with the policy that does."""
    lines = [_workloads_left(study), _recipes_left(study, findings), _training_left(study, findings)]
    if not _plants_faults(study.policy):
        who = _policy_with(_plants_faults)
        lines.append(
            f"how strong the inputs are was not measured: no fault was planted in the reference{_by(who, 'plants some')}"
        )
    return [line for line in lines if line]


def _workloads_left(study: Study) -> str:
    total, audited = len(study.problem.workloads), len(study.audited)
    left = total - audited
    if left <= 0:
        return ""
    most = max(LADDER, key=lambda p: p.workloads)
    whole = _policy_with(lambda p: p.workloads >= total)
    if whole is not None:
        who = f"policy {whole.name} audits all"
    elif most.workloads > audited:
        who = f"policy {most.name} audits {most.workloads}"
    else:
        who = "no named policy audits more"
    return f"{left} of {total} declared workloads {'is' if left == 1 else 'are'} not audited; {who}"


def _recipes_left(study: Study, findings: Sequence[Finding]) -> str:
    if not any(f.check == "fitted-inputs" and f.outcome is not Outcome.NOT_APPLICABLE for f in findings):
        return ""
    try:
        untried = [name for name in study.recipes if name != "declared" and name not in study.tried_recipes]
    except InfrastructureError:
        return ""  # the reference does not run here, which is a finding already
    who = _policy_with(lambda p: set(untried) <= set(study.recipes_of(p)))
    words, them = ("kind of inputs is", "it") if len(untried) == 1 else ("kinds of inputs are", "them")
    return f"{len(untried)} {words} not tried ({', '.join(untried)}){_by(who, f'tries {them}')}" if untried else ""


def _training_left(study: Study, findings: Sequence[Finding]) -> str:
    if not any(f.check == "training-divergence" for f in findings):
        return ""
    from seatrial.trials.matrix import find_adapter

    if isinstance(find_adapter(study.problem), str):
        return ""  # no policy could train with this problem
    if not study.policy.trial:
        who = _policy_with(lambda p: p.trial)
        return f"no training run was made{_by(who, 'makes them')}, and so does `seatrial train`"
    left = [data for data in STANDARD.trial_data if data not in study.policy.trial_data]
    return f"no training run on {', '.join(left)} tokens{_by(STANDARD, 'makes them')}" if left else ""


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


def _plants_faults(policy: Policy) -> bool:
    return policy.mutants > 0 and policy.adequacy_s > 0


def _policy_with(enough: Callable[[Policy], bool]) -> Policy | None:
    """The least thorough of the named policies that does it."""
    return next((p for p in LADDER if enough(p)), None)


def _by(policy: Policy | None, verb: str) -> str:
    return f"; policy {policy.name} {verb}" if policy is not None else ""
