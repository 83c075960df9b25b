"""Every reporter over every kind of report: what it must say, and what must not break it."""

from __future__ import annotations

import inspect
import io
import json
import re
import stat
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema  # type: ignore[import-untyped]  # its types are a package of their own
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from sample_reports import INF, NAN, SAMPLES, accepted, empty, hostile, inconclusive, not_finite, origin
from seatrial.errors import UsageError
from seatrial.model import CheckRow, Curve, Finding, Outcome, Report, TrialCell, Verdict
from seatrial.report import REPORTERS, check_paths, json_file, plots, sarif_file, words, write
from seatrial.report.data import loss_window, view
from seatrial.report.schema import schema, schema_text
from seatrial.report.terminal import render, sparkline

ALL = [pytest.param(make(), id=name) for name, make in SAMPLES.items()]
# Characters that must never reach a reader: they draw nothing, or redraw what stands beside them.
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def printed(reports: Sequence[Report], *, terminal: bool = False, encoding: str = "utf-8", width: int = 100) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict", write_through=True)
    render(
        reports, Console(file=file, force_terminal=terminal, width=width, color_system="standard" if terminal else None)
    )
    return raw.getvalue().decode(encoding)


# ---------------------------------------------------------------------------------------------------
# The table


@pytest.mark.parametrize("kind", REPORTERS)
def test_a_reporter_has_its_name_its_summary_and_its_page(kind: str) -> None:
    reporter = REPORTERS[kind]
    assert kind == reporter.NAME
    assert reporter.SUMMARY
    assert len(inspect.getdoc(reporter) or "") > 80


@pytest.mark.parametrize("kind", REPORTERS)
@pytest.mark.parametrize("report", ALL)
def test_every_reporter_writes_every_report(kind: str, report: Report, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "report"
    write(kind, [report], path)
    content = path.read_text("utf-8")
    assert content.endswith("\n") or (kind == "traces" and not report.benchmark_rule) or not content
    assert [file.name for file in path.parent.iterdir()] == ["report"]
    if kind != "json":
        assert not FORBIDDEN.search(content)


@pytest.mark.parametrize("kind", REPORTERS)
def test_every_reporter_writes_no_and_several_reports(kind: str) -> None:
    assert isinstance(REPORTERS[kind].text([]), str)
    several = REPORTERS[kind].text([origin(), accepted()]).replace("<wbr>", "")  # where a long name may break
    assert "fast_embedding_backward" in several
    assert "fp32_accumulator" in several


@pytest.mark.parametrize("kind", [kind for kind in REPORTERS if kind != "traces"])
def test_the_same_reports_give_the_same_text(kind: str) -> None:
    assert REPORTERS[kind].text([origin()]) == REPORTERS[kind].text([origin()])


# ---------------------------------------------------------------------------------------------------
# Writing


def test_an_unknown_report_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="json, html, markdown, junit, sarif, traces"):
        write("pdf", [origin()], tmp_path / "x")


@pytest.mark.parametrize("bad", ["", "inside a file/x", "nul\x00byte", "a/" + "n" * 300])
def test_a_path_that_cannot_be_written_is_a_usage_error_in_one_sentence(bad: str, tmp_path: Path) -> None:
    (tmp_path / "inside a file").write_text("")
    with pytest.raises(UsageError) as caught:
        write("json", [origin()], f"{tmp_path}/{bad}")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("give another path")


@pytest.mark.parametrize("bad", ["", "inside a file/x", "nul\x00byte", "a/" + "n" * 300])
def test_a_path_that_cannot_be_written_is_said_before_anything_else(bad: str, tmp_path: Path) -> None:
    (tmp_path / "inside a file").write_text("")
    with pytest.raises(UsageError) as caught:
        check_paths({"html": None, "json": Path(f"{tmp_path}/{bad}")})
    assert str(caught.value).endswith("give another path")
    assert "\n" not in str(caught.value)


def test_a_path_that_can_be_written_is_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("old")
    check_paths({"json": kept, "html": tmp_path / "new" / "page.html", "junit": None})
    assert kept.read_text() == "old"
    assert list((tmp_path / "new").iterdir()) == []


