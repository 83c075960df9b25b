"""The formats: what loads, what is refused and in which words, how inputs are drawn, what is reported as odd."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from seatrial.errors import CandidateError, ProblemError
from seatrial.formats import FORMATS, dtypes, expressions, load_candidates, load_problem
from seatrial.formats.plain import candidate_from_callable, problem_from_callables
from seatrial.formats.sol_inputs import OnDevice, draw_random, pack_fp4
from seatrial.model import Problem, TensorSpec, Workload

SAMPLES = Path(__file__).parent / "samples" / "sol_execbench"

DEFINITION: dict[str, Any] = {
    "name": "sample",
    "axes": {"rows": {"type": "var"}, "columns": {"type": "const", "value": 4}},
    "inputs": {"x": {"shape": ["rows", "columns"], "dtype": "float32"}},
    "outputs": {"y": {"shape": ["rows", "columns"], "dtype": "float32"}},
    "reference": "def run(x):\n    return 2 * x\n",
}
WORKLOAD: dict[str, Any] = {"uuid": "w", "axes": {"rows": 3}, "inputs": {"x": {"type": "random"}}}
SOLUTION: dict[str, Any] = {
    "name": "s",
    "definition": "sample",
    "author": "a",
    "spec": {"languages": ["pytorch"], "target_hardware": ["LOCAL"], "entry_point": "kernel.py::run"},
    "sources": [{"path": "kernel.py", "content": "def run(x, y):\n    y.copy_(2 * x)\n"}],
}


def write(folder: Path, definition: dict[str, Any], *workloads: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "definition.json").write_text(json.dumps(definition))
    (folder / "workload.jsonl").write_text("".join(json.dumps(w) + "\n" for w in workloads or (WORKLOAD,)))
    return folder


def changed(record: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one dotted field set; `...` removes it."""
    record = copy.deepcopy(record)
    *parents, last = path.split(".")
    inner = record
    for key in parents:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return record


def problem_with(folder: Path, inputs: dict[str, Any], rules: dict[str, Any] | None = None, **more: Any) -> Problem:
    definition = {**DEFINITION, **more, "inputs": inputs, "reference": f"def run({', '.join(inputs)}):\n    return 1\n"}
    rules = rules or {name: {"type": "random"} for name in inputs}
    return load_problem(write(folder, definition, {**WORKLOAD, "inputs": rules}))


# ---------------------------------------------------------------------------------------------------
# The table and the samples


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_page_and_declines_politely(name: str, tmp_path: Path) -> None:
    module = FORMATS[name]
    assert name == module.NAME
    assert module.__doc__ is not None and len(module.__doc__.splitlines()) > 5
    assert module.detect(tmp_path), "an empty folder is in no format"


@pytest.mark.parametrize("sample", sorted(p.name for p in SAMPLES.iterdir()))
def test_samples_load_draw_and_run(sample: str) -> None:
    problem = load_problem(SAMPLES / sample)
    inputs = problem.draw(problem.workloads[0], 1, "cpu")
    assert list(inputs) == [spec.name for spec in problem.inputs]
    for spec in problem.inputs:
        value, shape = inputs[spec.name], dtypes.stored_shape(spec, problem.sizes(problem.workloads[0].axes))
        assert shape == (tuple(value.shape) if isinstance(value, torch.Tensor) else None)
    assert isinstance(problem.reference(*inputs.values()), torch.Tensor)


def test_both_candidates_of_the_smallest_sample_come_in_order() -> None:
    problem = load_problem(SAMPLES / "smallest")
    assert [c.name for c in load_candidates([SAMPLES / "smallest"], problem=problem)] == [
        "doubled_rows-bad",
        "doubled_rows-good",
    ]


def test_a_definition_file_stands_for_its_folder() -> None:
    assert load_problem(SAMPLES / "smallest" / "definition.json").name == load_problem(SAMPLES / "smallest").name


def test_an_unknown_path_names_the_formats_and_their_reasons(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"sol-execbench: no definition\.json"):
        load_problem(tmp_path)
    with pytest.raises(ProblemError, match="does not exist"):
        load_problem(tmp_path / "nowhere")


# ---------------------------------------------------------------------------------------------------
# Sizes and expressions

LENGTHS = {"rows": 12, "half": 5}


@pytest.mark.parametrize(
    ("expression", "length"),
    [
        ("rows", 12),
        ("rows + half - 1", 16),
        ("2 * (rows + -half)", 14),
        ("rows / 4", 3),
        ("half / 2 * 2", 5),
        ("rows // half", 2),
        ("rows % half", 2),
        ("half ** 2", 25),
        ("+rows - 12", 0),
        ("0.5 * rows", 6),
    ],
)
def test_expressions_are_arithmetic(expression: str, length: int) -> None:
    assert expressions.evaluate_length(expression, LENGTHS) == length


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("half / 2", "gives 2.5"),
        ("half - rows", "gives -7"),
        ("rows // 0", "fails"),
        ("9 ** 9 ** 9", "too large"),
        ("unknown", "not an axis known before it"),
        ("__import__('os')", "Call"),
        ("rows.real", "Attribute"),
        ("rows if half else 1", "IfExp"),
        ("True", "Constant"),
        ("rows +", "not an arithmetic expression"),
        ("+".join(["rows"] * 400), "longer than"),
        ("(-8) ** 0.5", "negative"),
    ],
)
def test_anything_else_is_no_expression(expression: str, reason: str) -> None:
    with pytest.raises(ProblemError, match=reason):
        expressions.evaluate_length(expression, LENGTHS)


