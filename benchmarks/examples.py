"""Runs every example folder through `check` and keeps the reports.

    python benchmarks/examples.py --device cuda --policy standard --out results/examples-h200

Prints one line per candidate: verdict, time, first finding. Exits 1 when a faulty candidate is not rejected or an
honest one not accepted. On the CPU the Triton candidates are left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from seatrial.api import policy_named
from seatrial.devices import pick
from seatrial.formats import load_candidates, load_problem
from seatrial.model import Report
from seatrial.report import write
from seatrial.verify import Options, fresh_seed, verify

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def main() -> int:
    """Audit, print, keep; 0 when every verdict is as the file names say."""
    arguments = _arguments()
    device = pick(arguments.device)
    wrong = 0
    for folder in sorted(p for p in EXAMPLES.iterdir() if (p / "definition.json").is_file()):
        if arguments.only and folder.name not in arguments.only:
            continue
        started = time.monotonic()
        problem = load_problem(folder)
        files = sorted((folder / "candidates").glob("*.json"))
        files = [f for f in files if device.name.startswith("cuda") or "triton" not in f.name]
        candidates = load_candidates(files, entry_point=None, problem=problem)
        options = Options(
            policy=policy_named(arguments.policy),
            device=device,
            seed=fresh_seed() if arguments.seed is None else arguments.seed,
        )
        reports = verify(problem, candidates, options)
        wrong += sum(_line(r, f.stem) for r, f in zip(reports, files, strict=True))
        print(f"{folder.name}: {time.monotonic() - started:.1f} s in all", flush=True)
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            write("json", reports, arguments.out / f"{folder.name}.json")
    return 1 if wrong else 0


def _line(report: Report, stem: str) -> bool:
    """Print one candidate's line; True when its verdict is not what its file name says."""
    right = report.verdict.value == ("rejected" if stem.startswith("faulty") else "accepted")
    mark = "ok   " if right else "WRONG"
    print(
        f"{mark} {report.candidate:44} {report.verdict.value:12} {report.grade:6} {report.seconds:6.1f} s", flush=True
    )
    if not right or stem.startswith("faulty"):
        for finding in report.findings[:3]:
            print(f"        {finding.check}: {finding.outcome.value}: {finding.reason[:200]}", flush=True)
    return not right


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--policy", default="quick")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--only", action="append", help="an example folder's name")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