def test_two_reports_on_one_path_are_refused_and_two_on_a_device_are_not(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--json and --html both name"):
        check_paths({"json": tmp_path / "x", "html": tmp_path / "folder" / ".." / "x"})
    check_paths({"json": Path("/dev/null"), "html": Path("/dev/null")})


def test_a_failed_write_leaves_the_old_report_and_no_half_written_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    write("json", [accepted()], path)
    before = path.read_bytes()

    def disk_full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", disk_full)
    with pytest.raises(UsageError, match="No space left on device"):
        write("json", [origin()], path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_replaces_the_old_one_through_a_link_and_keeps_the_umask(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write("json", [accepted()], link)
    assert link.is_symlink()
    assert json_file.read(target.read_text())[0].verdict is Verdict.ACCEPTED
    fresh = tmp_path / "by hand"
    fresh.touch()
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(fresh.stat().st_mode)


def test_a_device_is_written_to_and_not_replaced() -> None:
    write("json", [accepted()], "/dev/null")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


# ---------------------------------------------------------------------------------------------------
# JSON and its schema


def test_one_report_stands_at_the_top_of_the_json_file() -> None:
    document = json.loads(REPORTERS["json"].text([origin()]))
    assert document["verdict"] == "rejected"
    assert {"findings", "benchmark_rule", "limits", "environment", "seeds"} <= document.keys()
    assert document["benchmark_rule"]["passed"] is True


def test_several_reports_stand_under_the_worst_verdict() -> None:
    document = json.loads(REPORTERS["json"].text([accepted(), inconclusive(), accepted()]))
    assert document["verdict"] == "inconclusive"
    assert [report["verdict"] for report in document["reports"]] == ["accepted", "inconclusive", "accepted"]
    assert json.loads(REPORTERS["json"].text([])) == {"verdict": "inconclusive", "reports": []}


@pytest.mark.parametrize("report", ALL)
def test_json_comes_back_as_it_was(report: Report) -> None:
    for reports in ([report], [report, accepted()]):
        content = REPORTERS["json"].text(reports)
        assert REPORTERS["json"].text(json_file.read(content)) == content


def test_numbers_that_json_lacks_come_back_as_numbers_even_in_details() -> None:
    finding = json_file.read(REPORTERS["json"].text([not_finite()]))[0].findings[0]
    assert finding.measured != finding.measured
    assert finding.allowed == INF
    assert finding.details["a"] != finding.details["a"]
    assert finding.details["b"] == [INF, {"c": -INF}]
    assert finding.details["d"] == 1.5


def test_a_file_that_is_no_report_is_refused_in_one_sentence() -> None:
    for content in (
        "",
        "[]",
        '{"verdict": "accepted"}',
        '{"reports": [1]}',
        REPORTERS["json"].text([origin()]).replace('"rejected"', '"maybe"', 1),
    ):
        with pytest.raises(UsageError, match="no seatrial report"):
            json_file.read(content)


_TEXT = st.text(max_size=20)
_LEAF = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | _TEXT
_DETAILS = st.dictionaries(_TEXT, st.recursive(_LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3), max_leaves=6), max_size=3)  # fmt: skip
_FINDINGS = st.builds(
    Finding, check=_TEXT, output=st.none() | _TEXT, outcome=st.sampled_from(Outcome), reason=_TEXT, measured=st.none() | st.floats(),
    allowed=st.none() | st.floats(), unit=_TEXT, reproducer=_TEXT, details=_DETAILS,
)  # fmt: skip
_CURVES = st.builds(
    Curve,
    run=st.sampled_from(["reference", "control", "candidate"]),
    seed=st.integers(0, 9),
    losses=st.lists(st.floats(), max_size=9),
)
_CELLS = st.builds(TrialCell, data=_TEXT, optimizer=_TEXT, learning_rate=st.floats(), verdict=_TEXT, reason=_TEXT,
                   first_step=st.none() | st.integers(-5, 99), curves=st.lists(_CURVES, max_size=4))  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(findings=st.lists(_FINDINGS, max_size=3), headline=_TEXT, seconds=st.floats(), verdict=st.sampled_from(Verdict))
def test_any_report_survives_json_and_obeys_the_schema(
    findings: list[Finding], headline: str, seconds: float, verdict: Verdict
) -> None:
    report = accepted().model_copy(
        update={"findings": findings, "headline": headline, "seconds": seconds, "verdict": verdict}
    )
    content = report.to_json()
    assert Report.from_json(content).to_json() == content
    _VALIDATOR.validate(json.loads(content))
    for kind in ("markdown", "junit", "sarif"):
        assert not FORBIDDEN.search(REPORTERS[kind].text([report]))
    ElementTree.fromstring(REPORTERS["junit"].text([report]))


_VALIDATOR = jsonschema.Draft202012Validator(schema())


def test_the_schema_is_a_schema_and_always_the_same_text() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema_text() == schema_text()
    assert json.loads(schema_text()) == schema()


@pytest.mark.parametrize("report", ALL)
def test_what_is_written_obeys_the_schema(report: Report) -> None:
    _VALIDATOR.validate(json.loads(REPORTERS["json"].text([report])))
    _VALIDATOR.validate(json.loads(REPORTERS["json"].text([report, accepted()])))


def test_the_schema_admits_three_words_for_numbers_and_no_fourth() -> None:
    document = json.loads(origin().to_json())
    document["findings"][0]["measured"] = "-Infinity"
    assert _VALIDATOR.is_valid(document)
    document["findings"][0]["measured"] = "a lot"
    assert not _VALIDATOR.is_valid(document)


def test_the_schema_refuses_a_field_that_no_report_has() -> None:
    document = json.loads(origin().to_json())
    document["extra"] = 1
    assert not _VALIDATOR.is_valid(document)


# ---------------------------------------------------------------------------------------------------
# Words


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, ""), (NAN, "not a number"), (INF, "infinite"), (-INF, "minus infinite"), (0.0, "0"), (-0.0, "0"), (8.0, "8"), (0.0584, "0.0584"),
     (1234.56, "1235"), (123456.7, "123457"), (1.2e-7, "1.2e-7"), (3.0e21, "3e21"), (-0.25, "-0.25"), (99.99999, "100")],
)  # fmt: skip
def test_numbers_in_words(value: float | None, said: str) -> None:
    assert words.number(value) == said