def test_axes_resolve_in_order_and_digits_are_lengths(tmp_path: Path) -> None:
    axes = {
        "rows": {"type": "var"},
        "twice": {"type": "expr", "expression": "2 * rows"},
        "all": {"type": "expr", "expression": "twice + 1"},
    }
    inputs = {"x": {"shape": ["all", "3"], "dtype": "float32"}}
    problem = problem_with(tmp_path, inputs, axes=axes, outputs={"y": {"shape": [], "dtype": "float32"}})
    assert problem.sizes({"rows": 4}) == {"rows": 4, "twice": 8, "all": 9}
    assert tuple(problem.draw(problem.workloads[0], 0, "cpu")["x"].shape) == (7, 3)  # type: ignore[union-attr]
    with pytest.raises(ProblemError, match="no length for 'rows'"):
        problem.sizes({})


def test_an_expression_that_fails_names_line_and_axis(tmp_path: Path) -> None:
    definition = changed(DEFINITION, "axes.columns", {"type": "expr", "expression": "rows / 2"})
    with pytest.raises(ProblemError, match=r"workload\.jsonl, line 1: axis 'columns'.*gives 1.5"):
        load_problem(write(tmp_path, definition))


# ---------------------------------------------------------------------------------------------------
# Malformed files: one sentence that names the place


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("name", ..., "name is missing"),
        ("axes.rows", {"type": "odd"}, "axes.rows"),
        ("axes.columns.value", -1, "axes.columns.const.value"),
        ("inputs.x.dtype", "float12", "'float12' is not one of float64"),
        ("inputs.x.shape", ["height"], "axis 'height', which axes does not declare"),
        ("inputs.rows", {"shape": [], "dtype": "float32"}, "name of an axis"),
        ("outputs.x", {"shape": [], "dtype": "float32"}, "both an input and an output"),
        ("outputs", {}, "no outputs"),
        ("reference", "def run(:", "does not parse"),
        ("reference", "def walk(x): ...", "no top-level function 'run'"),
        ("reference", "def run(z): ...", r"run\(z\) does not take the inputs \(x\)"),
        ("custom_inputs_entrypoint", "make", "'make' is not a top-level function"),
    ],
)
def test_a_wrong_definition_is_refused_in_one_sentence(path: str, value: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=reason) as caught:
        load_problem(write(tmp_path, changed(DEFINITION, path, value)))
    assert "definition.json" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("uuid", ..., "uuid is missing"),
        ("axes", {}, "no length for 'rows'"),
        ("axes.rows", -1, "axes.rows"),
        ("inputs.x", {"type": "guess"}, "inputs.x"),
        ("inputs.x", {"type": "scalar"}, "value is missing"),
        ("inputs", {"x": {"type": "custom"}, "z": {"type": "random"}}, "beside custom inputs"),
        ("inputs.x", {"type": "custom"}, "no custom_inputs_entrypoint"),
        ("tolerance", {"max_atol": "wide"}, "tolerance.max_atol"),
    ],
)
def test_a_wrong_workload_is_refused_by_line(path: str, value: Any, reason: str, tmp_path: Path) -> None:
    folder = write(tmp_path, DEFINITION, WORKLOAD, changed(WORKLOAD, path, value))
    with pytest.raises(ProblemError, match=reason) as caught:
        load_problem(folder)
    assert "workload.jsonl, line 2" in str(caught.value) and "\n" not in str(caught.value)


