"""seatrial decides whether a GPU kernel is safe to put into real training and inference.

    import seatrial
    report = seatrial.check("path/to/problem", "path/to/solution.json")
    report = seatrial.check(my_kernel, reference=my_reference, inputs=my_input_maker)

Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seatrial.errors import CandidateError, InfrastructureError, ProblemError, SeatrialError, UsageError
from seatrial.model import Finding, Outcome, Report, Verdict

if TYPE_CHECKING:
    from seatrial.api import check

__version__ = "0.1.0"

__all__ = [
    "CandidateError",
    "Finding",
    "InfrastructureError",
    "Outcome",
    "ProblemError",
    "Report",
    "SeatrialError",
    "UsageError",
    "Verdict",
    "__version__",
    "check",
]


def __getattr__(name: str) -> Any:
    if name == "check":  # loaded on first use, because it brings torch with it
        from seatrial.api import check

        return check
    raise AttributeError(f"module 'seatrial' has no attribute {name!r}")
