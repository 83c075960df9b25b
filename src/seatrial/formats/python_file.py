"""A candidate that is just a Python file.

The file is parsed, never imported. Its entry point is `run` unless one is named, its calling
convention follows from the number of parameters, and the sibling modules that it imports come along.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from seatrial.errors import CandidateError
from seatrial.formats import json_files
from seatrial.model import Candidate, Problem, SourceFile

GPU_LANGUAGES = ("triton", "cutlass", "cuda", "cupy", "cudnn", "tilelang")
DEFAULT_ENTRY = "run"


def load_python_file(path: Path, *, entry_point: str | None, problem: Problem) -> Candidate:
    """The candidate in a bare `.py` file.

    `entry_point` is `function` or `file.py::function`. A function of as many parameters as there are
    inputs returns the outputs; one of inputs plus outputs writes into them. Raises CandidateError when
    the file does not parse, has no such function, or the number of parameters fits neither.
    """
    text = json_files.read_text(path, CandidateError)
    tree = _parse(text, path)
    function = _find_function(tree, path, _function_name(entry_point, path))
    sources = (SourceFile(path.name, text), *_siblings(tree, path))
    gpu = any(imports_gpu_language(ast.parse(source.content)) for source in sources)
    return Candidate(
        name=path.stem,
        languages=("triton",) if gpu and "triton" in _imported(tree) else ("python",),
        entry_point=f"{path.name}::{function.name}",
        destination_passing=_writes_outputs(function, path, len(problem.inputs), len(problem.outputs)),
        sources=sources,
        definition=problem.name,
        path=str(path),
        needs_cuda=gpu,
    )


def imports_gpu_language(tree: ast.Module) -> bool:
    """True when the source imports a language that only runs on a GPU, anywhere in it."""
    return any(name in GPU_LANGUAGES for name in _imported(tree))


def _imported(tree: ast.Module) -> set[str]:
    """Top-level names of every module that the source imports absolutely."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _parse(text: str, path: Path) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as fault:
        place = f"{path}, line {fault.lineno}, column {fault.offset}"
        raise CandidateError(f"{place}: not valid Python ({fault.msg}); correct it") from fault
    except ValueError as fault:
        raise CandidateError(f"{path} is not Python text ({fault}); correct it") from fault


def _function_name(entry_point: str | None, path: Path) -> str:
    if entry_point is None:
        return DEFAULT_ENTRY
    file, separator, function = entry_point.rpartition("::")
    if separator and Path(file).name != path.name:
        raise CandidateError(
            f"entry point '{entry_point}' names {file} but the candidate is {path}; name a function of it"
        )
    return function


def _find_function(tree: ast.Module, path: Path, name: str) -> ast.FunctionDef:
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    matches = [node for node in functions if node.name == name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        lines = ", ".join(str(node.lineno) for node in matches)
        raise CandidateError(f"{path} defines '{name}' {len(matches)} times (lines {lines}); keep one")
    others = ", ".join(node.name for node in functions) or "none"
    raise CandidateError(f"{path} has no top-level function '{name}' (it has: {others}); name one with --entry-point")


def _writes_outputs(function: ast.FunctionDef, path: Path, inputs: int, outputs: int) -> bool:
    arguments = function.args
    positional = len(arguments.posonlyargs) + len(arguments.args)
    required = positional - len(arguments.defaults)

    def takes(count: int) -> bool:
        return required <= count and (count <= positional or arguments.vararg is not None)

    if takes(inputs):
        return False
    if takes(inputs + outputs):
        return True
    raise CandidateError(
        f"{path}, line {function.lineno}: {function.name} takes {positional} parameters; it must take the {inputs} inputs "
        f"and return, or the {inputs} inputs and the {outputs} outputs and write"
    )


def _siblings(tree: ast.Module, path: Path) -> Iterator[SourceFile]:
    """The modules beside `path` that it imports, and those that they import."""
    folder, seen, pending = path.parent, {path}, [(path, tree)]
    while pending:
        importer, parsed = pending.pop()
        for file in _local_files(parsed, importer.parent, folder):
            if file not in seen and file.resolve().is_relative_to(folder.resolve()):
                seen.add(file)
                text = json_files.read_text(file, CandidateError)
                pending.append((file, _parse(text, file)))
                yield SourceFile(file.relative_to(folder).as_posix(), text)


def _local_files(tree: ast.Module, here: Path, folder: Path) -> Iterator[Path]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module_files(folder, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = folder if not node.level else here.joinpath(*[".."] * (node.level - 1)).resolve()
            yield from _module_files(base, node.module or "")
            for alias in node.names:
                yield from _module_files(base, f"{node.module}.{alias.name}" if node.module else alias.name)


def _module_files(base: Path, dotted: str) -> Iterator[Path]:
    """The files of a local module and of the packages on the way to it."""
    place = base
    for part in filter(None, dotted.split(".")):
        place = place / part
        for file in (place.with_name(f"{part}.py"), place / "__init__.py"):
            if file.is_file():
                yield file
