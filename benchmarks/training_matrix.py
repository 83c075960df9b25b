"""The training matrix on the embedding gradient, at sizes of your choice, written out as a table and JSON.

    python benchmarks/training_matrix.py --device cuda --width 256 --vocabulary 8192 --steps 300 --seeds 3

The candidates are one faulty kernel and two honest ones, one line apart: gradients summed in bfloat16
(on a GPU by the real `index_add_`, on a CPU spelled out, because its own `index_add_` keeps a wide sum),
gradients summed in float32 in reverse order, and the same in float64.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from seatrial.model import Problem, TensorSpec, Trial, Value, Workload
from seatrial.trials.decoder import Sizes
from seatrial.trials.kernels import Kernel
from seatrial.trials.matrix import HonestRuns, Settings, run_matrix
from seatrial.trials.text import DATA


def per_token_gradient(dy: Tensor, ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> Tensor:
    """bf16 (N, H): the gradient of each looked-up row through RMSNorm."""
    rows = table[ids.flatten()].float()
    inverse = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
    normed, upstream = rows * inverse, dy.flatten(0, 1).float() * weight.float()
    return ((upstream - normed * (upstream * normed).mean(-1, keepdim=True)) * inverse).to(table.dtype)


def embedding_norm_backward(dy: Tensor, ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The reference: each row's gradients summed in float32, rounded once."""
    gradient = per_token_gradient(dy, ids, table, weight, eps)
    total = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
    return total.index_add_(0, ids.flatten(), gradient.float()).to(table.dtype)


def summed_in_bf16(inputs: Sequence[Value]) -> tuple[Tensor, ...]:
    """The fault: the running sum of each row is a bfloat16."""
    dy, ids, table, weight, eps = inputs
    gradient = per_token_gradient(dy, ids, table, weight, eps)  # type: ignore[arg-type]
    total = torch.zeros_like(table)  # type: ignore[arg-type]
    if total.is_cuda:
        return (total.index_add_(0, ids.flatten(), gradient),)  # type: ignore[union-attr]
    return (carried_in_bf16(ids.flatten(), gradient, total),)  # type: ignore[union-attr]


def carried_in_bf16(ids: Tensor, gradient: Tensor, total: Tensor) -> Tensor:
    """Exactly `for i: total[ids[i]] += gradient[i]` in the dtype of `total`, all first occurrences at once, then all second, …"""
    order = ids.argsort(stable=True)
    sorted_ids = ids[order]
    occurrence = torch.arange(len(ids)) - torch.searchsorted(sorted_ids, sorted_ids)
    by_occurrence = occurrence.argsort(stable=True)
    for turn in torch.split(by_occurrence, occurrence.bincount().tolist()):
        rows = sorted_ids[turn]
        total[rows] = total[rows] + gradient[order[turn]]
    return total


def summed_wide(dtype: torch.dtype) -> Kernel:
    """Honest: the running sum of each row is wide, last token first."""

    def kernel(inputs: Sequence[Value]) -> tuple[Tensor, ...]:
        dy, ids, table, weight, eps = inputs
        gradient = per_token_gradient(dy, ids, table, weight, eps)  # type: ignore[arg-type]
        total = torch.zeros(table.shape, dtype=dtype, device=table.device)  # type: ignore[union-attr]
        return (total.index_add_(0, ids.flatten().flip(0), gradient.flip(0).to(dtype)).to(table.dtype),)  # type: ignore[union-attr]

    return kernel


CANDIDATES: Mapping[str, Kernel] = {
    "summed in bfloat16": summed_in_bf16,
    "summed in float32, reversed": summed_wide(torch.float32),
    "summed in float64, reversed": summed_wide(torch.float64),
}


def problem(width: int, vocabulary: int) -> Problem:
    """Backward of embedding and RMSNorm, bfloat16, with free batch and length."""
    tokens, sizes = ("batch", "length"), {"hidden": width, "vocabulary": vocabulary}
    return Problem(
        name="embedding_rmsnorm_backward",
        format="plain",
        inputs=(
            TensorSpec("grad_output", (*tokens, "hidden"), "bfloat16"),
            TensorSpec("token_ids", tokens, "int64"),
            TensorSpec("embedding_weight", ("vocabulary", "hidden"), "bfloat16"),
            TensorSpec("norm_weight", ("hidden",), "bfloat16"),
            TensorSpec("eps", None, "float32"),
        ),
        outputs=(TensorSpec("grad_embedding", ("vocabulary", "hidden"), "bfloat16"),),
        workloads=(Workload("0", {"batch": 8, "length": 64}, {}),),
        reference=embedding_norm_backward,
        draw=lambda workload, seed, device: {},
        sizes=lambda axes: {**sizes, **axes},
        var_axes=tokens,
    )


def table_of(trial: Trial) -> str:
    """One line per cell."""
    lines = [
        f"{'data':8} {'optimizer':9} {'rate':>6} {'verdict':12} {'step':>5} {'gap':>9} {'band':>9} {'repeats':>7}  reason"
    ]
    for cell in trial.cells:
        gap, band = (f"{x:9.4f}" if x is not None else " " * 9 for x in (cell.gap, cell.band))
        step = "" if cell.first_step is None else cell.first_step
        lines.append(
            f"{cell.data:8} {cell.optimizer:9} {cell.learning_rate:6g} {cell.verdict:12} {step!s:>5} {gap} {band} "
            f"{cell.most_repeats!s:>7}  {cell.reason}"
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    for name, default in (("width", 64), ("vocabulary", 2048), ("layers", 1), ("heads", 4), ("length", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("batch", 128), ("steps", 20), ("warm-up", 0), ("seeds", 1), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--data", nargs="+", default=list(DATA))
    parser.add_argument("--sgd-rates", type=float, nargs="+", default=list(Settings().rates["sgd"]))
    parser.add_argument("--adamw-rates", type=float, nargs="+", default=list(Settings().rates["adamw"]))
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES))
    parser.add_argument("--json", type=Path, help="where to write all trials, curves included")
    return parser.parse_args()


def main() -> None:
    """Run the matrix for every candidate asked for; honest runs are made once."""
    asked = arguments()
    settings = Settings(
        data=tuple(asked.data),
        rates={"sgd": tuple(asked.sgd_rates), "adamw": tuple(asked.adamw_rates)},
        steps=asked.steps,
        warm_up=asked.warm_up,
        seeds=asked.seeds,
        batch=asked.batch,
        sizes=Sizes(asked.vocabulary, asked.width, asked.layers, asked.heads, asked.length),
        largest=10**10,
    )
    honest, written = HonestRuns(), {}
    for name in asked.candidates:
        started = time.monotonic()
        trial, why = run_matrix(
            problem(asked.width, asked.vocabulary),
            CANDIDATES[name],
            settings=settings,
            honest=honest,
            device=asked.device,
            kernels_on_device=True,
            seed=asked.seed,
        )
        if trial is None:
            sys.exit(why)
        sys.stdout.write(f"\n{name} ({time.monotonic() - started:.1f} s; {trial.model})\n{table_of(trial)}\n")
        sys.stdout.flush()
        written[name] = trial.model_dump(mode="json")
    if asked.json:
        machine = {"torch": torch.__version__, "python": platform.python_version(), "device": asked.device}
        asked.json.write_text(json.dumps({"machine": machine, "trials": written}, indent=1))


if __name__ == "__main__":
    main()
