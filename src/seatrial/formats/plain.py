"""Problems and candidates that are plain callables in the user's own program.

    problem = problem_from_callables(reference, make_inputs)
    candidate = candidate_from_callable(kernel)

There are no axes and no benchmark: one workload, whose shapes are those of the first draw.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from seatrial.errors import CandidateError, ProblemError
from seatrial.formats.python_file import imports_gpu_language
from seatrial.model import Candidate, InputRule, Problem, TensorSpec, Value, Workload

if TYPE_CHECKING:
    import torch

NAME = "plain"
FIRST_SEED, SECOND_SEED = 0, 1
SEED_IGNORED = "the input maker ignores its seed: two different seeds give the same values"


def problem_from_callables(
    reference: Callable[..., Any], inputs: Callable[..., Any], *, name: str | None = None
) -> Problem:
    """A problem from a reference and a function that makes its inputs.

    `inputs` takes a seed (int), a torch.Generator (a parameter named `generator`, or annotated as one)
    or nothing, and returns a dict, a tuple, a list or one tensor; one that takes nothing draws from the
    global random stream, which is seeded for it. The reference and the kernel are called with the inputs
    positionally. A dict whose keys are all parameters of the reference is put into its order first; one of
    which only some keys are, in other places, is refused. The reference runs once here, on the CPU, to learn
    the outputs. Values that two seeds do not change are an oddity of the problem. Raises ProblemError when
    either function fails or returns something else.
    """
    draw = PlainDraw(inputs, _parameter_names(reference))
    workload = Workload("inputs", {}, {})
    drawn = draw(workload, FIRST_SEED, "cpu")
    outputs = _run_once(reference, drawn)
    return Problem(
        name=name or _name_of(reference),
        format=NAME,
        inputs=tuple(_spec_of(key, value) for key, value in drawn.items()),
        outputs=tuple(_spec_of(key, value) for key, value in outputs.items()),
        workloads=(Workload("inputs", {}, {key: InputRule("custom") for key in drawn}),),
        reference=reference,
        draw=draw,
        sizes=_no_sizes,
        resizable=False,
        description=inspect.getdoc(reference) or "",
        path=inspect.getsourcefile(reference) or "" if inspect.isfunction(reference) else "",
        oddities=(SEED_IGNORED,) if _same_values(drawn, draw(workload, SECOND_SEED, "cpu")) else (),
    )


def refuse_other_order(kernel: Callable[..., Any], problem: Problem) -> None:
    """Raises CandidateError when a kernel names the inputs as the problem does, but in another order.

    Inputs travel by position, so such a kernel would be handed one in place of another without a word.
    """
    names = tuple(spec.name for spec in problem.inputs)
    clash = _misplaced(names, _parameter_names(kernel))
    if clash:
        raise CandidateError(
            f"kernel '{_name_of(kernel)}' takes `{clash}` in another place than the problem gives it "
            f"({', '.join(names)}), and inputs go by position; give its parameters that order"
        )


def candidate_from_callable(fn: Callable[..., Any], *, name: str | None = None) -> Candidate:
    """A candidate from a callable that returns its outputs.

    It travels as cloudpickle bytes: by value from `__main__`, for closures and from a module that
    imports seatrial, by reference from any other module, whose folder then stands in `import_paths`. Raises CandidateError when it
    cannot be pickled.
    """
    label = name or _name_of(fn)
    if not callable(fn):
        raise CandidateError(f"candidate '{label}' is {type(fn).__name__}, which cannot be called; give a function")
    try:
        pickled = _pickled(fn)
    except Exception as fault:  # foreign objects: pickling runs their code
        raise CandidateError(
            f"candidate '{label}' cannot be sent to another process ({type(fault).__name__}: {fault}); "
            "define it in a module or give its file"
        ) from fault
    home = _home_module(fn)
    return Candidate(
        name=label,
        languages=("python",),
        entry_point="",
        destination_passing=False,
        path=getattr(home, "__file__", "") or "",
        pickled=pickled,
        import_paths=_import_paths(home),
        needs_cuda=_needs_cuda(home),
    )


def _pickled(fn: Callable[..., Any]) -> bytes:
    """By reference as cloudpickle does, but by value from a module that imports seatrial: the child has none of it."""
    import cloudpickle  # type: ignore[import-untyped]  # it ships no types

    home = _home_module(fn)
    if home is None or home.__name__ == "__main__" or not _imports_seatrial(home):
        return bytes(cloudpickle.dumps(fn))
    cloudpickle.register_pickle_by_value(home)
    try:
        return bytes(cloudpickle.dumps(fn))
    finally:
        cloudpickle.unregister_pickle_by_value(home)


def _imports_seatrial(module: ModuleType) -> bool:
    origins = (getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in vars(module).values())
    return any(str(origin).partition(".")[0] == "seatrial" for origin in origins)


class PlainDraw:
    """Inputs by name from the user's function (model.Problem.draw)."""

    def __init__(self, make: Callable[..., Any], names: tuple[str, ...]) -> None:
        self._make = make
        self._names = names
        self._wanted = _wanted(make)

    def __call__(self, workload: Workload, seed: int, device: str) -> dict[str, Value]:
        """The inputs of this seed on `device`; raises ProblemError when they cannot be made."""
        import torch

        from seatrial.formats.sol_inputs import seeded

        with seeded(seed, "cpu"):
            try:
                made = self._call(seed)
            except Exception as fault:  # foreign code: whatever it raises is a fact about the problem
                raise ProblemError(
                    f"the inputs cannot be made for seed {seed} ({type(fault).__name__}: {fault})"
                ) from fault
        named = self._named(made)
        return {key: v.detach().to(device) if isinstance(v, torch.Tensor) else v for key, v in named.items()}

    def _call(self, seed: int) -> Any:
        import torch

        if self._wanted == "nothing":
            return self._make()
        if self._wanted == "generator":
            return self._make(torch.Generator().manual_seed(seed))
        return self._make(seed)

    def _named(self, made: Any) -> dict[str, Value]:
        import torch

        if isinstance(made, Mapping):
            named = _in_order({str(key): value for key, value in made.items()}, self._names)
        elif isinstance(made, Sequence) and not isinstance(made, str):
            fitting = self._names if len(self._names) == len(made) else tuple(f"input{i}" for i in range(len(made)))
            named = dict(zip(fitting, made, strict=True))
        else:
            named = {self._names[0] if len(self._names) == 1 else "input0": made}
        for key, value in named.items():
            if not isinstance(value, torch.Tensor | int | float | bool):
                raise ProblemError(f"input '{key}' is {type(value).__name__}, not a tensor or a number; return tensors")
        return named


