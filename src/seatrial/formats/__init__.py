"""The problem formats seatrial reads, and the two ways in: a problem and its candidates.

To add a format, write its module (see base.py) and add a line to `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from seatrial.errors import CandidateError, ProblemError
from seatrial.formats import sol_execbench
from seatrial.formats.base import Format
from seatrial.formats.python_file import load_python_file
from seatrial.model import Candidate, Problem

_sol_execbench: Format = sol_execbench

FORMATS: dict[str, Format] = {module.NAME: module for module in (_sol_execbench,)}


def load_problem(path: str | Path) -> Problem:
    """The problem at `path`, read by the first format that recognises it.

    Raises ProblemError when none does (with the reason of each) or when the files are wrong.
    """
    place = Path(path)
    if not place.exists():
        raise ProblemError(f"{place} does not exist; give the folder of a problem")
    declined = []
    for name, module in FORMATS.items():
        why_not = module.detect(place)
        if why_not is None:
            return module.load(place)
        declined.append(f"{name}: {why_not}")
    raise ProblemError(f"{place} is no problem that seatrial can read ({'; '.join(declined)}); give a problem's folder")


def load_candidates(
    paths: Iterable[str | Path], *, entry_point: str | None = None, problem: Problem
) -> list[Candidate]:
    """The candidates at `paths`, in order: solution files, folders of them, or bare `.py` files.

    `entry_point` (`function` or `file.py::function`) applies to bare files only; without it the
    function is `run`. Raises CandidateError when a file cannot be understood.
    """
    return [candidate for path in paths for candidate in _load(Path(path), entry_point, problem)]


def _load(path: Path, entry_point: str | None, problem: Problem) -> list[Candidate]:
    if not path.exists():
        raise CandidateError(f"{path} does not exist; give a solution file or a Python file")
    if path.suffix == ".py":
        return [load_python_file(path, entry_point=entry_point, problem=problem)]
    if path.is_file() and path.suffix != ".json":
        raise CandidateError(f"{path} is neither a .json solution nor a .py file; give one of these")
    module = FORMATS.get(problem.format, _sol_execbench)
    return module.load_candidates(path)
