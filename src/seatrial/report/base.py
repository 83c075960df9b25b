"""What a reporter is: a module with a name, a page of help and one function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from seatrial.model import Report


class Reporter(Protocol):
    """One output format.

    NAME      what the user types, and the key in the table
    SUMMARY   one line for the help text
    text      the whole file; one report per candidate, in the user's order. Pure: it touches no file.
    """

    NAME: str
    SUMMARY: str

    def text(self, reports: Sequence[Report]) -> str: ...
