"""What a problem format must offer.

A format is a plain module that satisfies `Format`: its docstring is its page in the documentation and
all of its vocabulary stops there. Foreign files are checked once, in that module; further in, values
are already right. To add one, write the module and add its line to the table in `formats/__init__.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from seatrial.model import Candidate, Problem


class Format(Protocol):
    """One way to write problems and candidates down."""

    NAME: str
    __doc__: str | None

    def detect(self, path: Path, /) -> str | None:
        """None when `path` is written in this format; otherwise why it is not, in a few words."""
        ...

    def load(self, path: Path, /) -> Problem:
        """The problem at `path`; raises ProblemError with the file, the line or field and what to change."""
        ...

    def load_candidates(self, path: Path, /) -> list[Candidate]:
        """The candidates at `path` (a file or a folder); raises CandidateError likewise."""
        ...
