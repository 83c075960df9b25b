"""The shipped examples say what their descriptions say.

No seatrial machinery here: the JSON is read as it is, sources are run from temporary files, and the
benchmark's rule is restated in a few lines. Every faulty candidate passes that rule (or is caught by it
for the stated reason), is wrong on its trigger, and differs from its honest twin in one line.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/definition.json"))
PAIRS = [("faulty", "honest"), ("faulty_triton", "honest_triton")]
FORMS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int64": torch.int64}

torch.set_num_threads(1)


class Example:
    """One example folder: its definition, workloads and candidates, with their sources ready to call."""

    def __init__(self, name: str, scratch: Path, device: str = "cpu") -> None:
        self.folder = EXAMPLES / name
        self.scratch = scratch
        self.device = torch.device(device)
        self.definition: dict[str, Any] = json.loads((self.folder / "definition.json").read_text())
        self.workloads = [json.loads(line) for line in (self.folder / "workload.jsonl").read_text().splitlines()]
        self.module = self._import("reference", self.definition["reference"])

    def solution(self, candidate: str) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "candidates" / f"{candidate}.json").read_text())
        return loaded

    def source(self, candidate: str) -> str:
        text: str = self.solution(candidate)["sources"][0]["content"]
        return text

    def reference(self, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        return as_tuple(self.module.run(*inputs))

    def kernel(self, candidate: str) -> Callable[[Sequence[Any]], tuple[Tensor, ...]]:
        """The candidate, freshly imported, as a function from inputs to outputs in either calling style."""
        solution = self.solution(candidate)
        run = self._import(candidate, self.source(candidate)).run

        def call(inputs: Sequence[Any]) -> tuple[Tensor, ...]:
            if not solution["spec"]["destination_passing_style"]:
                return as_tuple(run(*inputs))
            outputs = tuple(torch.zeros_like(expected) for expected in self.reference(inputs))
            run(*inputs, *outputs)
            return outputs

        return call

    def inputs(self, workload: dict[str, Any], seed: int) -> list[Any]:
        """Inputs as the benchmark draws them: custom generator, scalars, ones for norm weights, else randn."""
        torch.manual_seed(seed)
        axes = {name: axis["value"] for name, axis in self.definition["axes"].items() if axis["type"] == "const"}
        axes |= workload["axes"]
        if "custom_inputs_entrypoint" in self.definition:
            drawn = getattr(self.module, self.definition["custom_inputs_entrypoint"])(axes, self.device)
            return [drawn[name] for name in self.definition["inputs"]]
        return [self._plain_input(name, workload["inputs"][name], axes) for name in self.definition["inputs"]]

    def _plain_input(self, name: str, rule: dict[str, Any], axes: dict[str, int]) -> Any:
        if rule["type"] == "scalar":
            return rule["value"]
        spec = self.definition["inputs"][name]
        shape = [axes[axis] for axis in spec["shape"]]
        draw = torch.ones if name == "norm_weight" else torch.randn
        return draw(shape, dtype=FORMS[spec["dtype"]], device=self.device)

    def _import(self, name: str, source: str) -> ModuleType:
        path = self.scratch / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(f"{self.folder.name}_{name}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def benchmark_passes(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: dict[str, float]) -> bool:
    return all(
        matched_ratio(one, other, tolerance) >= tolerance["required_matched_ratio"]
        for one, other in zip(got, expected, strict=True)
    )


def matched_ratio(got: Tensor, expected: Tensor, tolerance: dict[str, float]) -> float:
    wide, reference = got.to(torch.float32), expected.to(torch.float32)
    if not (wide.isfinite().all() and reference.isfinite().all()):
        return 0.0
    allowed = tolerance["max_atol"] + tolerance["max_rtol"] * reference.abs()
    return float(((wide - reference).abs() <= allowed).float().mean())


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Root mean square error relative to the root mean square of the exact values."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())


@pytest.fixture(params=NAMES)
def example(request: pytest.FixtureRequest, tmp_path: Path) -> Example:
    return Example(request.param, tmp_path)


def one(name: str, tmp_path: Path) -> Example:
    return Example(name, tmp_path)


# --------------------------------------------------------------------------------------------------
# What holds for every example


def test_all_five_examples_are_there() -> None:
    assert NAMES == [
        "embedding_rmsnorm_backward",
        "fused_add_rmsnorm",
        "replayed_result",
        "rmsnorm",
        "softcap_softmax",
    ]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_twins_are_one_line_apart(example: Example, pair: tuple[str, str]) -> None:
    faulty, honest = (example.source(candidate).splitlines() for candidate in pair)
    assert len(faulty) == len(honest)
    assert sum(left != right for left, right in zip(faulty, honest, strict=True)) == 1


def test_definition_names_what_the_reference_takes(example: Example) -> None:
    code = example.module.run.__code__
    assert code.co_varnames[: code.co_argcount] == tuple(example.definition["inputs"])
    for spec in (*example.definition["inputs"].values(), *example.definition["outputs"].values()):
        assert spec["description"]
        assert spec["dtype"] in FORMS


def test_reference_returns_the_declared_outputs(example: Example) -> None:
    workload = example.workloads[0]
    axes = {name: axis.get("value", workload["axes"].get(name)) for name, axis in example.definition["axes"].items()}
    outputs = example.reference(example.inputs(workload, seed=0))
    specs = example.definition["outputs"].values()
    for output, spec in zip(outputs, specs, strict=True):
        assert list(output.shape) == [axes[axis] for axis in spec["shape"]]
        assert output.dtype == FORMS[spec["dtype"]]


def test_candidates_describe_themselves(example: Example) -> None:
    for candidate in itertools.chain.from_iterable(PAIRS):
        solution = example.solution(candidate)
        language = "triton" if candidate.endswith("triton") else "pytorch"
        assert solution["definition"] == example.definition["name"] == example.folder.name
        assert solution["spec"]["languages"] == [language]
        assert solution["spec"]["entry_point"] == "kernel.py::run"
        assert solution["description"]


def test_honest_is_as_good_as_the_reference(example: Example) -> None:
    honest = example.kernel("honest")
    for workload, seed in itertools.product(example.workloads, range(2)):
        inputs = example.inputs(workload, seed)
        expected = example.reference(inputs)
        got = honest(inputs)
        assert benchmark_passes(got, expected, workload["tolerance"])
        for mine, theirs in zip(got, expected, strict=True):
            assert mine.dtype == theirs.dtype
            assert relative_error(mine, theirs) < 2**-9  # less than one bfloat16 rounding on the whole


@pytest.mark.parametrize("name", [name for name in NAMES if name != "replayed_result"])
def test_faulty_passes_the_benchmark(name: str, tmp_path: Path) -> None:
    example = one(name, tmp_path)
    faulty = example.kernel("faulty")
    for workload, seed in itertools.product(example.workloads, range(5)):
        inputs = example.inputs(workload, seed)
        assert benchmark_passes(faulty(inputs), example.reference(inputs), workload["tolerance"]), workload["uuid"]


# --------------------------------------------------------------------------------------------------
# The trigger of each fault: the faulty candidate is wrong there, its twin is not


def test_bfloat16_carry_loses_what_a_repeated_token_collects(tmp_path: Path) -> None:
    example = one("embedding_rmsnorm_backward", tmp_path)
    inputs = example.inputs(example.workloads[-1], seed=0)
    inputs[0] = (inputs[0] + 0.5).to(torch.bfloat16)  # gradients of one class of token share a trend
    inputs[1] = torch.full_like(inputs[1], 7)
    exact = example.reference(inputs)[0][7]
    assert relative_error(example.kernel("faulty")(inputs)[0][7], exact) > 0.05
    assert relative_error(example.kernel("honest")(inputs)[0][7], exact) < 2**-9


def test_bfloat16_carry_grows_with_the_repeats(tmp_path: Path) -> None:
    example = one("embedding_rmsnorm_backward", tmp_path)
    faulty = example.kernel("faulty")
    errors = []
    for repeats in (4, 64, 1024):
        inputs = example.inputs(example.workloads[-1], seed=0)
        inputs[1].view(-1)[:repeats] = 7
        errors.append(relative_error(faulty(inputs)[0][7], example.reference(inputs)[0][7]))
    assert errors[0] < errors[1] < errors[2]


def test_missing_soft_cap_shows_on_large_scores(tmp_path: Path) -> None:
    example = one("softcap_softmax", tmp_path)
    inputs = example.inputs(example.workloads[0], seed=0)
    inputs[0] = (inputs[0] * 50).to(torch.bfloat16)
    exact = example.reference(inputs)[0]
    assert relative_error(example.kernel("faulty")(inputs)[0], exact) > 0.05
    assert relative_error(example.kernel("honest")(inputs)[0], exact) < 2**-9


@pytest.mark.parametrize("tokens", [1, 63, 65, 127, 300, 4097])
def test_compiled_in_sizes_leave_other_sizes_unfinished(tokens: int, tmp_path: Path) -> None:
    example = one("fused_add_rmsnorm", tmp_path)
    workload = {**example.workloads[0], "axes": {"tokens": tokens}}
    inputs = example.inputs(workload, seed=0)
    exact = example.reference(inputs)
    faulty, honest = example.kernel("faulty")(inputs), example.kernel("honest")(inputs)
    whole = tokens < min(load["axes"]["tokens"] for load in example.workloads)  # one table entry covers these
    assert torch.equal(faulty[1], exact[1]) == whole
    assert torch.equal(honest[1], exact[1])
    assert relative_error(honest[0], exact[0]) < 2**-9


def test_missing_eps_shows_on_tiny_rows(tmp_path: Path) -> None:
    example = one("rmsnorm", tmp_path)
    inputs = example.inputs(example.workloads[0], seed=0)
    inputs[0] = (inputs[0] * 1e-4).to(torch.bfloat16)
    exact = example.reference(inputs)[0]
    assert relative_error(example.kernel("faulty")(inputs)[0], exact) > 1.0
    assert relative_error(example.kernel("honest")(inputs)[0], exact) < 2**-9
    inputs[0].zero_()
    assert example.kernel("faulty")(inputs)[0].isnan().all()
    assert not example.kernel("honest")(inputs)[0].any()


def test_replayed_result_is_right_once_per_shape(tmp_path: Path) -> None:
    example = one("replayed_result", tmp_path)
    faulty, honest = example.kernel("faulty"), example.kernel("honest")
    first, second = (example.inputs(example.workloads[0], seed) for seed in (0, 1))
    assert relative_error(faulty(first)[0], example.reference(first)[0]) < 2**-9
    assert relative_error(faulty(second)[0], example.reference(second)[0]) > 0.1
    for inputs in (first, second):
        assert relative_error(honest(inputs)[0], example.reference(inputs)[0]) < 2**-9


def test_replayed_result_fails_the_benchmark_too(tmp_path: Path) -> None:
    example = one("replayed_result", tmp_path)
    faulty = example.kernel("faulty")
    workload = example.workloads[0]
    faulty(example.inputs(workload, seed=0))
    fresh = example.inputs(workload, seed=1)
    assert not benchmark_passes(faulty(fresh), example.reference(fresh), workload["tolerance"])


def test_candidates_and_references_name_no_device(example: Example) -> None:
    for source in (example.definition["reference"], example.source("faulty"), example.source("honest")):
        assert not re.search(r"cuda|\bcpu\b", source)


# --------------------------------------------------------------------------------------------------
# The same pairs in Triton


def on_trigger(example: Example) -> list[Any]:
    """Inputs on which the faulty candidate of this example is wrong (a replay: as soon as another call went before)."""
    workload = example.workloads[-1]
    if example.definition["name"] == "fused_add_rmsnorm":
        return example.inputs({**workload, "axes": {"tokens": 1000}}, seed=0)
    inputs = example.inputs(workload, seed=10)
    match example.definition["name"]:
        case "embedding_rmsnorm_backward":
            inputs[0] = (inputs[0] + 0.5).to(torch.bfloat16)
            inputs[1] = torch.full_like(inputs[1], 7)
        case "softcap_softmax":
            inputs[0] = (inputs[0] * 50).to(torch.bfloat16)
        case "rmsnorm":
            inputs[0] = (inputs[0] * 1e-4).to(torch.bfloat16)
    return inputs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_triton_twins_behave_as_the_plain_ones(name: str, tmp_path: Path) -> None:
    example = Example(name, tmp_path, device="cuda")
    faulty, honest = example.kernel("faulty_triton"), example.kernel("honest_triton")
    for workload, seed in itertools.product(example.workloads, range(3)):
        inputs = example.inputs(workload, seed)
        expected = example.reference(inputs)
        assert benchmark_passes(honest(inputs), expected, workload["tolerance"])
        replays = name == "replayed_result" and seed > 0
        assert benchmark_passes(faulty(inputs), expected, workload["tolerance"]) != replays, workload["uuid"]
    inputs = on_trigger(example)
    exact = example.reference(inputs)[0].float()
    assert relative_error(faulty(inputs)[0].nan_to_num(), exact) > 0.03
    assert relative_error(honest(inputs)[0], exact) < 2**-8
