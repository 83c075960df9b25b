"""The command line from end to end on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.model import Report

ROOT = Path(__file__).resolve().parents[1]
RMSNORM = ROOT / "examples" / "rmsnorm"


def seatrial(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "seatrial", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=280)


def test_check_writes_every_kind_of_report_and_exits_1(tmp_path: Path) -> None:
    kinds = {k: tmp_path / f"report.{k}" for k in ("json", "html", "markdown", "junit", "sarif", "traces")}
    flags = [word for kind, path in kinds.items() for word in (f"--{kind}", path)]
    done = seatrial(
        "check", RMSNORM, RMSNORM / "candidates" / "faulty.json", "--device", "cpu", "--policy", "quick", *flags
    )
    assert done.returncode == 1, done.stderr
    assert "rejected" in done.stdout.lower()
    assert "\x1b" not in done.stdout, "plain when not on a terminal"
    assert done.stderr == "", "no progress bars when not on a terminal"
    assert [k for k, p in kinds.items() if p.stat().st_size == 0] == []
    report = json.loads(kinds["json"].read_text())
    assert {"verdict", "findings", "benchmark_rule", "limits", "environment", "seeds"} <= report.keys()
    assert report["verdict"] == "rejected"
    assert report["benchmark_rule"]["passed"] is True
    wrong = next(f for f in report["findings"] if f["outcome"] == "failed")
    assert {"check", "output", "outcome", "reason", "measured", "allowed", "where", "reproducer"} <= wrong.keys()
    assert Report.from_json(kinds["json"].read_text()).verdict.value == "rejected"


def test_the_reproducer_of_a_finding_shows_it_again(tmp_path: Path) -> None:
    first = tmp_path / "first.json"
    seatrial(
        "check",
        RMSNORM,
        RMSNORM / "candidates" / "faulty.json",
        "--policy",
        "quick",
        "--device",
        "cpu",
        "--json",
        first,
    )
    finding = next(f for f in json.loads(first.read_text())["findings"] if f["outcome"] == "failed")
    again = tmp_path / "again.json"
    words = finding["reproducer"].split()
    assert words[:2] == ["seatrial", "check"]
    done = seatrial(*words[1:], "--json", again)
    assert done.returncode == 1
    same = [f for f in json.loads(again.read_text())["findings"] if f["reason"] == finding["reason"]]
    assert len(same) == 1
    assert same[0]["measured"] == finding["measured"]


def test_several_candidates_share_one_run(tmp_path: Path) -> None:
    out = tmp_path / "both.json"
    pair = [RMSNORM / "candidates" / f"{n}.json" for n in ("faulty", "honest")]
    done = seatrial("check", RMSNORM, *pair, "--device", "cpu", "--policy", "quick", "--json", out)
    assert done.returncode == 1
    both = json.loads(out.read_text())
    assert both["verdict"] == "rejected"
    assert [r["verdict"] for r in both["reports"]] == ["rejected", "accepted"]


def test_a_bare_python_file(tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text((RMSNORM / "src" / "honest.py").read_text())
    done = seatrial("check", RMSNORM, kernel, "--entry-point", "run", "--device", "cpu", "--policy", "quick")
    assert done.returncode == 0, done.stdout + done.stderr


def test_fail_fast_stops_early() -> None:
    done = seatrial(
        "check", RMSNORM, RMSNORM / "candidates" / "faulty.json", "--device", "cpu", "--policy", "quick", "--fail-fast"
    )
    assert done.returncode == 1
    assert "tampered-process" not in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "/no/such/folder", "x.json"], "/no/such/folder"),
        (["check", RMSNORM, "/no/such/solution.json"], "/no/such/solution.json"),
        (["check", RMSNORM, RMSNORM / "definition.json", "--only", "wrong-value"], "wrong-value"),
        (["check", RMSNORM, RMSNORM / "candidates" / "honest.json", "--policy", "hasty"], "hasty"),
        (["check", RMSNORM, RMSNORM / "candidates" / "honest.json", "--device", "cuda:99"], "cuda"),
        (["check", RMSNORM, RMSNORM / "candidates" / "honest.json", "--device", "tpu"], "tpu"),
        (["check", RMSNORM], "candidates"),
        (["check", RMSNORM, RMSNORM / "candidates" / "honest.json", "--seed", "many"], "--seed"),
        (["explain", "nonsense"], "nonsense"),
        (["demo", "--examples", "/no/such/examples"], "/no/such/examples"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_2(words: list[object], said: str) -> None:
    done = seatrial(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_malformed_json_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "definition.json").write_text('{\n  "name": "x",\n  oops\n}')
    (tmp_path / "workload.jsonl").write_text("{}\n")
    done = seatrial("check", tmp_path, RMSNORM / "candidates" / "honest.json")
    assert done.returncode == 2
    assert "definition.json" in done.stderr and "line 3" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_unwritable_report_path_is_said_in_one_sentence() -> None:
    done = seatrial(
        "check", RMSNORM, RMSNORM / "candidates" / "honest.json", "--device", "cpu", "--policy", "quick",
        "--only", "mutated-input", "--json", "/proc/nowhere/report.json",
    )  # fmt: skip
    assert done.returncode == 2
    assert "/proc/nowhere/report.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_listing_and_pages() -> None:
    listed = seatrial("checks")
    assert listed.returncode == 0
    assert "narrow-accumulator" in listed.stdout
    page = seatrial("explain", "narrow-accumulator")
    assert page.returncode == 0
    assert "What it misses" in page.stdout


def test_doctor_says_what_is_missing_and_why() -> None:
    done = seatrial("doctor")
    assert done.returncode == 0, done.stderr
    assert "yes  cpu" in done.stdout
    assert "confined by" in done.stdout
