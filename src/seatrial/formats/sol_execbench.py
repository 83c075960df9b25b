"""SOL-ExecBench problem folders.

A problem is a folder with `definition.json` (axes, inputs, outputs and the reference's source) and
`workload.jsonl` (one declared case per line); tensors may come from safetensors blobs beside it or in a
data folder above it. A candidate is a `solution.json` with its sources inside or beside it.

What a person may write, and what seatrial makes of it:

- axes are constants, variables (set by each workload) or arithmetic expressions over earlier axes;
- a shape lists axis names or digits; `[]` is a 0-D tensor and `null` a Python scalar;
- both FP4 names mean two values per byte along the last axis;
- an input is random (the benchmark's own rules by type and name), a scalar, a safetensors tensor, or
  custom: made by a function of the reference's source;
- a workload whose blob is missing is left out and reported, the others are kept;
- keys that the benchmark does not know are ignored as it ignores them, and reported.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from seatrial.errors import CandidateError, ProblemError
from seatrial.formats import blobs, json_files, sol_oddities, sol_schema
from seatrial.formats.expressions import evaluate_length
from seatrial.formats.python_file import imports_gpu_language
from seatrial.formats.reference_source import ReferenceFunction, ReferenceSource
from seatrial.model import Candidate, InputRule, Problem, SourceFile, TensorSpec, Tolerance, Value, Workload

if TYPE_CHECKING:
    from torch import Tensor

NAME = "sol-execbench"
DEFINITION, WORKLOADS = "definition.json", "workload.jsonl"
A_DEFINITION = "a definition, one JSON object with name, axes, inputs, outputs and reference,"
A_SOLUTION = "a solution, one JSON object with name, spec and sources,"
NOT_BUILT = "C++ and CUDA sources are not built yet"


def detect(path: Path) -> str | None:
    """None when `path` is a problem folder or the definition.json in one."""
    folder = _folder(path)
    for name in (DEFINITION, WORKLOADS):
        if not (folder / name).is_file():
            return f"no {name} in {folder}"
    return None


def load(path: Path) -> Problem:
    """The problem in a folder; raises ProblemError when no workload of it can be used."""
    folder = _folder(path)
    definition = _read_definition(folder / DEFINITION)
    sizes = AxisSizes(definition)
    written = _read_workloads(folder / WORKLOADS, definition, sizes)
    kept, declined = _with_blobs(written, definition, sizes, folder)
    inputs = tuple(_spec(name, tensor) for name, tensor in definition.inputs.items())
    reference = ReferenceSource(definition.reference, str(folder / DEFINITION))
    draw = Draw(definition, inputs, sizes, reference, folder)
    return Problem(
        name=definition.name,
        format=NAME,
        inputs=inputs,
        outputs=tuple(_spec(name, tensor) for name, tensor in definition.outputs.items()),
        workloads=kept,
        reference=reference.function("run"),
        draw=draw,
        sizes=sizes,
        var_axes=sizes.var_axes,
        resizable=bool(sizes.var_axes) and not any(_uses(w, "safetensors") for w in kept),
        op_type=definition.op_type or "",
        description=definition.description or "",
        reference_source=definition.reference,
        path=str(folder),
        has_benchmark_rule=True,
        oddities=sol_oddities.find(definition, written, kept, declined, draw),
    )


def load_candidates(path: Path) -> list[Candidate]:
    """The solution in a JSON file, or every solution*.json of a folder."""
    if not path.is_dir():
        return [_load_solution(path)]
    files = sorted(path.glob("solution*.json"))
    if not files:
        raise CandidateError(f"{path} holds no solution*.json; name the solution's file")
    return [_load_solution(file) for file in files]


# ---------------------------------------------------------------------------------------------------
# Reading


def _folder(path: Path) -> Path:
    return path.parent if path.name in (DEFINITION, WORKLOADS) else path


def _read_definition(path: Path) -> sol_schema.Definition:
    written = json_files.read_object(path, ProblemError, wanted=A_DEFINITION)
    try:
        return sol_schema.Definition.model_validate(written)
    except ValidationError as fault:
        raise ProblemError(f"{path}: {json_files.one_sentence(fault)}") from fault


def _read_workloads(
    path: Path, definition: sol_schema.Definition, sizes: AxisSizes
) -> list[sol_schema.WrittenWorkload]:
    found = [
        _read_workload(written, f"{path}, line {number}", definition, sizes)
        for number, written in json_files.read_lines(path, ProblemError)
    ]
    if not found:
        raise ProblemError(f"{path} holds no workload; add one per line")
    return found


def _read_workload(
    written: dict[str, Any], place: str, definition: sol_schema.Definition, sizes: AxisSizes
) -> sol_schema.WrittenWorkload:
    try:
        workload = sol_schema.WrittenWorkload.model_validate(written)
        sizes(workload.axes)
    except ValidationError as fault:
        raise ProblemError(f"{place}: {json_files.one_sentence(fault)}") from fault
    except ProblemError as fault:
        raise ProblemError(f"{place}: {fault}") from fault
    if definition.custom_inputs_entrypoint is None and _uses_custom(workload):
        raise ProblemError(f"{place}: inputs are custom but definition.json names no custom_inputs_entrypoint; add it")
    return workload


def _with_blobs(
    written: list[sol_schema.WrittenWorkload], definition: sol_schema.Definition, sizes: AxisSizes, folder: Path
) -> tuple[tuple[Workload, ...], list[str]]:
    """The workloads whose blobs are all there, and why each other one is left out."""
    kept, declined = [], []
    for line in written:
        missing = _missing_blob(line, definition, sizes, folder)
        if missing:
            declined.append(f"workload {line.uuid} is left out: {missing}")
        else:
            kept.append(_workload(line))
    if not kept:
        raise ProblemError(f"{folder / WORKLOADS}: none of its {len(written)} workloads can be drawn; {declined[0]}")
    return tuple(kept), declined


def _missing_blob(
    line: sol_schema.WrittenWorkload, definition: sol_schema.Definition, sizes: AxisSizes, folder: Path
) -> str | None:
    lengths = sizes(line.axes)
    for name, rule in line.inputs.items():
        if isinstance(rule, sol_schema.SafetensorsInput) and name in definition.inputs:
            try:
                blobs.check(folder, rule.path, rule.tensor_key, _spec(name, definition.inputs[name]), lengths)
            except ProblemError as fault:
                return f"input '{name}': {fault}"
    return None


def _workload(line: sol_schema.WrittenWorkload) -> Workload:
    t = line.tolerance
    return Workload(
        uuid=line.uuid,
        axes=dict(line.axes),
        inputs={name: _rule(rule) for name, rule in line.inputs.items()},
        tolerance=Tolerance(t.max_atol, t.max_rtol, t.required_matched_ratio, t.max_error_cap, t.allow_negative_inf),
    )


def _rule(written: sol_schema.WrittenInput) -> InputRule:
    match written:
        case sol_schema.ScalarInput(value=value):
            return InputRule("scalar", value=value)
        case sol_schema.SafetensorsInput(path=path, tensor_key=key):
            return InputRule("safetensors", path=path, tensor_key=key)
        case _:
            return InputRule(written.type)


def _spec(name: str, written: sol_schema.WrittenTensor) -> TensorSpec:
    shape = None if written.shape is None else tuple(written.shape)
    return TensorSpec(name, shape, written.dtype, written.description or "")


def _uses(workload: Workload, kind: str) -> bool:
    return any(rule.kind == kind for rule in workload.inputs.values())


def _uses_custom(line: sol_schema.WrittenWorkload) -> bool:
    return any(rule.type == "custom" for rule in line.inputs.values())


# ---------------------------------------------------------------------------------------------------
# Sizes and draws


class AxisSizes:
    """Every axis name to its length at given var axes (model.Problem.sizes)."""

    def __init__(self, definition: sol_schema.Definition) -> None:
        self._axes = definition.axes
        self.var_axes = tuple(n for n, a in definition.axes.items() if isinstance(a, sol_schema.VarAxis))

    def __call__(self, axes: Mapping[str, int]) -> dict[str, int]:
        missing = [name for name in self.var_axes if name not in axes]
        if missing:
            raise ProblemError(f"axes gives no length for '{missing[0]}'; add it")
        known = {name: axis.value for name, axis in self._axes.items() if isinstance(axis, sol_schema.ConstAxis)}
        known |= {name: axes[name] for name in self.var_axes}
        for name, axis in self._axes.items():
            if isinstance(axis, sol_schema.ExprAxis):
                known[name] = _expr_length(name, axis.expression, known)
        return known


def _expr_length(name: str, expression: str, known: Mapping[str, int]) -> int:
    try:
        return evaluate_length(expression, known)
    except ProblemError as fault:
        raise ProblemError(f"axis '{name}': {fault}") from fault


class Draw:
    """The benchmark's own inputs for a workload (model.Problem.draw)."""

    def __init__(
        self,
        definition: sol_schema.Definition,
        inputs: tuple[TensorSpec, ...],
        sizes: AxisSizes,
        reference: ReferenceSource,
        folder: Path,
    ) -> None:
        self._inputs, self._sizes, self._folder = inputs, sizes, folder
        self._op_type = definition.op_type or ""
        entry = definition.custom_inputs_entrypoint
        self._generate: ReferenceFunction | None = reference.function(entry) if entry else None

    def __call__(self, workload: Workload, seed: int, device: str) -> dict[str, Value]:
        """Inputs by name in declared order, on `device`; raises ProblemError when they cannot be made."""
        import torch

        from seatrial.formats.sol_inputs import draw_random

        generator = torch.Generator(device=device).manual_seed(seed)
        custom = self._custom(workload, seed, device) if _uses(workload, "custom") else {}
        sizes = self._sizes(workload.axes)
        drawn: dict[str, Value] = {}
        for spec in self._inputs:
            rule = workload.inputs.get(spec.name, InputRule("random"))
            if rule.kind == "scalar":
                assert rule.value is not None, "the schema demands a value"
                drawn[spec.name] = rule.value
            elif rule.kind == "safetensors":
                drawn[spec.name] = self._blob(rule, spec, sizes).to(device)
            elif rule.kind == "custom":
                drawn[spec.name] = _take(custom, spec.name, device)
            else:
                drawn[spec.name] = draw_random(spec, sizes, generator, op_type=self._op_type)
        return drawn

    def _blob(self, rule: InputRule, spec: TensorSpec, sizes: Mapping[str, int]) -> Tensor:
        assert rule.path is not None and rule.tensor_key is not None, "the schema demands both"
        return blobs.read(self._folder, rule.path, rule.tensor_key, spec, sizes)

    def _custom(self, workload: Workload, seed: int, device: str) -> Mapping[str, Any]:
        import contextlib

        import torch

        from seatrial.formats.sol_inputs import OnDevice, seeded

        if self._generate is None:
            raise ProblemError(
                f"workload {workload.uuid} is custom but no generator is declared; add custom_inputs_entrypoint"
            )
        name = self._generate.__name__
        scalars = {n: r.value for n, r in workload.inputs.items() if r.kind == "scalar"}
        redirect = OnDevice(device) if device == "cpu" else contextlib.nullcontext()
        with seeded(seed, device), redirect:
            try:
                made = self._generate({**self._sizes(workload.axes), **scalars}, torch.device(device))
            except ProblemError:
                raise
            except Exception as fault:  # foreign code: whatever it raises is a fact about the problem
                raise ProblemError(
                    f"generator '{name}' fails for {dict(workload.axes)} ({type(fault).__name__}: {fault}); "
                    "correct it or leave these sizes out"
                ) from fault
        if not isinstance(made, Mapping):
            raise ProblemError(f"generator '{name}' returned {type(made).__name__}, not a dict of inputs; correct it")
        return made


