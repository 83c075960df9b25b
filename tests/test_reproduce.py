"""Reproducers: the file shows the fault of its candidate and nothing in the honest twin, without seatrial."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import seatrial
from seatrial import Outcome, UsageError, Verdict
from seatrial.devices import pick
from seatrial.errors import InfrastructureError
from seatrial.formats import load_candidates, load_problem
from seatrial.policy import QUICK
from seatrial.reproduce.literals import literal_of, tensor_of
from seatrial.reproduce.replay import replay
from seatrial.reproduce.standalone import read, text_literal
from seatrial.verify import Options, verify

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# folder -> the check that names the fault, how much of the inputs' elements and of their content may be left
CASES = {
    "embedding_rmsnorm_backward": ("narrow-accumulator", 0.9, 0.02),
    "softcap_softmax": ("fitted-inputs", 0.01, 0.01),
    "fused_add_rmsnorm": ("fitted-sizes", 1.0, 0.1),
    "rmsnorm": ("fitted-inputs", 0.2, 0.02),
    "replayed_result": ("replayed-result", 0.01, 0.01),
}


@dataclass(frozen=True)
class Made:
    """The first file of an audit of a faulty example."""

    file: Path
    folder: Path
    command: str
    elements: int
    weight: int
    elements_before: int
    weight_before: int

    @property
    def honest(self) -> Path:
        return EXAMPLES / self.folder / "candidates" / "honest.json"


_made: dict[str, Made] = {}


@pytest.fixture(scope="module")
def folder_of_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reproducers")


def made(name: str, where: Path) -> Made:
    if name not in _made:
        _made[name] = make(name, where / name)
    return _made[name]


def make(name: str, where: Path) -> Made:
    problem = load_problem(EXAMPLES / name)
    faulty = load_candidates([EXAMPLES / name / "candidates" / "faulty.json"], entry_point=None, problem=problem)
    policy = replace(
        QUICK, probes=1, growth=3, workloads=1, shrink_s=60.0, shrink_calls=40
    )  # bounded by calls: repeatable
    options = Options(policy=policy, device=pick("cpu"), only=(CASES[name][0],), reproducers=where)
    report = verify(problem, faulty, options)[0]
    objection = next(f for f in report.findings if f.outcome is Outcome.FAILED)
    command, again = objection.reproducer.splitlines()
    file = Path(again.removeprefix("seatrial replay "))
    told = read(file)["SEATRIAL"]["elements"]
    return Made(file, Path(name), command, *told["here"], *told["in the audit"])


ALONE = """
import runpy, sys
sys.modules["seatrial"] = None
for words in {calls!r}:
    sys.argv = [{file!r}, *words]
    for name in [m for m in sys.modules if m.startswith("candidate_under_trial")]:
        del sys.modules[name]
    try:
        runpy.run_path({file!r}, run_name="__main__")
    except SystemExit as ended:
        print("exit code", ended.code, flush=True)
"""


def run_alone(file: Path, *calls: list[str]) -> list[int]:
    """Exit codes of the file run as anyone would, from another folder and without a seatrial to import."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    code = ALONE.format(file=str(file), calls=calls or ([],))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd="/", timeout=100
    )
    codes = [int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("exit code")]
    assert len(codes) == len(calls or ([],)), done.stdout + done.stderr
    return codes


@pytest.mark.parametrize("name", CASES)
def test_alone_the_file_shows_the_fault_and_not_in_the_honest_twin(name: str, folder_of_files: Path) -> None:
    one = made(name, folder_of_files)
    assert run_alone(one.file, [], ["--candidate", str(one.honest)]) == [1, 0]


@pytest.mark.parametrize("name", CASES)
def test_replayed_in_isolation_it_shows_and_not_in_the_honest_twin(name: str, folder_of_files: Path) -> None:
    one = made(name, folder_of_files)
    assert replay(one.file).shows
    assert not replay(one.file, candidate=one.honest).shows


@pytest.mark.parametrize("name", CASES)
def test_the_case_is_smaller_than_the_audits(name: str, folder_of_files: Path) -> None:
    one = made(name, folder_of_files)
    _, elements, weight = CASES[name]
    assert one.elements <= elements * one.elements_before
    assert one.weight <= weight * one.weight_before


def test_the_file_needs_no_bytes_where_literals_do(folder_of_files: Path) -> None:
    told = read(made("rmsnorm", folder_of_files).file)
    assert told["blobs"] == {}
    fill = told["CASE"]["calls"][0][0]["fill"]
    assert fill**2 < 1e-4, "a row of one value, zero or so small that the forgotten epsilon decides"


def test_a_narrow_carry_shows_by_more_than_one_rounding(folder_of_files: Path) -> None:
    told = read(made("embedding_rmsnorm_backward", folder_of_files).file)
    worst = told["CASE"]["points"][0]
    assert abs(worst["got"] - worst["expected"]) >= 4 * worst["allowed"] > 0


