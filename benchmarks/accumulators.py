"""How often each accumulator is named right: `python benchmarks/accumulators.py [--device cpu|cuda] [--json PATH]`.

Every class of accumulator × operation × dtypes × seeds goes through the real probes, in this process. On
the CPU the accumulators are simulated in torch, bit by bit; on a GPU they are Triton kernels and the
library's own (accumulators_cuda.py). Prints what was read against what is true.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seatrial.devices import Device, pick
from seatrial.numerics.accumulators import CERTAIN, Fingerprint, too_narrow
from seatrial.numerics.oracle import Oracle
from seatrial.numerics.probes import ProbePlan, fingerprints, plan_probes, read_probes
from seatrial.numerics.trace import trace

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LENGTHS = (331, 500, 613, 384, 700)  # terms of a sum, one per seed in turn; most are no power of two
BLOCK = 64
PARTS = 8
SHORT = {BF16: "bf16", F16: "fp16", F32: "fp32", torch.float8_e4m3fn: "fp8"}

Accumulate = Callable[[Tensor], Tensor]  # (n, …) fp32 terms -> (…) fp32 sums, every column for itself


# ---------------------------------------------------------------------------------------------------
# Accumulators


def in_fp32(terms: Tensor) -> Tensor:
    return terms.sum(0)


def step_by_step(dtype: torch.dtype) -> Accumulate:
    def accumulate(terms: Tensor) -> Tensor:
        carry = torch.zeros(terms.shape[1:], dtype=dtype)
        for term in terms.to(dtype).unbind():
            carry += term
        return carry.float()

    return accumulate


def carried_per_block(terms: Tensor) -> Tensor:
    carry = torch.zeros(terms.shape[1:], dtype=BF16)
    for block in torch.split(terms, BLOCK):
        carry = (carry.float() + block.sum(0)).to(BF16)
    return carry.float()


def compensated(terms: Tensor) -> Tensor:
    """Kahan's summation with everything in bfloat16."""
    total, lost = (torch.zeros(terms.shape[1:], dtype=BF16) for _ in range(2))
    for term in terms.to(BF16).unbind():
        corrected = term - lost
        grown = total + corrected
        lost, total = (grown - total) - corrected, grown
    return total.float()


def fourteen_bits(terms: Tensor) -> Tensor:
    """Hopper's fp8 tensor cores: products of 32 terms aligned to the largest and cut off, the carry as well."""
    carry = torch.zeros(terms.shape[1:], dtype=F64)
    for block in torch.split(terms.double(), 32):
        largest = torch.maximum(block.abs().amax(0), carry.abs())
        grain = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 14)
        carry = cut((torch.trunc(carry / grain) + torch.trunc(block / grain).sum(0)) * grain, 14)
    return carry.float()


def cut(x: Tensor, bits: int) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.trunc(mantissa * 2.0**bits) / 2.0**bits, exponent)


def split_partials(terms: Tensor) -> Tensor:
    parts = torch.split(terms, -(-terms.shape[0] // PARTS))
    return torch.stack([part.sum(0).to(BF16).float() for part in parts]).sum(0)


def to_tf32(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 2.0**11) / 2.0**11, exponent)


def as_it_is(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Accumulator:
    """One class: what becomes of the operands, how the terms are added up, and what is to be read."""

    name: str
    operand: Callable[[Tensor], Tensor]
    accumulate: Accumulate
    form: Callable[[int], str]  # terms of the sum -> Fingerprint.form
    honest: bool = False


CLASSES = (
    Accumulator("fp32", as_it_is, in_fp32, lambda n: "float32 accumulator", honest=True),
    Accumulator("TF32 inputs", to_tf32, in_fp32, lambda n: "TF32 operands"),
    Accumulator("fp16 step by step", as_it_is, step_by_step(F16), lambda n: "float16 carry every contribution"),
    Accumulator("bf16 step by step", as_it_is, step_by_step(BF16), lambda n: "bfloat16 carry every contribution"),
    Accumulator("bf16 per 64", as_it_is, carried_per_block, lambda n: f"bfloat16 carry every {BLOCK} terms"),
    Accumulator("Kahan bf16", as_it_is, compensated, lambda n: "compensated bfloat16 carry"),
    Accumulator("14-bit", as_it_is, fourteen_bits, lambda n: "14-bit carry every contribution"),
    Accumulator(
        "bf16 split-K partials", as_it_is, split_partials, lambda n: f"bfloat16 partial sums of {-(-n // PARTS)} terms"
    ),
)


# ---------------------------------------------------------------------------------------------------
# Operations


@dataclass(frozen=True)
class Operation:
    """A reference that sums in at least fp32 and rounds once, and a kernel of it for any accumulator."""

    name: str
    reference: Callable[..., Tensor]
    kernel: Callable[..., Tensor]  # (accumulator, output dtype, *inputs)
    inputs: Callable[[int, torch.dtype], tuple[Any, ...]]
    input_names: tuple[str, ...]
    input_axes: tuple[tuple[str, ...], ...]

    def referring_to(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        """The reference with this output dtype."""
        return lambda *inputs: self.reference(*inputs).to(dtype)


def wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, F32))


def normed(x: Tensor) -> Tensor:
    return wide(x) * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + 1e-6)


