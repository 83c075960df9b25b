"""Judges the sample problems of a SOL-ExecBench checkout with the solutions that ship beside them.

    git clone https://github.com/NVIDIA/SOL-ExecBench && python benchmarks/sol_samples.py SOL-ExecBench --device cuda

Their own solutions should be accepted (or inconclusive, with a reason, where the machine or the language does not allow
more); their hack samples should be rejected. Prints one line per candidate and exits 1 when one is not as expected.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from seatrial.api import policy_named
from seatrial.devices import pick
from seatrial.errors import SeatrialError
from seatrial.formats import load_candidates, load_problem
from seatrial.model import Report
from seatrial.verify import Options, verify

OWN = (
    "examples/pytorch/linear_backward",
    "examples/pytorch/gemma3_swiglu",
    "examples/triton/rmsnorm",
    "examples/triton/olmo3_post_norm",
    "examples/triton/nemotron_rms_norm",
    "tests/sol_execbench/samples/custom_inputs_matmul",
    "tests/sol_execbench/samples/triton_ref_vecadd",
)
HACKED = "examples/triton/rmsnorm"  # the problem that the hack samples claim to solve
HACKS = "tests/samples/rmsnorm/solution_hack_*.json"


def main() -> int:
    """Audit own solutions, then hacks; 0 when everything is as expected."""
    arguments = _arguments()
    device, policy = pick(arguments.device), policy_named(arguments.policy)
    rows: list[dict[str, object]] = []
    jobs = [(arguments.checkout / p, sorted((arguments.checkout / p).glob("solution*.json")), "accepted") for p in OWN]
    jobs.append((arguments.checkout / HACKED, sorted(arguments.checkout.glob(HACKS)), "rejected"))
    for folder, solutions, expected in jobs:
        if arguments.only and folder.name not in arguments.only:
            continue
        started = time.monotonic()
        try:
            problem = load_problem(folder)
            candidates = load_candidates(solutions, entry_point=None, problem=problem)
            reports = verify(problem, candidates, Options(policy=policy, device=device))
        except SeatrialError as error:
            print(f"WRONG {folder.name}: {error}", flush=True)
            rows.append({"problem": folder.name, "error": str(error), "as_expected": False})
            continue
        rows += [_row(r, expected, device.name) for r in reports]
        print(f"{folder.name}: {time.monotonic() - started:.1f} s", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": device.name, "policy": policy.name, "rows": rows}, indent=2))
    return 0 if all(r["as_expected"] for r in rows) else 1


def _row(report: Report, expected: str, device: str) -> dict[str, object]:
    verdict = report.verdict.value
    right = verdict == expected or (device == "cpu" and verdict == "inconclusive")
    print(f"{'ok   ' if right else 'WRONG'} {report.problem[:36]:36} {report.candidate[:36]:36} {verdict}", flush=True)
    shown = [f for f in report.findings if f.outcome.value not in ("held", "not-applicable")][:3]
    for finding in shown:
        print(f"        {finding.check}: {finding.outcome.value}: {finding.reason[:220]}", flush=True)
    return {
        "problem": report.problem,
        "candidate": report.candidate,
        "verdict": verdict,
        "expected": expected,
        "as_expected": right,
        "grade": report.grade,
        "seconds": report.seconds,
        "findings": [{"check": f.check, "outcome": f.outcome.value, "reason": f.reason} for f in shown],
        "environment": report.environment,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--policy", default="quick")
    parser.add_argument("--only", action="append", help="a problem folder's name")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
