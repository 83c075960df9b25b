"""HTML: one page that needs nothing but itself, for a person who must decide.

No script, no font, no request: the page forbids all of them to itself. It follows the reader's light or
dark setting, prints, and fits a phone.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from seatrial.model import Growth, Report, TrialCell, Verdict
from seatrial.report import words
from seatrial.report.data import loss_window, overview, views, worst
from seatrial.report.plots import cell_svg, growth_svg
from seatrial.report.templating import TEMPLATES, rendered

NAME = "html"
SUMMARY = "a page that needs nothing but itself, for a person"


def text(reports: Sequence[Report]) -> str:
    """The page."""
    shown = views(reports)
    verdict = worst(reports)
    return rendered(
        "page.html",
        reports=shown,
        title=_title(reports, verdict),
        verdict=verdict.value,
        overview=overview(reports),
        problems=", ".join(dict.fromkeys(report.problem for report in shown)),
        styles=Markup("\n".join((TEMPLATES / name).read_text("utf-8") for name in ("style.css", "plot.css"))),
        draw_growth=_growth,
        draw_cell=_cell,
        loss_window=loss_window,
    )


def _title(reports: Sequence[Report], verdict: Verdict) -> str:
    names = [words.name(report.candidate) for report in reports]
    subject = names[0] if len(names) == 1 else words.count(len(names), "candidate")
    return words.shortened(f"{words.VERDICT_WORDS[verdict]}: {subject} · seatrial", 120)


def _growth(growth: Growth) -> Markup:
    return Markup(growth_svg(growth, alone=False))


def _cell(cell: TrialCell, window: tuple[float, float]) -> Markup:
    return Markup(cell_svg(cell, window, alone=False))