def matmul_kernel(how: Accumulator, dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    products = how.operand(a.float()).T[:, :, None] * how.operand(b.float())[:, None, :]
    return how.accumulate(products).to(dtype)


def row_sum_kernel(how: Accumulator, dtype: torch.dtype, x: Tensor) -> Tensor:
    return how.accumulate(how.operand(x.float()).T.contiguous()).to(dtype)


def scatter_kernel(how: Accumulator, dtype: torch.dtype, ids: Tensor, source: Tensor, rows: int = 9) -> Tensor:
    out = torch.zeros(rows, source.shape[1])
    for row in ids.unique().tolist():
        out[row] = how.accumulate(how.operand(source.float())[ids == row])
    return out.to(dtype)


def norm_weight_kernel(how: Accumulator, dtype: torch.dtype, dy: Tensor, x: Tensor) -> Tensor:
    return how.accumulate(how.operand(dy.float()) * how.operand(normed(x).float())).to(dtype)


def scattered(ids: Tensor, source: Tensor) -> Tensor:
    out = torch.zeros(9, source.shape[1], dtype=wide(source).dtype, device=source.device)
    return out.index_add(0, ids, wide(source))


OPERATIONS = (
    Operation(
        "matmul",
        lambda a, b: wide(a) @ wide(b),
        matmul_kernel,
        lambda n, d: (torch.randn(6, n).to(d), torch.randn(n, 10).to(d)),
        ("a", "b"),
        (("M", "K"), ("K", "N")),
    ),
    Operation(
        "row sum",
        lambda x: wide(x).sum(-1),
        row_sum_kernel,
        lambda n, d: (torch.randn(24, n).to(d),),
        ("x",),
        (("rows", "K"),),
    ),
    Operation(
        "scatter-add",
        scattered,
        scatter_kernel,
        lambda n, d: (torch.randint(0, 9, (n,)), torch.randn(n, 24).to(d)),
        ("ids", "source"),
        (("tokens",), ("tokens", "hidden")),
    ),
    Operation(
        "norm weight gradient",
        lambda dy, x: (wide(dy) * normed(x)).sum(0),
        norm_weight_kernel,
        lambda n, d: (torch.randn(n, 24).to(d), torch.randn(n, 24).to(d)),
        ("dy", "x"),
        (("rows", "hidden"), ("rows", "hidden")),
    ),
)
DTYPES = ((F32, F32), (F32, BF16), (BF16, BF16))  # of inputs and output; bf16 inputs hide what TF32 does to them


# ---------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class Row:
    """One reading: what is true and what was read."""

    operation: str
    true: str
    inputs: str
    output: str
    terms: int
    seed: int
    expected: str
    honest: bool
    read: str
    confidence: str
    bits: int | None
    fault: bool
    sentence: str

    @property
    def right(self) -> bool:
        """The name, the place and the length of a block all as expected; "*" stands for anything."""
        return all(part in self.read for part in self.expected.split("*"))


def planned(
    operation: Operation, terms: int, inputs: torch.dtype, output: torch.dtype, seed: int, device: Device
) -> ProbePlan:
    """The probes of this operation at this size, confirmed on its float64 oracle."""
    torch.manual_seed(seed)
    drawn = [device.to_device(t) for t in operation.inputs(terms, inputs)]
    reference = operation.referring_to(output)
    return plan_probes(
        Oracle(reference, ("out",)),
        drawn,
        trace=trace(reference, drawn, operation.input_names),
        output_names=("out",),
        input_names=operation.input_names,
        output_dtypes=(output,),
        input_axes=operation.input_axes,
        seed=seed,
    )


def read(plan: ProbePlan, kernel: Callable[[Sequence[Any]], Tensor]) -> Fingerprint:
    """The fingerprint of one kernel."""
    (seen,) = fingerprints(read_probes(plan, lambda inputs: (kernel(inputs),)))
    return seen


def row_of(
    operation: Operation, true: str, dtypes: tuple[torch.dtype, torch.dtype], terms: int, seed: int, expected: str,
    seen: Fingerprint, *, honest: bool, capability: tuple[int, int] | None = None,
) -> Row:  # fmt: skip
    """What is true beside what was read."""
    return Row(
        operation.name, true, SHORT[dtypes[0]], SHORT[dtypes[1]], terms, seed, expected, honest,
        seen.form if seen.bits is not None else seen.accumulator, seen.confidence, seen.bits,
        too_narrow(seen, capability=capability).fault, seen.sentence,
    )  # fmt: skip


def simulated(seeds: Sequence[int], device: Device, operations: Sequence[Operation] = OPERATIONS) -> Iterator[Row]:
    """Every class on every operation, in torch on the CPU."""
    for operation in operations:
        for inputs, output in DTYPES:
            for seed in seeds:
                terms = LENGTHS[seed % len(LENGTHS)]
                plan = planned(operation, terms, inputs, output, seed, device)
                for how in CLASSES if inputs == F32 else [c for c in CLASSES if c.operand is not to_tf32]:
                    seen = read(plan, partial(run, operation, how, output))
                    yield row_of(
                        operation, how.name, (inputs, output), terms, seed, how.form(terms), seen, honest=how.honest
                    )


def run(operation: Operation, how: Accumulator, output: torch.dtype, inputs: Sequence[Any]) -> Tensor:
    """One call of the simulated kernel."""
    return operation.kernel(how, output, *inputs)


# ---------------------------------------------------------------------------------------------------
# The table


def confusion(rows: Sequence[Row]) -> str:
    """One line per class and operation: readings, how many are right and certain, and every other name that was read."""
    lines = [
        "| class | operation | readings | named right | certain | judged right | read instead |",
        "|---|---|---|---|---|---|---|",
    ]
    for true, operation in dict.fromkeys((r.true, r.operation) for r in rows):
        mine = [r for r in rows if (r.true, r.operation) == (true, operation)]
        other = Counter(r.read for r in mine if not r.right)
        words = ", ".join(f"{name} ({count})" for name, count in other.most_common()) or "—"
        lines.append(
            f"| {true} | {operation} | {len(mine)} | {sum(r.right for r in mine)} | "
            f"{sum(r.right and r.confidence == CERTAIN for r in mine)} | "
            f"{sum(r.fault is not r.honest for r in mine)} | {words} |"
        )
    return "\n".join(lines)


def by_operation(rows: Sequence[Row]) -> str:
    """Readings named right, of how many, per class and operation; then those that are certain of it."""
    operations = list(dict.fromkeys(r.operation for r in rows))
    lines = ["| class | " + " | ".join(operations) + " | certain |", "|---|" + "---|" * (len(operations) + 1)]
    for true in dict.fromkeys(r.true for r in rows):
        mine = [r for r in rows if r.true == true]
        cells = []
        for operation in operations:
            here = [r.right for r in mine if r.operation == operation]
            cells.append(f"{sum(here)} of {len(here)}")
        certain = sum(r.right and r.confidence == CERTAIN for r in mine)
        lines.append(f"| {true} | " + " | ".join(cells) + f" | {certain} of {len(mine)} |")
    return "\n".join(lines)


def matrix(rows: Sequence[Row]) -> str:
    """The confusion matrix over all operations and dtypes: true class × class read."""
    classes = list(dict.fromkeys(r.true for r in rows))
    names = {r.true: r.true for r in rows}
    read_as = [(r.true, names[r.true] if r.right else _class_of(r, rows)) for r in rows]
    columns = [*classes, *sorted({c for _, c in read_as} - set(classes))]
    lines = ["| true ↓ read → | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for true in classes:
        counts = Counter(c for t, c in read_as if t == true)
        lines.append(f"| {true} | " + " | ".join(str(counts[c] or "·") for c in columns) + " |")
    return "\n".join(lines)


def _class_of(row: Row, rows: Sequence[Row]) -> str:
    """The class whose expected name a wrong reading bears; the reading itself where there is none."""
    same = [r.true for r in rows if r.expected == row.read and r.true != row.true]
    return same[0] if same else row.read


def machine(device: Device) -> str:
    """Where this ran, in a line."""
    facts = device.facts()
    return f"{facts.get('model', platform.machine())}, torch {torch.__version__}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    device, started = pick(asked.device), time.perf_counter()
    device.prepare()
    rows: list[Row] = []
    if device.name.startswith("cuda"):
        import accumulators_cuda as on_cuda

        source = on_cuda.measured(range(asked.seeds), device)
    else:
        source = simulated(range(asked.seeds), device)
    for row in source:
        rows.append(row)
        if not row.right or row.fault is row.honest:
            print(
                f"{row.operation}, {row.true}, {row.inputs}→{row.output}, {row.terms} terms, seed {row.seed}: {row.sentence}",
                file=sys.stderr,
            )
    right, judged = sum(r.right for r in rows), sum(r.fault is not r.honest for r in rows)
    tables = [confusion] if device.name.startswith("cuda") else [matrix, by_operation]
    for table in tables:
        print(table(rows), end="\n\n")
    print(f"{right} of {len(rows)} named right, {judged} of {len(rows)} judged right")
    print(f"{machine(device)}; {time.perf_counter() - started:.0f} s")
    if asked.json:
        written = {"machine": machine(device), "rows": [vars(r) for r in rows]}
        asked.json.write_text(json.dumps(written, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
