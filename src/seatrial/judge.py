"""Findings to one verdict. No clock, no device, no candidate code."""

from __future__ import annotations

from collections.abc import Sequence

from seatrial.model import Finding, Outcome, Verdict

# What a person wants to read first: the cause, then its effects.
PRIORITY = (
    "does-not-load",
    "crashing-call",
    "broken-contract",
    "tampered-process",
    "out-of-bounds",
    "narrow-accumulator",
    "replayed-result",
    "stale-output",
    "mutated-input",
    "wrong-values",
    "fitted-sizes",
    "fitted-inputs",
    "assumed-layout",
    "training-divergence",
)
URGENCY = {
    Outcome.FAILED: 0,
    Outcome.NOT_VERIFIED: 1,
    Outcome.LIMITED: 2,
    Outcome.NOTED: 3,
    Outcome.HELD: 4,
    Outcome.NOT_APPLICABLE: 5,
}


def conclude(findings: Sequence[Finding]) -> Verdict:
    """One proven fault rejects; else anything unverified is inconclusive; else limits, else accepted.

    No finding at all means that nothing was verified: inconclusive.
    """
    outcomes = {f.outcome for f in findings}
    if Outcome.FAILED in outcomes:
        return Verdict.REJECTED
    if Outcome.NOT_VERIFIED in outcomes or not outcomes & {Outcome.HELD, Outcome.LIMITED}:
        return Verdict.INCONCLUSIVE
    if Outcome.LIMITED in outcomes:
        return Verdict.ACCEPTED_WITH_LIMITS
    return Verdict.ACCEPTED


def in_reading_order(findings: Sequence[Finding]) -> list[Finding]:
    """Faults first, causes before effects; stable otherwise."""

    def rank(f: Finding) -> tuple[int, int]:
        place = PRIORITY.index(f.check) if f.check in PRIORITY else len(PRIORITY)
        return URGENCY[f.outcome], place

    return sorted(findings, key=rank)


def headline(
    verdict: Verdict, findings: Sequence[Finding], *, ran: int, known: int, policy: str = "", left_out: int = 0
) -> str:
    """The verdict's ground in one sentence; `findings` in reading order.

    `ran` of `known` checks were carried out; when some were not, the sentence says so. Of an acceptance it says too
    how many things `policy` itself leaves out.
    """
    first = findings[0].reason if findings else "nothing could be checked"
    part = "" if ran == known else _part(ran, known)
    if verdict is Verdict.ACCEPTED:
        aside = len({f.check for f in findings if f.outcome is Outcome.NOT_APPLICABLE})
        held = f"{'it' if ran == 1 else 'they'} held" if not aside else f"{ran - aside} held"
        apart = f", {aside} {'does' if aside == 1 else 'do'} not apply to this problem" if aside else ""
        ground = f"{part or f'all {ran} checks were run'}; {held}{apart}"
        gaps = f"; policy {policy} leaves out {_count(left_out, 'thing', 'things')}, named below" if left_out else ""
        return f"{ground}{gaps}."
    more = sum(f.outcome is findings[0].outcome for f in findings) - 1 if findings else 0
    nouns = ("objection", "objections") if verdict is Verdict.REJECTED else ("finding like it", "findings like it")
    others = f" (and {more} more {nouns[more != 1]})" if more else ""
    return f"{first}{others}{f'; {part}' if part else ''}."


def _part(ran: int, known: int) -> str:
    return f"{ran} of {known} checks {'was' if ran == 1 else 'were'} run" if ran else "no check was run"


def _count(things: int, singular: str, plural: str) -> str:
    return f"{things} {singular if things == 1 else plural}"


# Here the judge itself weighs the native reference against the candidate (reference deficient), and an unbounded
# carry is a fault whatever the reference does: a control that fails one of these excuses nobody.
WEIGHED_AGAINST_NATIVE = ("wrong-values", "fitted-inputs", "fitted-sizes", "narrow-accumulator", "training-divergence")


def demote_where_control_fails(findings: Sequence[Finding], control: dict[str, str]) -> list[Finding]:
    """A check that the reference itself fails cannot speak about a candidate.

    `control` maps such checks to the reason; their failures become not verified.
    """
    return [
        f.model_copy(
            update={
                "outcome": Outcome.NOT_VERIFIED,
                "reason": f"the control fails this check too, so it cannot judge here ({control[f.check]}): {f.reason}",
            }
        )
        if f.outcome is Outcome.FAILED and f.check in control and f.check not in WEIGHED_AGAINST_NATIVE
        else f
        for f in findings
    ]
