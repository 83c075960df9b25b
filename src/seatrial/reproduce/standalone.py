"""One self-contained Python file per finding: it needs torch and the candidate, and nothing of seatrial.

The file is made of literals (the shrunk inputs, the exact values of the elements at fault, the candidate's and the
reference's source) and of a short program that calls the candidate and compares. Tensors that are too much for
literals are base64 of safetensors, or a .safetensors beside the file. `read` gives the literals back without
running anything of the file.
"""

from __future__ import annotations

import ast
import base64
import math
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from typing import TYPE_CHECKING, Any

from seatrial.errors import InfrastructureError, UsageError
from seatrial.model import Candidate, Finding, OutputSlot, Problem, Value
from seatrial.reproduce.literals import literal_of
from seatrial.reproduce.nouns import Situation, Symptom
from seatrial.reproduce.shrink import numel, weight

if TYPE_CHECKING:
    from torch import Tensor

INLINE_BYTES = 256 << 10
MOST_BYTES = 64 << 20
FORMAT = 1
NAMES = ("CASE", "CANDIDATE", "REFERENCE", "BYTES", "SEATRIAL")
WIDTH = 110


class TooLargeToKeep(InfrastructureError):
    """The inputs are more than a reproducer may hold on disk; the command of the finding draws them again."""


@dataclass(frozen=True)
class Reproducer:
    """What a file says; also what is needed to have seatrial judge it again."""

    finding: Finding
    situation: Situation
    symptom: Symptom
    problem: Problem
    slots: tuple[OutputSlot, ...]
    candidate: Candidate
    device: str
    policy: str
    seed: int
    timeout_s: float
    original_elements: int
    original_weight: int

    @property
    def inputs(self) -> tuple[tuple[Value, ...], ...]:
        """Of every call, in the layout that it is made with."""
        return tuple(self.situation.inputs_of(self.problem, call) for call in range(len(self.situation.calls)))


def write(reproducer: Reproducer, path: Path) -> None:
    """Write the file, and a .safetensors beside it when its tensors are large. Raises TooLargeToKeep."""
    from safetensors.torch import save

    blobs: dict[str, Tensor] = {}
    case = _case(reproducer, blobs)
    if sum(b.numel() for b in blobs.values()) > MOST_BYTES:
        raise TooLargeToKeep(f"the inputs are more than {MOST_BYTES >> 20} MiB, which a reproducer does not keep")
    data = save(blobs) if blobs else b""
    inside = len(data) <= INLINE_BYTES
    path.parent.mkdir(parents=True, exist_ok=True)
    if not inside:
        path.with_suffix(".safetensors").write_bytes(data)
    path.write_text(
        _rendered(reproducer, case, base64.b64encode(data).decode() if inside else ""), encoding="utf-8", newline="\n"
    )


def read(path: Path) -> dict[str, Any]:
    """The literals of a reproducer by name, and its tensors under "blobs". Runs nothing of the file.

    Raises UsageError when it is no reproducer of this version, or its .safetensors is missing.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in NAMES
        }
    except (OSError, SyntaxError, ValueError, RecursionError) as fault:
        raise UsageError(f"{path} cannot be read as a reproducer ({fault}); give a file that seatrial wrote") from fault
    if set(found) != set(NAMES) or not isinstance(found["SEATRIAL"], dict):
        raise UsageError(f"{path} is no reproducer of seatrial; give a file that `--reproducers` wrote")
    if found["SEATRIAL"].get("format") != FORMAT:
        raise UsageError(f"{path} was written in another format; this version of seatrial reads format {FORMAT}")
    return {**found, "blobs": _blobs(path, found)}


def _blobs(path: Path, found: dict[str, Any]) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    beside = path.with_suffix(".safetensors")
    try:
        if found["BYTES"]:
            return dict(load(base64.b64decode(found["BYTES"])))
        return dict(load(beside.read_bytes())) if found["SEATRIAL"].get("bytes") else {}
    except (OSError, ValueError, SafetensorError) as fault:
        raise UsageError(f"the tensors of {path} cannot be read ({fault}); keep {beside.name} beside it") from fault


def file_name(finding: Finding, candidate: str, taken: set[str]) -> str:
    """A name that says candidate, check and output, and is not taken; it is added to `taken`."""
    words = "-".join(w for w in (candidate, finding.check, finding.output or "") if w)
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", words).strip("-")[:120] or "finding"
    name, n = f"{stem}.py", 2
    while name in taken:
        name, n = f"{stem}-{n}.py", n + 1
    taken.add(name)
    return name


# -- literals -----------------------------------------------------------------------------------------


def _case(reproducer: Reproducer, blobs: dict[str, Tensor]) -> dict[str, Any]:
    from seatrial.formats.dtypes import torch_dtype

    situation, symptom = reproducer.situation, reproducer.symptom
    case: dict[str, Any] = {
        "kind": situation.kind,
        "device": reproducer.device,
        "input_names": [s.name for s in reproducer.problem.inputs],
        "outputs": [
            {"name": s.name, "shape": None if s.shape is None else list(s.shape), "dtype": _dtype(torch_dtype(s.dtype))}
            for s in reproducer.slots
        ],
        "output": situation.output,
        "calls": [
            [literal_of(v, blobs, f"call {c} input {p}") for p, v in enumerate(inputs)]
            for c, inputs in enumerate(reproducer.inputs)
        ],
        "points": [
            {
                "index": list(p.index),
                "got": _number(p.got),
                "expected": _number(p.expected),
                "allowed": _number(p.allowed),
            }
            for p in symptom.points
        ],
        "timeout_s": reproducer.timeout_s,
    }
    if symptom.statistic is not None:
        told = symptom.statistic
        expected = literal_of(told.expected, blobs, "expected")
        case["statistic"] = {
            "name": told.name,
            "measured": told.measured,
            "allowed": told.allowed,
            "expected": expected,
        }
    return case


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _number(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _about(reproducer: Reproducer, *, has_bytes: bool) -> dict[str, Any]:
    finding, candidate = reproducer.finding, reproducer.candidate
    return {
        "format": FORMAT,
        "check": finding.check,
        "output": finding.output,
        "cause": finding.cause,
        "reason": finding.reason,
        "family": reproducer.situation.family,
        "problem": reproducer.problem.name,
        "problem_path": reproducer.problem.path,
        "declared": [(s.name, s.dtype) for s in reproducer.problem.inputs],
        "declared_outputs": [(s.name, s.shape, s.dtype) for s in reproducer.slots],
        "candidate": candidate.name,
        "languages": list(candidate.languages),
        "needs_cuda": candidate.needs_cuda,
        "policy": reproducer.policy,
        "seed": reproducer.seed,
        "pickled_reference": _pickled_reference(reproducer.problem),
        "bytes": has_bytes,
        "elements": {  # of all input tensors; and those that differ from the commonest value of their tensor
            "here": [numel(reproducer.situation), weight(reproducer.situation)],
            "in the audit": [reproducer.original_elements, reproducer.original_weight],
        },
    }


def _pickled_reference(problem: Problem) -> dict[str, Any]:
    if problem.reference_source:
        return {}
    from seatrial.formats.plain import candidate_from_callable

    made = candidate_from_callable(problem.reference)
    return {"pickled": base64.b64encode(made.pickled).decode(), "import_paths": list(made.import_paths)}


def _candidate(candidate: Candidate) -> str:
    if candidate.pickled:
        told = {
            "pickled": base64.b64encode(candidate.pickled).decode(),
            "import_paths": list(candidate.import_paths),
            "entry_point": "",
            "destination_passing": candidate.destination_passing,
        }
        return pformat(told, width=WIDTH, sort_dicts=False)
    sources = "".join(f"        {s.path!r}: {text_literal(s.content)},\n" for s in candidate.sources)
    return (
        f'{{\n    "entry_point": {candidate.entry_point!r},\n'
        f'    "destination_passing": {candidate.destination_passing!r},\n'
        f'    "sources": {{\n{sources}    }},\n}}'
    )


def text_literal(text: str) -> str:
    """A Python literal of a source text that can be read as it is, where triple quotes allow that."""
    for quotes in ("'''", '"""'):
        whole = f"r{quotes}{text}{quotes}"
        try:
            if ast.literal_eval(whole) == text:
                return whole
        except (SyntaxError, ValueError):
            continue
    return repr(text)