def test_broken_json_names_file_line_and_column(tmp_path: Path) -> None:
    folder = write(tmp_path, DEFINITION)
    (folder / "workload.jsonl").write_text(json.dumps(WORKLOAD) + '\n\n{"uuid": }\n')
    with pytest.raises(ProblemError, match=r"workload\.jsonl, line 3, column 10"):
        load_problem(folder)
    (folder / "definition.json").write_text('{\n  "name": "x",\n}')
    with pytest.raises(ProblemError, match=r"definition\.json, line 3, column 1"):
        load_problem(folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[]", "found a list"),
        (b"\xff\xfe", "not UTF-8"),
        (b"", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_definition_that_is_no_object(content: bytes, reason: str, tmp_path: Path) -> None:
    folder = write(tmp_path, DEFINITION)
    (folder / "definition.json").write_bytes(content)
    with pytest.raises(ProblemError, match=reason):
        load_problem(folder)


def test_no_workload_at_all(tmp_path: Path) -> None:
    folder = write(tmp_path, DEFINITION)
    (folder / "workload.jsonl").write_text("\n")
    with pytest.raises(ProblemError, match="holds no workload"):
        load_problem(folder)


# ---------------------------------------------------------------------------------------------------
# The benchmark's random inputs: facts about the distributions


def drawn(name: str, dtype: str, shape: tuple[int, ...] | None = (512, 64), description: str = "", **more: Any) -> Any:
    spec = TensorSpec(name, None if shape is None else tuple(map(str, shape)), dtype, description)
    return draw_random(spec, {}, torch.Generator().manual_seed(7), **more)


def is_normal(values: torch.Tensor, *, sigma: float = 1.0) -> bool:
    wide = values.double()
    n = wide.numel()
    return abs(float(wide.mean())) < 5 * sigma / math.sqrt(n) and abs(float(wide.std()) / sigma - 1) < 5 / math.sqrt(n)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_plain_floats_are_standard_normal_in_their_own_type(dtype: str) -> None:
    values = drawn("x", dtype)
    assert values.dtype == dtypes.torch_dtype(dtype) and is_normal(values)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_is_clamped_at_two(dtype: str) -> None:
    values = drawn("norm_weight", dtype)
    assert values.dtype == dtypes.torch_dtype(dtype), "names decide nothing for fp8"
    assert float(values.float().abs().max()) == 2.0 and float(values.float().std()) > 0.8


@pytest.mark.parametrize("dtype", ["float4_e2m1", "float4_e2m1fn_x2"])
def test_fp4_is_packed_two_to_a_byte(dtype: str) -> None:
    values = drawn("x", dtype)
    assert values.dtype == torch.float4_e2m1fn_x2 and values.shape == (512, 32)
    codes = values.view(torch.uint8)
    assert set((codes & 7).unique().tolist()) >= set(range(7)), "all magnitudes up to 4 occur"


def test_fp4_rounds_to_its_grid_with_ties_to_even_codes_low_nibble_first() -> None:
    on_grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 99.0])
    assert pack_fp4(on_grid).view(torch.uint8).tolist() == [0x10, 0x32, 0x54, 0x76]
    assert pack_fp4(-on_grid[1:7]).view(torch.uint8).tolist() == [0xA9, 0xCB, 0xED]
    assert pack_fp4(ties).view(torch.uint8).tolist() == [0x20, 0x42, 0x64, 0x76]
    with pytest.raises(ProblemError, match="last axis even"):
        pack_fp4(torch.zeros(3))


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [("int8", -128, 128), ("int16", -1024, 1024), ("int32", -1024, 1024), ("int64", -1024, 1024), ("bool", 0, 2)],
)
def test_integers_fill_their_range(dtype: str, low: int, high: int) -> None:
    values = drawn("ids", dtype)
    assert values.dtype == dtypes.torch_dtype(dtype)
    assert (int(values.int().min()), int(values.int().max())) == (low, high - 1)


@pytest.mark.parametrize(
    "name",
    [
        "norm_weight",
        "q_norm_weight",
        "rmsnorm_weight",
        "input_layernorm_weight",
        "norm1_weight",
        "post_layernorm2_weight",
    ],
)
def test_norm_weights_are_ones_and_their_biases_zeros(name: str) -> None:
    assert bool((drawn(name, "bfloat16") == 1).all())
    assert bool((drawn(name.replace("weight", "bias"), "bfloat16") == 0).all())


@pytest.mark.parametrize("name", ["normal_weight", "norm", "normweight", "weight_norm"])
def test_names_that_only_resemble_a_norm_vary(name: str) -> None:
    assert drawn(name, "float32").unique().numel() > 1000


@pytest.mark.parametrize(
    ("name", "description"), [("attention_mask", ""), ("causal_mask", ""), ("bias", "Causal attention mask, additive")]
)
def test_a_square_causal_mask_closes_the_upper_triangle(name: str, description: str) -> None:
    mask = drawn(name, "bfloat16", (2, 8, 8), description)
    upper = torch.ones(8, 8).triu(1).bool()
    assert bool((mask[:, upper] == torch.finfo(torch.bfloat16).min).all()) and bool((mask[:, ~upper] == 0).all())


@pytest.mark.parametrize(
    ("name", "description"),
    [
        ("attention_mask", ""),
        ("x_mask", ""),
        ("drop_mask", ""),
        ("pad_mask", "1.0 for valid tokens"),
        ("pad_mask", "Binary"),
    ],
)
def test_binary_masks_are_zeros_and_ones(name: str, description: str) -> None:
    values = drawn(name, "float32", (512, 64), description)
    assert values.unique().tolist() == [0.0, 1.0] and abs(float(values.mean()) - 0.5) < 0.02


def test_a_mask_without_those_words_is_a_normal() -> None:
    assert is_normal(drawn("pad_mask", "float32"))


@pytest.mark.parametrize("name", ["cos", "sin", "cos_cached", "sin_cached", "rope_cos", "rope_sin"])
def test_rotary_tables_are_cosines_and_sines(name: str) -> None:
    values = drawn(name, "float32")
    assert float(values.abs().max()) <= 1
    assert (float(values.mean()) > 0.5) == ("cos" in name), "the cosine of a small angle is near one"


@pytest.mark.parametrize(
    "name", ["rstd", "std", "variance", "var", "x_rstd", "running_var", "rstd2", "x_std1", "in_variance"]
)
def test_statistics_are_positive(name: str) -> None:
    values = drawn(name, "float32")
    assert float(values.min()) >= 0.1 and abs(float(values.mean()) - 0.1 - math.sqrt(2 / math.pi)) < 0.02


@pytest.mark.parametrize(("name", "low", "high"), [("A_log", -5, -1), ("A", -1, -0.001), ("g", -5, 0)])
def test_decays_are_uniform_and_negative(name: str, low: float, high: float) -> None:
    values = drawn(name, "float32")
    assert low <= float(values.min()) < low + 0.01 * (high - low)
    assert high - 0.01 * (high - low) < float(values.max()) <= high