def test_a_python_file_may_stand_in_for_the_candidate(folder_of_files: Path) -> None:
    one = made("rmsnorm", folder_of_files)
    twins = EXAMPLES / "rmsnorm" / "src"
    calls = ["--candidate", f"{twins / 'honest.py'}"], ["--candidate", f"{twins / 'faulty.py'}::run"], ["--reference"]
    assert run_alone(one.file, *calls) == [0, 1, 0]


def test_what_cannot_run_is_no_verdict(folder_of_files: Path, tmp_path: Path) -> None:
    one = made("rmsnorm", folder_of_files)
    broken = tmp_path / "broken.py"
    broken.write_text("def run(x, norm_weight, eps):\n    raise ValueError('not today')\n")
    assert run_alone(one.file, ["--candidate", str(broken)]) == [3]
    with pytest.raises(InfrastructureError, match="not today"):
        replay(one.file, candidate=broken)


# -- the command line -----------------------------------------------------------------------------------


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "seatrial", *map(str, words)], capture_output=True, text=True, check=False, timeout=100
    )


def test_exit_codes_of_replay(folder_of_files: Path, tmp_path: Path) -> None:
    one = made("rmsnorm", folder_of_files)
    replayed = command("replay", one.file)
    assert replayed.returncode == 1
    assert len(replayed.stdout.splitlines()) == 2
    assert f"shrunk: inputs of {one.elements:,} elements, {one.elements_before:,} in the audit;" in replayed.stdout
    other = tmp_path / "other.py"
    other.write_text("import os\nos._exit(1)\n")
    unusable = command("replay", other)
    assert (unusable.returncode, unusable.stdout) == (2, "")
    assert "no reproducer" in unusable.stderr
    without_device = tmp_path / "cuda.py"
    without_device.write_text(one.file.read_text().replace("'device': 'cpu'", "'device': 'cuda:99'"))
    with pytest.raises(InfrastructureError, match="cuda:99"):  # the command line makes it exit code 3
        replay(without_device)


def test_replay_says_when_a_case_is_the_audits_own(folder_of_files: Path, tmp_path: Path) -> None:
    one = made("rmsnorm", folder_of_files)
    told = read(one.file)["SEATRIAL"]["elements"]
    whole = tmp_path / "whole.py"
    whole.write_text(one.file.read_text().replace(f"'in the audit': {told['in the audit']}", f"'in the audit': {told['here']}"))  # fmt: skip
    assert replay(whole).case == f"the case is that of the audit, not shrunk: inputs of {told['here'][0]:,} elements"
    assert replay(whole, candidate=one.honest).case == replay(whole).case


def test_replay_executes_nothing_of_the_file(folder_of_files: Path, tmp_path: Path) -> None:
    one = made("rmsnorm", folder_of_files)
    trap = tmp_path / "trap.py"
    mark = tmp_path / "executed"
    trap.write_text(f"{one.file.read_text()}\nopen({str(mark)!r}, 'w').close()\n")
    assert replay(trap).shows
    assert not mark.exists()


def test_without_the_option_there_is_one_command_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = seatrial.check(clobbering, reference=doubled, inputs=make_x, policy="quick", only=["mutated-input"])
    objection = next(f for f in report.findings if f.outcome is Outcome.FAILED)
    assert "\n" not in objection.reproducer
    assert list(tmp_path.iterdir()) == []


# -- every other kind, from Python ------------------------------------------------------------------------


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def make_x(seed: int) -> dict[str, Any]:
    return {"x": torch.randn(64, 33, generator=torch.Generator().manual_seed(seed))}


def clobbering(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2).clone()


def copying(x: torch.Tensor) -> torch.Tensor:
    return x.mul(2).clone()