def _in_order(named: dict[str, Value], parameters: tuple[str, ...]) -> dict[str, Value]:
    """The inputs as the reference takes them by position; raises ProblemError where the names say otherwise."""
    if set(named) <= set(parameters):
        named = {name: named[name] for name in parameters if name in named}
    clash = _misplaced(tuple(named), parameters)
    if clash:
        raise ProblemError(
            f"the inputs ({', '.join(named)}) go by position, and the reference takes `{clash}` in another place "
            f"({', '.join(parameters)}); name them all as the reference does and leave none out before it"
        )
    return named


def _misplaced(names: Sequence[str], parameters: Sequence[str]) -> str:
    """The first name that is a parameter, yet not the one that its position reaches; empty when there is none."""
    return next((name for i, name in enumerate(names) if name in parameters and name not in parameters[i : i + 1]), "")


def _same_values(first: Mapping[str, Value], second: Mapping[str, Value]) -> bool:
    """True when no tensor differs; where there are floating tensors, they alone count (ids may well be fixed)."""
    import torch

    pairs = [(a, second.get(name)) for name, a in first.items() if isinstance(a, torch.Tensor)]
    drawn = [pair for pair in pairs if pair[0].is_floating_point() or pair[0].is_complex()] or pairs
    return bool(drawn) and all(isinstance(b, torch.Tensor) and _alike(a, b) for a, b in drawn)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is like NaN


