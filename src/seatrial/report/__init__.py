"""Reports: the verdict and its evidence in every form that somebody reads.

`REPORTERS` is the table; the terminal is apart (`report/terminal.py`), for it draws on a console.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from seatrial.errors import UsageError
from seatrial.model import Report
from seatrial.report import html_page, json_file, junit_xml, markdown, sarif_file, traces_file
from seatrial.report.base import Reporter

REPORTERS: dict[str, Reporter] = {
    "json": json_file,
    "html": html_page,
    "markdown": markdown,
    "junit": junit_xml,
    "sarif": sarif_file,
    "traces": traces_file,
}


def write(kind: str, reports: Sequence[Report], path: str | Path) -> None:
    """Write one report file, whole or not at all; missing folders are made.

    UsageError, in one sentence, when `kind` is unknown or the path cannot be written.
    """
    if kind not in REPORTERS:
        raise UsageError(f"there is no report called {kind!r}; choose one of {', '.join(REPORTERS)}")
    content = REPORTERS[kind].text(reports).encode("utf-8")
    try:
        _write_whole(Path(path), content)
    except (OSError, ValueError) as problem:  # ValueError: a path with a NUL in it
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
        raise UsageError(
            f"the {kind} report cannot be written to {str(path)!r}: {reason}; give another path"
        ) from problem


def _write_whole(path: Path, content: bytes) -> None:
    path = path.resolve()  # a symbolic link stays one: its target is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        path.write_bytes(content)  # /dev/stdout, a named pipe: nothing to replace
        return
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:80]}.", suffix=".part")
    half_written = Path(name)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        half_written.chmod(_readable_as_usual())
        half_written.replace(path)
    finally:
        half_written.unlink(missing_ok=True)


def _readable_as_usual() -> int:
    # mkstemp makes a private file; a report is for others too, as far as the user's umask lets them.
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
