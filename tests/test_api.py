"""The public names, and the plain-callables door."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import seatrial
from seatrial import Outcome, UsageError, Verdict
from seatrial.checks import CHECKS


def reference(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x.float() * scale).sum(-1).to(x.dtype)


def honest(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x.float().flip(-1) * scale).sum(-1).to(x.dtype)


def faulty(x: torch.Tensor, scale: float) -> torch.Tensor:
    total = torch.zeros(x.shape[:-1], dtype=x.dtype)
    for column in (x.float() * scale).unbind(-1):
        total = (total.float() + column).to(x.dtype)
    return total


def make(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(32, 512, generator=g).bfloat16(), "scale": 0.5}


def test_two_functions_and_an_input_maker_need_no_files() -> None:
    good = seatrial.check(honest, reference=reference, inputs=make, policy="quick", device="cpu")
    bad = seatrial.check(faulty, reference=reference, inputs=make, policy="quick", device="cpu")
    assert good.verdict is Verdict.ACCEPTED, [f.reason for f in good.findings if f.outcome is not Outcome.HELD]
    assert bad.verdict is Verdict.REJECTED
    assert "bfloat16" in bad.headline


def test_a_replay_with_the_same_seed_draws_the_same_inputs() -> None:
    reports = [
        seatrial.check(
            faulty, reference=reference, inputs=make, policy="quick", device="cpu", seed=11, only=["wrong-values"]
        )
        for _ in range(2)
    ]
    measured = [[(f.reason, f.measured) for f in r.findings] for r in reports]
    assert measured[0] == measured[1]


def test_exported_names() -> None:
    assert all(hasattr(seatrial, name) for name in seatrial.__all__)
    assert sorted(seatrial.__all__) == seatrial.__all__


def test_importing_seatrial_does_not_import_torch() -> None:
    code = "import sys, seatrial; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: seatrial.check(honest), "reference= and inputs="),
        (lambda: seatrial.check("nowhere"), "needs a candidate"),
        (lambda: seatrial.check("/nowhere/at/all", "x.json"), "/nowhere/at/all"),
        (lambda: seatrial.check(honest, reference=reference, inputs=make, policy="hasty"), "hasty"),
        (lambda: seatrial.check(honest, reference=reference, inputs=make, only=["nonsense"]), "nonsense"),
    ],
)
def test_misuse_gets_one_sentence(call: Any, words: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def clamped(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x.float().clamp(-9, 9).mul(scale).to(x.dtype)


def clamped_in_place(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x.clamp_(-9, 9).float().mul(scale).to(x.dtype)


def test_a_clamp_in_place_shows_on_inputs_that_it_changes() -> None:
    run = {"reference": clamped, "inputs": make, "policy": "quick", "device": "cpu", "only": ["mutated-input"]}
    assert seatrial.check(clamped, **run).verdict is Verdict.ACCEPTED
    assert seatrial.check(clamped_in_place, **run).verdict is Verdict.REJECTED


KEPT: list[torch.Tensor] = []


def into_a_kept_buffer(x: torch.Tensor, scale: float) -> torch.Tensor:
    result = reference(x, scale)
    if not KEPT:
        KEPT.append(torch.empty_like(result))
    return KEPT[0].copy_(result)


def through_a_kept_buffer(x: torch.Tensor, scale: float) -> torch.Tensor:
    result = reference(x, scale)
    if not KEPT:
        KEPT.append(torch.empty_like(result))
    return KEPT[0].copy_(result).clone()


def test_a_result_that_the_next_call_overwrites_is_rejected_and_a_copy_of_it_is_not() -> None:
    run = {"reference": reference, "inputs": make, "policy": "quick", "device": "cpu", "only": ["replayed-result"]}
    assert seatrial.check(through_a_kept_buffer, **run).verdict is Verdict.ACCEPTED
    rejected = seatrial.check(into_a_kept_buffer, **run)
    assert rejected.verdict is Verdict.REJECTED
    assert "overwritten" in rejected.headline


def with_gaps(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.relu(x.float() - scale).to(x.dtype)


def make_with_nan(seed: int) -> dict[str, Any]:
    x = make(seed)["x"].clone()
    x[0, 0] = float("nan")
    return {"x": x, "scale": 0.5}


def test_nan_among_the_inputs_is_judged_by_position() -> None:
    run = {
        "reference": with_gaps,
        "inputs": make_with_nan,
        "policy": "quick",
        "device": "cpu",
        "only": ["wrong-values"],
    }
    assert seatrial.check(with_gaps, **run).verdict is Verdict.ACCEPTED
    silent = seatrial.check(lambda x, scale: torch.nan_to_num(with_gaps(x, scale)), **run)
    assert silent.verdict is Verdict.REJECTED


def test_a_dict_of_inputs_goes_by_name_whatever_its_order() -> None:
    def turned(seed: int) -> dict[str, Any]:
        return dict(reversed(make(seed).items()))

    run = {"reference": reference, "policy": "quick", "device": "cpu", "only": ["wrong-values"], "seed": 3}
    straight, other = (seatrial.check(honest, inputs=inputs, **run) for inputs in (make, turned))
    assert other.verdict is straight.verdict is Verdict.ACCEPTED
    assert [f.measured for f in other.findings] == [f.measured for f in straight.findings]


def subtract(a: torch.Tensor, b: torch.Tensor, c: float = 1.0) -> torch.Tensor:
    return a - c * b


def subtract_from(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return b - a


def two(first: str, second: str) -> Any:
    def inputs(seed: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(seed)
        return {first: torch.randn(8, generator=g), second: torch.randn(8, generator=g)}

    return inputs


@pytest.mark.parametrize(
    ("kernel", "inputs", "words"),
    [
        (subtract, two("b", "x"), "takes `b` in another place"),
        (subtract, two("a", "c"), "takes `c` in another place"),
        (subtract_from, two("a", "b"), "kernel 'subtract_from' takes `a` in another place"),
    ],
)
def test_names_that_contradict_the_positions_are_refused(kernel: Any, inputs: Any, words: str) -> None:
    with pytest.raises(UsageError) as error:
        seatrial.check(kernel, reference=subtract, inputs=inputs, policy="quick", device="cpu")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ("x", "y"), ("a", "y")])
def test_names_that_fit_or_are_others_are_taken(names: tuple[str, str]) -> None:
    report = seatrial.check(
        subtract, reference=subtract, inputs=two(*names), policy="quick", device="cpu", only=["does-not-load"]
    )
    assert report.verdict is Verdict.ACCEPTED


def make_once(seed: int) -> dict[str, Any]:
    return make(0)


def make_with_fixed_ids(seed: int) -> dict[str, Any]:
    return {"a": make(seed)["x"].float(), "b": torch.arange(512)}


def test_an_input_maker_that_ignores_its_seed_is_said() -> None:
    run = {"policy": "quick", "device": "cpu", "only": ["does-not-load"]}
    fixed = seatrial.check(honest, reference=reference, inputs=make_once, **run)
    drawn = seatrial.check(honest, reference=reference, inputs=make, **run)
    ids = seatrial.check(subtract, reference=subtract, inputs=make_with_fixed_ids, **run)
    assert any("ignores its seed" in oddity for oddity in fixed.oddities)
    assert any("fresh draws were impossible" in limit for limit in fixed.limits)
    for report in (drawn, ids):
        assert not any("ignores its seed" in oddity for oddity in report.oddities)
        assert not any("fresh draws were impossible" in limit for limit in report.limits)


def test_a_part_of_an_audit_is_run_again_as_that_part() -> None:
    report = seatrial.check(
        honest, reference=reference, inputs=make, policy="quick", device="cpu", seed=5, only=["does-not-load"],
        skip=["wrong-values"], fail_fast=True,
    )  # fmt: skip
    assert report.replay == (
        "seatrial.check(honest, reference=…, inputs=…, seed=5, policy='quick', device='cpu', "
        "only=['does-not-load'], skip=['wrong-values'], fail_fast=True)"
    )
    assert report.headline == f"1 of {len(CHECKS)} checks was run; it held."


def add_residual(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return x * 2 + residual


def without_residual(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return x * 2


def make_with_zeros(seed: int) -> dict[str, Any]:
    return {"x": torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)), "residual": torch.zeros(16, 32)}


def test_an_input_that_is_always_zero_is_varied_so_that_ignoring_it_shows() -> None:
    run = {"reference": add_residual, "inputs": make_with_zeros, "policy": "quick", "device": "cpu"}
    honest = seatrial.check(add_residual, only=["fitted-inputs"], **run)
    ignoring = seatrial.check(without_residual, only=["fitted-inputs"], **run)
    assert (honest.verdict, ignoring.verdict) == (Verdict.ACCEPTED, Verdict.REJECTED)


def silu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x)


def silu_by_tanh(x: torch.Tensor) -> torch.Tensor:
    half = x.float() * 0.5
    return (half + half * torch.tanh(half)).to(x.dtype)


def silu_cut(x: torch.Tensor) -> torch.Tensor:
    half = x.float().clamp(min=-12) * 0.5
    return (half + half * torch.tanh(half)).to(x.dtype)


def bf16_rows(seed: int) -> dict[str, Any]:
    return {"x": torch.randn(64, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()}


def test_a_function_made_of_tanh_is_honest_and_one_that_is_cut_off_is_not() -> None:
    run = {"reference": silu, "inputs": bf16_rows, "policy": "quick", "device": "cpu", "only": ["fitted-inputs"]}
    assert seatrial.check(silu_by_tanh, **run).verdict is Verdict.ACCEPTED
    assert seatrial.check(silu_cut, **run).verdict is Verdict.REJECTED


def first_of_the_largest(x: torch.Tensor) -> torch.Tensor:
    return x.argmax(-1)


def last_of_the_largest(x: torch.Tensor) -> torch.Tensor:
    return x.shape[-1] - 1 - x.flip(-1).argmax(-1)


def before_the_last_of_the_largest(x: torch.Tensor) -> torch.Tensor:
    return (x.shape[-1] - 2 - x.flip(-1).argmax(-1)).clamp(min=0)


def rows_with_equals(seed: int) -> dict[str, Any]:
    return {"x": torch.randint(0, 3, (64, 16), generator=torch.Generator().manual_seed(seed)).float()}


def test_any_of_several_equals_may_be_named_and_nothing_else() -> None:
    run = {"reference": first_of_the_largest, "inputs": rows_with_equals, "policy": "quick", "device": "cpu"}
    fair = seatrial.check(last_of_the_largest, only=["wrong-values"], **run)
    wrong = seatrial.check(before_the_last_of_the_largest, only=["wrong-values"], **run)
    assert (fair.verdict, wrong.verdict) == (Verdict.ACCEPTED, Verdict.REJECTED)


def add_in_place(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return x.add_(residual)


def add_elsewhere(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return x + residual


def test_a_kernel_may_work_in_an_input_only_where_the_reference_does() -> None:
    def ones(seed: int) -> dict[str, Any]:
        drawn = make_with_zeros(seed)
        return {**drawn, "residual": torch.ones_like(drawn["residual"])}

    run = {"inputs": ones, "policy": "quick", "device": "cpu", "only": ["mutated-input"]}
    assert seatrial.check(add_in_place, reference=add_in_place, **run).verdict is Verdict.ACCEPTED
    assert seatrial.check(add_in_place, reference=add_elsewhere, **run).verdict is Verdict.REJECTED


def writing_notes(x: torch.Tensor, scale: float) -> torch.Tensor:
    import os

    os.environ["SOME_LIBRARY_WAS_HERE"] = "1"
    return honest(x, scale)


def steering_cublas(x: torch.Tensor, scale: float) -> torch.Tensor:
    import os

    os.environ["NVIDIA_TF32_OVERRIDE"] = "1"
    return honest(x, scale)


def test_environment_variables_are_noted_and_those_that_bear_on_results_rejected() -> None:
    for kernel, outcome, named in (
        (writing_notes, Outcome.NOTED, "SOME_LIBRARY_WAS_HERE"),
        (steering_cublas, Outcome.FAILED, "NVIDIA_TF32_OVERRIDE"),
    ):
        report = seatrial.check(
            kernel, reference=reference, inputs=make, policy="quick", device="cpu", only=["tampered-process"]
        )
        spoken = [f for f in report.findings if f.outcome is not Outcome.HELD]
        assert [f.outcome for f in spoken] == [outcome] and named in spoken[0].reason
        assert report.verdict is (Verdict.REJECTED if outcome is Outcome.FAILED else Verdict.ACCEPTED)
