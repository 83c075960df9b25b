"""The pairs as tests: a few of them here, all of them over fresh seeds with SEATRIAL_QUALITY_SEEDS=20.

Which few follows from a seed that is printed and fresh in every run; SEATRIAL_QUALITY_CHOICE=N repeats a choice.
A verdict that is known to be wrong is a strict expected failure: one that comes right must lose its excuse.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
import zlib
from pathlib import Path

import pytest
from tests.quality.case import Pair
from tests.quality.pairs import FAULTY, HONEST, PAIRS, README, TABLES, excuse, is_right, judge, readme, sides_of

from seatrial.model import Finding, Outcome, Verdict

A_FEW = 8
SEEDS = int(os.environ.get("SEATRIAL_QUALITY_SEEDS", "0"))
# Workers of one run must choose alike: xdist gives all of them the same name of the run.
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID") or secrets.token_hex(8)
CHOICE = int(os.environ.get("SEATRIAL_QUALITY_CHOICE") or zlib.crc32(RUN.encode()))


def chosen() -> list[tuple[str, str, int]]:
    """Case, side and seed of every audit of this run."""
    draw = random.Random(CHOICE)
    cases = list(PAIRS) if SEEDS else draw.sample(list(PAIRS), A_FEW)
    return [
        (case, side, draw.randrange(2**31))
        for case in cases
        for side in sides_of(PAIRS[case])
        for _ in range(SEEDS or 1)
    ]


def parameters() -> list[object]:
    made: list[object] = []
    for case, side, seed in chosen():
        known = excuse(PAIRS[case], side)
        strict = not known.startswith("sometimes")
        marks = [pytest.mark.xfail(reason=known, strict=strict)] if known else []
        made.append(pytest.param(case, side, seed, id=f"{case}-{side}-{seed}", marks=marks))
    return made


@pytest.mark.parametrize(("case", "side", "seed"), parameters())
def test_verdict_is_right(case: str, side: str, seed: int) -> None:
    sys.stdout.write(f"SEATRIAL_QUALITY_CHOICE={CHOICE}\n")
    judged = judge(case, side, seed)
    assert judged.right, f"{PAIRS[case].title}: the {side} kernel is {judged.verdict}: {judged.why}"


def pair(**changed: object) -> Pair:
    return Pair(**{"case": "X", "title": "x", "reference": abs, "inputs": dict, "honest": abs, "faulty": abs} | changed)  # type: ignore[arg-type]


def failed(check: str, cause: str = "") -> list[Finding]:
    return [Finding(check=check, outcome=Outcome.FAILED, reason="", cause=cause)]


@pytest.mark.parametrize(
    ("asked", "side", "verdict", "findings", "right"),
    [
        (pair(), HONEST, Verdict.ACCEPTED, [], True),
        (pair(), HONEST, Verdict.ACCEPTED_WITH_LIMITS, [], True),
        (pair(), HONEST, Verdict.INCONCLUSIVE, [], False),
        (pair(lenient=True), HONEST, Verdict.INCONCLUSIVE, [], True),
        (pair(lenient=True), HONEST, Verdict.REJECTED, failed("wrong-values"), False),
        (pair(), FAULTY, Verdict.REJECTED, failed("wrong-values"), True),
        (pair(), FAULTY, Verdict.REJECTED, failed("stale-output"), False),
        (pair(causes=("values:tail",)), FAULTY, Verdict.REJECTED, failed("wrong-values", "values:tail"), True),
        (pair(), FAULTY, Verdict.ACCEPTED, [], False),
        (pair(), FAULTY, Verdict.INCONCLUSIVE, [], False),
        (pair(lenient=True), FAULTY, Verdict.INCONCLUSIVE, [], True),
        (pair(lenient=True), FAULTY, Verdict.ACCEPTED, [], False),
    ],
)
def test_what_counts_as_right(asked: Pair, side: str, verdict: Verdict, findings: list[Finding], right: object) -> None:
    assert is_right(asked, side, verdict, findings) is right


def test_cases_are_unique_and_inputs_follow_their_seed() -> None:
    assert len(PAIRS) == sum(len(table.PAIRS) for table in TABLES)
    for case, one in PAIRS.items():
        same, again, other = ({k: str(v) for k, v in one.inputs(seed).items()} for seed in (1, 1, 2))
        assert same == again, case
        assert same != other, case


def test_readme_is_up_to_date() -> None:
    assert Path(README).read_text() == readme(), "run python -m tests.quality.pairs --readme"
