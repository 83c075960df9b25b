"""Writes and reads beyond the ends of tensors; each fault beside its honest twin, one expression apart."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import seatrial
from seatrial import Outcome, Report
from seatrial.checks import out_of_bounds
from seatrial.model import CallRecord, Ran
from seatrial.reproduce.replay import replay

TILE = 16


def rows_summed(x: Tensor) -> Tensor:
    return x.sum(-1)


def drawn(seed: int) -> dict[str, Any]:
    return {"x": torch.randn(6, 20, generator=torch.Generator().manual_seed(seed))}


def memory(x: Tensor, first: int, count: int) -> Tensor:
    """So many numbers from there on, as a kernel loads them: by address."""
    there = (ctypes.c_float * count).from_address(x.data_ptr() + 4 * first)
    return torch.frombuffer(there, dtype=torch.float32)


def summed_by_tiles(x: Tensor, masked: Callable[[int, int], int]) -> Tensor:
    x = x.contiguous()
    y = torch.zeros(x.shape[0])
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], TILE):
            y[row] += memory(x, row * x.shape[1] + start, masked(row, x.shape[1] - start)).sum()
    return y


def masking(x: Tensor) -> Tensor:
    return summed_by_tiles(x, lambda row, left: min(TILE, left))


def masking_all_rows_but_the_last(x: Tensor) -> Tensor:
    return summed_by_tiles(x, lambda row, left: TILE if row == x.shape[0] - 1 else min(TILE, left))


def loading_more_than_it_uses(x: Tensor) -> Tensor:
    x = x.contiguous()
    y = torch.zeros(x.shape[0])
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], TILE):
            loaded = memory(x, row * x.shape[1] + start, TILE)
            y[row] += torch.where(torch.arange(TILE) < x.shape[1] - start, loaded, 0.0).sum()
    return y


def writing(x: Tensor, beyond: int) -> Tensor:
    x = x.contiguous()
    kept = memory(x, x.numel() - 1, 1).clone()
    ctypes.memset(x.data_ptr() + x.nbytes - 4 + beyond, 0, 4)
    memory(x, x.numel() - 1, 1).copy_(kept)
    return x.sum(-1)


def writing_behind(x: Tensor) -> Tensor:
    return writing(x, 4)


def writing_within(x: Tensor) -> Tensor:
    return writing(x, 0)


def audit(kernel: Callable[..., Tensor], **options: Any) -> Report:
    return seatrial.check(
        kernel, reference=rows_summed, inputs=drawn, policy="quick", device="cpu", only=("out-of-bounds",), **options
    )


@pytest.mark.parametrize(
    ("kernel", "cause", "words"),
    [
        (masking_all_rows_but_the_last, "out-of-bounds:read", "depends on memory beyond the ends of the tensors"),
        (writing_behind, "out-of-bounds:write", "writes behind the last element of input `x`"),
    ],
)
def test_an_access_beyond_the_ends_is_rejected_and_its_reproducer_shows_it(
    kernel: Callable[..., Tensor], cause: str, words: str, tmp_path: Path
) -> None:
    report = audit(kernel, reproducers=tmp_path)
    (objection,) = [f for f in report.findings if f.outcome is Outcome.FAILED]
    assert (objection.check, objection.cause) == ("out-of-bounds", cause)
    assert words in objection.reason
    (file,) = tmp_path.glob("*.py")
    assert replay(file).shows
    codes = []
    for options in ((), ("--candidate", f"{__file__}::masking")):
        done = subprocess.run([sys.executable, str(file), *options], capture_output=True, text=True, timeout=120)
        codes.append(done.returncode)
    assert codes == [1, 0], done.stdout + done.stderr


@pytest.mark.parametrize("kernel", [masking, loading_more_than_it_uses, writing_within])
def test_what_stays_within_or_throws_away_what_it_loaded_holds(kernel: Callable[..., Tensor]) -> None:
    assert [f.outcome for f in audit(kernel).findings] == [Outcome.HELD]


@pytest.mark.parametrize("place", ["behind output 7", "behind you", ""])
def test_what_a_child_says_in_words_of_its_own_is_no_less_a_write(place: str) -> None:
    study = _study()
    job = out_of_bounds.plan(study)[0]
    record = CallRecord(Ran.RETURNED, (torch.zeros(6),), facts={"guards_broken": [place]})
    findings = _judged(study, job, [record] * 3)
    assert [f.cause for f in findings if f.outcome is Outcome.FAILED] == ["out-of-bounds:write"]


def _study() -> Any:
    from seatrial.devices import pick
    from seatrial.formats.plain import problem_from_callables
    from seatrial.policy import QUICK
    from seatrial.study import Study

    return Study(problem_from_callables(rows_summed, drawn), QUICK, pick("cpu"), seed=1)


def _judged(study: Any, job: Any, records: Sequence[CallRecord]) -> Sequence[Any]:
    from seatrial.checks.base import Evidence

    return out_of_bounds.judge(
        study, [Evidence(job, tuple(records), {"overruns": [(job.cases[0], r) for r in records]})]
    ).findings
