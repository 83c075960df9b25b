"""What an audit knows about a problem before it sees a candidate."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.sources import problem_of

import seatrial.study as studies
from seatrial.checks import CHECKS
from seatrial.checks.base import Example
from seatrial.devices import pick
from seatrial.limits import _constant_inputs
from seatrial.model import Finding, Outcome, OutputSlot
from seatrial.policy import QUICK, STANDARD, Policy
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
        monkeypatch.setattr(subject, "_native_is_bounded", lambda case, output, same, wide=wide: wide)
        assert subject.excuses(case, off_by(share)) == [excused]


@pytest.mark.parametrize("slope", [1.0, 3.0])
def test_a_native_carry_excuses_where_io_roundings_leave_nothing_to_judge(
    monkeypatch: pytest.MonkeyPatch, slope: float
) -> None:
    subject = study()
    case = subject.case(subject.smallest)
    exact = subject.exact(case)[0]
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(3), dtype=exact.dtype)
    monkeypatch.setattr(subject, "native", lambda of: ((exact * (1 + 0.1 * noise)).float(),))
    monkeypatch.setattr(subject, "_native_is_bounded", lambda case, output, same: False)
    whole = subject.judge
    for io_judges in (True, False):

        def judge(case: studies.Case, outputs: tuple[torch.Tensor, ...], contract: str = "TC") -> tuple[Any, ...]:
            reports = whole(case, outputs, contract)
            return reports if contract != "IO" or io_judges else tuple(replace(r, passed=None) for r in reports)  # noqa: B023

        monkeypatch.setattr(subject, "judge", judge)
        outputs = ((exact * (1 - slope * 0.1 * noise)).float(),)
        assert subject.excuses(case, outputs) == [slope == 1.0 and not io_judges]


def test_a_native_carry_bounds_nothing_and_wide_sums_do(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = study()
    case = subject.case(subject.smallest, "scaled-up-32")
    for bits, unbounded, bounded in ((24, False, True), (None, False, True), (8, True, False), (14, False, False)):
        found = SimpleNamespace(bits=bits, unbounded=unbounded)
        monkeypatch.setattr(subject, "native_fingerprints", {"out0": found})
        assert subject._native_is_bounded(case, "out0") is bounded
        assert subject._native_is_bounded(case, "out0", same=True) is not unbounded
    monkeypatch.setattr(subject, "native_fingerprints", {})
    assert subject._native_is_bounded(case, "out0")
    declared = subject.case(subject.smallest)
    assert not subject._native_is_bounded(declared, "out0") and subject._native_is_bounded(declared, "out0", same=True)


def test_only_the_native_result_itself_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = study()
    case = subject.case(subject.smallest)
    exact = subject.exact(case)[0]
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(2), dtype=exact.dtype)
    monkeypatch.setattr(subject, "native", lambda of: (exact + 1e-3 * noise,))
    for share, same in ((1e-3, True), (1.1e-3, True), (-1e-3, False), (0.0, False), (2e-3, False)):
        assert subject._gives(case, (exact + share * noise,), 0) is same, share


def test_the_native_result_of_an_excused_case_is_graded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = study()
    case = subject.case(subject.smallest)
    short = tuple(t * (1 - 1e-3) for t in subject.native(case))
    monkeypatch.setattr(subject, "native", lambda of: short)
    monkeypatch.setattr(subject, "_native_is_bounded", lambda case, output, same: True)
    whole, grade, graded, judged = subject.judge, subject.graded, [], []

    def counting_grade(case: studies.Case, outputs: tuple[torch.Tensor, ...]) -> object:
        graded.append(outputs is short)
        return grade(case, outputs)

    def counting_judge(case: studies.Case, outputs: tuple[torch.Tensor, ...]) -> object:
        judged.append(outputs is short)
        return whole(case, outputs)

    monkeypatch.setattr(subject, "graded", counting_grade)
    monkeypatch.setattr(subject, "judge", counting_judge)
    assert subject.native_falls_short(case)
    for share in (0.9e-3, 1.1e-3, 1e-1):
        outputs = tuple(t * (1 - share) for t in subject.exact(case))
        assert subject.excuses(case, outputs) == [share < 1e-2]
    assert graded.count(True) == judged.count(True) == 1
    assert graded.count(False) == judged.count(False) == 3


def test_the_cache_counts_what_an_envelope_holds_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = study()
    cases = [subject.case(w) for w in subject.problem.workloads]
    assert len(cases) >= 2
    envelopes = [subject.envelope(case) for case in cases]
    for envelope in envelopes:
        out = envelope.oracle.values[0]
        assert envelope.nbytes > 8 * out.numel() * (len(envelope.samples[0]) + 3), "samples, oracle, sigma and more"
    assert subject.envelope(cases[0]) is envelopes[0]
    monkeypatch.setattr(studies, "CACHE_BYTES", envelopes[1].nbytes)
    small = study()
    first = small.envelope(cases[0])
    small.envelope(cases[1])
    assert small.envelope(cases[0]) is not first


# -- inputs that hold one or two values ---------------------------------------------------------------

_ATTENTION = "import torch\n\ndef run(q, attn_bias):\n    s = q @ q.T / 8{}\n    return torch.softmax(s, -1) @ q\n"
_BIASED = (
    "import torch\n\ndef make(seed):\n    g = torch.Generator().manual_seed(seed)\n"
    "    bias = torch.where(torch.rand(64, 64, generator=g) < 0.5, 0.0, {})\n"
    "    bias.fill_diagonal_(0.0)\n"
    "    return {{'q': torch.randn(64, 64, generator=g), 'attn_bias': bias}}\n"
)


def attention(low: str, policy: Policy = STANDARD, scores: str = " + attn_bias") -> Study:
    reference = _ATTENTION.format(scores)
    return Study(problem_of(Example(reference, _BIASED.format(low), reference)), policy, pick("cpu"), 1)


def as_a_mask(q: torch.Tensor, attn_bias: torch.Tensor) -> torch.Tensor:
    return torch.softmax((q @ q.T / 8).masked_fill(attn_bias < 0, -1e4), -1) @ q


def added(q: torch.Tensor, attn_bias: torch.Tensor) -> torch.Tensor:
    return torch.softmax((q @ q.T / 8) + attn_bias, -1) @ q


@pytest.mark.parametrize("low", ["-1e4", "float('-inf')"])
def test_a_bias_taken_for_a_mask_shows_where_it_holds_other_values_and_an_added_one_passes(low: str) -> None:
    subject = attention(low)
    shown = {}
    for kernel in (as_a_mask, added):
        for case in (subject.case(subject.middle, draw=2), *subject.drawn_cases):
            reports = subject.judge(case, [kernel(*subject.inputs(case))])  # type: ignore[arg-type]
            shown[kernel, case.recipe] = all(r.passed is not False for r in reports)
    assert [name for (kernel, name), held in shown.items() if kernel is as_a_mask and not held] == ["graded-bias"]
    assert all(held for (kernel, _), held in shown.items() if kernel is added)


def test_what_only_ever_holds_its_own_two_values_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = [Finding(check="fitted-inputs", outcome=Outcome.HELD, reason="held")]
    varied = attention("-1e4")
    assert varied.varied_between_two == {} and _constant_inputs(varied, ran) == []
    compared = attention("-1e4", scores=" + torch.where(attn_bias < 0, attn_bias, 0.0)")
    assert "graded-bias" not in compared.recipes
    assert compared.varied_between_two == {"attn_bias": (-1e4, 0.0)}
    assert _constant_inputs(compared, ran) == [
        "`attn_bias` held only -10000 and 0 in every input tried: a kernel that takes it for a mask passes"
    ]
    assert _constant_inputs(compared, []) == []


def test_a_recipe_that_the_reference_does_not_define_varies_nothing() -> None:
    inputs = (
        "import torch\n\ndef make(seed):\n    g = torch.Generator().manual_seed(seed)\n"
        "    return {'x': torch.randn(16, 64, generator=g), 'steps': torch.zeros(64)}\n"
    )
    for reference, never in (
        ("def run(x, steps):\n    return x * 2 + steps\n", []),
        ("def run(x, steps):\n    assert not steps.any()\n    return x * 2 + steps\n", ["steps"]),
    ):
        subject = Study(problem_of(Example(reference, inputs, reference)), STANDARD, pick("cpu"), 1)
        assert subject.never_varied == never


def test_recipes_that_repeat_others_are_for_problems_where_a_call_costs_nothing() -> None:
    reference = "def run(x, a, b):\n    return x * a + b\n"
    for rows, cheap in ((16, True), (4096, False)):
        inputs = (
            "import torch\n\ndef make(seed):\n    g = torch.Generator().manual_seed(seed)\n"
            f"    return {{'x': torch.randn({rows}, 64, generator=g), 'a': torch.ones(64), 'b': torch.zeros(64)}}\n"
        )
        subject = Study(problem_of(Example(reference, inputs, reference)), STANDARD, pick("cpu"), 1)
        assert "varied-constants" in subject.tried_recipes
        for name in ("varied-constants-again", "varied-a", "varied-b"):
            assert (name in subject.tried_recipes) is cheap
