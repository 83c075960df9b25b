"""The measured strength of an audit's inputs, in lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from seatrial.model import Adequacy
from seatrial.report.words import one_line


def share(part: int, whole: int) -> str:
    """ "43 of 45 (96 %)"."""
    return f"{part} of {whole}" + (f" ({part / whole:.0%})".replace("%", " %") if whole else "")


def lines(problem: str, measured: Adequacy) -> Iterator[str]:
    """Score, the benchmark's score beside it, survivors, and what helped."""
    yield f"{one_line(problem)}: {share(measured.exposed, measured.planted)} planted faults exposed by seatrial's inputs"
    if measured.benchmark_exposed is not None:
        yield f"  {share(measured.benchmark_exposed, measured.planted)} by the benchmark's own inputs and rule"
    yield from _block("not exposed", measured.survivors)
    yield from _block("change nothing on any input tried", [f.words for f in measured.faults if f.equivalent])
    yield from _block(
        "inputs found by aiming at survivors, which an audit uses on the candidate", measured.extra_inputs
    )
    yield from _block("candidates that compute nothing and were not rejected", measured.null_survivors)
    if measured.not_tried:
        yield f"  {measured.not_tried} more were not tried: the time was up"


def _block(heading: str, entries: list[str]) -> Iterator[str]:
    if entries:
        yield f"  {heading}:"
    for entry in entries:
        yield f"    {one_line(entry)}"
