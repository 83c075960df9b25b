"""The command line from end to end on the CPU."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from seatrial.checks import CHECKS
from seatrial.devices import pick
from seatrial.formats import load_candidates, load_problem
from seatrial.model import Finding, Outcome, Report
from seatrial.policy import POLICIES
from seatrial.progress import Lines
from seatrial.study import Study
from seatrial.verify import Options, _command, reproducer

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
    lines = done.stderr.splitlines()
    assert "seatrial: rmsnorm-faulty: wrong-values" in lines, "plain progress when not on a terminal"
    starts = [line for line in lines if line.startswith("seatrial: rmsnorm-faulty: ") and "," not in line]
    assert len(starts) == len(set(starts)) == len(CHECKS), "one line a check"
    assert lines[-1] == "Wrote " + ", ".join(map(str, kinds.values()))
    assert ElementTree.parse(kinds["junit"]).getroot().get("tests") == str(len(CHECKS))
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


def test_fail_fast_stops_early_and_says_so() -> None:
    done = seatrial(
        "check", RMSNORM, RMSNORM / "candidates" / "faulty.json", "--device", "cpu", "--policy", "quick", "--fail-fast",
        "--quiet",
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == ""
    assert "tampered-process" not in done.stdout
    assert re.search(rf"; \d of {len(CHECKS)} checks were run\.$", done.stdout.splitlines()[2])
    assert re.search(r" --fail-fast --seed \d+ ", done.stdout.splitlines()[-1])


def test_run_it_again_says_what_was_run() -> None:
    part = ("--skip", "training-divergence", "--only", "does-not-load", "--only", "training-divergence", "--strict")
    done = seatrial(
        "check", RMSNORM, RMSNORM / "candidates" / "honest.json", *part, "--device", "cpu", "--policy", "quick",
        "--seed", "5",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"1 of {len(CHECKS)} checks was run; it held; policy quick leaves out 1 thing, named below." in done.stdout
    again = done.stdout.splitlines()[-1].split()
    assert again[2:] == [
        str(RMSNORM), str(RMSNORM / "candidates" / "honest.json"), "--only", "does-not-load", "--only",
        "training-divergence", "--skip", "training-divergence", "--strict", "--seed", "5", "--policy", "quick",
        "--device", "cpu",
    ]  # fmt: skip
    assert seatrial(*again[1:]).stdout.splitlines()[:3] == done.stdout.splitlines()[:3]


def test_a_kernel_for_cuda_on_the_cpu_says_why_and_how_to_run_it(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    kernel = tmp_path / "kernel.py"
    kernel.write_text("import triton\n\n\ndef run(x, weight, eps):\n    return x\n")
    done = seatrial("check", RMSNORM, kernel, "--device", "cpu", "--policy", "quick", "--seed", "5", "--json", out)
    assert done.returncode == 3, done.stderr
    report = Report.from_json(out.read_text())
    assert report.headline.endswith("needs a CUDA device, and this audit ran on cpu; no check was run.")
    assert [(row.check, row.outcome.value, row.summary) for row in report.checks] == [
        ("does-not-load", "not-verified", report.findings[0].reason)
    ]
    assert report.findings[0].reproducer.endswith("--device cuda")
    assert "--only" not in report.findings[0].reproducer
    assert report.replay.endswith("--device cpu")


def reproducers(command: str) -> tuple[str, str]:
    """(what was run, the reproducer of a training finding) of a run that never happened."""
    problem = load_problem(RMSNORM)
    (kernel,) = load_candidates([RMSNORM / "candidates" / "honest.json"], problem=problem)
    policy, device = POLICIES["quick"], pick("cpu")
    options = Options(policy, device, 5, only=("does-not-load", "training-divergence"), command=command)
    study = Study(problem, policy, device, 5)
    finding = Finding(check="training-divergence", outcome=Outcome.FAILED, reason="r")
    return _command(study, kernel, options), reproducer(study, kernel, finding, options)


def test_a_run_of_train_is_run_again_by_train() -> None:
    rest = f"{RMSNORM} {RMSNORM / 'candidates' / 'honest.json'}"
    tail = "--seed 5 --policy quick --device cpu"
    assert reproducers("train") == (f"seatrial train {rest} {tail}",) * 2
    assert reproducers("check")[1] == f"seatrial check {rest} --only training-divergence {tail}"


def test_progress_lines_are_one_a_check_and_one_every_15_seconds() -> None:
    out, now = io.StringIO(), [0.0]
    lines = Lines(out, clock=lambda: now[0])
    for second in range(40):
        now[0] = float(second)
        lines("k", f"wrong-values  smallest, {second} of 40" if second % 2 else "wrong-values", second / 100)
    lines("k", "fitted-sizes", 0.5)
    lines("other", "fitted-sizes", 0.0)
    assert out.getvalue().splitlines() == [
        "seatrial: k: wrong-values",
        "seatrial: k: wrong-values, smallest, 15 of 40",
        "seatrial: k: wrong-values, 30 % of all checks done",
        "seatrial: k: fitted-sizes",
        "seatrial: other: fitted-sizes",
    ]


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
        (["check", RMSNORM, RMSNORM / "candidates" / "honest.json", "--seed", "-1"], "leave --seed out"),
        (["check", RMSNORM, RMSNORM / "candidates" / "honest.json", "--json", "x.out", "--html", "x.out"], "both name"),
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


def test_an_unwritable_report_path_is_said_in_one_sentence_before_the_audit() -> None:
    done = seatrial(
        "check", RMSNORM, RMSNORM / "candidates" / "honest.json", "--device", "cpu", "--policy", "quick",
        "--only", "mutated-input", "--json", "/proc/nowhere/report.json",
    )  # fmt: skip
    assert done.returncode == 2
    assert "/proc/nowhere/report.json" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_every_report_option_is_described() -> None:
    shown = " ".join(seatrial("check", "--help").stdout.split())
    for option, words in (
        ("json", "JSON"), ("html", "page"), ("markdown", "pull request"), ("junit", "test case per check"),
        ("sarif", "code scanning"), ("traces", "the benchmark's own rule"),
    ):  # fmt: skip
        described = shown.partition(f"--{option} PATH")[2].partition("--")[0]
        assert words in described, option


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
    listed = done.stdout.partition("What this machine cannot verify:\n")[2].partition("\n\n")[0].splitlines()
    assert len(listed) >= 3
    assert any("streams" in line for line in listed) == ("no   cuda" in done.stdout)
