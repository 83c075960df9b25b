"""Findings to verdicts."""

from __future__ import annotations

import pytest

from seatrial.judge import conclude, demote_where_control_fails, headline, in_reading_order
from seatrial.model import Finding, Outcome, Verdict


def finding(outcome: Outcome, check: str = "wrong-values") -> Finding:
    return Finding(check=check, outcome=outcome, reason=f"{check} {outcome.value}")


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([Outcome.HELD], Verdict.ACCEPTED),
        ([Outcome.HELD, Outcome.NOTED, Outcome.NOT_APPLICABLE], Verdict.ACCEPTED),
        ([Outcome.HELD, Outcome.LIMITED], Verdict.ACCEPTED_WITH_LIMITS),
        ([Outcome.HELD, Outcome.NOT_VERIFIED], Verdict.INCONCLUSIVE),
        ([Outcome.LIMITED, Outcome.NOT_VERIFIED], Verdict.INCONCLUSIVE),
        ([Outcome.NOT_VERIFIED, Outcome.FAILED], Verdict.REJECTED),
        ([Outcome.HELD, Outcome.FAILED], Verdict.REJECTED),
        ([], Verdict.INCONCLUSIVE),
        ([Outcome.NOT_APPLICABLE], Verdict.INCONCLUSIVE),
        ([Outcome.NOTED], Verdict.INCONCLUSIVE),
    ],
)
def test_the_verdict_of(outcomes: list[Outcome], verdict: Verdict) -> None:
    assert conclude([finding(o, *([f"check {i}"] if i else [])) for i, o in enumerate(outcomes)]) is verdict


def test_exit_codes() -> None:
    assert [v.exit_code() for v in Verdict] == [0, 0, 1, 3]
    assert Verdict.ACCEPTED_WITH_LIMITS.exit_code(strict=True) == 1


def test_causes_are_read_before_effects() -> None:
    findings = [
        finding(Outcome.HELD, "stale-output"),
        finding(Outcome.FAILED, "training-divergence"),
        finding(Outcome.FAILED, "narrow-accumulator"),
    ]
    ordered = in_reading_order(findings)
    assert [f.check for f in ordered] == ["narrow-accumulator", "training-divergence", "stale-output"]
    said = headline(Verdict.REJECTED, ordered, ran=12, known=12)
    assert said == "narrow-accumulator failed (and 1 more objection)."
    more = headline(Verdict.REJECTED, [*ordered[:2], *ordered[:2]], ran=12, known=12)
    assert more == "narrow-accumulator failed (and 3 more objections)."


@pytest.mark.parametrize(
    ("verdict", "outcomes", "ran", "said"),
    [
        (Verdict.ACCEPTED, [Outcome.HELD], 12, "all 12 checks were run; they held."),
        (
            Verdict.ACCEPTED,
            [Outcome.HELD, Outcome.NOT_APPLICABLE],
            12,
            "all 12 checks were run; 11 held, 1 does not apply to this problem.",
        ),
        (
            Verdict.ACCEPTED,
            [Outcome.NOT_APPLICABLE, Outcome.HELD],
            2,
            "2 of 12 checks were run; 1 held, 1 does not apply to this problem.",
        ),
        (Verdict.ACCEPTED, [Outcome.HELD] * 2, 2, "2 of 12 checks were run; they held."),
        (Verdict.ACCEPTED, [Outcome.HELD], 1, "1 of 12 checks was run; it held."),
        (Verdict.REJECTED, [Outcome.FAILED], 4, "wrong-values failed; 4 of 12 checks were run."),
        (Verdict.INCONCLUSIVE, [Outcome.NOT_VERIFIED], 0, "wrong-values not-verified; no check was run."),
        (
            Verdict.INCONCLUSIVE,
            [Outcome.NOT_VERIFIED] * 2,
            12,
            "wrong-values not-verified (and 1 more finding like it).",
        ),
    ],
)
def test_a_headline_says_how_much_of_the_audit_it_speaks_for(
    verdict: Verdict, outcomes: list[Outcome], ran: int, said: str
) -> None:
    assert (
        headline(
            verdict, [finding(o, *([f"check {i}"] if i else [])) for i, o in enumerate(outcomes)], ran=ran, known=12
        )
        == said
    )


def test_an_acceptance_says_what_its_policy_leaves_out_and_a_rejection_does_not() -> None:
    gaps = {"ran": 12, "known": 12, "policy": "quick", "left_out": 2}
    assert headline(Verdict.ACCEPTED, [finding(Outcome.HELD)], **gaps) == (
        "all 12 checks were run; they held; policy quick leaves out 2 things, named below."
    )
    part = headline(Verdict.ACCEPTED, [finding(Outcome.HELD)], **{**gaps, "ran": 1, "left_out": 1})
    assert part == "1 of 12 checks was run; it held; policy quick leaves out 1 thing, named below."
    assert "leaves out" not in headline(Verdict.REJECTED, [finding(Outcome.FAILED)], **gaps)


def test_a_check_that_the_control_fails_cannot_reject() -> None:
    findings = [finding(Outcome.FAILED, "mutated-input"), finding(Outcome.FAILED, "wrong-values")]
    after = demote_where_control_fails(findings, {"mutated-input": "x changed", "wrong-values": "off"})
    assert [f.outcome for f in after] == [Outcome.NOT_VERIFIED, Outcome.FAILED]
    assert "x changed" in after[0].reason
    assert conclude(after[:1]) is Verdict.INCONCLUSIVE
