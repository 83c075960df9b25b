"""Reports: the verdict and its evidence in every form that somebody reads.

`REPORTERS` is the table; the terminal is apart (`report/terminal.py`), for it draws on a console.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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


def check_paths(paths: Mapping[str, Path | None]) -> None:
    """Raises UsageError, in one sentence, for a report path that could not be written; missing folders are made.

    `paths` are by kind of report. To be asked before an audit begins, which may take minutes.
    """
    taken: dict[Path, str] = {}
    for kind, path in paths.items():
        if path is None:
            continue
        with _said_once(kind, path):
            place = path.resolve()
            if _try_to_write(place):
                if place in taken:
                    raise UsageError(f"--{taken[place]} and --{kind} both name {str(path)!r}; give each its own path")
                taken[place] = kind


def _try_to_write(place: Path) -> bool:
    """True for a place that a report would have for itself; raises OSError when it cannot be written."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        mode = place.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        if not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return False  # /dev/null, a pipe: several may share it
    tempfile.TemporaryFile(dir=place.parent).close()
    return True


@contextmanager
def _said_once(kind: str, path: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as problem:  # ValueError: a path with a NUL in it
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
        raise UsageError(
            f"the {kind} report cannot be written to {str(path)!r}: {reason}; give another path"
        ) from problem


def write(kind: str, reports: Sequence[Report], path: str | Path) -> None:
    """Write one report file, whole or not at all; missing folders are made.

    UsageError, in one sentence, when `kind` is unknown or the path cannot be written.
    """
    if kind not in REPORTERS:
        raise UsageError(f"there is no report called {kind!r}; choose one of {', '.join(REPORTERS)}")
    content = REPORTERS[kind].text(reports).encode("utf-8")
    with _said_once(kind, path):
        _write_whole(Path(path), content)


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