def test_hidden_characters_are_spelled_out() -> None:
    assert words.one_line("a\x1b[31mb\u202ec\x00\r\nd\te") == "a\\x1b[31mb\\u202ec\\x00 d e"
    assert words.plain("two\nlines") == "two\nlines"


def test_text_without_end_is_cut() -> None:
    assert len(words.plain("x" * 10**6)) < 21_000
    assert words.plain("x" * 10**6).endswith("more characters)")


def test_a_ratio_just_below_all_is_not_rounded_up_to_all() -> None:
    rule = origin().benchmark_rule
    assert rule is not None
    row = rule.rows[0].model_copy(update={"matched_ratio": 0.999999})
    shown = view(origin().model_copy(update={"benchmark_rule": rule.model_copy(update={"rows": [row]})})).rule
    assert shown is not None
    assert shown.rows[0].matched == "99.99 %"


# ---------------------------------------------------------------------------------------------------
# Data: decides nothing, but fails closed


def test_a_row_is_no_milder_than_its_findings() -> None:
    row = CheckRow(check="a", title="A", outcome=Outcome.HELD, calls=1, seconds=0.1)
    failed = Finding(check="a", outcome=Outcome.FAILED, reason="r")
    base = empty().model_copy(update={"checks": [row]})
    assert view(base).checks[0].outcome == "held"
    assert view(base.model_copy(update={"findings": [failed]})).checks[0].outcome == "failed"
    noted = failed.model_copy(update={"outcome": Outcome.NOTED})
    assert view(base.model_copy(update={"findings": [noted]})).checks[0].outcome == "held"


def test_a_reason_that_stands_above_is_pointed_to_and_not_repeated() -> None:
    rows = [
        row.model_copy(update={"summary": origin().findings[1].reason})
        for row in origin().checks
        if row.check == "error-beyond-honest"
    ]
    assert view(origin().model_copy(update={"checks": rows})).checks[0].summary == "see objection 2"


def test_names_in_backticks_are_code_and_cannot_smuggle_markup() -> None:
    reason = "`a_b` differs from `<b>` | and ` alone"
    report = empty().model_copy(update={"findings": [Finding(check="c", outcome=Outcome.FAILED, reason=reason)]})
    assert "<code>a_b</code> differs from <code>&lt;b&gt;</code> | and ` alone" in REPORTERS["html"].text([report])
    assert "`a_b` differs from `<b>` \\| and \\` alone" in REPORTERS["markdown"].text([report])


