"""The test is tested: single faults planted in a reference, and which of them an audit's inputs expose."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.sources import problem_of

import seatrial.study as studies
from seatrial import cli
from seatrial.adequacy.aim import FORMS, Aim, first_aims
from seatrial.adequacy.carry import carried_matmul, carried_scatter, carried_sum, toward_zero
from seatrial.adequacy.kinds import BY_NAME, KINDS
from seatrial.adequacy.mutants import Mutant, exact_outputs, find_mutants, planted
from seatrial.adequacy.nulls import null_outputs
from seatrial.adequacy.score import Budget, Court, Fate, chosen_mutants, harden, measure, sentence
from seatrial.adequacy.words import lines
from seatrial.checks.base import Example
from seatrial.devices import pick
from seatrial.errors import UsageError
from seatrial.formats import load_problem
from seatrial.model import Adequacy
from seatrial.policy import QUICK, STANDARD
from seatrial.study import Study
from seatrial.verify import Options, measured_adequacy, selected

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
AMPLE = 60.0  # seconds: the work ends long before, so that the result does not depend on the machine


@cache
def measured(name: str) -> Adequacy:
    return measure(Study(load_problem(EXAMPLES / name), STANDARD, pick("cpu"), 7), AMPLE, mutants=400, benchmark=True)


def small_study(reference: str, inputs: str) -> Study:
    return Study(problem_of(Example(reference, inputs, reference)), QUICK, pick("cpu"), 3)


def rows_of(dtype: str = "bfloat16", shape: str = "32, 128") -> str:
    return (
        "import torch\n\ndef make(seed):\n    g = torch.Generator().manual_seed(seed)\n"
        f"    return {{'x': torch.randn({shape}, generator=g).to(torch.{dtype})}}\n"
    )


def fault(name: str, kind: str, words: str) -> tuple[bool, bool | None]:
    """Whether seatrial's and the benchmark's inputs expose the fault of this kind on the line that holds `words`."""
    template = re.escape(BY_NAME[kind].words).replace(r"\{op\}", r"\w+")
    found = [f for f in measured(name).faults if re.match(f"{template} at ", f.words) and words in f.words]
    assert found, [f.words for f in measured(name).faults]
    assert not any(f.equivalent for f in found)
    return all(f.exposed for f in found), any(f.benchmark_exposed or False for f in found)


# -- what the benchmark lets live must die here -------------------------------------------------------


def test_a_soft_cap_without_tanh_lives_under_the_benchmarks_inputs_and_dies_here() -> None:
    assert fault("softcap_softmax", "no-operation", "leaves out tanh") == (True, False)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("bf16-carry-of-tiles", "mean"), ("no-guard", "eps"), ("one-for-all", "norm_weight"), ("wrong-divisor", "mean")],
)
def test_faults_of_a_norm_that_live_under_the_benchmarks_inputs_die_here(kind: str, words: str) -> None:
    assert fault("rmsnorm", kind, words) == (True, False)


@pytest.mark.parametrize("kind", ["half-the-data", "bf16-carry", "fp16-carry"])
def test_other_faults_of_a_norm_die_here(kind: str) -> None:
    assert fault("rmsnorm", kind, "mean")[0]


@pytest.mark.parametrize(
    "name", ["embedding_rmsnorm_backward", "fused_add_rmsnorm", "replayed_result", "rmsnorm", "softcap_softmax"]
)
def test_at_least_95_percent_of_the_planted_faults_die_in_every_example(name: str) -> None:
    result = measured(name)
    assert result.not_tried == 0
    assert result.planted >= 8
    assert result.exposed >= 0.95 * result.planted, result.survivors
    assert result.null_survivors == []
    assert result.benchmark_exposed is not None
    assert result.benchmark_exposed < result.exposed


# -- planting -----------------------------------------------------------------------------------------


def softmax_of_difference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    wide = (x - y).float()
    return torch.softmax(wide.tanh() * 3.0, dim=-1).to(torch.bfloat16)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).bfloat16()


def test_a_mutant_alters_one_operation_and_leaves_the_reference_alone() -> None:
    x, y = drawn(4, 64), drawn(4, 64).flip(0)
    before = softmax_of_difference(x, y)
    found = {m.name.split(" ")[0]: m for m in find_mutants(softmax_of_difference, [x, y])}
    assert torch.equal(planted(softmax_of_difference, found["swapped"])(x, y), softmax_of_difference(y, x))
    no_tanh = planted(softmax_of_difference, found["no-operation"])(x, y)
    assert torch.equal(no_tanh, torch.softmax((x - y).float() * 3.0, dim=-1).to(torch.bfloat16))
    assert torch.equal(softmax_of_difference(x, y), before)


def test_the_place_of_a_fault_is_said_with_the_source_line() -> None:
    words = [m.words for m in find_mutants(softmax_of_difference, [drawn(4, 64), drawn(4, 64)])]
    assert any(w.startswith("leaves out tanh at line") and "wide.tanh() * 3.0" in w for w in words), words


def test_a_mutant_runs_in_fp64_too_and_without_a_fault_nothing_changes() -> None:
    x, y = drawn(4, 64), drawn(4, 64).flip(0)
    right = exact_outputs(softmax_of_difference, [x, y], ["out"])[0]
    unaltered = Mutant("none", "changes nothing")
    assert torch.equal(exact_outputs(planted(softmax_of_difference, unaltered), [x, y], ["out"])[0], right)
    no_tanh = next(m for m in find_mutants(softmax_of_difference, [x, y]) if m.name.startswith("no-operation"))
    faulty = exact_outputs(planted(softmax_of_difference, no_tanh), [x, y], ["out"])[0]
    wanted = torch.softmax((x - y).double() * 3.0, dim=-1)
    assert faulty.dtype == torch.float64
    assert float((faulty - wanted).abs().max()) < 0.01 < float((faulty - right).abs().max())


def test_an_operation_in_place_is_altered_as_well() -> None:
    def scatter(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(4, x.shape[1]).index_add_(0, ids, x)

    x, ids = torch.ones(6, 3), torch.tensor([0, 0, 0, 1, 2, 2])
    found = {m.name.split(" ")[0]: m for m in find_mutants(scatter, [x, ids])}
    assert planted(scatter, found["overwritten"])(x, ids)[:, 0].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert float(planted(scatter, found["lost-contribution"])(x, ids).sum()) == 15.0
    assert scatter(x, ids)[:, 0].tolist() == [3.0, 1.0, 2.0, 0.0]


def test_every_kind_has_words_and_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(KINDS)
    assert all(kind.words and kind.ops for kind in KINDS)


# -- narrow carries, beside the honest sum --------------------------------------------------------------


def test_a_bf16_carry_stands_still_where_an_fp32_carry_does_not() -> None:
    terms = torch.ones(3, 2048)
    assert carried_sum(terms, torch.float32).tolist() == [2048.0] * 3
    steps = carried_sum(torch.ones(1, 256) * 1.0, torch.bfloat16)
    assert steps.tolist() == [256.0]
    assert float(carried_sum(torch.cat([torch.full((1, 1), 512.0), torch.ones(1, 255)], 1), torch.bfloat16)) == 512.0
    assert float(carried_sum(torch.cat([torch.full((1, 1), 512.0), torch.ones(1, 255)], 1), torch.float32)) == 767.0


def test_carried_products_and_scatters_agree_with_torch_in_fp32() -> None:
    left, right = torch.randn(5, 300, dtype=torch.float64), torch.randn(300, 7, dtype=torch.float64)
    assert torch.allclose(carried_matmul(left, right, torch.float64), left @ right)
    assert not torch.allclose(carried_matmul(left, right, torch.bfloat16), left @ right, rtol=1e-4)
    rows, index = torch.randn(3000, 4, dtype=torch.float64), torch.arange(3000) % 5
    base = torch.zeros(8, 4, dtype=torch.float64)
    assert torch.allclose(carried_scatter(base, index, rows, torch.float64), base.index_add(0, index, rows))
    assert torch.equal(base, torch.zeros_like(base))


def test_cutting_off_goes_toward_zero_and_keeps_what_is_exact() -> None:
    values = torch.tensor([1.0, 1.0078, -1.0077, 3.9999, 0.0, 2.0**-130])
    cut = toward_zero(values, torch.bfloat16)
    assert bool((cut.abs() <= values.abs()).all())
    assert bool((cut[[0, 4]] == values[[0, 4]]).all())
    assert float(cut[3]) == 3.984375 < float(values[3].bfloat16())


# -- judging ------------------------------------------------------------------------------------------


def test_a_mutant_that_changes_nothing_is_counted_apart() -> None:
    study = small_study("def run(x):\n    return (x.clamp(min=-1e30) * 1.5).abs()\n", rows_of("float32"))
    result = measure(study, AMPLE, mutants=50)
    same = [f.words for f in result.faults if f.equivalent]
    assert any("clamp" in words for words in same), result
    assert not any("leaves out abs" in words for words in same)
    assert result.planted + result.equivalent == len(result.faults)
    assert f"{result.equivalent} more changed nothing" in result.sentence


def test_the_same_seed_gives_the_same_faults_and_fates() -> None:
    def once() -> list[tuple[str, str]]:
        study = small_study("import torch\n\ndef run(x):\n    return torch.tanh(x.float()).sum(-1)\n", rows_of())
        return [(f.words, f.by) for f in measure(study, AMPLE, mutants=8).faults]

    first = once()
    assert first == once()
    assert len(first) >= 4


def test_a_survivor_is_hunted_and_what_kills_it_becomes_an_input_of_the_audit() -> None:
    reference = "import torch\n\ndef run(x):\n    return (5 * torch.tanh(x.float() / 5)).bfloat16()\n"
    study = small_study(reference, rows_of().replace("torch.randn(", "0.01 * torch.randn("))
    study.__dict__["recipes"] = {"declared": study.recipes["declared"]}  # an audit without any recipe
    court = Court(study)
    fate = Fate(next(m for m in chosen_mutants(study, 50) if "tanh" in m.words and m.name.startswith("no-operation")))
    court.meet_policy([fate], Budget(AMPLE))
    assert fate.alive and fate.survived
    helpful = harden(court, [fate], Budget(AMPLE))
    assert not fate.alive
    assert helpful and helpful[0] in study.tried_recipes
    assert not court._objections(
        study.case(study.middle, helpful[0]), study.native(study.case(study.middle, helpful[0]))
    )


def test_candidates_that_compute_nothing_are_rejected_and_the_reference_is_not() -> None:
    study = small_study("import torch\n\ndef run(x):\n    return torch.softmax(x.float(), -1).bfloat16()\n", rows_of())
    court, case = Court(study), study.case(study.smallest)
    nulls = dict(null_outputs(study, case))
    assert set(nulls) == {"zeros", "a constant", "a copy of an input", "the answer to other inputs"}
    assert all(court._objections(case, outputs) for outputs in nulls.values())
    assert not court._objections(case, study.native(case))


def test_a_reference_that_ignores_its_inputs_is_said_to_let_null_candidates_live() -> None:
    study = small_study("import torch\n\ndef run(x):\n    return torch.zeros_like(x) * x.float().sum()\n", rows_of())
    assert measure(study, AMPLE, mutants=4).null_survivors == []  # zeros are right here, so they are no null candidate
    assert "computes nothing was not rejected: zeros" in sentence(3, [], 0, 0, ["zeros"])


def test_aims_keep_shape_dtype_and_domain() -> None:
    given = {"x": drawn(6, 40).abs(), "w": drawn(40)}
    for form in FORMS:
        changed = Aim({"x": (form, 3)}).recipe().apply(given, 1)
        x = changed["x"]
        assert isinstance(x, torch.Tensor)
        assert (x.shape, x.dtype) == ((6, 40), torch.bfloat16)
        assert changed["w"] is given["w"]
        assert bool(torch.isfinite(x).all())
        if form != "from a normal":
            assert bool((x >= 0).all()), form
    assert len({aim.name for aim in first_aims(("x", "w"), ("eps",))}) == 5


# -- in words, and in an audit ------------------------------------------------------------------------


def test_the_sentence_counts_and_names_survivors() -> None:
    assert sentence(45, [], 0, 0, []) == "45 of 45 faults planted in the reference were exposed"
    text = sentence(43, ["leaves out tanh at line 5", "has no epsilon (add)"], 1, 2, [])
    assert text.startswith(
        "43 of 45 faults planted in the reference were exposed; the 2 that were not: leaves out tanh"
    )
    assert text.endswith("1 more changed nothing on any input tried; for 2 more there was no time")
    assert "no fault could be planted" in sentence(0, [], 0, 0, [])


def test_lines_put_the_benchmarks_score_beside_the_own_one() -> None:
    shown = list(lines("rmsnorm", measured("rmsnorm")))
    assert "planted faults exposed by seatrial's inputs" in shown[0]
    assert "by the benchmark's own inputs and rule" in shown[1]


def test_the_command_prints_the_score_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "adequacy.json"
    assert cli.adequacy(EXAMPLES / "rmsnorm", device="cpu", policy="quick", seed=3, json=out) == 0
    shown = capsys.readouterr().out
    written = Adequacy.model_validate_json(out.read_text())
    assert f"{written.exposed} of {written.planted}" in shown
    assert "by the benchmark's own inputs and rule" in shown
    assert "seed 3, policy quick, cpu" in shown
    with pytest.raises(UsageError, match=r"adequacy\.json"):
        cli.adequacy(EXAMPLES / "rmsnorm", device="cpu", policy="quick", seed=3, json=out / "adequacy.json")


def test_an_audit_without_fitted_inputs_or_without_mutants_says_that_nothing_was_measured() -> None:
    study = small_study("def run(x):\n    return x * 2\n", rows_of("float32"))
    options = Options(policy=QUICK, device=pick("cpu"), seed=1)
    assert "was not measured" in measured_adequacy(study, selected(("wrong-values",), ()), options).sentence
    none = replace(QUICK, mutants=0)
    study = Study(study.problem, none, study.device, 1)
    assert "plants no faults" in measured_adequacy(study, selected((), ()), replace(options, policy=none)).sentence


# -- inputs that the measured problems lacked ---------------------------------------------------------

POST_NORM = """import torch

