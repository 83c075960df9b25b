"""`seatrial replay FILE`: the calls of a reproducer again, in seatrial's isolation and before its judge.

Nothing of the file is executed here: its literals are read, the reference (trusted, as in every audit) runs in this
process, the candidate in a confined one.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.bench import Bench
from seatrial.errors import InfrastructureError, UsageError
from seatrial.model import Candidate, OutputSlot, Problem, SourceFile, TensorSpec, Value, Workload
from seatrial.policy import POLICIES, STANDARD
from seatrial.reproduce.literals import tensor_of
from seatrial.reproduce.nouns import KINDS, Situation
from seatrial.reproduce.standalone import read
from seatrial.reproduce.symptoms import examine
from seatrial.study import Clock, Study

SECONDS = 600.0


@dataclass(frozen=True)
class Replayed:
    """Whether the fault still shows, in one sentence for a person; `case` says how much smaller the case became."""

    shows: bool
    words: str
    case: str = ""


def replay(path: Path, *, candidate: Path | None = None, entry_point: str | None = None, device: str = "") -> Replayed:
    """Have the file's candidate (or another one) called as the file says, and judge what it gives.

    Raises UsageError when the file or the candidate cannot be understood, InfrastructureError when the calls could
    not be made or judged here.
    """
    from seatrial.devices import pick
    from seatrial.formats import load_candidates
    from seatrial.workers.process import ForkServer

    told = read(path)
    try:
        situation, problem, kernel = _situation(told), _problem(told, path), _candidate(told)
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        raise UsageError(f"{path} is damaged ({type(fault).__name__}: {fault}); write it again") from fault
    if candidate is not None:
        kernel = load_candidates([candidate], entry_point=entry_point, problem=problem)[0]
    try:
        place = pick(device or told["CASE"]["device"])
    except UsageError as fault:
        raise fault if device else InfrastructureError(str(fault)) from fault
    if kernel.not_built or (kernel.needs_cuda and not place.name.startswith("cuda")):
        raise InfrastructureError(kernel.not_built or f"{kernel.name} needs a CUDA device; this is {place.name}")
    policy = POLICIES.get(told["SEATRIAL"]["policy"], STANDARD)
    study = Study(problem, policy, place, int(told["SEATRIAL"]["seed"]))
    with ForkServer() as server:
        bench = Bench(study, kernel, server, Clock(SECONDS))
        try:
            answer = examine(study, bench, situation)
        finally:
            bench.close()
    if answer.unable:
        raise InfrastructureError(answer.unable)
    output = f" of `{told['SEATRIAL']['output']}`" if told["SEATRIAL"]["output"] else ""
    about = f"{told['SEATRIAL']['check']}{output} by {kernel.name}"
    if answer.symptom is None:
        return Replayed(False, f"{about}: the fault no longer shows", _size(told))
    return Replayed(True, f"{about}: the fault shows: {answer.symptom.words}", _size(told))


def _size(told: dict[str, Any]) -> str:
    """How far the case was shrunk; empty where the file holds no inputs."""
    counts = told["SEATRIAL"].get("elements", {})
    (here, telling), (before, told_before) = (counts.get(k, (0, 0)) for k in ("here", "in the audit"))
    if not here:
        return ""
    if (here, telling) == (before, told_before):
        return f"the case is that of the audit, not shrunk: inputs of {here:,} elements"
    return (
        f"the case was shrunk: inputs of {here:,} elements, {before:,} in the audit; {telling:,} of them differ from "
        f"the commonest value of their tensor, {told_before:,} did in the audit"
    )


def _situation(told: dict[str, Any]) -> Situation:
    case = told["CASE"]
    if case["kind"] not in KINDS:
        raise UsageError(f"{case['kind']!r} is no kind of reproducer; known are {', '.join(KINDS)}")
    calls = tuple(tuple(tensor_of(v, told["blobs"]) for v in inputs) for inputs in case["calls"])
    return Situation(case["kind"], {}, calls, case["output"], told["SEATRIAL"]["family"])


def _problem(told: dict[str, Any], path: Path) -> Problem:
    """The problem at the file's own sizes."""
    about, case = told["SEATRIAL"], told["CASE"]
    calls = case["calls"]
    shapes = [_shape(v) for v in calls[0]] if calls else [()] * len(about["declared"])
    inputs = tuple(
        TensorSpec(name, shape, dtype) for (name, dtype), shape in zip(about["declared"], shapes, strict=True)
    )
    outputs = tuple(
        TensorSpec(s.name, None if s.shape is None else _declared(s), s.dtype)
        for s in (OutputSlot(name, shape, dtype) for name, shape, dtype in about["declared_outputs"])
    )

    def draw(workload: Workload, seed: int, device: str) -> dict[str, Value]:
        return {s.name: tensor_of(v, told["blobs"]) for s, v in zip(inputs, calls[0], strict=True)}

    return Problem(
        name=about["problem"],
        format="reproducer",
        inputs=inputs,
        outputs=outputs,
        workloads=(Workload("reproducer", {}, {}),),
        reference=_reference(told, path),
        draw=draw,
        sizes=lambda axes: {},
        resizable=False,
        reference_source=told["REFERENCE"],
        path=about["problem_path"],
    )


def _shape(told: Any) -> tuple[str, ...] | None:
    return tuple(str(n) for n in told["shape"]) if isinstance(told, dict) else None


def _declared(slot: OutputSlot) -> tuple[str, ...]:
    from seatrial.formats.dtypes import is_packed_fp4

    shape = list(slot.shape or ())
    if is_packed_fp4(slot.dtype):
        shape[-1] *= 2  # two values share a byte
    return tuple(str(n) for n in shape)


def _reference(told: dict[str, Any], path: Path) -> Any:
    if told["REFERENCE"]:
        from seatrial.formats.reference_source import ReferenceSource

        return ReferenceSource(told["REFERENCE"], str(path)).function("run")
    return _PickledReference(told["SEATRIAL"]["pickled_reference"])


class _PickledReference:
    """A reference that was a Python object; unpickled when it is first called."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self._function: Any = None

    def __call__(self, *inputs: Value) -> Any:
        if self._function is None:
            self._function = self._load()
        return self._function(*inputs)

    def _load(self) -> Any:
        import sys

        import cloudpickle  # type: ignore[import-untyped]  # it ships no types

        added = [p for p in self._told["import_paths"] if p not in sys.path]
        sys.path += added
        try:
            return cloudpickle.loads(base64.b64decode(self._told["pickled"]))
        finally:
            for place in added:
                sys.path.remove(place)


def _candidate(told: dict[str, Any]) -> Candidate:
    about, given = told["SEATRIAL"], told["CANDIDATE"]
    return Candidate(
        name=about["candidate"],
        languages=tuple(about["languages"]),
        entry_point=given["entry_point"],
        destination_passing=given["destination_passing"],
        sources=tuple(SourceFile(path, text) for path, text in given.get("sources", {}).items()),
        pickled=base64.b64decode(given.get("pickled", "")),
        import_paths=tuple(given.get("import_paths", ())),
        needs_cuda=about["needs_cuda"],
    )