def _take(custom: Mapping[str, Any], name: str, device: str) -> Value:
    import torch

    if name not in custom:
        raise ProblemError(f"the generator makes no '{name}' but {', '.join(map(str, custom))}; correct it")
    value = custom[name]
    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    if isinstance(value, bool | int | float):
        return value
    raise ProblemError(f"the generator makes '{name}' as {type(value).__name__}, not a tensor or a number; correct it")


# ---------------------------------------------------------------------------------------------------
# Candidates


def _load_solution(path: Path) -> Candidate:
    written = json_files.read_object(path, CandidateError, wanted=A_SOLUTION)
    try:
        solution = sol_schema.Solution.model_validate(written)
    except ValidationError as fault:
        raise CandidateError(f"{path}: {json_files.one_sentence(fault)}") from fault
    spec = solution.spec
    sources = tuple(SourceFile(source.path, _content(source, path)) for source in solution.sources)
    return Candidate(
        name=solution.name,
        languages=tuple(spec.languages),
        entry_point=spec.entry_point,
        destination_passing=spec.destination_passing_style,
        sources=sources,
        definition=solution.definition,
        author=solution.author,
        path=str(path),
        needs_cuda=not spec.is_python or _needs_cuda(spec.languages, sources),
        not_built="" if spec.is_python else NOT_BUILT,
    )


def _content(source: sol_schema.WrittenSource, solution: Path) -> str:
    """The source's text; an empty one is taken from the file of that name beside the solution."""
    if source.content:
        return source.content
    file = solution.parent / source.path
    if not file.resolve().is_relative_to(solution.parent.resolve()):
        raise CandidateError(f"{solution}: source '{source.path}' links out of the solution's folder; copy it in")
    if not file.is_file():
        raise CandidateError(
            f"{solution}: source '{source.path}' has no content and is no file beside it; add one of them"
        )
    return json_files.read_text(file, CandidateError)


def _needs_cuda(languages: list[str], sources: tuple[SourceFile, ...]) -> bool:
    if any(language not in ("pytorch", "python") for language in languages):
        return True
    return any(source.path.endswith(".py") and _imports_gpu(source) for source in sources)


def _imports_gpu(source: SourceFile) -> bool:
    try:
        return imports_gpu_language(ast.parse(source.content))
    except (SyntaxError, ValueError):
        return False  # it will not import either, which is a finding about the candidate
