"""What a fresh child costs, and what a call costs: `python benchmarks/fork_server.py [--json PATH]`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from seatrial.devices import pick
from seatrial.model import Candidate, OutputSlot, Ran, SourceFile
from seatrial.policy import Policy
from seatrial.workers.process import ForkServer

SOURCE = "def run(x):\n    return x + 1\n"
CANDIDATE = Candidate("plus one", ("pytorch",), "kernel.py::run", False, (SourceFile("kernel.py", SOURCE),))
ROUNDS = 20
SIZES = {"tiny": 16, "16 MB": 1 << 22}


def milliseconds(step: Callable[[], object]) -> float:
    """Median of ROUNDS, after one round to warm up."""
    times = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        step()
        times.append((time.perf_counter() - started) * 1e3)
    return median(times[1:])


def measure(server: ForkServer, device: str) -> dict[str, float]:
    """Milliseconds by what was done on `device`."""

    def open_and_close() -> None:
        with server.open(CANDIDATE, device=device, policy=Policy()) as fresh:
            assert fresh.loaded.ran is Ran.RETURNED, fresh.loaded.error

    found = {"fresh child": milliseconds(open_and_close)}
    with server.open(CANDIDATE, device=device, policy=Policy()) as session:
        for name, count in SIZES.items():
            tensor, slot = torch.rand(count), OutputSlot("y", (count,), "float32")

            def call(tensor: torch.Tensor = tensor, slot: OutputSlot = slot) -> None:
                assert session.call([tensor], [slot]).usable

            found[f"call, {name} in and out"] = milliseconds(call)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    to_file = parser.parse_args().json
    started = time.perf_counter()
    with ForkServer() as server:
        server.isolation()
        found: dict[str, dict[str, float]] = {"start": {"fork server": (time.perf_counter() - started) * 1e3}}
        for device in dict.fromkeys(["cpu", pick("auto").name]):
            found[device] = measure(server, device)
    for place, rows in found.items():
        for what, cost in rows.items():
            sys.stdout.write(f"{place:8} {what:24} {cost:9.2f} ms\n")
    if to_file:
        to_file.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
