"""What is being done, on stderr: bars on a terminal, plain lines elsewhere. stdout is never touched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

Sink = Callable[[str, str, float], None]  # (candidate, "check  what part of it, n of m", share done of this candidate)

EVERY_S = 15.0


@contextmanager
def shown(stream: TextIO, *, quiet: bool) -> Iterator[Sink]:
    """A sink that shows progress on `stream` in the form that it can carry; `quiet` shows nothing."""
    from rich.console import Console

    console = Console(file=stream)
    if quiet:
        yield lambda candidate, words, share: None
    elif console.is_terminal:
        with _bars(console) as sink:
            yield sink
    else:
        yield Lines(stream)


class Lines:
    """One line when a check of a candidate starts, and one every 15 s while it lasts."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._at = ("", "")
        self._said = 0.0

    def __call__(self, candidate: str, words: str, share: float) -> None:
        """Take note; print only what is due."""
        check, _, part = words.partition("  ")
        at = (candidate, check)
        now = self._clock()
        if at != self._at:
            self._print(f"{candidate}: {check}")
        elif now - self._said >= EVERY_S:
            self._print(f"{candidate}: {check}, {part or f'{100 * share:.0f} % of all checks done'}")
        else:
            return
        self._at, self._said = at, now

    def _print(self, line: str) -> None:
        self._stream.write(f"seatrial: {' '.join(line.split())}\n")
        self._stream.flush()


@contextmanager
def _bars(console: Console) -> Iterator[Sink]:
    """Bars: candidate, check, workload, time left."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description:24}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[words]:48.48}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bars:
        tasks: dict[str, Any] = {}

        def show(candidate: str, words: str, share: float) -> None:
            if candidate not in tasks:
                tasks[candidate] = bars.add_task(candidate[:24], total=1.0, words=words)
            bars.update(tasks[candidate], completed=share, words=words)

        yield show
