"""The five example folders: each faulty candidate is rejected for its cause, each honest twin accepted, on fresh seeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.devices import pick
from seatrial.formats import load_candidates, load_problem
from seatrial.model import Outcome, Report, Verdict
from seatrial.policy import QUICK
from seatrial.verify import Options, verify

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SEEDS = 10

# folder -> (check that must object, output it names, cause, words of its reason)
CAUSES = {
    "embedding_rmsnorm_backward": ("narrow-accumulator", "grad_embed_weight", "accumulator:bfloat16", "bfloat16"),
    "softcap_softmax": ("fitted-inputs", None, "values:", "wrong beyond rounding"),
    "fused_add_rmsnorm": ("fitted-sizes", None, "values:", "wrong beyond rounding"),
    "rmsnorm": ("fitted-inputs", None, "values:", "wrong beyond rounding"),
    "replayed_result": ("replayed-result", None, "replayed", "of call 1 again"),
}


def audit(folder: str, *, plants_faults: bool) -> list[Report]:
    problem = load_problem(EXAMPLES / folder)
    pair = [EXAMPLES / folder / "candidates" / f"{n}.json" for n in ("faulty", "honest")]
    candidates = load_candidates(pair, entry_point=None, problem=problem)
    policy = QUICK if plants_faults else replace(QUICK, mutants=0)
    return verify(problem, candidates, Options(policy=policy, device=pick("cpu")))


def test_every_example_folder_is_covered() -> None:
    assert sorted(p.name for p in EXAMPLES.iterdir() if p.is_dir()) == sorted(CAUSES)


@pytest.mark.parametrize("draw", range(SEEDS))
@pytest.mark.parametrize("folder", CAUSES)
def test_faulty_is_rejected_for_its_cause_and_its_twin_accepted(folder: str, draw: int) -> None:
    check, output, cause, words = CAUSES[folder]
    faulty, honest = audit(folder, plants_faults=draw < 2)  # how strong the inputs are is the same question each time
    objections = [f for f in faulty.findings if f.outcome is Outcome.FAILED]
    assert faulty.verdict is Verdict.REJECTED
    assert any(
        f.check == check and f.cause.startswith(cause) and words in f.reason and output in (None, f.output)
        for f in objections
    ), [(f.check, f.output, f.reason) for f in objections]
    troubles = [(f.check, f.reason, f.where.seed) for f in honest.findings if f.outcome is not Outcome.HELD]
    assert honest.verdict is Verdict.ACCEPTED, (honest.seeds, troubles)