def leaving_the_tail(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    y[:, : x.shape[1] // 32 * 32] = x[:, : x.shape[1] // 32 * 32] * 2
    return y


def writing_the_tail(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    y[:, : x.shape[1]] = x[:, : x.shape[1]] * 2
    return y


def in_half(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).half()


def in_full(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).float()


def dying(x: torch.Tensor) -> torch.Tensor:
    os.abort()
    return x * 2


def living(x: torch.Tensor) -> torch.Tensor:
    os.getpid()
    return x * 2


KEPT: list[torch.Tensor] = []


def handing_out_one_buffer(x: torch.Tensor) -> torch.Tensor:
    KEPT[:] = KEPT or [torch.empty_like(x)]
    return KEPT[0].copy_(x * 2)


def handing_out_copies(x: torch.Tensor) -> torch.Tensor:
    KEPT[:] = KEPT or [torch.empty_like(x)]
    return KEPT[0].copy_(x * 2).clone()


def taking_rows_for_dense(x: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(x, x.shape, (x.shape[1], 1)) * 2


def taking_rows_as_they_lie(x: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(x, x.shape, x.stride()) * 2


@pytest.mark.parametrize(
    ("check", "faulty", "honest"),
    [
        ("assumed-layout", taking_rows_for_dense, taking_rows_as_they_lie),
        ("mutated-input", clobbering, copying),
        ("stale-output", leaving_the_tail, writing_the_tail),
        ("broken-contract", in_half, in_full),
        ("crashing-call", dying, living),
        ("replayed-result", handing_out_one_buffer, handing_out_copies),
    ],
)
def test_faults_beyond_values_have_a_file_that_passes_their_twins(
    check: str, faulty: Any, honest: Any, tmp_path: Path
) -> None:
    report = seatrial.check(
        faulty,
        reference=doubled,
        inputs=make_x,
        policy="quick",
        device="cpu",
        only=[check],
        any_layout=True,
        reproducers=tmp_path / "files",
    )
    assert report.verdict is Verdict.REJECTED
    file = Path(report.findings[0].reproducer.splitlines()[1].removeprefix("seatrial replay "))
    twin = tmp_path / "twin.py"
    twin.write_text(f"import os\nimport torch\nKEPT = []\n\n{inspect.getsource(honest)}")
    assert run_alone(file, [], ["--candidate", f"{twin}::{honest.__name__}"]) == [1, 0]
    assert replay(file).shows


def off_beyond_one_and_not_a_number_at_nought(x: torch.Tensor) -> torch.Tensor:
    doubled = torch.where(x > 1, x * 2.25, x * 2)
    return torch.where(x == 0, torch.full_like(x, float("nan")), doubled)


def test_shrinking_does_not_turn_a_fault_into_another(tmp_path: Path) -> None:
    seatrial.check(
        off_beyond_one_and_not_a_number_at_nought,
        reference=doubled,
        inputs=make_x,
        policy="quick",
        device="cpu",
        only=["wrong-values"],
        reproducers=tmp_path,
    )
    (file,) = tmp_path.glob("*.py")
    told = read(file)
    assert told["SEATRIAL"]["elements"]["here"] < told["SEATRIAL"]["elements"]["in the audit"]
    assert all(p["expected"] > 2 and p["got"] == pytest.approx(1.125 * p["expected"]) for p in told["CASE"]["points"])


def test_an_honest_kernel_gets_no_file(tmp_path: Path) -> None:
    report = seatrial.check(
        copying, reference=doubled, inputs=make_x, policy="quick", only=["mutated-input"], reproducers=tmp_path
    )
    assert report.verdict is Verdict.ACCEPTED
    assert list(tmp_path.iterdir()) == []


# -- literals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3, 4, dtype=torch.bfloat16),
        torch.tensor([1.5, float("nan"), float("-inf"), -0.0]),
        torch.full((64, 64), 7),
        torch.arange(5000).reshape(50, 100),
        torch.randn(40, 40).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.tensor(2.0),
        torch.tensor(2**62 + 1),
    ],
    ids=lambda value: f"{value.dtype} {tuple(value.shape)}",
)
def test_a_tensor_survives_its_literal_bit_for_bit(value: torch.Tensor) -> None:
    blobs: dict[str, torch.Tensor] = {}
    back = tensor_of(ast.literal_eval(repr(literal_of(value, blobs, "key"))), blobs)
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert back.reshape(-1).view(torch.uint8).tolist() == value.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(24.0).reshape(4, 6).T,
        torch.arange(24.0).reshape(4, 6)[1:, :5],
        torch.randn(3, 1000)[:, 1:],
        torch.tensor([3.0]).expand(4, 5),
        torch.arange(9, dtype=torch.bfloat16)[1:],
    ],
    ids=lambda value: f"{tuple(value.shape)} by {value.stride()} from {value.storage_offset()}",
)
def test_so_do_its_strides_and_offset(value: torch.Tensor) -> None:
    blobs: dict[str, torch.Tensor] = {}
    back = tensor_of(ast.literal_eval(repr(literal_of(value, blobs, "key"))), blobs)
    assert torch.equal(back, value)
    assert (back.stride(), back.storage_offset()) == (value.stride(), value.storage_offset())


@pytest.mark.parametrize("text", ["", "a = '''x'''\n", 'b = r"""\'\'\'"""\\', "line\r\nend\\", "'"])
def test_a_source_survives_its_literal(text: str) -> None:
    assert ast.literal_eval(text_literal(text)) == text


@pytest.mark.parametrize("text", ["", "CASE = 1\n", "def f(:\n", "CASE = CANDIDATE = 3\n"])
def test_other_files_are_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    file = tmp_path / "any.py"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        read(file)
    assert "\n" not in str(error.value)
