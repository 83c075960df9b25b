"""Reproducers: the file shows the fault of its candidate and nothing in the honest twin, without seatrial."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import dataclass
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
    options = Options(policy=QUICK, device=pick("cpu"), only=(CASES[name][0],), reproducers=where)
    report = verify(problem, faulty, options)[0]
    objection = next(f for f in report.findings if f.outcome is Outcome.FAILED)
    command, again = objection.reproducer.splitlines()
    file = Path(again.removeprefix("seatrial replay "))
    told = read(file)["SEATRIAL"]["elements"]
    return Made(file, Path(name), command, *told["here"], *told["in the audit"])


def run_alone(file: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """The file as anyone would run it: another folder, no seatrial to import."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    blocked = f"import sys, runpy; sys.modules['seatrial'] = None; sys.argv = {[str(file), *map(str, words)]!r}; "
    code = blocked + f"runpy.run_path({str(file)!r}, run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=file.parent,
        timeout=100,
    )


@pytest.mark.parametrize("name", CASES)
def test_alone_the_file_shows_the_fault_and_not_in_the_honest_twin(name: str, folder_of_files: Path) -> None:
    one = made(name, folder_of_files)
    faulty, honest = run_alone(one.file), run_alone(one.file, "--candidate", one.honest)
    assert faulty.returncode == 1, faulty.stdout + faulty.stderr
    assert "the fault shows" in faulty.stdout
    assert honest.returncode == 0, honest.stdout + honest.stderr
    assert "the fault does not show" in honest.stdout


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
    assert told["CASE"]["calls"][0][0]["fill"] == 0.0, "a row of zeros is the plainest that shows a forgotten epsilon"


def test_a_python_file_may_stand_in_for_the_candidate(folder_of_files: Path) -> None:
    one = made("rmsnorm", folder_of_files)
    twins = EXAMPLES / "rmsnorm" / "src"
    assert run_alone(one.file, "--candidate", twins / "honest.py").returncode == 0
    assert run_alone(one.file, "--candidate", f"{twins / 'faulty.py'}::run").returncode == 1
    assert run_alone(one.file, "--reference").returncode == 0


def test_what_cannot_run_is_no_verdict(folder_of_files: Path, tmp_path: Path) -> None:
    one = made("rmsnorm", folder_of_files)
    broken = tmp_path / "broken.py"
    broken.write_text("def run(x, norm_weight, eps):\n    raise ValueError('not today')\n")
    assert run_alone(one.file, "--candidate", broken).returncode == 3
    with pytest.raises(InfrastructureError, match="not today"):
        replay(one.file, candidate=broken)


# -- the command line -----------------------------------------------------------------------------------


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "seatrial", *map(str, words)], capture_output=True, text=True, check=False, timeout=100
    )


def test_exit_codes_of_replay(folder_of_files: Path, tmp_path: Path) -> None:
    one = made("rmsnorm", folder_of_files)
    assert command("replay", one.file).returncode == 1
    assert command("replay", one.file, "--candidate", one.honest).returncode == 0
    other = tmp_path / "other.py"
    other.write_text("import os\nos._exit(1)\n")
    unusable = command("replay", other)
    assert (unusable.returncode, unusable.stdout) == (2, "")
    assert "no reproducer" in unusable.stderr
    without_device = tmp_path / "cuda.py"
    without_device.write_text(one.file.read_text().replace("'device': 'cpu'", "'device': 'cuda:99'"))
    assert command("replay", without_device).returncode == 3


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


@pytest.mark.parametrize(
    ("check", "faulty", "honest"),
    [
        ("mutated-input", clobbering, copying),
        ("stale-output", leaving_the_tail, writing_the_tail),
        ("broken-contract", in_half, in_full),
        ("crashing-call", dying, living),
        ("replayed-result", handing_out_one_buffer, handing_out_copies),
    ],
)
def test_faults_beyond_values_have_a_file_and_their_twins_none(
    check: str, faulty: Any, honest: Any, tmp_path: Path
) -> None:
    run: dict[str, Any] = {"reference": doubled, "inputs": make_x, "policy": "quick", "device": "cpu", "only": [check]}
    assert seatrial.check(honest, **run, reproducers=tmp_path / "honest").verdict is Verdict.ACCEPTED
    assert list((tmp_path / "honest").iterdir()) == []
    rejected = seatrial.check(faulty, **run, reproducers=tmp_path / "faulty")
    assert rejected.verdict is Verdict.REJECTED
    file = Path(rejected.findings[0].reproducer.splitlines()[1].removeprefix("seatrial replay "))
    assert run_alone(file).returncode == 1
    assert replay(file).shows


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
    ids=str,
)
def test_a_tensor_survives_its_literal_bit_for_bit(value: torch.Tensor) -> None:
    blobs: dict[str, torch.Tensor] = {}
    back = tensor_of(ast.literal_eval(repr(literal_of(value, blobs, "key"))), blobs)
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert back.reshape(-1).view(torch.uint8).tolist() == value.reshape(-1).view(torch.uint8).tolist()


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
