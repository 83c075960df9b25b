"""What an audit knows about a problem before it sees a candidate."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.sources import problem_of

from seatrial.checks import CHECKS
from seatrial.devices import pick
from seatrial.model import OutputSlot
from seatrial.policy import QUICK
from seatrial.study import Study, TooLarge


def study(seed: int = 1, name: str = "fitted-sizes") -> Study:
    example = CHECKS[name].ACCEPTS
    assert example is not None
    return Study(problem_of(example), QUICK, pick("cpu"), seed)


def test_seeds_depend_on_names_and_never_on_the_order_of_work() -> None:
    one, other = study(), study()
    other.case(other.smallest, draw=7)
    assert one.case(one.smallest) == other.case(other.smallest)
    assert one.case(one.smallest) != one.case(one.smallest, draw=1)
    assert study(seed=2).case(one.smallest) != one.case(one.smallest)


def test_inputs_are_drawn_once_and_replayed() -> None:
    one, other = study(), study()
    case = one.case(one.smallest)
    assert one.inputs(case) is one.inputs(case)
    assert all(torch.equal(a, b) for a, b in zip(one.inputs(case), other.inputs(case), strict=True))  # type: ignore[arg-type]


def test_output_slots_follow_the_sizes_that_inputs_imply() -> None:
    subject = study()
    assert subject.slots_for([torch.zeros(5, 32)]) == (OutputSlot("out0", (5, 32), "float32"),)


def test_a_reference_with_kernels_of_its_own_is_judged_by_a_weaker_oracle_that_says_so() -> None:
    plain = study()
    source = "import triton\n\ndef run(x):\n    return x * 2 + 1\n"
    opaque = Study(replace(plain.problem, reference_source=source), QUICK, pick("cpu"), 1)
    case = plain.case(plain.smallest)
    outputs = plain.native(case)
    assert [r.passed for r in plain.judge(case, outputs)] == [True]
    assert plain.oracle_limits() == []
    assert [r.passed for r in opaque.judge(case, outputs)] == [True]
    assert [r.passed for r in opaque.judge(case, [t * 1.001 for t in outputs])] == [False]
    assert "GPU kernels of its own" in opaque.oracle_limits()[0] and "weaker oracle" in opaque.oracle_limits()[0]


def test_a_case_too_large_for_the_machine_is_said_and_not_tried() -> None:
    subject = study()
    subject.device.free_memory = lambda: 1000  # type: ignore[method-assign]
    with pytest.raises(TooLarge, match="GiB are free on cpu"):
        subject.inputs(subject.case(subject.smallest))


def test_a_native_reference_that_falls_short_excuses_what_is_no_farther_off_when_it_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = study()
    case = subject.case(subject.smallest)
    exact = subject.exact(case)[0]

    def off_by(share: float) -> tuple[torch.Tensor, ...]:
        noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=exact.dtype)
        return ((exact * (1 + share * noise.clamp(-2, 2))).float(),)

    monkeypatch.setattr(subject, "native", lambda of: off_by(1e-3))
    for wide, share, excused in ((True, -1.2e-3, True), (True, -1e-2, False), (False, -1.2e-3, False)):
        monkeypatch.setattr(subject, "_native_is_bounded", lambda case, output, wide=wide: wide)
        assert subject.excuses(case, off_by(share)) == [excused]


def test_a_native_carry_bounds_nothing_and_wide_sums_do(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = study()
    case = subject.case(subject.smallest, "scaled-up-32")
    for bits, unbounded, bounded in ((24, False, True), (None, False, True), (8, True, False), (14, False, False)):
        found = SimpleNamespace(bits=bits, unbounded=unbounded)
        monkeypatch.setattr(subject, "native_fingerprints", {"out0": found})
        assert subject._native_is_bounded(case, "out0") is bounded
    monkeypatch.setattr(subject, "native_fingerprints", {})
    assert subject._native_is_bounded(case, "out0")
    assert not subject._native_is_bounded(subject.case(subject.smallest), "out0")
