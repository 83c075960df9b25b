"""What the oracle, the honest floor and the probes cost, as multiples of the reference's own time.

    python benchmarks/cost.py --device cpu --json results/cpu/cost.json

For every folder under examples/, on the workload that most checks use: one native run of the reference, one float64
run, the envelope with its four samples, and all swamping probes read on the reference. Medians of five.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seatrial.devices import pick
from seatrial.formats import load_problem
from seatrial.numerics.envelope import CONTRACTS, Envelope
from seatrial.policy import POLICIES
from seatrial.study import Study

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def main() -> int:
    """One line per example; JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = pick(arguments.device)
    rows = []
    print(f"{'problem':28} {'elements':>9} {'native':>10} {'float64':>9} {'envelope':>9} {'probes':>9}  calls")
    for folder in sorted(p.parent for p in EXAMPLES.glob("*/definition.json")):
        study = Study(load_problem(folder), POLICIES["standard"], device, seed=7)
        row = _row(study)
        rows.append({"problem": folder.name, **row})
        print(
            f"{folder.name:28} {row['elements']:9d} {row['native_ms']:7.2f} ms {row['float64']:7.1f} x {row['envelope']:7.1f} x "
            f"{row['probes']:7.1f} x  {row['probe_calls']}",
            flush=True,
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({"device": device.name, "facts": dict(device.facts()), "rows": rows}, indent=1)
        )
    return 0


def _row(study: Study) -> dict[str, Any]:
    case = study.case(study.middle, draw=2)
    placed = study.placed(study.inputs(case))
    native = _median(study, lambda: study.oracle.native(placed))
    exact = _median(study, lambda: study.oracle.run(placed))
    envelope = _median(
        study,
        lambda: Envelope.build(study.oracle, placed, contract=CONTRACTS["TC"], samples=study.policy.samples, seed=1),
    )
    calls = 0

    def counted(inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        return study.native_kernel(inputs)

    probes = _probe_seconds(study, counted)
    return {
        "elements": study.elements(case.workload),
        "native_ms": native * 1e3,
        "float64": exact / native,
        "envelope": envelope / native,
        "probes": probes / native,
        "probe_calls": calls,
    }


def _probe_seconds(study: Study, kernel: Callable[[Any], Any]) -> float:
    from seatrial.numerics.probes import read_probes

    if study.too_large_to_probe:
        return float("nan")
    started = time.perf_counter()
    read_probes(study.probe_plan, kernel)
    return time.perf_counter() - started


def _median(study: Study, work: Callable[[], Any], times: int = 5) -> float:
    def once() -> float:
        started = time.perf_counter()
        work()
        study.device.synchronise()
        return time.perf_counter() - started

    once()
    return statistics.median(once() for _ in range(times))


if __name__ == "__main__":
    sys.exit(main())
