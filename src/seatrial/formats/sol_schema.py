"""The files of a SOL-ExecBench problem as they are written: fields, defaults and the rules between them.

Keys that the benchmark does not know are kept (`model_extra`), because a misspelt key that is silently
ignored changes what the benchmark tests; `sol_oddities` reports them.
"""

from __future__ import annotations

import ast
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from seatrial.formats.dtypes import DTYPES

PYTHON_LANGUAGES = ("pytorch", "triton", "cute_dsl", "cutile", "cudnn_frontend", "python")
CPP_LANGUAGES = ("cutlass", "cudnn", "cublas", "cuda_cpp")

Text: TypeAlias = Annotated[str, Field(min_length=1)]
Length: TypeAlias = Annotated[int, Field(ge=0)]


def _known_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"element type '{name}' is not one of {', '.join(DTYPES)}")
    return name


def _infer_type(value: Any) -> Any:
    """An axis or input without a `type` is understood from the fields it has, as the benchmark does."""
    if not isinstance(value, dict) or "type" in value:
        return value
    for field, kind in (("expression", "expr"), ("tensor_key", "safetensors"), ("path", "safetensors")):
        if field in value:
            return {"type": kind, **value}
    return value


class _Written(BaseModel):
    model_config = ConfigDict(extra="allow")


class ConstAxis(_Written):
    type: Literal["const"]
    value: Length
    description: str | None = None


class VarAxis(_Written):
    type: Literal["var"]
    description: str | None = None


class ExprAxis(_Written):
    type: Literal["expr"]
    expression: Text
    description: str | None = None


def _infer_axis(value: Any) -> Any:
    value = _infer_type(value)
    if isinstance(value, dict) and "type" not in value:
        return {"type": "const" if "value" in value else "var", **value}
    return value


Axis: TypeAlias = Annotated[
    Annotated[ConstAxis | VarAxis | ExprAxis, Field(discriminator="type")], BeforeValidator(_infer_axis)
]


class WrittenTensor(_Written):
    shape: list[Text] | None
    dtype: Annotated[str, AfterValidator(_known_dtype)]
    description: str | None = None


class Definition(_Written):
    """definition.json."""

    name: Text
    op_type: str | None = None
    axes: dict[Text, Axis]
    custom_inputs_entrypoint: Text | None = None
    inputs: dict[Text, WrittenTensor]
    outputs: dict[Text, WrittenTensor]
    reference: Text
    description: str | None = None
    hf_id: str | None = None

    @model_validator(mode="after")
    def _names_agree(self) -> Definition:
        for name in self.inputs:
            if name in self.axes:
                raise ValueError(f"input '{name}' has the name of an axis; rename one of them")
            if name in self.outputs:
                raise ValueError(f"'{name}' is both an input and an output; rename one of them")
        if not self.outputs:
            raise ValueError("there are no outputs; declare at least one")
        for name, spec in (self.inputs | self.outputs).items():
            unknown = [axis for axis in spec.shape or () if axis not in self.axes and not axis.isdigit()]
            if unknown:
                raise ValueError(
                    f"'{name}' uses axis '{unknown[0]}', which axes does not declare; add it or correct the shape"
                )
        return self

    @model_validator(mode="after")
    def _reference_fits(self) -> Definition:
        functions = top_level_functions(self.reference)
        if "run" not in functions:
            raise ValueError("reference has no top-level function 'run'; add it")
        arguments = functions["run"].args
        parameters = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        if parameters != list(self.inputs):
            raise ValueError(
                f"reference run({', '.join(parameters)}) does not take the inputs ({', '.join(self.inputs)}) "
                "by the same names in the same order; correct one of them"
            )
        entry = self.custom_inputs_entrypoint
        if entry is not None and entry not in functions:
            raise ValueError(f"custom_inputs_entrypoint '{entry}' is not a top-level function of the reference; add it")
        return self


def top_level_functions(source: str) -> dict[str, ast.FunctionDef]:
    """Functions defined at the top level of Python source; raises ValueError when it does not parse."""
    try:
        tree = ast.parse(source)
    except SyntaxError as fault:
        raise ValueError(f"Python source does not parse (line {fault.lineno}: {fault.msg}); correct it") from fault
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


class RandomInput(_Written):
    type: Literal["random"]


class ScalarInput(_Written):
    type: Literal["scalar"]
    value: int | float | bool