def test_a_finding_without_a_row_gets_one() -> None:
    finding = Finding(check="lonely", outcome=Outcome.NOT_VERIFIED, reason="r")
    shown = view(empty().model_copy(update={"findings": [finding]}))
    assert [(check.check, check.outcome) for check in shown.checks] == [("lonely", "not-verified")]
    assert shown.checks[0].summary == "see not verified 1"


def test_the_summary_of_several_tells_the_one_reason_of_a_candidate_that_could_not_run() -> None:
    finding = Finding(check="does-not-load", outcome=Outcome.NOT_VERIFIED, reason="a triton kernel needs CUDA")
    stopped = empty().model_copy(update={"candidate": "k", "findings": [finding]})
    summary = printed([stopped, accepted()]).partition("Summary")[2]
    assert "1 thing not verified: a triton kernel needs CUDA" in summary


def test_a_grade_says_what_it_speaks_of_and_is_silent_where_a_proven_fault_contradicts_it() -> None:
    wrong = Finding(check="wrong-values", outcome=Outcome.FAILED, reason="r")
    elsewhere = wrong.model_copy(update={"check": "fitted-inputs"})
    grades = [
        (view(empty().model_copy(update={"grade": grade, "findings": findings})).grade)
        for grade, findings in (("F32", []), ("F32", [elsewhere]), ("F32", [wrong]), ("REJECT", [wrong]))
    ]
    declared = "on the declared inputs"
    assert grades == [f"F32 {declared}", f"F32 {declared}", "", f"REJECT {declared}"]
    contradicted = printed([empty().model_copy(update={"grade": "F32", "findings": [wrong]})])
    assert "grade" not in contradicted
    assert "accurate as an fp32" not in contradicted


def test_a_minimum_is_required_and_a_maximum_allowed_in_every_report() -> None:
    terminal, page, junit, sarif, markdown = (
        printed([origin()]),
        REPORTERS["html"].text([origin()]),
        *(REPORTERS[kind].text([origin()]) for kind in ("junit", "sarif", "markdown")),
    )
    for text in (terminal, junit, sarif, markdown):
        assert "at least 24 bits required" in text
        assert "24 bits allowed" not in text
        assert re.search(r"at most 0\\?\.0013 .*?allowed", text)
    assert ">required, at least</span><b>24 bits</b>" in page
    assert ">allowed, at most</span>" in page


def test_the_seed_of_a_case_is_not_taken_for_the_seed_of_the_run() -> None:
    labels = [label for finding in view(origin()).objections for label, _ in finding.where]
    assert "case seed" in labels
    assert "seed" not in labels


def test_an_error_that_is_no_number_is_not_within_the_floor() -> None:
    rows = view(not_finite()).growth[0].rows
    assert [row.factor for row in rows] == ["within", "unknown", "unknown", "unknown", "6.0 ×"]


def test_a_failed_minimum_reads_at_least_and_a_failed_maximum_at_most() -> None:
    accumulator, error, _ = view(origin()).objections
    assert (accumulator.measured, accumulator.bound, accumulator.allowed) == ("8 bits", "at least", "24 bits")
    assert (error.bound, error.factor) == ("at most", "45 ×")
    assert error.scale is not None
    assert error.scale.measured == 100
    assert error.scale.allowed == pytest.approx(100 * 0.0013 / 0.0584, abs=0.01)


def test_the_cells_are_counted_in_a_sentence() -> None:
    hidden, agreeing = view(origin()).trial, view(accepted()).trial
    assert hidden is not None
    assert agreeing is not None
    assert hidden.tally == "diverges in 1, drifts in 1, is masked in 4 of 6 cells"
    assert agreeing.tally == "agrees in 6 of 6 cells"


def test_a_benchmark_rule_that_did_not_run_is_no_failure_of_the_candidate() -> None:
    rule = view(inconclusive()).rule
    assert rule is not None
    assert rule.word == "NOT RUN"
    assert view(inconclusive()).contrast == ""


# ---------------------------------------------------------------------------------------------------
# Terminal


def test_the_verdict_is_the_first_thing_said() -> None:
    first, second = printed([origin()]).strip().splitlines()[:2]
    assert first == "REJECTED: fast_embedding_backward"
    assert second.strip() == origin().headline