def _rendered(reproducer: Reproducer, case: dict[str, Any], data: str) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("seatrial.reproduce"),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    keeps_bytes = any("bytes" in v for inputs in case["calls"] for v in inputs if isinstance(v, dict)) or "bytes" in (
        case.get("statistic", {}).get("expected", {})
    )
    return environment.get_template("standalone.py.j2").render(
        docstring=_docstring(reproducer),
        kind=case["kind"],
        layouts=any(isinstance(v, dict) and "strides" in v for inputs in case["calls"] for v in inputs),
        points=bool(case["points"]),
        statistic=bool(case.get("statistic")),
        case=pformat(case, width=WIDTH, sort_dicts=False, compact=True),
        candidate=_candidate(reproducer.candidate),
        reference=text_literal(reproducer.problem.reference_source),
        bytes=_long(data),
        seatrial=pformat(_about(reproducer, has_bytes=keeps_bytes), width=WIDTH, sort_dicts=False, compact=True),
    )


def _long(data: str) -> str:
    if not data:
        return '""'
    return '"""\\\n' + "\n".join(textwrap.wrap(data, WIDTH)) + '\n"""'


def _docstring(reproducer: Reproducer) -> str:
    finding, situation = reproducer.finding, reproducer.situation
    # Everything in this text may be the candidate's own words: no quote or backslash of theirs ends the docstring.
    about = [
        finding.reason,
        f"check {finding.check}"
        + (f", output {finding.output}" if finding.output else "")
        + f", cause {finding.cause}",
        f"problem {reproducer.problem.name}, candidate {reproducer.candidate.name}",
    ]
    if situation.calls:
        small, large = numel(situation), reproducer.original_elements
        about.append(
            f"Here: {reproducer.symptom.words}. The inputs have {small:,} elements (in the audit {large:,}), of which "
            f"{weight(situation):,} (in the audit {reproducer.original_weight:,}) differ from the commonest value of "
            "their tensor."
        )
    if situation.kind == "values":
        about.append(
            "`expected` is what the reference gives in float64; `allowed` is the final rounding of the output's type "
            "plus as much as honest kernels of this precision leave on these inputs."
        )
    if finding.advice:
        about.append(finding.advice)
    needs = "torch and cloudpickle" if reproducer.candidate.pickled else "torch"
    about.append(
        f"It needs {needs}, and what the candidate itself imports. Run it: exit code 1 shows the fault, 0 not."
    )
    about.append("`seatrial replay` on this file judges it again in isolation; see --help for another candidate.")
    text = "\n\n".join(textwrap.fill(_harmless(words), WIDTH) for words in about)
    return f'"""{text}\n"""'


def _harmless(words: str) -> str:
    printable = "".join(c if c.isprintable() else " " for c in words)
    return " ".join(printable.replace("\\", "/").replace('"', "'").split())
