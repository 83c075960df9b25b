"""The benchmark's own rule: each clause with a tensor that passes and its twin that does not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from seatrial.benchmark_rule import failed_row, judge_record, judge_workload, summarise, trace_line
from seatrial.formats import load_candidates, load_problem
from seatrial.model import BenchmarkRow, BenchmarkRule, CallRecord, InputRule, Ran, Tolerance, Workload

STRICT = Tolerance(max_atol=0.1, max_rtol=0.0, required_matched_ratio=1.0)
INF = math.inf
SMALLEST = Path(__file__).parent / "samples" / "sol_execbench" / "smallest"


def workload(**tolerance: Any) -> Workload:
    return Workload("w", {"n": 4}, {"x": InputRule("random")}, replace(STRICT, **tolerance))


def judged(got: list[float], want: list[float], **tolerance: Any) -> BenchmarkRow:
    return judge_workload(workload(**tolerance), [torch.tensor(got)], [torch.tensor(want)])


@pytest.mark.parametrize(
    ("passes", "fails", "want", "tolerance"),
    [
        ([1.1, 2.0], [1.11, 2.0], [1.0, 2.0], {"max_atol": 0.105}),
        ([1.1, 2.2], [1.1, 2.3], [1.0, 2.0], {"max_atol": 0.0, "max_rtol": 0.11}),
        ([9.0, 1.0, 1.0, 1.0], [9.0, 9.0, 1.0, 1.0], [1.0] * 4, {"required_matched_ratio": 0.75}),
        ([4.0, 1.0, 1.0, 1.0], [9.0, 1.0, 1.0, 1.0], [1.0] * 4, {"required_matched_ratio": 0.75, "max_error_cap": 5.0}),
        ([-INF, 1.0], [INF, 1.0], [-INF, 1.0], {"allow_negative_inf": True}),
        ([-INF, 1.0], [1.0, 1.0], [-INF, 1.0], {"allow_negative_inf": True}),
        ([1e-9, 0.0], [0.0, 0.0], [1e-9, 1e-9], {}),
        ([0.0, 0.0], [math.nan, 0.0], [0.0, 0.0], {}),
    ],
    ids=["atol", "rtol", "ratio", "cap", "plus infinity", "one-sided", "all zero", "nan"],
)
def test_each_clause_and_its_twin(
    passes: list[float], fails: list[float], want: list[float], tolerance: dict[str, Any]
) -> None:
    assert judged(passes, want, **tolerance).status == "PASSED"
    failed = judged(fails, want, **tolerance)
    assert failed.status == "INCORRECT_NUMERICAL" and failed.message.startswith("output 0: ")


def test_negative_infinity_fails_where_it_is_not_allowed() -> None:
    assert judged([-INF], [-INF]).status == "INCORRECT_NUMERICAL"
    assert judged([-INF], [-INF], allow_negative_inf=True).status == "PASSED"


def test_a_reference_that_is_not_finite_fails_everyone() -> None:
    row = judged([1.0, 1.0], [1.0, math.nan])
    assert row.status == "INCORRECT_NUMERICAL" and row.max_absolute_error is not None
    assert math.isnan(row.max_absolute_error)


def test_figures_are_those_of_the_worst_element() -> None:
    row = judged([1.0, 2.5, -4.0, 8.0], [1.0, 2.0, -4.0, 8.0], required_matched_ratio=0.5)
    assert (row.matched_ratio, row.max_absolute_error, row.max_relative_error) == (0.75, 0.5, 0.25)
    assert (row.atol, row.rtol, row.required_matched_ratio) == (0.1, 0.0, 0.5)


def test_relative_error_is_measured_against_at_least_atol() -> None:
    assert judged([0.05], [0.0]).max_relative_error == pytest.approx(0.5)
    assert judged([0.0], [0.0], max_atol=0.0).max_relative_error == 0.0


def test_shape_dtype_and_count_come_before_values() -> None:
    want = [torch.ones(4)]
    assert judge_workload(workload(), [torch.ones(4, 1)], want).status == "INCORRECT_SHAPE"
    assert judge_workload(workload(), [torch.ones(4).half()], want).status == "INCORRECT_DTYPE"
    assert judge_workload(workload(), [], want).status == "RUNTIME_ERROR"
    assert judge_workload(workload(), [torch.ones(4)], want).status == "PASSED"


def test_the_second_output_counts_too() -> None:
    want = [torch.ones(4), torch.arange(4)]
    assert judge_workload(workload(), want, want).status == "PASSED"
    row = judge_workload(workload(), [torch.ones(4), torch.zeros(4, dtype=torch.int64)], want)
    assert row.status == "INCORRECT_NUMERICAL" and row.message.startswith("output 1")


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_scalars_and_empty_outputs_pass_when_equal(shape: tuple[int, ...]) -> None:
    assert judge_workload(workload(), [torch.ones(shape)], [torch.ones(shape)]).status == "PASSED"


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2, torch.bool, torch.int8]
)
def test_every_type_can_be_compared(dtype: torch.dtype) -> None:
    is_fp4 = dtype == torch.float4_e2m1fn_x2
    ones = torch.ones(4, dtype=torch.uint8).view(dtype) if is_fp4 else torch.ones(4).to(dtype)
    zeros = torch.zeros(4, dtype=torch.uint8).view(dtype) if is_fp4 else torch.zeros(4).to(dtype)
    assert judge_workload(workload(), [ones], [ones]).status == "PASSED"
    assert judge_workload(workload(), [zeros], [ones]).status == "INCORRECT_NUMERICAL"


@pytest.mark.parametrize(
    ("record", "status"),
    [
        (CallRecord(Ran.RAISED, error="boom"), "RUNTIME_ERROR"),
        (CallRecord(Ran.CRASHED), "RUNTIME_ERROR"),
        (CallRecord(Ran.TIMED_OUT), "TIMEOUT"),
        (CallRecord(Ran.RETURNED, breaches=("output y has shape [3], not [4]",)), "INCORRECT_SHAPE"),
        (CallRecord(Ran.RETURNED, breaches=("output y has dtype float16, not float32",)), "INCORRECT_DTYPE"),
        (CallRecord(Ran.RETURNED, breaches=("2 outputs, not 1",)), "RUNTIME_ERROR"),
        (CallRecord(Ran.RETURNED, outputs=(torch.ones(4),)), "PASSED"),
    ],
)
def test_how_a_call_ended_becomes_a_status(record: CallRecord, status: str) -> None:
    problem = load_problem(SMALLEST)
    assert judge_record(problem, workload(), record, [torch.ones(4)]).status == status


def test_the_summary_counts_and_an_empty_one_is_no_pass() -> None:
    good, bad = judged([1.0], [1.0]), failed_row(workload(), "TIMEOUT", "")
    assert summarise([good, good]).passed
    mixed = summarise([good, bad])
    assert not mixed.passed and mixed.summary == "1 of 2 workloads pass the benchmark's own rule (TIMEOUT)"
    assert not summarise([]).passed
    assert BenchmarkRule.model_validate_json(mixed.model_dump_json()) == mixed


@pytest.mark.parametrize(
    ("got", "status", "correctness", "performance"),
    [
        ([1.0], "PASSED", True, True),
        ([2.0], "INCORRECT_NUMERICAL", True, False),
        ([math.nan], "INCORRECT_NUMERICAL", True, False),
        (None, "RUNTIME_ERROR", False, False),
    ],
)
def test_a_trace_has_exactly_the_parts_its_status_allows(
    *, got: list[float] | None, status: str, correctness: bool, performance: bool
) -> None:
    problem = load_problem(SMALLEST)
    (candidate,) = load_candidates([SMALLEST / "solution_good.json"], problem=problem)
    row = failed_row(workload(), "RUNTIME_ERROR", "boom") if got is None else judged(got, [1.0])
    line = trace_line(problem, workload(), candidate, row, timestamp="2000-01-01T00:00:00")
    evaluation = json.loads(json.dumps(line, allow_nan=False))["evaluation"]
    assert evaluation["status"] == status
    assert (evaluation["correctness"] is not None, evaluation["performance"] is not None) == (correctness, performance)
    if correctness:
        assert evaluation["correctness"]["has_nan"] == (got is not None and math.isnan(got[0]))


def test_a_trace_repeats_the_workload_as_it_is_written() -> None:
    problem = load_problem(SMALLEST)
    (candidate,) = load_candidates([SMALLEST / "solution_good.json"], problem=problem)
    rules = {
        "a": InputRule("scalar", value=2),
        "b": InputRule("safetensors", path="p", tensor_key="k"),
        "c": InputRule("custom"),
    }
    line = trace_line(problem, replace(workload(), inputs=rules), candidate, judged([1.0], [1.0]), timestamp="t")
    assert line["definition"] == "doubled_rows" and line["solution"] == "doubled_rows-good"
    assert line["workload"]["inputs"] == {
        "a": {"type": "scalar", "value": 2},
        "b": {"type": "safetensors", "path": "p", "tensor_key": "k"},
        "c": {"type": "custom"},
    }
    assert line["workload"]["tolerance"]["max_atol"] == 0.1
