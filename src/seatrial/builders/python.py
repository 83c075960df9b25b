"""Python sources (PyTorch, Triton and the other languages embedded in Python) to a callable.

The entry file is imported from its place on disk under a private package name; the other files can be
imported by their own names, after everything that was there before: a source called `torch.py` or
`random.py` shadows nothing. Runs in the child only.
"""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

_PACKAGE = "seatrial_candidate"
_KEPT_LINES = 24


class BuildFailed(Exception):
    """The source could not be turned into a callable; the message is for its author."""


def build(sources: Sequence[tuple[str, str]], entry_point: str, folder: Path) -> Callable[..., Any]:
    """Writes `sources` (relative path, text) below `folder` and returns the function `entry_point` names.

    `entry_point` is "file.py::function". Raises BuildFailed when it names nothing callable, and whatever
    the candidate's own import raises.
    """
    file, _, function = entry_point.partition("::")
    _write(sources, folder)
    sys.dont_write_bytecode = True
    sys.path.append(str(folder))
    importlib.invalidate_caches()
    linecache.clearcache()
    if file not in {str(PurePosixPath(path)) for path, _ in sources}:
        raise BuildFailed(f"the entry point {entry_point!r} names a file that is not among the sources")
    return _find(_import(file, folder), function, file)


def _write(sources: Sequence[tuple[str, str]], folder: Path) -> None:
    for path, text in sources:
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts:
            raise BuildFailed(f"the source path {path!r} leaves the candidate's folder")
        target = folder / parts
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8", errors="surrogateescape")


def _import(file: str, folder: Path) -> ModuleType:
    """Under a private package, so that relative imports work and no name of ours or torch's is taken."""
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[_PACKAGE] = package
    stem = PurePosixPath(file).with_suffix("")
    name = ".".join((_PACKAGE, *stem.parts))
    if file.endswith(".py") and "." not in "".join(stem.parts):
        return importlib.import_module(name)
    return _import_oddly_named(f"{_PACKAGE}.entry", folder / file)


def _import_oddly_named(name: str, path: Path) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise BuildFailed(f"{path.name} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def _find(module: ModuleType, function: str, file: str) -> Callable[..., Any]:
    found: Any = module
    for part in function.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        there = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))[:10]
        raise BuildFailed(f"{file} defines no callable {function!r}; it has {', '.join(there) or 'none at all'}")
    return found  # type: ignore[no-any-return]


def in_own_words(error: BaseException, folder: Path) -> str:
    """The end of a traceback as its author knows it: own files by their own names, our frames left out."""
    told = traceback.TracebackException.from_exception(error)
    here = str(folder) + "/"
    own = [f for f in told.stack if f.filename.startswith(here)]
    if own:
        told.stack = traceback.StackSummary.from_list(told.stack[told.stack.index(own[0]) :])
    text = "".join(told.format()).replace(here, "").replace(f"{_PACKAGE}.", "")
    return "\n".join(text.strip().splitlines()[-_KEPT_LINES:])