def test_cumulated_decay_falls_along_the_last_axis() -> None:
    values = drawn("A_cumsum", "float32")
    steps = values.diff(dim=-1)
    assert float(steps.max()) <= 0 and float(steps.min()) >= -0.1 - 1e-5


@pytest.mark.parametrize(
    ("name", "description"), [("routing_weights", ""), ("attn_weights", ""), ("p", "Softmax output")]
)
def test_softmax_outputs_sum_to_one(name: str, description: str) -> None:
    values = drawn(name, "float32", (512, 64), description)
    assert torch.allclose(values.sum(-1), torch.ones(512)) and float(values.min()) > 0


def test_probs_of_a_sampling_problem_are_probabilities_and_of_others_are_not() -> None:
    assert torch.allclose(drawn("probs", "float32", op_type="sampling").sum(-1), torch.ones(512))
    assert is_normal(drawn("probs", "float32"))


@pytest.mark.parametrize(
    "name", ["weight", "q_weight", "gate_proj", "o_proj_weight", "up_projs", "lm_weight_matrix", "q_proj2"]
)
def test_weight_matrices_are_scaled_by_their_fan_in(name: str) -> None:
    assert is_normal(drawn(name, "float32"), sigma=1 / 8)
    assert is_normal(drawn(name, "float32", (4096,))), "a vector is no matrix"


def test_scalars_are_python_numbers_and_0d_is_a_tensor() -> None:
    assert type(drawn("alpha", "float32", None)) is float
    assert type(drawn("count", "int32", None)) is int
    assert type(drawn("flag", "bool", None)) is bool
    assert drawn("alpha", "bfloat16", ()).shape == ()


def test_a_draw_is_a_function_of_its_seed_and_leaves_global_streams_alone() -> None:
    problem = load_problem(SAMPLES / "custom_ids")
    before = torch.get_rng_state()
    first, again, other = (problem.draw(problem.workloads[0], seed, "cpu") for seed in (1, 1, 2))
    assert torch.equal(first["grad_output"], again["grad_output"])  # type: ignore[arg-type]
    assert not torch.equal(first["grad_output"], other["grad_output"])  # type: ignore[arg-type]
    assert torch.equal(before, torch.get_rng_state())


# ---------------------------------------------------------------------------------------------------
# Scalars, custom inputs, blobs


def test_scalar_rules_pass_their_value_as_it_is(tmp_path: Path) -> None:
    inputs = {n: {"shape": None, "dtype": "float32"} for n in ("a", "b", "c")}
    rules = {
        "a": {"type": "scalar", "value": True},
        "b": {"type": "scalar", "value": 3},
        "c": {"type": "scalar", "value": 1e-6},
    }
    problem = problem_with(tmp_path, inputs, rules)
    values = problem.draw(problem.workloads[0], 0, "cpu")
    assert [(type(v), v) for v in values.values()] == [(bool, True), (int, 3), (float, 1e-6)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return {'z': 1}", "makes no 'x' but z"),
        ("return [1]", "returned list, not a dict"),
        ("return {'x': 'text'}", "makes 'x' as str"),
        ("raise KeyError('rows')", "generator 'make' fails.*KeyError"),
    ],
)
def test_a_wrong_generator_is_reported_when_it_is_used(body: str, reason: str, tmp_path: Path) -> None:
    reference = f"def make(axes, device):\n    {body}\ndef run(x):\n    return x\n"
    definition = {**DEFINITION, "reference": reference, "custom_inputs_entrypoint": "make"}
    problem = load_problem(write(tmp_path, definition, changed(WORKLOAD, "inputs.x", {"type": "custom"})))
    with pytest.raises(ProblemError, match=reason):
        problem.draw(problem.workloads[0], 0, "cpu")


def test_code_that_names_cuda_is_moved() -> None:
    with OnDevice("cpu"):
        made = torch.ones(2, device="cuda").to("cuda:1").cuda() + torch.zeros(2, device=torch.device("cuda", 0))
    assert made.device.type == "cpu" and made.tolist() == [1.0, 1.0]


BLOB_RULE = {"type": "safetensors", "path": "data/blob/set/x.safetensors", "tensor_key": "x"}
BLOB_WORKLOAD = {**WORKLOAD, "uuid": "blob", "inputs": {"x": BLOB_RULE}}


def put_blob(root: Path, tensor: torch.Tensor, key: str = "x") -> None:
    file = root / str(BLOB_RULE["path"])
    file.parent.mkdir(parents=True)
    save_file({key: tensor}, file)


@pytest.mark.parametrize("up", [0, 1, 3])
def test_blobs_are_found_beside_and_above(up: int, tmp_path: Path) -> None:
    folder = write(tmp_path.joinpath(*"abc"), DEFINITION, BLOB_WORKLOAD)
    put_blob([folder, *folder.parents][up], torch.arange(12.0).reshape(3, 4))
    problem = load_problem(folder)
    assert torch.equal(problem.draw(problem.workloads[0], 0, "cpu")["x"], torch.arange(12.0).reshape(3, 4))  # type: ignore[arg-type]
    assert not problem.resizable


