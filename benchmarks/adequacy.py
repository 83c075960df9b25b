"""Plants single faults in references and counts which are exposed, by seatrial's inputs and by the benchmark's own.

    python benchmarks/adequacy.py --sol SOL-ExecBench --json adequacy.json --page docs/adequacy.md

Takes the problems of `examples/` and, with --sol, the sample problems of a SOL-ExecBench checkout. Workloads that this
machine should not be asked for are left out (the smallest is kept as long as it fits); a problem that cannot run here is
skipped with a reason. --page writes the table into that page. Exits 1 when a problem falls short of 95 % or all
together of 99 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import seatrial.study as study_of_a_problem
from seatrial.adequacy.score import measure
from seatrial.adequacy.words import lines
from seatrial.api import policy_named
from seatrial.devices import pick
from seatrial.errors import SeatrialError
from seatrial.formats import load_problem
from seatrial.model import Adequacy, Problem
from seatrial.study import ORACLE_BYTES_PER_ELEMENT, Study

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SAMPLES = ("examples/*/*", "tests/sol_execbench/samples/*")
ELEMENTS = 1 << 21  # of a workload; larger ones are left out unless nothing smaller is declared
EACH, TOGETHER = 0.95, 0.99
MARKS = ("<!-- table -->", "<!-- end of table -->")


def main() -> int:
    """Measure every problem; print, keep, judge against the targets."""
    arguments = _arguments()
    limit = arguments.memory_gib << 30
    study_of_a_problem.CACHE_BYTES = limit // 8
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    rows: list[dict[str, object]] = []
    skipped: list[tuple[str, str]] = []
    for folder in _folders(arguments.sol):
        if arguments.only and folder.name not in arguments.only:
            continue
        name, outcome = _measure(folder, arguments, {str(r["problem"]) for r in rows})
        if isinstance(outcome, str):
            skipped += [(name, outcome)] if outcome and (name, outcome) not in skipped else []
            print(f"{name}: skipped: {outcome or 'measured before'}", flush=True)
            continue
        rows.append({"problem": name, "folder": folder.name, **outcome.model_dump()})
        print("\n".join(lines(name, outcome)), flush=True)
    table = _table(rows, skipped)
    print(table)
    if arguments.json:
        kept = {
            "machine": _machine(),
            "policy": arguments.policy,
            "seed": arguments.seed,
            "rows": rows,
            "skipped": skipped,
        }
        arguments.json.write_text(json.dumps(kept, indent=2) + "\n")
    if arguments.page:
        _write_into(arguments.page, table)
    return 0 if _on_target(rows) else 1


def _folders(checkout: Path | None) -> list[Path]:
    found = sorted(p for p in EXAMPLES.iterdir() if (p / "definition.json").is_file())
    for pattern in SAMPLES if checkout else ():
        assert checkout is not None
        found += sorted(p for p in checkout.glob(pattern) if (p / "definition.json").is_file())
    return found


def _measure(folder: Path, arguments: argparse.Namespace, known: set[str]) -> tuple[str, Adequacy | str]:
    """The problem's name, and its adequacy or why there is none (empty when it was measured before)."""
    gc.collect()  # what the problem before kept
    policy = policy_named(arguments.policy)
    device = pick(arguments.device)
    try:
        problem = load_problem(folder)
        if problem.name in known:
            return problem.name, ""
        study = Study(_bounded(problem, Study(problem, policy, device, 0)), policy, device, arguments.seed)
        need = study.elements(study.smallest) * ORACLE_BYTES_PER_ELEMENT
        if need > arguments.memory_gib << 30:
            return problem.name, f"its smallest workload needs about {need / 2**30:.0f} GiB for the float64 runs"
        started = time.monotonic()
        measured = measure(study, arguments.seconds, mutants=arguments.mutants, benchmark=True)
        return problem.name, measured.model_copy(update={"seconds": round(time.monotonic() - started, 1)})
    except (SeatrialError, MemoryError, RuntimeError) as error:
        return folder.name, str(error).replace(f"{folder}/", "").strip().splitlines()[0][:200]


def _bounded(problem: Problem, study: Study) -> Problem:
    ordered = sorted(problem.workloads, key=study.elements)
    return replace(problem, workloads=tuple(w for w in ordered if study.elements(w) <= ELEMENTS) or ordered[:1])


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}".replace("%", " %") if whole else "–"


def _table(rows: list[dict[str, object]], skipped: list[tuple[str, str]]) -> str:
    lines_ = [
        "| problem | faults | exposed by seatrial | by the benchmark's own inputs and rule | change nothing | not tried | time |",
        "|---|---|---|---|---|---|---|",
    ]
    sums = [0, 0, 0, 0, 0]
    for row in rows:
        planted, exposed, bench, same, left = (
            int(str(row[k] or 0)) for k in ("planted", "exposed", "benchmark_exposed", "equivalent", "not_tried")
        )
        sums = [a + b for a, b in zip(sums, (planted, exposed, bench, same, left), strict=True)]
        lines_.append(
            f"| `{row['problem']}` | {planted} | {exposed} ({_percent(exposed, planted)}) | "
            f"{bench} ({_percent(bench, planted)}) | {same} | {left} | {row['seconds']} s |"
        )
    planted, exposed, bench, same, left = sums
    lines_.append(
        f"| **all** | {planted} | **{exposed} ({_percent(exposed, planted)})** | **{bench} ({_percent(bench, planted)})** "
        f"| {same} | {left} | |"
    )
    living = [f"- `{row['problem']}`: {words}" for row in rows for words in row["survivors"]]  # type: ignore[attr-defined]
    lines_ += ["", "Not exposed:", "", *(living or ["- none"])]
    if skipped:
        lines_ += ["", "Skipped:", "", *(f"- `{name}`: {why}" for name, why in skipped)]
    lines_ += ["", f"Machine: {_machine()}."]
    return "\n".join(lines_) + "\n"


def _machine() -> str:
    import torch

    models = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{os.cpu_count()} × {models[0] if models else platform.machine()}, one thread, torch {torch.__version__}"


def _write_into(page: Path, table: str) -> None:
    before, rest = page.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    page.write_text(f"{before}{MARKS[0]}\n\n{table}\n{MARKS[1]}{after}")


def _on_target(rows: list[dict[str, object]]) -> bool:
    counts = [(int(str(row["exposed"])), int(str(row["planted"]))) for row in rows]
    exposed, planted = (sum(c) for c in zip(*counts, strict=True)) if counts else (0, 0)
    return bool(planted) and all(e >= EACH * p for e, p in counts) and exposed >= TOGETHER * planted


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sol", type=Path, help="a SOL-ExecBench checkout")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--policy", default="standard")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mutants", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=60.0, help="per problem")
    parser.add_argument("--memory-gib", type=int, default=6)
    parser.add_argument("--only", action="append", help="a problem folder's name")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