def _wanted(make: Callable[..., Any]) -> str:
    """What the inputs function takes: "nothing", "generator" or "seed"."""
    try:
        parameters = list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError):
        return "nothing"
    if not parameters:
        return "nothing"
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(required) > 1:
        raise ProblemError(
            f"the inputs function takes {len(required)} arguments; it may take one: a seed or a generator"
        )
    first = parameters[0]
    return "generator" if "enerator" in f"{first.name} {first.annotation}" else "seed"


def _parameter_names(reference: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(reference).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _run_once(reference: Callable[..., Any], drawn: Mapping[str, Value]) -> dict[str, Value]:
    import torch

    copies = [v.clone() if isinstance(v, torch.Tensor) else v for v in drawn.values()]
    try:
        with torch.no_grad():
            made = reference(*copies)
    except Exception as fault:  # foreign code: whatever it raises is a fact about the problem
        raise ProblemError(
            f"the reference fails on its first inputs ({type(fault).__name__}: {fault}); correct it or the inputs"
        ) from fault
    return _named_outputs(made)


def _named_outputs(made: Any) -> dict[str, Value]:
    import torch

    if isinstance(made, Mapping):
        named = {str(key): value for key, value in made.items()}
    elif isinstance(made, tuple | list):
        named = {f"output{i}": value for i, value in enumerate(made)}
    else:
        named = {"output": made}
    for key, value in named.items():
        if not isinstance(value, torch.Tensor | int | float | bool):
            raise ProblemError(
                f"reference output '{key}' is {type(value).__name__}, not a tensor or a number; return tensors"
            )
    if not named:
        raise ProblemError("the reference returns nothing; return its outputs")
    return named


def _spec_of(name: str, value: Value) -> TensorSpec:
    import torch

    if isinstance(value, torch.Tensor):
        return TensorSpec(name, tuple(str(n) for n in value.shape), _dtype_name(value.dtype))
    kinds = {bool: "bool", int: "int64", float: "float32"}
    return TensorSpec(name, None, kinds[type(value)])


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _no_sizes(axes: Mapping[str, int]) -> dict[str, int]:
    return {}


def _name_of(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))


def _home_module(fn: Callable[..., Any]) -> ModuleType | None:
    inner = inspect.unwrap(fn)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    name = getattr(inner, "__module__", None) or type(inner).__module__
    return sys.modules.get(name)


def _import_paths(home: ModuleType | None) -> tuple[str, ...]:
    """Where the child finds what the pickle names: the module's own root, then the program's own paths.

    What is installed is left out: the child has it already.
    """
    places = [Path(entry or ".").resolve() for entry in sys.path]
    file = getattr(home, "__file__", None)
    if home is not None and file and home.__name__ != "__main__":
        places.insert(0, _root_of(home.__name__, Path(file)))
    kept = [str(place) for place in places if place.is_dir() and not _is_installed(place)]
    return tuple(dict.fromkeys(kept))


def _is_installed(place: Path) -> bool:
    """True for the standard library and site-packages, false for a program inside the same prefix."""
    return any(place.is_relative_to(Path(known).resolve()) for known in sysconfig.get_paths().values())


def _root_of(module: str, file: Path) -> Path:
    """The folder from which `import module` finds `file`."""
    depth = module.count(".") + (file.name == "__init__.py")
    return file.resolve().parents[depth]


def _needs_cuda(home: ModuleType | None) -> bool:
    try:
        return home is not None and imports_gpu_language(ast.parse(inspect.getsource(home)))
    except (OSError, TypeError, SyntaxError):
        return False
