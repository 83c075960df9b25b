"""What a newcomer reads: limits of a verdict apart from gaps of a policy, a crash told once, times, sizes, inputs by name."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import seatrial
from sample_reports import accepted, empty, origin
from seatrial import Outcome, Verdict
from seatrial.bench import MOST_DEATHS, MOST_HANGS, Bench
from seatrial.devices import pick
from seatrial.doctor import not_verifiable
from seatrial.formats import load_candidates, load_problem
from seatrial.limits import policy_limits
from seatrial.model import Finding, Report
from seatrial.policy import DEEP, DEMO, LADDER, POLICIES, QUICK, STANDARD, Policy
from seatrial.report import REPORTERS
from seatrial.report.data import view
from seatrial.report.terminal import render, render_compact
from seatrial.study import Clock, Study
from seatrial.verify import Options, verify
from seatrial.workers.process import ForkServer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BACKWARD = EXAMPLES / "embedding_rmsnorm_backward"


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def make_x(seed: int) -> dict[str, Any]:
    return {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))}


def aborting(x: torch.Tensor) -> torch.Tensor:
    os.abort()
    return x * 2


def raising(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("not today")


def raising_on_large(x: torch.Tensor) -> torch.Tensor:
    if float(x.abs().max()) > 20:
        raise ValueError("too large")
    return x * 2


def audit(kernel: Any, policy: str | Policy = "quick", **more: Any) -> Report:
    return seatrial.check(kernel, reference=doubled, inputs=make_x, policy=policy, device="cpu", seed=1, **more)


def printed(reports: Sequence[Report], *, compact: bool = False) -> str:
    file = io.StringIO()
    (render_compact if compact else render)(reports, Console(file=file, soft_wrap=True))
    return file.getvalue()


def in_every_form(report: Report) -> dict[str, str]:
    """The report for a person in three forms, without the markup that stands between words."""
    texts = {"terminal": printed([report]), **{kind: REPORTERS[kind].text([report]) for kind in ("html", "markdown")}}
    return {kind: re.sub(r"<wbr>|</?code>|[\\`]", "", " ".join(text.split())) for kind, text in texts.items()}


# -- limits of the verdict, gaps of the policy ------------------------------------------------------------


def gaps_of(policy: Policy, folder: Path = BACKWARD) -> list[str]:
    study = Study(load_problem(folder), policy, pick("cpu"), 1)
    ran = [Finding(check=c, outcome=Outcome.HELD, reason="r") for c in ("fitted-inputs", "training-divergence")]
    return policy_limits(study, ran)


def test_a_gap_of_a_policy_names_the_policy_that_closes_it() -> None:
    workloads, recipes, training = gaps_of(QUICK)
    assert workloads == "3 of 5 declared workloads are not audited; policy deep audits all"
    assert re.fullmatch(r"\d+ kinds of inputs are not tried \(.*\); policy standard tries them", recipes)
    assert training == "no training run was made; policy standard makes them, and so does `seatrial train`"
    assert gaps_of(STANDARD) == ["1 of 5 declared workloads is not audited; policy deep audits all"]
    assert gaps_of(DEEP) == []
    assert "no training run on zipf tokens; policy standard makes them" in gaps_of(DEMO)


def test_recipes_and_planted_faults_that_a_policy_leaves_out_are_gaps_too() -> None:
    few = gaps_of(replace(STANDARD, recipes=2, workloads=16, mutants=0))
    assert [re.sub(r"\d+ kinds of inputs are not tried \(.*\)", "kinds", gap) for gap in few] == [
        "kinds; policy standard tries them",
        "how strong the inputs are was not measured: no fault was planted in the reference; policy quick plants some",
    ]
    assert gaps_of(replace(STANDARD, workloads=16)) == []


def test_no_policy_claims_to_audit_more_workloads_than_it_does() -> None:
    study = Study(load_problem(BACKWARD), replace(QUICK, workloads=16), pick("cpu"), 1)
    many = replace(study.problem, workloads=study.problem.workloads * 5)
    quick, deep = (policy_limits(Study(many, policy, pick("cpu"), 1), []) for policy in (QUICK, DEEP))
    assert quick == ["23 of 25 declared workloads are not audited; policy deep audits 16"]
    assert deep == ["9 of 25 declared workloads are not audited; no named policy audits more"]


def test_the_ladder_of_policies_leaves_out_less_and_less() -> None:
    assert [len(gaps_of(policy)) for policy in LADDER] == [3, 1, 0]
    assert set(POLICIES.values()) == {*LADDER, DEMO}


def test_an_acceptance_counts_what_its_policy_leaves_out_and_the_two_lists_stand_apart() -> None:
    report = audit(doubled, replace(QUICK, recipes=1))
    assert report.verdict is Verdict.ACCEPTED
    assert re.search(r"all \d+ checks were run; \d+ held, \d+ do(es)? not apply to this problem; policy quick leaves out 1 thing, named below\.$", report.headline)  # fmt: skip
    assert any("audited on the CPU" in limit for limit in report.limits)
    assert not any("not tried" in limit or "policy" in limit for limit in report.limits)
    (gap,) = report.policy_limits
    assert gap.endswith("; policy standard tries them")
    for kind, text in in_every_form(report).items():
        heading = f"What {'the policy' if kind == 'markdown' else 'policy quick'} leaves out"
        assert text.index("Limits of this verdict") < text.index(heading)
        assert gap.partition(" (")[0] in text
    whole = audit(doubled, STANDARD, skip=["training-divergence"])
    assert whole.policy_limits == []
    assert "leaves out" not in printed([whole])


# -- a crash is told once ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "how"), [(aborting, "crashed"), (raising, "raised an error")])
def test_a_crash_is_one_objection_and_one_line_for_what_it_prevents(kernel: Any, how: str) -> None:
    report = audit(kernel)
    assert [f.check for f in report.findings if f.outcome is Outcome.FAILED] == ["crashing-call"]
    shown = view(report)
    assert shown.unverified == ()
    prevented = {f.check for f in report.findings if f.outcome is Outcome.NOT_VERIFIED}
    assert len(prevented) == 9
    assert shown.prevented_words.startswith(
        f"{len(prevented)} checks could not run: the candidate {how} in every call ("
    )
    for text in in_every_form(report).values():
        assert text.count(shown.prevented_words) == 1
        assert "Not verified" not in text
    assert prevented <= {row.check for row in report.checks if row.outcome is Outcome.NOT_VERIFIED}
    assert REPORTERS["junit"].text([report]).count("<error ") == len(prevented), (
        "what lists checks one by one lists them all"
    )
    assert shown.tally == f"1 objection, {len(prevented)} checks that it prevents"


def test_a_size_at_which_everything_crashes_is_no_second_objection() -> None:
    problem = load_problem(EXAMPLES / "rmsnorm")
    (honest,) = load_candidates([EXAMPLES / "rmsnorm" / "candidates" / "honest.json"], problem=problem)
    broken = replace(honest, sources=tuple(replace(s, content="import os\n\ndef run(*given):\n    os.abort()\n") for s in honest.sources))  # fmt: skip
    options = Options(QUICK, pick("cpu"), 1, only=("crashing-call", "fitted-sizes"))
    together, alone = (verify(problem, [broken], replace(options, only=only))[0] for only in (options.only, ("fitted-sizes",)))  # fmt: skip
    assert [f.check for f in together.findings if f.outcome is Outcome.FAILED] == ["crashing-call"]
    assert [f.check for f in alone.findings if f.outcome is Outcome.FAILED] == ["fitted-sizes"]


def test_what_a_single_call_prevents_stands_by_itself_where_the_declared_calls_return() -> None:
    report = audit(raising_on_large, only=["crashing-call", "fitted-inputs"])
    assert report.verdict is Verdict.INCONCLUSIVE
    shown = view(report)
    assert shown.prevented == ()
    assert any("ValueError: too large" in finding.reason for finding in shown.unverified)


def test_checks_that_lost_some_of_their_calls_are_counted_as_such() -> None:
    crash = Finding(check="crashing-call", outcome=Outcome.FAILED, reason="r", cause="call:crashed")
    details = {"calls": 8, "calls without a result": 3}
    lost = Finding(
        check="wrong-values", outcome=Outcome.NOT_VERIFIED, reason="s", cause="call:crashed", details=details
    )
    other = Finding(check="stale-output", outcome=Outcome.NOT_VERIFIED, reason="the oracle is not finite")
    shown = view(empty().model_copy(update={"findings": [crash, lost, other]}))
    assert shown.prevented_words == (
        "1 check could not be finished: the candidate crashed in 3 of their 8 calls (wrong-values)"
    )
    assert [f.reason for f in shown.unverified] == ["the oracle is not finite"]
    mixed = lost.model_copy(update={"check": "fitted-inputs", "cause": "call:timed-out"})
    words = view(empty().model_copy(update={"findings": [crash, lost, mixed]})).prevented_words
    assert words.startswith("2 checks could not be finished: the candidate did not return in 6 of their 16 calls")


def refusal(kernel: Any, calls: int, policy: Policy = QUICK) -> str:
    """What the bench says in place of a call that it no longer makes."""
    from seatrial.formats.plain import candidate_from_callable, problem_from_callables

    study = Study(problem_from_callables(doubled, make_x), policy, pick("cpu"), 1)
    case = study.case(study.smallest)
    with ForkServer() as server:
        bench = Bench(study, candidate_from_callable(kernel), server, Clock(60.0))
        try:
            return [bench.call(case) for _ in range(calls + 1)][-1].error
        finally:
            bench.close()


def sleeping(x: torch.Tensor) -> torch.Tensor:
    import time

    time.sleep(30)
    return x * 2


def test_a_candidate_that_is_called_no_more_is_told_the_limit_and_its_reason() -> None:
    end = "a candidate is called no more, so that its audit comes to an end"
    assert refusal(aborting, MOST_DEATHS) == f"not called: after {MOST_DEATHS} calls that ended its process {end}"
    hasty = replace(QUICK, call_timeout_s=0.5)
    assert refusal(sleeping, MOST_HANGS, hasty) == f"not called: after {MOST_HANGS} calls that hung until their deadline {end}"  # fmt: skip
    assert refusal(doubled, MOST_DEATHS) == ""


# -- times ------------------------------------------------------------------------------------------------


def test_the_time_of_the_whole_audit_stands_in_every_report_of_a_batch() -> None:
    problem = load_problem(EXAMPLES / "rmsnorm")
    paths = [EXAMPLES / "rmsnorm" / "candidates" / f"{name}.json" for name in ("faulty", "honest")]
    options = Options(QUICK, pick("cpu"), 1, only=("does-not-load", "broken-contract"))
    reports = verify(problem, load_candidates(paths, problem=problem), replace(options, started=options.started - 100))
    whole = {report.audit_seconds for report in reports}
    assert len(whole) == 1
    assert whole.pop() >= 100 + sum(report.seconds for report in reports)
    assert all(0 < report.seconds < 90 for report in reports)


def test_a_time_is_told_for_the_audit_and_for_the_candidate() -> None:
    timed = origin().model_copy(update={"audit_seconds": 300.0})
    assert view(timed).took == "the whole audit took 5.0 min, this candidate 2.4 min of it"
    assert view(origin()).took == "took 2.4 min"
    for text in in_every_form(timed).values():
        assert "5.0 min" in text and "2.4 min" in text
    batch = printed([timed, accepted().model_copy(update={"audit_seconds": 300.0})])
    assert re.search(r"ACCEPTED +fp32_accumulator +.* +2\.3 min\n", batch)
    assert "The whole audit took 5.0 min: start, control, planted faults and every candidate." in batch


# -- the compact form ---------------------------------------------------------------------------------------


def test_the_compact_form_is_short_and_keeps_verdicts_amounts_and_limits() -> None:
    pair = [origin(), accepted().model_copy(update={"policy_limits": ["gap; policy deep closes it"]})]
    short, long = printed(pair, compact=True), printed(pair)
    assert len(short.splitlines()) < 45 < len(long.splitlines())
    assert short.index("REJECTED: fast_embedding_backward") < short.index("ACCEPTED: fp32_accumulator")
    assert short.index("ACCEPTED: fp32_accumulator") < short.index("\nSummary\n")
    assert re.search(r"narrow-accumulator +failed +8 bits, at least 24 bits required\n", short)
    assert "training: the candidate diverges in 1, drifts in 1, is masked in 4 of 6 cells" in short
    for line in (*origin().limits, "gap; policy deep closes it"):
        assert short.count(line) == 1


# -- inputs by name -------------------------------------------------------------------------------------------


def capped(logits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return 5 * torch.tanh(logits * scale / 5)


def not_capped(logits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return 5 * (logits * scale / 5)


def make_logits(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {"logits": 1e-2 * torch.randn(32, 64, generator=g).bfloat16(), "scale": torch.tensor(1.0)}


def test_a_finding_of_fitted_inputs_names_the_inputs_and_how_they_were_changed() -> None:
    run = {"reference": capped, "inputs": make_logits, "policy": "quick", "device": "cpu", "only": ["fitted-inputs"]}
    fine, wrong = seatrial.check(capped, **run), seatrial.check(not_capped, **run)
    assert fine.verdict is Verdict.ACCEPTED, fine.headline
    finding = wrong.findings[0]
    assert finding.outcome is Outcome.FAILED
    assert re.search(rf"cases, worst with .*`logits`.*recipe {finding.where.inputs}\)", finding.reason), finding.reason
    assert "`logits`" in wrong.headline


def test_only_inputs_that_really_changed_are_named() -> None:
    study = Study(load_problem(BACKWARD), QUICK, pick("cpu"), 1)
    assert study.told_inputs(study.case(study.smallest)) == ""
    assert study.told_inputs(study.case(study.smallest, "one-id")) == "all ids the same (`token_ids`, recipe one-id)"
    scaled = study.told_inputs(study.case(study.smallest, "scaled-up-32"))
    assert scaled.endswith(" times 32 (recipe scaled-up-32)")
    assert "`token_ids`" not in scaled
    recipe = study.recipes["scaled-up-32"]
    assert recipe.told_of(["a", "b"]) == "`a`, `b` times 32"
    assert recipe.told_of([]) == recipe.words


# -- what is not probed ---------------------------------------------------------------------------------------

OFFSET = 2.0**23  # float32 numbers of this size are whole: the reference keeps no bit of a small sum


def coarse_sum(x: torch.Tensor) -> torch.Tensor:
    return ((x.float().sum(0) + OFFSET) - OFFSET).bfloat16()


def coarse_sum_from_the_end(x: torch.Tensor) -> torch.Tensor:
    return ((x.float().flip(0).sum(0) + OFFSET) - OFFSET).bfloat16()


def coarse_sum_of_a_half(x: torch.Tensor) -> torch.Tensor:
    return ((x.float()[:128].sum(0) + OFFSET) - OFFSET).bfloat16()


def make_rows(seed: int) -> dict[str, Any]:
    return {"x": torch.randn(256, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()}


def test_where_the_native_reference_answers_no_probe_the_sums_are_a_limit_and_the_values_still_speak() -> None:
    run = {"reference": coarse_sum, "inputs": make_rows, "policy": "quick", "device": "cpu", "seed": 3}
    run["only"] = ["narrow-accumulator", "wrong-values"]
    limit = "`output`: the native reference answers these probes no better, so its sums are not probed"
    fair, faulty = seatrial.check(coarse_sum_from_the_end, **run), seatrial.check(coarse_sum_of_a_half, **run)
    for report in (fair, faulty):
        assert limit in report.limits
        (probed,) = [f for f in report.findings if f.check == "narrow-accumulator"]
        assert probed.outcome is Outcome.NOT_APPLICABLE
    assert (fair.verdict, faulty.verdict) == (Verdict.ACCEPTED, Verdict.REJECTED)
    assert [f.check for f in faulty.findings if f.outcome is Outcome.FAILED] == ["wrong-values"]


# -- doctor ---------------------------------------------------------------------------------------------------


def test_doctor_lists_what_a_machine_cannot_verify() -> None:
    bare, one_core, with_gpu = (
        " ".join(not_verifiable(has_cuda=cuda, cores=cores)) for cuda, cores in ((False, 2), (False, 1), (True, 16))
    )
    for what in ("Triton", "streams", "races between blocks", "precision of a GPU's units", "C++ and CUDA sources"):
        assert what in bare
    assert "one core" in one_core and "one core" not in bare
    assert "streams" not in with_gpu and "precision of a GPU's units" not in with_gpu
    assert "C++ and CUDA sources" in with_gpu


# -- the demo -------------------------------------------------------------------------------------------------


def test_the_demo_prints_the_compact_form_and_sends_the_rest_to_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from seatrial import cli

    asked: list[Any] = []

    def no_audit(*given: Any, **more: Any) -> list[Report]:
        asked.extend(given)
        return [origin(), accepted()]

    monkeypatch.setattr(cli, "_verify", no_audit)
    page = tmp_path / "page.html"
    assert cli.demo(html=page, json=None, device="cpu", seed=1, examples=EXAMPLES, quiet=True) == 0
    said = capsys.readouterr().out
    assert asked[4] == "demo"
    assert f"Every objection, curve and limit is on the page: {page}\n" in said
    assert said.splitlines()[-1] == origin().replay
    assert len(said.splitlines()) < 50
    text = page.read_text()
    for finding in origin().findings:
        assert not finding.reproducer or finding.reproducer in text
