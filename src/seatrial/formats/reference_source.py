"""Reference source as a callable that imports itself when it is first called.

The text is written to a private temporary folder and imported from there, because `inspect` and
`@triton.jit` need a real file. Nothing is imported before the first call, so a problem can be read
where the reference's own imports (triton, a GPU) are missing; the failure is reported by the call.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from seatrial.errors import ProblemError

_serial = itertools.count()


class ReferenceSource:
    """The module that a problem's reference text makes. `origin` is the file to blame in messages."""

    def __init__(self, source: str, origin: str) -> None:
        self._source = source
        self._origin = origin
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._module: types.ModuleType | None = None

    def function(self, name: str) -> ReferenceFunction:
        """The top-level function `name`, imported when it is first called."""
        return ReferenceFunction(self, name)

    def resolve(self, name: str) -> Any:
        """The object `name` of the imported module; raises ProblemError when it cannot be imported."""
        if self._module is None:
            self._module = self._import()
        try:
            return getattr(self._module, name)
        except AttributeError as fault:
            raise ProblemError(
                f"{self._origin}: the reference defines no '{name}' once imported; correct it"
            ) from fault

    def _import(self) -> types.ModuleType:
        self._folder = tempfile.TemporaryDirectory(prefix="seatrial-reference-")
        name = f"seatrial_reference_{next(_serial)}"
        file = Path(self._folder.name) / f"{name}.py"
        file.write_text(self._source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None, "a .py file always has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look their module up by name
        try:
            spec.loader.exec_module(module)
        except Exception as fault:  # foreign code: whatever it raises is a fact about the problem
            del sys.modules[name]
            raise ProblemError(self._cannot("be imported", fault)) from fault
        return module

    def _cannot(self, what: str, fault: Exception) -> str:
        missing = getattr(fault, "name", None) if isinstance(fault, ModuleNotFoundError) else None
        advice = f"install '{missing}'" if missing else "correct the reference or run it where it works"
        return f"{self._origin}: the reference cannot {what} here ({type(fault).__name__}: {fault}); {advice}"


class ReferenceFunction:
    """One function of a reference. Calling it raises ProblemError when its imports fail; what the
    function itself raises comes through as it is."""

    def __init__(self, module: ReferenceSource, name: str) -> None:
        self._module = module
        self.__name__ = name

    def __call__(self, *arguments: Any) -> Any:
        function = self._module.resolve(self.__name__)
        try:
            return function(*arguments)
        except ImportError as fault:
            raise ProblemError(self._module._cannot("run", fault)) from fault
