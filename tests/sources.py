"""Turns a check's Example (three Python sources) into a Problem and a Candidate without files."""

from __future__ import annotations

from typing import Any

from seatrial.checks.base import Example
from seatrial.model import Candidate, Problem, SourceFile, TensorSpec, Workload


def problem_of(example: Example) -> Problem:
    """The example's reference and input maker as a Problem; AXES in the input source makes it resizable."""
    reference: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    exec(example.reference, reference)
    exec(example.inputs, inputs)
    axes: dict[str, list[int]] = inputs.get("AXES", {})
    first = inputs["make"](0)
    outputs = reference["run"](*first.values())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    lengths = {min(sizes, key=lambda s: abs(s - 8)): axis for axis, sizes in axes.items()}

    def shape(tensor: Any) -> tuple[str, ...]:
        return tuple(lengths.get(n, str(n)) for n in tensor.shape)

    def spec(name: str, tensor: Any) -> TensorSpec:
        if isinstance(tensor, float):
            return TensorSpec(name, None, "float32")
        return TensorSpec(name, shape(tensor), str(tensor.dtype).removeprefix("torch."))

    def draw(workload: Workload, seed: int, device: str) -> dict[str, Any]:
        return {
            k: v if isinstance(v, float) else v.to(device) for k, v in inputs["make"](seed, **workload.axes).items()
        }

    counts = max((len(sizes) for sizes in axes.values()), default=1)
    workloads = tuple(
        Workload(f"case-{i}", {axis: sizes[i % len(sizes)] for axis, sizes in axes.items()}, {}) for i in range(counts)
    )
    return Problem(
        name="example",
        format="plain",
        inputs=tuple(spec(k, v) for k, v in first.items()),
        outputs=tuple(spec(f"out{i}", t) for i, t in enumerate(outputs)),
        workloads=workloads,
        reference=reference["run"],
        draw=draw,
        sizes=lambda given: dict(given),
        var_axes=tuple(axes),
        resizable=bool(axes),
        reference_source=example.reference,
    )


def candidate_of(example: Example, name: str = "candidate") -> Candidate:
    """The example's candidate, return style."""
    return Candidate(
        name=name,
        languages=("pytorch",),
        entry_point="kernel.py::run",
        destination_passing=False,
        sources=(SourceFile("kernel.py", example.candidate),),
    )
