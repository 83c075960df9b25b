"""What the benchmark itself would say: SOL-ExecBench's own rule, on its own inputs.

seatrial never judges by it. It stands in the report beside seatrial's verdict, so that a reader sees
what the benchmark accepts. The rule, per output: NaN or infinity on either side fails, unless both are
-inf and the workload allows it; an all-zero output against a non-zero reference fails; an element
matches when |x - y| <= atol + rtol * |y| in fp32; enough elements must match, and no error may exceed
the optional cap. One round is judged here where the benchmark runs several.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seatrial.model import BenchmarkRow, BenchmarkRule, CallRecord, Candidate, InputRule, Problem, Ran, Workload

if TYPE_CHECKING:
    from torch import Tensor

    from seatrial.model import Tolerance

NAME = "SOL-ExecBench"
MEASURED = ("PASSED", "INCORRECT_NUMERICAL")  # the statuses that carry error figures in a trace

_STATUS = {Ran.TIMED_OUT: "TIMEOUT"}


@dataclass(frozen=True)
class _Errors:
    """Error figures of one output: the largest errors, the share of elements that match, and the verdict."""

    absolute: float
    relative: float
    matched: float
    wrong: str  # why it fails; empty when it passes


def judge_workload(workload: Workload, outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> BenchmarkRow:
    """The benchmark's rule on one workload.

    `outputs` are the candidate's and `expected` the native reference's tensors, in declared order on one
    device; nothing is changed. Errors are NaN when a NaN decided, infinite when an infinity did.
    """
    if len(outputs) != len(expected):
        return failed_row(workload, "RUNTIME_ERROR", f"{len(outputs)} outputs where {len(expected)} are expected")
    for place, (got, want) in enumerate(zip(outputs, expected, strict=True)):
        if got.shape != want.shape:
            return failed_row(workload, "INCORRECT_SHAPE", f"output {place}: {list(got.shape)}, not {list(want.shape)}")
        if got.dtype != want.dtype:
            return failed_row(workload, "INCORRECT_DTYPE", f"output {place}: {got.dtype}, not {want.dtype}")
    return _numerical_row(
        workload, [_compare(g, w, workload.tolerance) for g, w in zip(outputs, expected, strict=True)]
    )


def judge_record(problem: Problem, workload: Workload, record: CallRecord, expected: Sequence[Tensor]) -> BenchmarkRow:
    """The rule on what one call gave; a call without usable outputs gets the status that fits how it ended."""
    if record.ran is not Ran.RETURNED:
        return failed_row(workload, _STATUS.get(record.ran, "RUNTIME_ERROR"), record.error)
    if record.breaches:
        return failed_row(workload, _breach_status(record.breaches[0]), record.breaches[0])
    return judge_workload(workload, record.outputs, expected)


def failed_row(workload: Workload, status: str, message: str) -> BenchmarkRow:
    """A row for a workload that produced nothing to compare."""
    return BenchmarkRow(
        workload=workload.uuid, axes=dict(workload.axes), status=status, message=message, **_bounds(workload)
    )


def summarise(rows: Sequence[BenchmarkRow]) -> BenchmarkRule:
    """The rule over all rows: passed when there are rows and every one passed."""
    passed = sum(row.status == "PASSED" for row in rows)
    others = ", ".join(dict.fromkeys(row.status for row in rows if row.status != "PASSED"))
    return BenchmarkRule(
        name=NAME,
        passed=bool(rows) and passed == len(rows),
        summary=f"{passed} of {len(rows)} workloads pass the benchmark's own rule" + (f" ({others})" if others else ""),
        rows=list(rows),
    )


def trace_line(
    problem: Problem,
    workload: Workload,
    candidate: Candidate,
    row: BenchmarkRow,
    *,
    timestamp: str,
    hardware: str = "unknown",
    libs: Mapping[str, str] | None = None,
    log: str = "",
    performance: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """One line of the benchmark's published trace form, ready for json.dumps.

    `performance` holds latency_ms, reference_latency_ms and speedup_factor; a row that passed without a
    timing gets zeros, which is that form's way of saying so.
    """
    timed = performance or {"latency_ms": 0.0, "reference_latency_ms": 0.0, "speedup_factor": 0.0}
    return {
        "definition": problem.name,
        "workload": _written_workload(workload),
        "solution": candidate.name,
        "evaluation": {
            "status": row.status,
            "environment": {"hardware": hardware, "libs": dict(libs or {})},
            "timestamp": timestamp,
            "log": log or row.message,
            "correctness": _written_correctness(row) if row.status in MEASURED else None,
            "performance": dict(timed) if row.status == "PASSED" else None,
        },
    }


# ---------------------------------------------------------------------------------------------------
# The rule


def _compare(got: Tensor, want: Tensor, tolerance: Tolerance) -> _Errors:
    import torch

    x, y = _as_fp32(got), _as_fp32(want)
    both_lowest = (x == -math.inf) & (y == -math.inf) & tolerance.allow_negative_inf
    if not bool(((torch.isfinite(x) & torch.isfinite(y)) | both_lowest).all()):
        return _not_finite(x, y)
    largest = float(torch.linalg.vector_norm(y[~both_lowest]))
    if _all_zero(x) and not _all_zero(y):
        return _Errors(largest, largest, 0.0, "all zero where the reference is not")
    x, y = x[~both_lowest], y[~both_lowest]
    if x.numel() == 0:
        return _Errors(0.0, 0.0, 1.0, "")
    return _measure(x, y, tolerance)


def _measure(x: Tensor, y: Tensor, tolerance: Tolerance) -> _Errors:
    import torch

    error = (x - y).abs()
    allowed = tolerance.max_atol + tolerance.max_rtol * y.abs()
    matches = (error <= allowed) & error.isfinite()
    matched = 1.0 - float((~matches).sum()) / error.numel()
    absolute = float(error.max())
    floor = max(tolerance.max_atol, torch.finfo(torch.float32).tiny)  # an atol of 0 would give 0/0 at zeros
    relative = float((error / y.abs().clamp(min=floor)).max())
    wrong = ""
    if matched < tolerance.required_matched_ratio:
        wrong = f"{matched:.6f} of the elements match where {tolerance.required_matched_ratio} must"
    elif tolerance.max_error_cap is not None and absolute > tolerance.max_error_cap:
        wrong = f"largest error {absolute:.4g} exceeds the cap {tolerance.max_error_cap:.4g}"
    return _Errors(absolute, relative, matched, wrong)


def _not_finite(x: Tensor, y: Tensor) -> _Errors:
    nan = bool(x.isnan().any() or y.isnan().any())
    figure, word = (math.nan, "NaN") if nan else (math.inf, "infinity")
    return _Errors(figure, figure, 0.0, f"{word} in the output or the reference")


def _all_zero(values: Tensor) -> bool:
    return not bool((values != 0).any())


def _as_fp32(values: Tensor) -> Tensor:
    import torch

    if values.dtype == torch.float4_e2m1fn_x2:  # torch has no arithmetic for it; the packed codes are compared
        values = values.view(torch.uint8)
    return values.detach().to(torch.float32)


def _numerical_row(workload: Workload, errors: Sequence[_Errors]) -> BenchmarkRow:
    failures = [(place, e) for place, e in enumerate(errors) if e.wrong]
    shown = [e for _, e in failures[:1]] or list(errors)
    return BenchmarkRow(
        workload=workload.uuid,
        axes=dict(workload.axes),
        status="INCORRECT_NUMERICAL" if failures else "PASSED",
        matched_ratio=min((e.matched for e in shown), default=1.0),
        max_absolute_error=max((e.absolute for e in shown), default=0.0),
        max_relative_error=max((e.relative for e in shown), default=0.0),
        message=f"output {failures[0][0]}: {failures[0][1].wrong}" if failures else "",
        **_bounds(workload),
    )


def _bounds(workload: Workload) -> dict[str, Any]:
    tolerance = workload.tolerance
    return {
        "atol": tolerance.max_atol,
        "rtol": tolerance.max_rtol,
        "required_matched_ratio": tolerance.required_matched_ratio,
    }


def _breach_status(breach: str) -> str:
    words = breach.lower()
    if "shape" in words:
        return "INCORRECT_SHAPE"
    return "INCORRECT_DTYPE" if "dtype" in words or "type" in words else "RUNTIME_ERROR"


# ---------------------------------------------------------------------------------------------------
# The trace form


def _written_workload(workload: Workload) -> dict[str, Any]:
    tolerance = workload.tolerance
    return {
        "uuid": workload.uuid,
        "axes": dict(workload.axes),
        "inputs": {name: _written_rule(rule) for name, rule in workload.inputs.items()},
        "tolerance": {
            "max_atol": tolerance.max_atol,
            "max_rtol": tolerance.max_rtol,
            "required_matched_ratio": tolerance.required_matched_ratio,
            "max_error_cap": tolerance.max_error_cap,
            "allow_negative_inf": tolerance.allow_negative_inf,
        },
    }


def _written_rule(rule: InputRule) -> dict[str, Any]:
    match rule.kind:
        case "scalar":
            return {"type": "scalar", "value": rule.value}
        case "safetensors":
            return {"type": "safetensors", "path": rule.path, "tensor_key": rule.tensor_key}
        case kind:
            return {"type": kind}


def _written_correctness(row: BenchmarkRow) -> dict[str, Any]:
    """An error that is no number is 0.0 with a flag beside it; NaN goes before infinity."""
    errors = [e for e in (row.max_absolute_error, row.max_relative_error) if e is not None]
    has_nan = any(math.isnan(e) for e in errors)
    return {
        "max_relative_error": _finite(row.max_relative_error),
        "max_absolute_error": _finite(row.max_absolute_error),
        "has_nan": has_nan,
        "has_inf": not has_nan and any(math.isinf(e) for e in errors),
        "extra": None if row.matched_ratio is None else {"matched_ratio": row.matched_ratio},
    }


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0