@pytest.mark.parametrize("terminal", [True, False])
def test_the_terminal_says_all_that_is_needed(terminal: bool) -> None:  # noqa: FBT001  # a test parameter
    said = printed([origin()], terminal=terminal)
    assert "benchmark's own rule: PASSED 4 of 4 workloads" in said
    for finding in origin().findings:
        assert not finding.reproducer or f"\n{finding.reproducer}\n" in said
    assert f"\n{origin().replay}\n" in said
    assert "masked" in said
    assert "18446744073709551557" in said
    assert "Only the CPU was available" in said
    assert "385" in said


def test_a_pipe_gets_no_colour_and_no_wrapping() -> None:
    narrow, wide = printed([origin()], width=40), printed([origin()], width=400)
    assert "\x1b" not in narrow
    assert narrow == wide


def test_a_terminal_gets_colour() -> None:
    assert "\x1b[1;31mREJECTED" in printed([origin()], terminal=True)


def test_hostile_text_commands_no_terminal() -> None:
    assert not FORBIDDEN.search(printed([hostile()]))
    in_colour = re.sub(r"\x1b\[[0-9;]*m", "", printed([hostile()], terminal=True))
    assert not FORBIDDEN.search(in_colour)
    assert "[link](javascript" in printed([hostile()])


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("report", ALL)
def test_a_narrow_encoding_still_gets_everything(report: Report, encoding: str) -> None:
    assert report.verdict.value.upper().replace("-", " ") in printed([report], encoding=encoding)
    assert printed([report], encoding=encoding, terminal=True)


def test_several_candidates_end_in_a_summary() -> None:
    said = printed([origin(), accepted()])
    assert re.search(r"Summary\n.*verdict.*\n.*REJECTED +fast_embedding_backward.*\n.*ACCEPTED +fp32_accumulator", said)
    assert "Summary" not in printed([origin()])
    assert "No candidate was audited" in printed([])


def test_a_sparkline_rises_breaks_and_stays_short() -> None:
    assert sparkline([0, 1, 2, 3], 0, 3) == "▁▃▆█"
    assert sparkline([0, NAN, INF], 0, 1) == "▁××"
    assert sparkline([0, NAN, 9], 0, 1, unicode=False) == "_x@"
    assert len(sparkline(range(10_000), 0, 10_000)) == 20
    assert sparkline([], 0, 1) == ""


# ---------------------------------------------------------------------------------------------------
# HTML


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.said.append(data)


@pytest.mark.parametrize("report", ALL)
def test_the_page_needs_nothing_but_itself(report: Report) -> None:
    for tag, attributes in Tags(REPORTERS["html"].text([report, accepted()])).seen:
        assert tag not in {"script", "img", "iframe", "object", "base", "form"}
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("src") is None
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))


def test_hostile_text_is_on_the_page_as_text() -> None:
    page = Tags(REPORTERS["html"].text([hostile()]))
    assert any("<script>alert(1)</script>" in said for said in page.said)
    assert any("{{7*7}}" in said for said in page.said)


def test_the_page_says_both_opinions_and_every_objection() -> None:
    said = " ".join("".join(Tags(REPORTERS["html"].text([origin()])).said).split())
    assert (
        said.index("Rejected")
        < said.index("SOL-ExecBench says Passed 4 of 4 workloads")
        < said.index("seatrial says Rejected")
    )
    for finding in origin().findings:
        assert finding.reason in said
        assert finding.reproducer in said
    assert "The benchmark lets it pass. seatrial does not." in said
    assert said.count("masked") >= 5


def test_anchors_of_several_candidates_differ() -> None:
    tags = Tags(REPORTERS["html"].text([origin(), accepted(), origin()])).seen
    names = [attributes["id"] for _, attributes in tags if "id" in attributes]
    links = [attributes["href"] for tag, attributes in tags if tag == "a"]
    assert len(names) == len(set(names))
    assert [link and link[1:] for link in links] == ["candidate-1", "candidate-2", "candidate-3"]
    assert {link and link[1:] for link in links} <= set(names)


# ---------------------------------------------------------------------------------------------------
# Pictures


@pytest.mark.parametrize("report", ALL)
def test_pictures_are_whole_on_their_own(report: Report) -> None:
    pictures = [plots.growth_svg(growth) for growth in report.growth]
    pictures += [plots.training_picture_svg(report.trial)] if report.trial else []
    for picture in filter(None, pictures):
        root = ElementTree.fromstring(picture)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "nan" not in re.sub(r"<text.*?</text>|aria-label=\"[^\"]*\"", "", picture).lower()
        assert "prefers-color-scheme" in picture