class SafetensorsInput(_Written):
    type: Literal["safetensors"]
    path: Text
    tensor_key: Text


class CustomInput(_Written):
    type: Literal["custom"]


def _infer_input(value: Any) -> Any:
    value = _infer_type(value)
    if isinstance(value, dict) and "type" not in value:
        return {"type": "scalar" if "value" in value else "random", **value}
    return value


WrittenInput: TypeAlias = Annotated[
    Annotated[RandomInput | ScalarInput | SafetensorsInput | CustomInput, Field(discriminator="type")],
    BeforeValidator(_infer_input),
]


class WrittenTolerance(_Written):
    max_atol: float = 1e-2
    max_rtol: float = 1e-2
    required_matched_ratio: float = 0.99
    max_error_cap: float | None = None
    allow_negative_inf: bool = False


class WrittenWorkload(_Written):
    """One line of workload.jsonl."""

    uuid: Text
    axes: dict[str, Length]
    inputs: dict[str, WrittenInput]
    tolerance: WrittenTolerance = WrittenTolerance()

    @model_validator(mode="after")
    def _custom_is_alone(self) -> WrittenWorkload:
        kinds = {name: rule.type for name, rule in self.inputs.items()}
        if "custom" in kinds.values() and set(kinds.values()) != {"custom"}:
            other = next(name for name, kind in kinds.items() if kind != "custom")
            raise ValueError(f"'{other}' is {kinds[other]} beside custom inputs; make all of them custom or none")
        return self


class WrittenSource(_Written):
    path: Text
    content: str | None = None

    @model_validator(mode="after")
    def _stays_inside(self) -> WrittenSource:
        path = PurePosixPath(self.path.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or (path.parts[:1] and path.parts[0].endswith(":")):
            raise ValueError(
                f"source path '{self.path}' leaves the solution's folder; use a relative path without '..'"
            )
        return self


class CompileOptions(_Written):
    cflags: list[str] = []
    cuda_cflags: list[str] = ["-O3", "--use_fast_math"]
    ld_flags: list[str] = ["-lcuda"]


class BuildSpec(_Written):
    languages: list[str]
    target_hardware: list[str] = []
    entry_point: str
    dependencies: list[str] = []
    destination_passing_style: bool = True
    binding: str | None = None
    compile_options: CompileOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_language(cls, value: Any) -> Any:
        """Some solutions say `language` with one word."""
        if isinstance(value, dict) and "languages" not in value and isinstance(value.get("language"), str):
            return {**{k: v for k, v in value.items() if k != "language"}, "languages": [value["language"]]}
        return value

    @model_validator(mode="after")
    def _consistent(self) -> BuildSpec:
        if not self.languages:
            raise ValueError("languages is empty; name the language of the sources")
        unknown = [name for name in self.languages if name not in PYTHON_LANGUAGES + CPP_LANGUAGES]
        if unknown:
            raise ValueError(f"language '{unknown[0]}' is not one of {', '.join(PYTHON_LANGUAGES + CPP_LANGUAGES)}")
        if {name in CPP_LANGUAGES for name in self.languages} == {True, False}:
            raise ValueError(f"languages {self.languages} mix Python and C++; keep one kind")
        file, separator, function = self.entry_point.partition("::")
        if not separator or not file or not function.isidentifier():
            raise ValueError(f"entry_point '{self.entry_point}' is not of the form file::function")
        if self.is_python and not file.endswith(".py"):
            raise ValueError(f"entry_point '{self.entry_point}' must name a .py file for {', '.join(self.languages)}")
        return self

    @property
    def is_python(self) -> bool:
        return self.languages[0] in PYTHON_LANGUAGES


class Solution(_Written):
    """solution.json."""

    name: Text
    definition: str = ""
    author: str = ""
    spec: BuildSpec
    sources: Annotated[list[WrittenSource], Field(min_length=1)]
    description: str | None = None

    @model_validator(mode="after")
    def _entry_is_there(self) -> Solution:
        paths = [source.path for source in self.sources]
        twice = [path for path in paths if paths.count(path) > 1]
        if twice:
            raise ValueError(f"source '{twice[0]}' is given twice; keep one")
        entry = self.spec.entry_point.partition("::")[0]
        if entry not in paths:
            raise ValueError(f"entry_point names '{entry}' but sources holds {', '.join(paths)}; correct one of them")
        return self