def run(x, residual, weight, eps):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return residual + (weight.float() * wide).bfloat16()
"""
POST_NORM_INPUTS = """import torch

AXES = {'rows': [128, 256]}

def make(seed, rows=128):
    g = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(rows, 2048, generator=g).bfloat16() for _ in range(2))
    return {'x': x, 'residual': residual, 'weight': torch.randn(2048, generator=g).bfloat16(), 'eps': 1e-6}
"""


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        ("leaves out one element of all (mean)", "covered-x"),
        ("leaves out the last element (mean)", "covered-x"),
        ("rounds the result of pow to bfloat16", "leaning-x"),
        ("has eps = 1e-06 compiled in", "tiny-other-eps"),
    ],
)
def test_faults_of_a_long_mean_beside_a_residual_die_without_a_hunt(words: str, recipe: str) -> None:
    study = Study(problem_of(Example(POST_NORM, POST_NORM_INPUTS, POST_NORM)), STANDARD, pick("cpu"), 3)
    court = Court(study)
    case = study.case(study.middle, recipe)
    assert recipe in study.tried_recipes and court.is_fair(case), "the reference as it is passes"
    fates = [Fate(m) for m in chosen_mutants(study, 400) if m.words.startswith(words)]
    assert fates and all(court.meet(fate, case) for fate in fates)
    declared = study.case(study.middle, draw=2)
    assert not any(court.meet(Fate(fate.mutant), declared) for fate in fates), "the declared inputs do not show it"


def test_each_case_is_prepared_once_however_many_mutants_meet_it(monkeypatch: pytest.MonkeyPatch) -> None:
    study = small_study("import torch\n\ndef run(x):\n    return torch.tanh(x.float()).sum(-1)\n", rows_of())
    monkeypatch.setattr(studies, "CACHE_BYTES", 1)  # nothing but the newest is kept
    court = Court(study)
    judged: list[object] = []
    whole = study.judge

    def counting(case: studies.Case, outputs: Sequence[torch.Tensor]) -> object:
        judged.append(case.key)
        return whole(case, outputs)

    monkeypatch.setattr(study, "judge", counting)
    monkeypatch.setattr(court, "_effect", lambda *given: 1.0)
    fates = [Fate(replace(Mutant("none", "changes nothing"), name=f"none {i}")) for i in range(3)]
    fates += [Fate(m) for m in chosen_mutants(study, 50) if m.is_rounding or m.is_carry]
    court.meet_policy(fates, Budget(AMPLE))
    changes = sum(a != b for a, b in pairwise(judged))
    assert len(judged) > len(set(judged)) >= 4 and changes == len(set(judged)) - 1


def test_a_length_compiled_in_dies_on_either_axis_with_few_sizes() -> None:
    inputs = (
        "import torch\n\nAXES = {'rows': [8, 256], 'depth': [5, 96]}\n\ndef make(seed, rows=8, depth=5):\n"
        "    g = torch.Generator().manual_seed(seed)\n    return {'x': torch.randn(rows, depth, 32, generator=g)}\n"
    )
    reference = "def run(x):\n    return x * 2 + 1\n"
    problem = problem_of(Example(reference, inputs, reference))
    assert problem.var_axes == ("rows", "depth")
    study = Study(problem, replace(QUICK, sizes=1), pick("cpu"), 3)
    court = Court(study)
    fates = [Fate(m) for m in chosen_mutants(study, 50) if m.axis]
    court.meet_policy(fates, Budget(AMPLE))
    assert {f.mutant.axis for f in fates if not f.alive} == {"rows", "depth"}
    assert all(court.is_fair(study.case(w)) for w in study.outside_sizes())
