"""What a person should know about a SOL-ExecBench problem before trusting its benchmark: one sentence each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel

from seatrial.errors import ProblemError
from seatrial.formats import sol_names, sol_schema
from seatrial.formats.dtypes import RESOLUTION, declared_shape
from seatrial.model import TensorSpec, Value, Workload

if TYPE_CHECKING:
    Draw = Callable[[Workload, int, str], dict[str, Value]]

MISSPELT = {"required_match_ratio": "required_matched_ratio"}
CHEAP_DRAW = 2**20  # elements; a generator is run at load only on a workload this small
LOOSE_UNITS = 4  # a relative tolerance of more units in the last place than this is reported


def find(
    definition: sol_schema.Definition,
    written: Sequence[sol_schema.WrittenWorkload],
    kept: Sequence[Workload],
    declined: Sequence[str],
    draw: Draw,
) -> tuple[str, ...]:
    """Every oddity of a problem, most consequential first."""
    return (
        *_left_out(declined, len(written)),
        *_misspelt_keys(written),
        *_unknown_keys(definition, written),
        *_unused_generator(definition, written),
        *_constant_generator(definition, kept, draw),
        *_pinned_norms(definition, written),
        *_float64_random(definition, written),
        *_whole_outputs(definition, written),
        *_loose_tolerance(definition, written),
        *_sparse_outputs(definition, written),
    )


def _left_out(declined: Sequence[str], total: int) -> Iterable[str]:
    if declined:
        yield f"{len(declined)} of {total} workloads are left out; {declined[0]}"


def _misspelt_keys(written: Sequence[sol_schema.WrittenWorkload]) -> Iterable[str]:
    for wrong, right in MISSPELT.items():
        lines = [w for w in written if wrong in (w.tolerance.model_extra or {})]
        if lines:
            meant = (lines[0].tolerance.model_extra or {})[wrong]
            default = sol_schema.WrittenTolerance().required_matched_ratio
            yield (
                f"{len(lines)} workloads spell the tolerance key '{right}' as '{wrong}' ({meant}); "
                f"the benchmark ignores it and applies {default}"
            )


def _unknown_keys(definition: sol_schema.Definition, written: Sequence[sol_schema.WrittenWorkload]) -> Iterable[str]:
    for key in _extras(definition):
        yield f"definition.json has the key '{key}', which the benchmark ignores"
    counts: Counter[str] = Counter()
    for line in written:
        known = {*definition.inputs}
        counts.update({*_extras(line)} - {f"tolerance.{wrong}" for wrong in MISSPELT})
        counts.update(f"inputs.{name}" for name in line.inputs if name not in known)
        counts.update(f"axes.{name}" for name in line.axes if name not in definition.axes)
    for key, count in counts.items():
        yield f"{count} workloads have the key '{key}', which the benchmark ignores"


def _extras(record: BaseModel) -> list[str]:
    """Dotted names of the keys that a record and the records in it do not know."""
    found = list(record.model_extra or {})
    for field in type(record).model_fields:
        value = getattr(record, field)
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for key, item in inner:
            if isinstance(item, BaseModel):
                prefix = f"{field}.{key}" if key else field
                found += [f"{prefix}.{extra}" for extra in _extras(item)]
    return found


def _unused_generator(
    definition: sol_schema.Definition, written: Sequence[sol_schema.WrittenWorkload]
) -> Iterable[str]:
    entry = definition.custom_inputs_entrypoint
    if entry and not any(rule.type == "custom" for line in written for rule in line.inputs.values()):
        yield f"the generator '{entry}' is declared but no workload asks for custom inputs, so its result is never used"


def _constant_generator(definition: sol_schema.Definition, kept: Sequence[Workload], draw: Draw) -> Iterable[str]:
    custom = [w for w in kept if any(rule.kind == "custom" for rule in w.inputs.values())]
    if not custom:
        return
    smallest = min(custom, key=lambda w: math.prod(max(1, n) for n in w.axes.values()))
    try:
        if _elements(definition, smallest) > CHEAP_DRAW:
            return
        first, second = draw(smallest, 1, "cpu"), draw(smallest, 2, "cpu")
    except ProblemError as fault:
        yield f"the generator could not be tried on the CPU: {fault}"
        return
    if all(_identical(first[name], second[name]) for name in first):
        yield (
            f"the generator '{definition.custom_inputs_entrypoint}' is not random: two seeds give identical inputs, "
            "so a table per shape passes the benchmark"
        )


def _elements(definition: sol_schema.Definition, workload: Workload) -> int:
    from seatrial.formats.sol_execbench import AxisSizes

    sizes = AxisSizes(definition)(workload.axes)
    return sum(math.prod(_shape(n, t, sizes)) for n, t in definition.inputs.items())


def _shape(name: str, tensor: sol_schema.WrittenTensor, sizes: dict[str, int]) -> tuple[int, ...]:
    return (
        declared_shape(TensorSpec(name, None if tensor.shape is None else tuple(tensor.shape), tensor.dtype), sizes)
        or ()
    )


def _identical(first: Value, second: Value) -> bool:
    import torch

    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return type(first) is type(second) and bool(first == second)
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (first, second))
    return torch.equal(one, other)


def _pinned_norms(definition: sol_schema.Definition, written: Sequence[sol_schema.WrittenWorkload]) -> Iterable[str]:
    for name, tensor in definition.inputs.items():
        value = None if tensor.shape is None else sol_names.pinned(name, tensor.dtype)
        if value and any(_is_random(line, name) for line in written):
            yield f"'{name}' is always all {value} in the benchmark, so a kernel that ignores it passes there"


def _is_random(line: sol_schema.WrittenWorkload, name: str) -> bool:
    return name not in line.inputs or line.inputs[name].type == "random"


def _float64_random(definition: sol_schema.Definition, written: Sequence[sol_schema.WrittenWorkload]) -> Iterable[str]:
    for name, tensor in definition.inputs.items():
        if tensor.dtype == "float64" and any(_is_random(line, name) for line in written):
            yield f"'{name}' is a random float64 input, which the benchmark refuses to draw; it is drawn from a normal here"


def _whole_outputs(definition: sol_schema.Definition, written: Sequence[sol_schema.WrittenWorkload]) -> Iterable[str]:
    least = min(line.tolerance.required_matched_ratio for line in written)
    for name, tensor in definition.outputs.items():
        if tensor.dtype not in RESOLUTION and "float4" not in tensor.dtype and least < 1:
            yield f"{tensor.dtype} output '{name}' has one right answer, but the benchmark lets {1 - least:.3g} of it be wrong"


def _loose_tolerance(definition: sol_schema.Definition, written: Sequence[sol_schema.WrittenWorkload]) -> Iterable[str]:
    widest = max(line.tolerance.max_rtol for line in written)
    for dtype in dict.fromkeys(tensor.dtype for tensor in definition.outputs.values()):
        unit = RESOLUTION.get(dtype)
        if unit and widest > LOOSE_UNITS * unit:
            names = ", ".join(name for name, tensor in definition.outputs.items() if tensor.dtype == dtype)
            yield (
                f"the benchmark allows a relative error of {widest:g} in {names}, {widest / unit:,.0f} times the "
                f"resolution of {dtype}, besides its absolute allowance"
            )


def _sparse_outputs(definition: sol_schema.Definition, written: Sequence[sol_schema.WrittenWorkload]) -> Iterable[str]:
    """An output whose rows can only be reached through indices, with fewer indices than the rows that may be wrong."""
    from seatrial.formats.sol_execbench import AxisSizes

    sizes_of = AxisSizes(definition)
    indices = {n: t for n, t in definition.inputs.items() if t.dtype.startswith("int") and t.shape}
    reached = {axis for t in definition.inputs.values() for axis in t.shape or ()}
    for name, tensor in definition.outputs.items():
        if len(tensor.shape or ()) < 2 or not indices or (tensor.shape or [""])[0] in reached:
            continue
        blind = 0
        for line in written:
            sizes = sizes_of(line.axes)
            most_rows = max(math.prod(_shape(n, t, sizes)) for n, t in indices.items())
            rows = _shape(name, tensor, sizes)[0]
            blind += most_rows < (1 - line.tolerance.required_matched_ratio) * rows
        if blind:
            yield (
                f"in {blind} workloads output '{name}' has so many more rows than there are indices that every row "
                "reached by an index may be wrong and the matched ratio still passes"
            )