def test_a_blob_root_may_be_named_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_blob(tmp_path / "far", torch.ones(3, 4))
    folder = write(tmp_path / "a" / "b" / "c" / "d" / "e", DEFINITION, BLOB_WORKLOAD)
    monkeypatch.setenv("FLASHINFER_TRACE_DIR", str(tmp_path / "far" / "data"))
    assert load_problem(folder).workloads[0].uuid == "blob"


@pytest.mark.parametrize(
    ("tensor", "key", "reason"),
    [
        (None, "x", "neither in the problem's folder nor"),
        (torch.ones(4, 4), "x", r"shape \[4, 4\] where \[3, 4\] is declared"),
        (torch.ones(3, 4).half(), "x", "float16 where float32 is declared"),
        (torch.ones(3, 4), "other", "no tensor 'x' but other"),
    ],
)
def test_a_workload_without_its_blob_is_left_out_and_the_others_stay(
    tensor: torch.Tensor | None, key: str, reason: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, DEFINITION, BLOB_WORKLOAD, WORKLOAD)
    if tensor is not None:
        put_blob(folder, tensor, key)
    problem = load_problem(folder)
    assert [w.uuid for w in problem.workloads] == ["w"]
    assert "1 of 2 workloads are left out" in problem.oddities[0]
    with pytest.raises(ProblemError, match=reason):
        load_problem(write(folder, DEFINITION, BLOB_WORKLOAD))


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret.safetensors", "data/../../x.safetensors"])
def test_a_blob_path_may_not_leave_the_folder(path: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "problem", DEFINITION, changed(BLOB_WORKLOAD, "inputs.x.path", path))
    save_file({"x": torch.ones(3, 4)}, tmp_path / "secret.safetensors")
    with pytest.raises(ProblemError, match="leaves the problem's folder"):
        load_problem(folder)


def test_a_blob_may_not_be_a_link_out_of_the_roots(tmp_path: Path) -> None:
    outside, data = tmp_path / "outside", tmp_path / "data" / "blob" / "set"
    for place in (outside, data):
        place.mkdir(parents=True)
    save_file({"x": torch.ones(3, 4)}, outside / "x.safetensors")
    folder = write(
        data.parent / "deep" / "er" / "problem", DEFINITION, changed(BLOB_WORKLOAD, "inputs.x.path", "x.safetensors")
    )
    (folder / "x.safetensors").symlink_to("/etc/hostname")
    with pytest.raises(ProblemError, match="neither in the problem's folder"):
        load_problem(folder)


# ---------------------------------------------------------------------------------------------------
# The reference


def test_a_reference_is_imported_from_a_real_file_when_it_is_called(tmp_path: Path) -> None:
    reference = "import inspect, sys\nsys.touched = True\ndef run(x):\n    return inspect.getsource(run)\n"
    problem = load_problem(write(tmp_path, {**DEFINITION, "reference": reference}))
    assert not hasattr(sys, "touched"), "loading imports nothing"
    assert problem.reference(None).startswith("def run(x)")
    del sys.touched  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "reference",
    ["import no_such_dsl\ndef run(x):\n    return x\n", "def run(x):\n    import no_such_dsl\n    return x\n"],
)
def test_a_reference_whose_imports_fail_loads_and_says_so_when_called(reference: str, tmp_path: Path) -> None:
    problem = load_problem(write(tmp_path, {**DEFINITION, "reference": reference}))
    with pytest.raises(ProblemError, match=r"definition\.json: the reference cannot .*install 'no_such_dsl'"):
        problem.reference(torch.ones(1))


def test_what_the_reference_itself_raises_comes_through(tmp_path: Path) -> None:
    problem = load_problem(write(tmp_path, {**DEFINITION, "reference": "def run(x):\n    return 1 // 0\n"}))
    with pytest.raises(ZeroDivisionError):
        problem.reference(torch.ones(1))


# ---------------------------------------------------------------------------------------------------
# Oddities


def oddities(folder: Path, definition: dict[str, Any], *workloads: dict[str, Any]) -> str:
    return "\n".join(load_problem(write(folder, definition, *workloads)).oddities)


def test_a_quiet_problem_has_no_oddities_and_a_misspelt_tolerance_is_one(tmp_path: Path) -> None:
    definition = changed(DEFINITION, "outputs.y.dtype", "bfloat16")
    right = {**WORKLOAD, "tolerance": {"required_matched_ratio": 0.98}}
    wrong = {**WORKLOAD, "tolerance": {"required_match_ratio": 0.98}}
    assert oddities(tmp_path, definition, right) == ""
    found = oddities(tmp_path, definition, wrong, wrong)
    assert "2 workloads spell the tolerance key 'required_matched_ratio' as 'required_match_ratio' (0.98)" in found
    assert found.count("\n") == 0, "the misspelt key is not reported twice"
    assert load_problem(tmp_path).workloads[0].tolerance.required_matched_ratio == 0.99


def test_unknown_keys_are_named(tmp_path: Path) -> None:
    definition = changed({**DEFINITION, "constraints": ["rows > 1"]}, "axes.rows.note", "x")
    workload = {**WORKLOAD, "weight": 2, "inputs": {"x": {"type": "random"}, "ghost": {"type": "random"}}}
    found = oddities(tmp_path, definition, workload)
    for key in ("'constraints'", "'axes.rows.note'", "'weight'", "'inputs.ghost'"):
        assert key in found


GENERATOR = "import torch\ndef make(a, device):\n    return {{'x': {}}}\ndef run(x):\n    return x\n"