def test_the_training_picture_shows_every_cell_and_its_verdict() -> None:
    trial = origin().trial
    assert trial is not None
    said = [
        element.text
        for element in ElementTree.fromstring(plots.training_picture_svg(trial)).iter(
            "{http://www.w3.org/2000/svg}text"
        )
    ]
    assert said.count("masked") == 4
    assert "text · SGD + momentum" in said
    assert "outside from step 14" in said
    assert "candidate not a number from step 44" in said


def test_a_growth_without_a_point_to_draw_is_no_picture() -> None:
    assert plots.growth_svg(not_finite().growth[1]) == ""
    assert plots.growth_svg(not_finite().growth[2]) == ""


def cell(*losses: float, first_step: int | None = None) -> TrialCell:
    curves = [
        Curve(run="reference", seed=0, losses=[2.0, 1.0, 1.0, 1.0]),
        Curve(run="candidate", seed=0, losses=list(losses)),
    ]
    return TrialCell(
        data="d", optimizer="o", learning_rate=1, verdict="drifts", reason="", first_step=first_step, curves=curves
    )


def candidate_line(drawn: TrialCell) -> plots.Line:
    return next(line for line in plots.cell_plot(drawn, loss_window([drawn])).lines if line.css == "candidate")


def test_a_curve_ends_in_a_cross_where_it_is_no_number() -> None:
    whole, broken = candidate_line(cell(2.0, 1.0, 1.0, 1.0)), candidate_line(cell(2.0, 1.0, NAN, 1.0))
    assert (whole.crosses, whole.path.count("L")) == ((), 3)
    assert (len(broken.crosses), broken.path.count("L")) == (1, 1)
    assert len(candidate_line(cell(INF)).crosses) == 1
    assert candidate_line(cell(INF)).path == ""


def test_a_curve_above_the_picture_leaves_with_an_arrow_and_may_come_back() -> None:
    line = candidate_line(cell(2.0, 90.0, 90.0, 1.0))
    assert len(line.arrows) == 1
    assert line.path.count("M") == 2
    assert candidate_line(cell(2.0, 1.0, 1.0, 1.0)).arrows == ()
    never_seen = candidate_line(cell(90.0, 90.0, 90.0, 90.0))
    assert (never_seen.path, len(never_seen.arrows)) == ("", 1)


def test_a_long_curve_is_thinned_and_keeps_its_spike() -> None:
    losses = [1.0] * 5000
    losses[3210] = 1.4
    line = candidate_line(cell(*losses))
    assert line.path.count("L") < 600
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", line.path)]
    assert min(heights) < max(heights) - 10


@settings(max_examples=60, deadline=None)
@given(cells=st.lists(_CELLS, min_size=1, max_size=3))
def test_any_losses_can_be_drawn(cells: list[TrialCell]) -> None:
    low, high = loss_window(cells)
    assert low < high
    for one in cells:
        drawing = plots.cell_svg(one, (low, high))
        ElementTree.fromstring(drawing)
        numbers = [
            float(number)
            for path in re.findall(r' d="([^"]*)"', drawing)
            for number in re.findall(r"-?[\d.]+(?:e-?\d+)?", path)
        ]
        assert all(-10 <= number <= 350 for number in numbers)


# ---------------------------------------------------------------------------------------------------
# Markdown


def html_in(markdown: str) -> list[str]:
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(markdown)
    inner = [child for token in tokens for child in (token.children or [])]
    return [token.content for token in (*tokens, *inner) if token.type in ("html_block", "html_inline")]


@pytest.mark.parametrize("report", ALL)
def test_the_only_html_in_markdown_is_our_folding(report: Report) -> None:
    ours = re.compile(r"(<details><summary>[\w ',]+</summary>|</details>)\s*")
    for html in html_in(REPORTERS["markdown"].text([report, accepted()])):
        assert ours.fullmatch(html), html


def test_hostile_text_makes_no_link_no_image_no_mention_in_markdown() -> None:
    text = REPORTERS["markdown"].text([hostile()])
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    inner = [child for token in tokens for child in (token.children or [])]
    kinds = {child.type for child in inner}
    assert "link_open" not in kinds
    assert "image" not in kinds
    prose = "".join(child.content for child in inner if child.type == "text")
    assert "@everyone" not in prose
    assert "@\u200beveryone" in prose


