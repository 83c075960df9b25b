"""Cases whose oracle does not fit are judged by rows, where rows are independent, and refused elsewhere."""

from __future__ import annotations

import pytest
import torch
from tests.sources import problem_of

import seatrial.study as studies
from seatrial import rows
from seatrial.checks.base import Example
from seatrial.devices import pick
from seatrial.policy import QUICK
from seatrial.study import Case, Study, TooLarge

COUNT, WIDTH = 600, 64
INPUTS = """import torch

AXES = {'rows': [8, 600]}

def make(seed, rows=8):
    g = torch.Generator().manual_seed(seed)
    return {'x': torch.randn(rows, 64, generator=g).bfloat16(), 'w': torch.randn(64, generator=g)}
"""
BY_ROWS = (
    "def run(x, w):\n    return (x.float() * (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w).bfloat16()\n"
)
OVER_ROWS = "def run(x, w):\n    return (x.float() - x.float().mean(0)) * w\n"
BY_NEIGHBOURS = "def run(x, w):\n    return x.float() * w + x.float().roll(1, 0)\n"


def study(reference: str, monkeypatch: pytest.MonkeyPatch, *, room_for_rows: int) -> tuple[Study, Case]:
    """A machine on which the oracle of so many rows fits, and the inputs of all of them."""
    subject = Study(problem_of(Example(reference, INPUTS, "")), QUICK, pick("cpu"), seed=3)
    monkeypatch.setattr(studies, "PLAIN_BYTES_PER_ELEMENT", 1)
    room = 2 * room_for_rows * 2 * WIDTH * studies.ORACLE_BYTES_PER_ELEMENT
    subject.device.free_memory = lambda: room  # type: ignore[method-assign]
    return subject, subject.case(subject.audited[-1])


def test_rows_that_stand_alone_are_found_out_by_running_the_reference() -> None:
    for reference, axis in ((BY_ROWS, "rows"), (OVER_ROWS, None), (BY_NEIGHBOURS, None)):
        assert Study(problem_of(Example(reference, INPUTS, "")), QUICK, pick("cpu"), seed=3).row_axis == axis


def test_a_large_case_is_judged_in_parts_as_it_is_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, case = study(BY_ROWS, monkeypatch, room_for_rows=70)
    parts = subject.parts(case)
    assert len(parts) > 4 and sum(p.part[2] - p.part[1] for p in parts if p.part) == COUNT
    honest = subject.native(case)
    assert [t.shape[0] for t in honest] == [COUNT]
    assert [r.passed for r in subject.judge(case, honest)] == [True]
    assert subject.judge(case, honest)[0].elements == COUNT * WIDTH
    exact = subject.exact(case)[0]
    whole = subject.oracle.run(subject.inputs(case)).values[0]
    assert torch.allclose(exact, whole, rtol=1e-12)

    wrong = honest[0].clone()
    wrong[431, 7] *= 1.5
    (report,) = subject.judge(case, [wrong])
    assert report.passed is False and report.worst_index == (431, 7)
    assert report.expected == pytest.approx(float(whole[431, 7]))
    assert subject.excuses(case, [wrong]) == [False]


def test_a_case_that_fits_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, case = study(BY_ROWS, monkeypatch, room_for_rows=COUNT)
    assert subject.parts(case) == [case]


def test_a_sum_over_rows_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, case = study(OVER_ROWS, monkeypatch, room_for_rows=70)
    with pytest.raises(TooLarge, match="GiB for its float64 oracle"):
        subject.judge(case, [torch.zeros(COUNT, WIDTH)])


def test_not_even_one_row_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, case = study(BY_ROWS, monkeypatch, room_for_rows=70)
    assert subject.row_axis == "rows"
    subject.device.free_memory = lambda: 2 * WIDTH * COUNT  # type: ignore[method-assign]
    with pytest.raises(TooLarge):
        subject.parts(case)


def test_steps_are_even_and_complete() -> None:
    assert list(rows.steps(10, 4)) == [(0, 3), (3, 6), (6, 10)]
    assert list(rows.steps(3, 8)) == [(0, 3)]


def test_large_inputs_are_not_counted_against_the_candidates_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, _ = study(BY_ROWS, monkeypatch, room_for_rows=70)
    at_least = COUNT * WIDTH * 2 * 2  # bfloat16 in and out
    assert subject.largest_call_mib << 20 <= at_least * 2 * studies.COPIES_IN_CHILD
    monkeypatch.setattr(studies, "COPIES_IN_CHILD", 1 << 12)
    del subject.largest_call_mib
    assert subject.largest_call_mib << 20 > at_least * (1 << 12)