@pytest.mark.parametrize(("made", "constant"), [("torch.ones(3, 4)", True), ("torch.randn(3, 4)", False)])
def test_a_generator_without_randomness_is_reported(made: str, *, constant: bool, tmp_path: Path) -> None:
    definition = {**DEFINITION, "reference": GENERATOR.format(made), "custom_inputs_entrypoint": "make"}
    found = oddities(tmp_path, definition, changed(WORKLOAD, "inputs.x", {"type": "custom"}))
    assert ("two seeds give identical inputs" in found) == constant


def test_a_generator_that_no_workload_asks_for_is_reported(tmp_path: Path) -> None:
    definition = {**DEFINITION, "reference": GENERATOR.format("torch.randn(3, 4)"), "custom_inputs_entrypoint": "make"}
    assert "'make' is declared but no workload asks" in oddities(tmp_path, definition, WORKLOAD)
    assert "no workload asks" not in oddities(tmp_path, definition, changed(WORKLOAD, "inputs.x", {"type": "custom"}))


def test_pinned_norms_are_reported_only_when_random(tmp_path: Path) -> None:
    inputs = {"norm_weight": {"shape": ["columns"], "dtype": "float32"}}
    assert any("always all ones" in o for o in problem_with(tmp_path, inputs).oddities)
    other = {"norm_width": {"shape": ["columns"], "dtype": "float32"}}
    assert not any("always all" in o for o in problem_with(tmp_path, other).oddities)


def test_whole_number_outputs_under_a_matched_ratio_are_reported(tmp_path: Path) -> None:
    assert "lets 0.01 of it be wrong" in oddities(tmp_path, changed(DEFINITION, "outputs.y.dtype", "int64"))


def test_a_tolerance_looser_than_the_type_is_reported(tmp_path: Path) -> None:
    tight = {**WORKLOAD, "tolerance": {"max_rtol": 1e-7}}
    assert "83,886 times the resolution of float32" in oddities(tmp_path, DEFINITION)
    assert "resolution" not in oddities(tmp_path, DEFINITION, tight)


def test_sparse_rows_that_the_ratio_cannot_see_are_reported(tmp_path: Path) -> None:
    definition = json.loads((SAMPLES / "custom_ids" / "definition.json").read_text())
    workload = json.loads((SAMPLES / "custom_ids" / "workload.jsonl").read_text().splitlines()[0])
    assert "more rows than there are indices" in oddities(tmp_path, definition, changed(workload, "axes.tokens", 2))
    assert "more rows than there are indices" not in oddities(tmp_path, definition, changed(workload, "axes.tokens", 3))


# ---------------------------------------------------------------------------------------------------
# Solutions


def candidate(folder: Path, solution: dict[str, Any]) -> Any:
    problem = load_problem(write(folder, DEFINITION))
    (folder / "s.json").write_text(json.dumps(solution))
    return load_candidates([folder / "s.json"], problem=problem)[0]


def test_a_solution_becomes_a_candidate(tmp_path: Path) -> None:
    c = candidate(tmp_path, SOLUTION)
    assert (c.name, c.languages, c.entry_point, c.definition, c.author) == (
        "s",
        ("pytorch",),
        "kernel.py::run",
        "sample",
        "a",
    )
    assert c.destination_passing and not c.needs_cuda and not c.not_built


def test_one_language_and_a_source_beside_the_file() -> None:
    problem = load_problem(SAMPLES / "custom_ids")
    (c,) = load_candidates([SAMPLES / "custom_ids" / "solution.json"], problem=problem)
    assert c.languages == ("python",) and "index_add_" in c.sources[0].content and not c.destination_passing


