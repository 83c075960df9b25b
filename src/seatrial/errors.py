"""Everything seatrial raises on purpose.

    SeatrialError
    ├── UsageError             the problem, candidate or option could not be understood (exit 2)
    │   ├── ProblemError       a problem folder, definition or workload
    │   └── CandidateError     a solution file, source or entry point
    └── InfrastructureError    our own machinery failed; never a verdict about the candidate

What a candidate does wrong is never an exception here: it is a Finding. A message is one sentence
that shows the value, the limit, the place and the next step.
"""

from __future__ import annotations


class SeatrialError(Exception):
    """Root of the tree."""


class UsageError(SeatrialError):
    """The user's input could not be understood; the message says what to change."""


class ProblemError(UsageError):
    """A problem (definition, workload, blob, reference source) could not be understood."""


class CandidateError(UsageError):
    """A candidate's description (not its behaviour) could not be understood."""


class InfrastructureError(SeatrialError):
    """The fork server, a pipe or the device broke in our hands; the work is reported not verified."""