def test_markdown_tables_keep_their_columns() -> None:
    text = REPORTERS["markdown"].text([hostile(), origin()])
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    widths: list[int] = []
    for token in tokens:
        if token.type == "tr_open":
            widths.append(0)
        elif token.type in ("td_open", "th_open"):
            widths[-1] += 1
    assert set(widths) <= {3, 4, 5, 6}
    for line in text.splitlines():
        if line.startswith("| ") and "---" not in line:
            assert len(re.findall(r"(?<!\\)\|", line)) - 1 in {3, 4, 5, 6}


def test_markdown_says_the_verdict_first_and_the_contrast() -> None:
    text = REPORTERS["markdown"].text([origin()])
    assert text.splitlines()[0] == "## ❌ Rejected: `fast_embedding_backward`"
    assert "Benchmark's own rule: **PASSED** 4 of 4 workloads" in text
    assert origin().findings[0].reproducer in text


def test_a_comment_fits_into_a_comment() -> None:
    assert len(REPORTERS["markdown"].text([hostile()] * 40)) < 65_536
    assert "does not fit" in REPORTERS["markdown"].text([origin()] * 60)


# ---------------------------------------------------------------------------------------------------
# JUnit


def cases(report: Report) -> dict[str, list[str]]:
    root = ElementTree.fromstring(REPORTERS["junit"].text([report]))
    return {case.get("name", ""): [child.tag for child in case] for case in root.iter("testcase")}


def test_a_failed_check_is_a_failure_and_its_honest_twin_passes() -> None:
    assert cases(origin())["narrow-accumulator"] == ["failure", "system-out"]
    assert cases(accepted())["narrow-accumulator"] == []


def test_there_is_one_case_for_each_check_and_one_for_a_verdict_that_no_check_tells() -> None:
    for report in (origin(), accepted(), inconclusive()):
        assert list(cases(report)) == [check.check for check in view(report).checks]
    untold = accepted().model_copy(update={"verdict": Verdict.REJECTED})
    assert next(iter(cases(untold))) == "verdict"
    assert cases(untold)["verdict"] == ["failure"]


def test_what_was_not_verified_is_an_error_and_never_skipped() -> None:
    assert cases(inconclusive())["contract"][0] == "error"
    assert cases(empty()) == {"verdict": ["error"]}
    assert cases(origin())["other-device"][0] == "skipped"


@pytest.mark.parametrize("kind", ["terminal", "html", "markdown"])
def test_the_strength_of_the_inputs_is_told(kind: str) -> None:
    told = next(r for r in (make() for make in SAMPLES.values()) if r.adequacy and r.adequacy.planted)
    silent = told.model_copy(update={"adequacy": None})
    text = printed if kind == "terminal" else REPORTERS[kind].text
    shown, without = (text([r]) for r in (told, silent))
    assert "44 of 45 faults planted in the reference were exposed" in " ".join(shown.split())
    assert "planted in the reference" not in " ".join(without.split())


def test_limits_pass_and_are_told() -> None:
    report = SAMPLES["accepted-with-limits"]()
    assert cases(report)["refused-shape"] == ["system-out"]
    assert "Refuses every seq_len" in REPORTERS["junit"].text([report])


def test_junit_counts_what_it_holds() -> None:
    root = ElementTree.fromstring(REPORTERS["junit"].text([origin(), inconclusive()]))
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("8", "3", "1")
    assert [suite.get("name") for suite in root] == ["seatrial: fast_embedding_backward", "seatrial: cuda_kernel"]
    assert ElementTree.fromstring(REPORTERS["junit"].text([])).get("errors") == "1"


def test_junit_failures_carry_the_reproducer() -> None:
    root = ElementTree.fromstring(REPORTERS["junit"].text([origin()]))
    failure = root.find(".//testcase[@name='error-beyond-honest']/failure")
    assert failure is not None
    assert failure.get("message") == origin().findings[1].reason
    assert origin().findings[1].reproducer in (failure.text or "")


# ---------------------------------------------------------------------------------------------------
# SARIF