@pytest.mark.parametrize(
    ("languages", "file", "content", "needs_cuda", "built"),
    [
        (["pytorch"], "k.py", "import torch", False, True),
        (["pytorch"], "k.py", "def f():\n    from triton import jit", True, True),
        (["pytorch"], "k.py", "# import triton", False, True),
        (["triton"], "k.py", "x = 1", True, True),
        (["cute_dsl"], "k.py", "x = 1", True, True),
        (["cutile", "pytorch"], "k.py", "x = 1", True, True),
        (["cuda_cpp"], "k.cu", "int x;", True, False),
        (["cutlass", "cublas"], "k.cpp", "int x;", True, False),
    ],
)
def test_languages_say_what_a_candidate_needs(
    *,
    languages: list[str],
    file: str,
    content: str,
    needs_cuda: bool,
    built: bool,
    tmp_path: Path,
) -> None:
    solution = changed(changed(SOLUTION, "spec.languages", languages), "spec.entry_point", f"{file}::run")
    c = candidate(tmp_path, {**solution, "sources": [{"path": file, "content": content}]})
    assert (c.needs_cuda, c.not_built == "") == (needs_cuda, built)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("spec", ..., "spec is missing"),
        ("spec.languages", ["fortran"], "'fortran' is not one of"),
        ("spec.languages", ["pytorch", "cuda_cpp"], "mix Python and C"),
        ("spec.languages", [], "languages is empty"),
        ("spec.entry_point", "kernel.py", "not of the form file::function"),
        ("spec.entry_point", "other.py::run", "names 'other.py' but sources holds kernel.py"),
        ("spec.entry_point", "kernel.cu::run", "must name a .py file"),
        ("sources", [], "sources"),
        ("sources", SOLUTION["sources"] * 2, "given twice"),
        ("sources", [{"path": "../kernel.py", "content": "x"}], "leaves the solution's folder"),
        ("sources", [{"path": "/kernel.py", "content": "x"}], "leaves the solution's folder"),
        ("sources", [{"path": "a\\..\\..\\kernel.py", "content": "x"}], "leaves the solution's folder"),
        ("sources", [{"path": "kernel.py", "content": ""}], "no content and is no file beside it"),
    ],
)
def test_a_wrong_solution_is_refused_in_one_sentence(path: str, value: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(CandidateError, match=reason) as caught:
        candidate(tmp_path, changed(SOLUTION, path, value))
    assert "s.json" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            [],
            "expected a solution, one JSON object with name, spec and sources, but found a list of 0; give one object",
        ),
        ([SOLUTION] * 2, "but found a list of 2"),
        ("kernel", "but found a string"),
        ({}, "fields name, spec, sources are missing; add them"),
        ({"name": "k"}, "fields spec, sources are missing; add them"),
        (changed(SOLUTION, "name", ...), "field name is missing; add it"),
        ({"name": 7, "sources": []}, r"field name: .* \(found 7\), and 2 more: spec, sources"),
    ],
)
def test_what_was_found_and_what_is_missing_is_named(content: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(CandidateError, match=words) as caught:
        candidate(tmp_path, content)
    assert "\n" not in str(caught.value)


def test_a_source_may_not_be_a_link_out(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").symlink_to("/etc/hostname")
    with pytest.raises(CandidateError, match="links out"):
        candidate(tmp_path, changed(SOLUTION, "sources", [{"path": "kernel.py"}]))


# ---------------------------------------------------------------------------------------------------
# Bare Python files


def bare(folder: Path, source: str, entry_point: str | None = None) -> Any:
    problem = load_problem(write(folder, DEFINITION))
    (folder / "kernel.py").write_text(source)
    return load_candidates([folder / "kernel.py"], entry_point=entry_point, problem=problem)[0]


@pytest.mark.parametrize(
    ("signature", "destination_passing"),
    [("x", False), ("x, y", True), ("x, /, y", True), ("x, y=None", False), ("*tensors", False), ("x, *rest", False)],
)
def test_the_number_of_parameters_decides_how_a_bare_file_is_called(
    *,
    signature: str,
    destination_passing: bool,
    tmp_path: Path,
) -> None:
    assert bare(tmp_path, f"def run({signature}): ...").destination_passing == destination_passing


@pytest.mark.parametrize("entry_point", ["fast", "kernel.py::fast", "some/kernel.py::fast"])
def test_an_entry_point_may_be_named(entry_point: str, tmp_path: Path) -> None:
    c = bare(tmp_path, "def run(x): ...\ndef fast(x): ...\n", entry_point)
    assert c.entry_point == "kernel.py::fast" and c.name == "kernel"


@pytest.mark.parametrize(
    ("source", "entry_point", "reason"),
    [
        ("def walk(x): ...", None, r"no top-level function 'run' \(it has: walk\)"),
        ("def run(x): ...\ndef run(x): ...", None, r"2 times \(lines 1, 2\)"),
        ("def run(): ...", None, "takes 0 parameters; it must take the 1 inputs"),
        ("def run(x, y, z): ...", None, "takes 3 parameters"),
        ("def run(x:", None, "line 1, column"),
        ("def run(x): ...", "other.py::run", "names other.py but the candidate is"),
    ],
)
def test_a_bare_file_that_cannot_be_called(source: str, entry_point: str | None, reason: str, tmp_path: Path) -> None:
    with pytest.raises(CandidateError, match=reason) as caught:
        bare(tmp_path, source, entry_point)
    assert "\n" not in str(caught.value)


def test_siblings_that_are_imported_come_along_and_others_do_not(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    for name, text in {
        "pack/__init__.py": "from .inner import f",
        "pack/inner.py": "import deep",
        "deep.py": "import triton",
        "other.py": "",
    }.items():
        (tmp_path / name).write_text(text)
    c = bare(tmp_path, "from pack import inner\nimport torch\ndef run(x): ...")
    assert [s.path for s in c.sources] == ["kernel.py", "pack/__init__.py", "pack/inner.py", "deep.py"]
    assert c.needs_cuda, "deep.py imports triton"


def test_a_bare_file_is_never_imported(tmp_path: Path) -> None:
    assert bare(tmp_path, "raise SystemExit(1)\ndef run(x): ...").entry_point == "kernel.py::run"


def test_paths_that_are_no_candidate(tmp_path: Path) -> None:
    problem = load_problem(SAMPLES / "smallest")
    (tmp_path / "k.txt").write_text("")
    for path, reason in ((tmp_path / "k.txt", "neither"), (tmp_path / "no.py", "not exist"), (tmp_path, "no solution")):
        with pytest.raises(CandidateError, match=reason):
            load_candidates([path], problem=problem)


# ---------------------------------------------------------------------------------------------------
# Plain callables


def scaled(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x * factor, x.sum(-1)


MAKERS: list[Callable[..., Any]] = [
    lambda seed: (torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)), 2.0),
    lambda: [torch.randn(3, 4), 2.0],
    lambda generator: {"x": torch.randn(3, 4, generator=generator), "factor": 2.0},
]


@pytest.mark.parametrize("make", MAKERS, ids=["seed", "nothing", "generator"])
def test_a_problem_from_callables_is_named_shaped_and_seeded(make: Callable[..., Any]) -> None:
    problem = problem_from_callables(scaled, make)
    assert problem.name == "scaled" and not problem.resizable and not problem.has_benchmark_rule
    assert problem.inputs == (TensorSpec("x", ("3", "4"), "float32"), TensorSpec("factor", None, "float32"))
    assert [(o.name, o.shape) for o in problem.outputs] == [("output0", ("3", "4")), ("output1", ("3",))]
    first, again, other = (problem.draw(problem.workloads[0], seed, "cpu")["x"] for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)  # type: ignore[arg-type]


def test_dict_and_single_outputs_and_a_single_input() -> None:
    assert problem_from_callables(torch.square, lambda: torch.ones(2)).outputs[0].name == "output"
    named = problem_from_callables(lambda x: {"low": x, "high": x}, lambda: torch.ones(2))
    assert [o.name for o in named.outputs] == ["low", "high"] and named.inputs[0].name == "x"


@pytest.mark.parametrize(
    ("reference", "inputs", "reason"),
    [
        (lambda x: None, lambda: torch.ones(1), "output 'output' is NoneType"),
        (lambda x: 1 // 0, lambda: torch.ones(1), "fails on its first inputs"),
        (lambda x: x, lambda: 1 // 0, "inputs cannot be made for seed 0"),
        (lambda x: x, lambda: "text", "is str, not a tensor"),
        (lambda x: x, lambda a, b: a, "takes 2 arguments"),
    ],
)
def test_callables_that_make_no_problem(reference: Any, inputs: Any, reason: str) -> None:
    with pytest.raises(ProblemError, match=reason):
        problem_from_callables(reference, inputs)


def run_elsewhere(folder: Path, script: str) -> str:
    """Run a script as __main__, then load what it wrote in another process with only its import paths."""
    (folder / "script.py").write_text(textwrap.dedent(script))
    subprocess.run([sys.executable, str(folder / "script.py")], check=True, cwd=folder, timeout=60)
    child = (
        "import json, pickle, sys\nimport cloudpickle\n"
        "told = json.load(open('told.json'))\nsys.path[:] = told['paths'] + [p for p in sys.path if p]\n"
        "print(pickle.loads(bytes.fromhex(told['pickled']))(20))"
    )
    return subprocess.run(
        [sys.executable, "-c", child], check=True, cwd=folder, timeout=60, capture_output=True, text=True
    ).stdout.strip()


TELL = """
import json
from seatrial.formats.plain import candidate_from_callable
c = candidate_from_callable(kernel)
json.dump({"paths": c.import_paths, "pickled": c.pickled.hex()}, open("told.json", "w"))
"""


def test_a_closure_of_the_main_script_travels_by_value(tmp_path: Path) -> None:
    script = "def maker(n):\n    return lambda x: helper(x) + n\ndef helper(x):\n    return 2 * x\nkernel = maker(2)\n"
    assert run_elsewhere(tmp_path, script + TELL) == "42"


def test_a_function_of_a_module_travels_by_reference_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "lib" / "pack").mkdir(parents=True)
    (tmp_path / "lib" / "pack" / "__init__.py").write_text("")
    (tmp_path / "lib" / "pack" / "kernels.py").write_text("def kernel(x):\n    return 2 * x + 2\n")
    script = "import sys\nsys.path.append('lib')\nfrom pack.kernels import kernel\n"
    assert run_elsewhere(tmp_path, script + TELL) == "42"


def test_what_cannot_be_pickled_is_refused() -> None:
    held = (n for n in range(3))
    with pytest.raises(CandidateError, match="cannot be sent to another process"):
        candidate_from_callable(lambda x: next(held))
    with pytest.raises(CandidateError, match="cannot be called"):
        candidate_from_callable(3)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------
# Names of types


@pytest.mark.parametrize("name", dtypes.DTYPES)
def test_every_type_name_is_a_torch_type(name: str) -> None:
    again = str(dtypes.torch_dtype(name)).removeprefix("torch.")
    assert dtypes.torch_dtype(again) == dtypes.torch_dtype(name)
    assert again == (dtypes.FP4 if dtypes.is_packed_fp4(name) else name)


def test_fp4_halves_the_last_axis_only() -> None:
    sizes = {"rows": 3, "columns": 8}
    spec = TensorSpec("w", ("rows", "columns"), "float4_e2m1")
    assert (dtypes.declared_shape(spec, sizes), dtypes.stored_shape(spec, sizes)) == ((3, 8), (3, 4))
    with pytest.raises(ProblemError, match="must be even"):
        dtypes.stored_shape(spec, {"rows": 8, "columns": 3})


def test_loading_does_not_import_torch() -> None:
    script = (
        "import sys\nfrom seatrial.formats import load_problem\n"
        f"load_problem({str(SAMPLES / 'smallest')!r})\nassert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_resized_workload_draws_at_its_own_sizes() -> None:
    problem = load_problem(SAMPLES / "custom_ids")
    resized = Workload("new", {"tokens": 7}, problem.workloads[0].inputs)
    assert tuple(problem.draw(resized, 0, "cpu")["ids"].shape) == (7,)  # type: ignore[union-attr]
