"""Audits an RMSNorm whose largest workload has inputs and outputs of several gigabytes: the oracle goes by rows.

    python benchmarks/large_problem.py --device cuda --json results/h200/large_problem.json

The honest kernel must be accepted; the faulty one, whose 32-bit row offset wraps at 2^31 elements, must not. Prints the
verdict, the time and what the parent's process held at most. Exits 1 when a verdict is wrong.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REFERENCE = """import torch

def run(x, w):
    return (x.float() * (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w.float()).to(x.dtype)
"""
DEFINITION = {
    "name": "large_rmsnorm",
    "description": "RMSNorm over the last dimension.",
    "op_type": "rmsnorm",
    "axes": {"rows": {"type": "var"}, "width": {"type": "const"}},
    "inputs": {
        "x": {"shape": ["rows", "width"], "dtype": "bfloat16"},
        "w": {"shape": ["width"], "dtype": "bfloat16"},
    },
    "outputs": {"y": {"shape": ["rows", "width"], "dtype": "bfloat16"}},
    "reference": REFERENCE,
}
CANDIDATE = """import torch

def run(x, w):
    y = torch.empty_like(x)
    rows = torch.arange(x.shape[0], device=x.device)
    for start in range(0, x.shape[0], 1 << 15):
        at = rows[start : start + (1 << 15)]
        {wrap}
        part = x[at].float()
        y[at] = (part * (part.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w.float()).to(x.dtype)
    return y
"""
HONEST = "at = at.long()"
FAULTY = "at = at % max(1, (1 << 31) // x.shape[1])"


def main() -> int:
    """Both kernels, one line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name, wrap, verdicts in (
        ("honest", HONEST, ("accepted", "accepted-with-limits")),
        ("32-bit offsets", FAULTY, ("rejected",)),
    ):
        row = _audit(wrap, arguments) | {"kernel": name}
        row["right"] = row["verdict"] in verdicts
        rows.append(row)
        print(
            f"{name:16} {row['verdict']:12} {row['seconds']:7.1f} s, parent at most {row['parent_gib']:.0f} GiB: {row['headline'][:200]}"
        )
    if arguments.json:
        size = arguments.rows * arguments.width * 2 / 2**30
        told = {
            "device": arguments.device,
            "rows": arguments.rows,
            "width": arguments.width,
            "gib_of_x": round(size, 2),
        }
        arguments.json.write_text(json.dumps({**told, "runs": rows}, indent=1))
    return 0 if all(row["right"] for row in rows) else 1


def _definition(width: int) -> dict[str, Any]:
    axes = {"rows": {"type": "var"}, "width": {"type": "const", "value": width}}
    return {**DEFINITION, "axes": axes}


def _workload(rows: int) -> str:
    inputs = {name: {"type": "random"} for name in ("x", "w")}
    tolerance = {"max_atol": 0.01, "max_rtol": 0.02, "required_matched_ratio": 0.99}
    return json.dumps({"uuid": f"{rows}-rows", "axes": {"rows": rows}, "inputs": inputs, "tolerance": tolerance}) + "\n"


def _audit(wrap: str, arguments: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import replace

    from seatrial.devices import pick
    from seatrial.formats import load_candidates, load_problem
    from seatrial.policy import QUICK
    from seatrial.verify import Options, verify

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "definition.json").write_text(json.dumps(_definition(arguments.width)))
        (place / "workload.jsonl").write_text("".join(_workload(rows) for rows in (64, arguments.rows)))
        (place / "kernel.py").write_text(CANDIDATE.format(wrap=wrap))
        problem = load_problem(place)
        kernels = load_candidates([place / "kernel.py"], entry_point="run", problem=problem)
        began = time.perf_counter()
        only = ("does-not-load", "crashing-call", "broken-contract", "wrong-values", "fitted-inputs", "stale-output")
        options = Options(policy=replace(QUICK, budget_s=400.0), device=pick(arguments.device), seed=1, only=only)
        report = verify(problem, kernels, options)[0]
    return {
        "verdict": report.verdict.value,
        "seconds": round(time.perf_counter() - began, 1),
        "parent_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
        "headline": report.headline,
        "findings": [f"{f.check}: {f.outcome.value}: {f.reason[:200]}" for f in report.findings],
    }


if __name__ == "__main__":
    sys.exit(main())