@pytest.mark.parametrize("report", ALL)
def test_sarif_holds_together(report: Report) -> None:
    document = json.loads(REPORTERS["sarif"].text([report, accepted()]))
    assert document["version"] == "2.1.0"
    (run,) = document["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules)
    expected = [f for f in report.findings if f.outcome in (Outcome.FAILED, Outcome.LIMITED, Outcome.NOT_VERIFIED)]
    assert len(run["results"]) == len(expected)
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["message"]["text"]
        assert (result["kind"] == "fail") == (result["level"] != "none")
        (place,) = result["locations"]
        if "physicalLocation" in place:
            assert re.fullmatch(
                r"[A-Za-z0-9._~!$&'()*+,;=:@/%-]+", place["physicalLocation"]["artifactLocation"]["uri"]
            )
            assert place["physicalLocation"]["region"]["startLine"] >= 1


def test_sarif_points_at_the_candidate_and_says_how_to_reproduce() -> None:
    first = json.loads(REPORTERS["sarif"].text([origin()]))["runs"][0]["results"][0]
    assert first["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "examples/embedding_backward/candidates/bf16_accumulator.json"},
        "region": {"startLine": 1},
    }
    assert first["level"] == "error"
    assert f"Reproduce: {origin().findings[0].reproducer}" in first["message"]["text"]


def test_sarif_knows_lines_absolute_paths_and_plain_callables() -> None:
    finding = Finding(check="c", outcome=Outcome.LIMITED, reason="r", details={"line": 7})
    base = empty().model_copy(update={"findings": [finding]})

    def place(path: str) -> dict[str, object]:
        document = json.loads(sarif_file.text([base.model_copy(update={"candidate_path": path})]))
        found: dict[str, object] = document["runs"][0]["results"][0]["locations"][0]
        return found

    assert place("/a b/k.py") == {
        "physicalLocation": {"artifactLocation": {"uri": "file:///a%20b/k.py"}, "region": {"startLine": 7}}
    }
    assert place("") == {"logicalLocations": [{"name": "(no name)", "kind": "function"}]}


def test_the_same_fault_keeps_its_fingerprint_whatever_the_seed() -> None:
    def print_of(finding: Finding) -> str:
        document = json.loads(sarif_file.text([origin().model_copy(update={"findings": [finding]})]))
        return str(document["runs"][0]["results"][0]["partialFingerprints"]["seatrial/v1"])

    first = origin().findings[0]
    assert print_of(first) == print_of(first.model_copy(update={"measured": 9.0}))
    assert print_of(first) != print_of(first.model_copy(update={"output": "other"}))


# ---------------------------------------------------------------------------------------------------
# Traces


def traces(report: Report) -> list[dict[str, Any]]:
    return [json.loads(line) for line in REPORTERS["traces"].text([report]).splitlines()]


def test_a_trace_says_what_the_benchmark_says_and_logs_what_seatrial_says() -> None:
    lines = traces(origin())
    assert len(lines) == 4
    for line in lines:
        assert line["evaluation"]["status"] == "PASSED"
        assert str(line["evaluation"]["log"]).startswith("seatrial: rejected: The gradient of a token")
        assert line["definition"] == origin().problem
        assert line["evaluation"]["performance"] is not None
    assert str(traces(accepted())[0]["evaluation"]["log"]).startswith("seatrial: accepted\n")


def test_a_trace_has_the_fields_that_its_status_demands() -> None:
    rule = origin().benchmark_rule
    assert rule is not None
    for status, correctness, performance in (
        ("PASSED", True, True),
        ("INCORRECT_NUMERICAL", True, False),
        ("RUNTIME_ERROR", False, False),
    ):
        row = rule.rows[0].model_copy(update={"status": status})
        evaluation = traces(origin().model_copy(update={"benchmark_rule": rule.model_copy(update={"rows": [row]})}))[0][
            "evaluation"
        ]
        assert (evaluation["correctness"] is not None, evaluation["performance"] is not None) == (
            correctness,
            performance,
        )


def test_an_error_that_is_no_number_is_flagged_in_a_trace() -> None:
    assert traces(not_finite())[0]["evaluation"]["correctness"] == {
        "max_relative_error": 0.0, "max_absolute_error": 0.0, "has_nan": True, "has_inf": False, "extra": {"matched_ratio": 0.0},
    }  # fmt: skip


def test_no_rule_no_trace() -> None:
    assert REPORTERS["traces"].text([empty()]) == ""
