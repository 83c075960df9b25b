"""The training matrix: data × optimizer, reference against candidate, with honest controls.

One decoder per run, all from one start on the same batches. Honest runs belong to the problem, so they
are kept and used again for the next candidate. The candidate is only ever called with the operation's
inputs; the loop, the data, the seeds and the judgement stay here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from threading import Lock
from typing import TypeAlias

import torch
from torch import Tensor

from seatrial.model import Curve, Problem, Trial, TrialCell, Value
from seatrial.trials import judge as judging
from seatrial.trials.adapters import ADAPTERS, Adapter, Match, Refused
from seatrial.trials.decoder import Decoder, Sizes, Slots
from seatrial.trials.kernels import (
    Kernel,
    KernelFailed,
    in_another_order,
    reference_kernel,
    through_the_cpu,
    watched_for_shape,
    with_another_last_bit,
)
from seatrial.trials.loop import OPTIMIZERS, Run, train
from seatrial.trials.text import DATA, batches, stream

Progress: TypeAlias = Callable[[str, int, int], None]  # "text × sgd: candidate", step, steps in this run


@dataclass(frozen=True)
class Settings:
    """How large a trial is. A size that the problem fixes (width, vocabulary, …) overrides the one here.

    Few steps of many tokens: the more often one id repeats within a step, the more a narrow accumulator
    loses, and a fault that shows at a rate where honest training is calm needs no chaos to be seen.

    rates: learning rates to try per optimizer, highest first; a cell uses the highest at which its honest
    runs train stably and stay together, because a fault shows first where training is least forgiving.
    """

    data: tuple[str, ...] = DATA
    optimizers: tuple[str, ...] = OPTIMIZERS
    rates: Mapping[str, tuple[float, ...]] = field(
        default_factory=lambda: {"sgd": (0.5, 0.3, 0.2, 0.1, 0.05, 0.02), "adamw": (3e-3, 1e-3, 3e-4)}
    )
    steps: int = 20
    warm_up: int = 0  # steps to reach the learning rate
    controls: int = 1  # honest controls per cell: another order of summation and another last bit
    seeds: int = 1
    batch: int = 128
    sizes: Sizes = field(default_factory=Sizes)
    largest: int = 8_000_000  # parameters; beyond it a run takes too long to be worth it on this device

    workers: int = 2  # threads that train honest runs on a CPU, one core each


@dataclass
class HonestRuns:
    """Runs of the reference and of the controls, kept across the candidates of one problem and one Settings."""

    runs: dict[tuple[str, str, float, int, str], Run] = field(default_factory=dict)


def run_matrix(
    problem: Problem,
    candidate: Kernel,
    *,
    settings: Settings | None = None,
    extra_controls: Mapping[str, Kernel] | None = None,
    honest: HonestRuns | None = None,
    fault_proven: bool = False,
    device: str = "cpu",
    kernels_on_device: bool = False,
    progress: Progress | None = None,
    seed: int = 0,
) -> tuple[Trial | None, str]:
    """Train the decoder with `candidate` and with honest kernels, and compare: (trial, "") or (None, why not).

    candidate           called once per step with the declared inputs, in order, on the CPU (on `device` when
                        `kernels_on_device`). It may raise KernelFailed: its cells are then not verified.
    extra_controls      further kernels known to be honest, by name; they widen the band
    honest              filled with the honest runs, and read from: pass the same one for every candidate of a
                        problem, with the same settings, seed and extra controls
    progress            called after every step, from several threads but never from two at once
    fault_proven        a numeric fault was proven elsewhere: a cell that agrees is then called masked
    """
    settings = settings or Settings()
    found = find_adapter(problem)
    if isinstance(found, str):
        return None, found
    bench = Bench(problem, *found, settings, device, kernels_on_device, progress or _silent, seed)
    if bench.sizes.parameters() > settings.largest:
        return None, f"the decoder would have {bench.sizes.parameters():,} parameters, more than {settings.largest:,}"
    try:
        bench.slots(reference_kernel(problem))
    except Refused as refusal:
        return None, str(refusal)
    started = time.monotonic()
    judged = _judge_cells(bench, candidate, {**bench.controls(), **(extra_controls or {})}, honest or HonestRuns())
    cells = name_masked_cells(judged, fault_proven=fault_proven, by_row=bench.by_row)
    seconds = time.monotonic() - started
    return Trial(adapter=bench.adapter.NAME, model=bench.in_words(), cells=cells, seconds=seconds), ""


def find_adapter(problem: Problem) -> tuple[Adapter, Match] | str:
    """The first adapter that matches with its match, or why there is none."""
    for adapter in ADAPTERS.values():
        match = adapter.matches(problem)
        if match is not None:
            return adapter, match
    return f"no training adapter fits this operation; there are: {', '.join(ADAPTERS)}"


def _silent(cell: str, step: int, total: int) -> None:
    pass


# ---------------------------------------------------------------------------------------------------
# One run


@dataclass
class Bench:
    """Everything that all runs of a matrix share."""

    problem: Problem
    adapter: Adapter
    match: Match
    settings: Settings
    device: str
    kernels_on_device: bool
    progress: Progress
    seed: int

    def __post_init__(self) -> None:
        self.sizes, self.batch = fitted_sizes(self.settings, self.match.sizes)
        self.by_row = self.adapter is ADAPTERS["embedding backward"]
        self.workers = self.settings.workers if self.device == "cpu" else 1
        self._alone = Lock()

    def slots(self, kernel: Kernel) -> Slots:
        away = self.device != "cpu" and not self.kernels_on_device
        return self.adapter.fit(self.problem, self.match, through_the_cpu(kernel) if away else kernel)

    def controls(self) -> dict[str, Kernel]:
        """The honest controls that every problem has, each in its own order and with its own last bits."""
        reference = reference_kernel(self.problem)
        return {
            f"control {i}": with_another_last_bit(
                in_another_order(reference, self.match.axes, seed=self.seed + i), seed=self.seed + i
            )
            for i in range(1, self.settings.controls + 1)
        }

    def run(self, name: str, kernel: Kernel, data: str, optimizer: str, rate: float, seed: int) -> Run:
        """One training run; start and batches depend on `seed` alone."""
        with self._alone, torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + seed)
            model = Decoder(self.sizes, self.slots(kernel)).to(self.device)
        watched = self.adapter.watched(model)
        cell = f"{data} × {optimizer}: {name}"
        return train(
            model,
            watched,
            self._batches(data, seed),
            optimizer=optimizer,
            rate=rate,
            warm_up=self.settings.warm_up,
            by_row=self.by_row,
            each_step=lambda step: self._report(cell, step + 1),
        )

    def _report(self, cell: str, step: int) -> None:
        with self._alone:
            self.progress(cell, step, self.settings.steps)

    def _batches(self, data: str, seed: int) -> list[tuple[Tensor, Tensor]]:
        tokens = stream(data, vocabulary=self.sizes.vocabulary, seed=self.seed + seed)
        cut = batches(
            tokens, batch=self.batch, length=self.sizes.length, steps=self.settings.steps, seed=self.seed + seed + 1
        )
        return [(ids.to(self.device), targets.to(self.device)) for ids, targets in cut]

    def in_words(self) -> str:
        s = self.sizes
        layers = f"{s.layers} {'layer' if s.layers == 1 else 'layers'}"
        return (
            f"decoder with {layers}, width {s.width}, {s.heads} heads, vocabulary {s.vocabulary}, "
            f"{self.batch} × {s.length} tokens a step, {self.settings.steps} steps, fp32 master weights"
        )


def fitted_sizes(settings: Settings, insisted: Mapping[str, int]) -> tuple[Sizes, int]:
    """(model sizes, batch) of the settings, with what the problem insists on put in."""
    wanted = settings.sizes
    tokens = insisted.get("tokens")
    length, batch = insisted.get("length", wanted.length), insisted.get("batch", settings.batch)
    if tokens is not None:
        length = length if tokens % length == 0 else tokens
        batch = tokens // length
    width, heads = insisted.get("width"), insisted.get("heads", wanted.heads)
    if width is None:
        width = wanted.width + -wanted.width % heads
    if "batch" not in insisted and tokens is None and width > wanted.width:
        batch = max(16, batch * wanted.width // width)  # a wider model sees fewer tokens, so that a trial takes as long
    while width % heads:
        heads -= 1
    return Sizes(insisted.get("vocabulary", wanted.vocabulary), width, wanted.layers, heads, length), batch


# ---------------------------------------------------------------------------------------------------
# All cells


@dataclass(frozen=True)
class _Cell:
    data: str
    optimizer: str
    rate: float
    judged: judging.Judged
    seeds: tuple[judging.Twins, ...] = ()


def _judge_cells(bench: Bench, candidate: Kernel, controls: Mapping[str, Kernel], honest: HonestRuns) -> list[_Cell]:
    """Cells side by side, one worker each: first its honest runs, then the candidate's. One failure ends the rest."""
    places = [(data, optimizer) for data in bench.settings.data for optimizer in bench.settings.optimizers]
    checked, failures = one_at_a_time(watched_for_shape(candidate, bench.problem)), list[str]()

    def cell(place: tuple[str, str]) -> _Cell:
        if failures:
            return _Cell(*place, 0.0, judging.Judged("not verified", f"not run, {failures[0]}"))
        try:
            trained = _honest_at_highest_rate(bench, controls, honest, *place)
            return _judge_cell(bench, checked, *place, *trained)
        except KernelFailed as failed:
            failures.append(f"because the candidate could not be called: {failed}")
            return _Cell(*place, 0.0, judging.Judged("not verified", f"no verdict, {failures[-1]}"))

    with one_core_each(), ThreadPoolExecutor(bench.workers, initializer=_use_one_core) as pool:
        return list(pool.map(cell, places))


def one_at_a_time(kernel: Kernel) -> Kernel:
    """`kernel` behind a lock, for its process serves one call at a time; once it has failed it is not called again."""
    alone, failures = Lock(), list[KernelFailed]()

    def serial(inputs: Sequence[Value]) -> tuple[Tensor, ...]:
        with alone:
            if failures:
                raise KernelFailed(str(failures[0]))
            try:
                return kernel(inputs)
            except KernelFailed as failed:
                failures.append(failed)
                raise

    return serial


def _judge_cell(
    bench: Bench, candidate: Kernel, data: str, optimizer: str, rate: float, seeds: Sequence[Sequence[Run]]
) -> _Cell:
    if not all(judging.is_stable(run) for runs in seeds for run in runs):
        return _Cell(data, optimizer, rate, judging.Judged("not verified", judging.RESTLESS))
    twins = []
    for seed, runs in enumerate(seeds):
        errors: list[float] = []
        kernel = compared_by_row(candidate, bench, errors) if bench.by_row else candidate
        trained = bench.run("candidate", kernel, data, optimizer, rate, seed)
        trained.row_errors = errors
        twins.append(judging.Twins(runs[0], tuple(runs[1:]), trained))
    return _Cell(data, optimizer, rate, judging.judge(twins), tuple(twins))


def compared_by_row(kernel: Kernel, bench: Bench, errors: list[float]) -> Kernel:
    """`kernel`, noting at every call how wrong the row with most contributions is (relative L2, same inputs)."""
    reference = reference_kernel(bench.problem)
    ids_at, table_at = bench.match.inputs["ids"], bench.match.outputs["d_table"]

    def noting(inputs: Sequence[Value]) -> tuple[Tensor, ...]:
        outputs, ids = kernel(inputs), inputs[ids_at]
        assert isinstance(ids, Tensor), "token ids are a tensor"
        row = int(ids.flatten().mode().values)
        got, want = outputs[table_at][row].double(), reference(inputs)[table_at][row].double()
        if want.any():
            errors.append(float((got - want).norm() / want.norm()))
        return outputs

    return noting


@contextmanager
def one_core_each() -> Iterator[None]:
    """One thread per tensor operation while several runs train side by side."""
    before = torch.get_num_threads()
    _use_one_core()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _use_one_core() -> None:
    torch.set_num_threads(1)


def _honest_at_highest_rate(
    bench: Bench, controls: Mapping[str, Kernel], honest: HonestRuns, data: str, optimizer: str
) -> tuple[float, list[list[Run]]]:
    """The highest rate at which honest runs are stable and stay together, and these runs: [reference, controls…] per seed."""
    kernels = {"reference": reference_kernel(bench.problem), **controls}
    for rate in bench.settings.rates[optimizer]:
        seeds = []
        for seed in range(bench.settings.seeds):
            runs: list[Run] = []
            for name, kernel in kernels.items():
                key = (data, optimizer, rate, seed, name)
                if key not in honest.runs:
                    honest.runs[key] = bench.run(name, kernel, data, optimizer, rate, seed)
                runs.append(honest.runs[key])
                if not judging.is_stable(runs[-1]):
                    break
            seeds.append(runs)
            if not judging.stay_together(runs):
                break
        else:
            return rate, seeds
    return rate, seeds


# ---------------------------------------------------------------------------------------------------
# Across cells: where a fault is there and does not show


def name_masked_cells(cells: Sequence[_Cell], *, fault_proven: bool, by_row: bool) -> list[TrialCell]:
    """The cells as the report shows them; a cell that agrees while a fault is known is masked, with the reason."""
    caught = [cell for cell in cells if cell.judged.verdict in ("drifts", "diverges")]
    masked = [
        replace(cell.judged, verdict="masked", reason=_why_masked(cell, caught, by_row=by_row))
        if cell.judged.verdict == "agrees" and (fault_proven or caught)
        else cell.judged
        for cell in cells
    ]
    return [_public(cell, judged, by_row=by_row) for cell, judged in zip(cells, masked, strict=True)]


def _why_masked(cell: _Cell, caught: Sequence[_Cell], *, by_row: bool) -> str:
    if not by_row:
        return f"the fault leaves no trace in this loss: {cell.judged.reason}"
    repeats = _most_repeats(cell)
    elsewhere = max(caught, key=_most_repeats, default=None)
    if elsewhere is not None and 4 * repeats < _most_repeats(elsewhere):
        return (
            f"one row gets at most {repeats} contributions in a step here, against {_most_repeats(elsewhere)} in "
            f"{elsewhere.data} × {elsewhere.optimizer}: too few for the fault to show in the loss"
        )
    wrong = median([error for twins in cell.seeds for error in twins.candidate.row_errors] or [float("nan")])
    measured = (
        f"the gradient of the row with most contributions ({repeats} in one step) is off by {100 * wrong:.2g} % "
        f"(relative L2 error, median over the steps)"
    )
    if cell.optimizer == "adamw":
        gradient, update = _ratio(cell, "row_gradients"), _ratio(cell, "row_updates")
        return (
            f"{measured}, but AdamW scales every element's step by that element's own history: the row's update norm "
            f"is {update:.3g} times the reference's at {gradient:.3g} times its gradient norm"
        )
    return f"{measured}, which is too little to show in the loss here"


def _most_repeats(cell: _Cell) -> int:
    return max(count for twins in cell.seeds for count in twins.candidate.repeats)


def _ratio(cell: _Cell, what: str) -> float:
    """Median over all steps of candidate / reference; NaN when the reference's are all zero."""
    pairs = [
        (candidate, reference)
        for twins in cell.seeds
        for candidate, reference in zip(getattr(twins.candidate, what), getattr(twins.reference, what), strict=False)
    ]
    ratios = [candidate / reference for candidate, reference in pairs if reference > 0]
    return float(median(ratios)) if ratios else float("nan")


def _public(cell: _Cell, judged: judging.Judged, *, by_row: bool) -> TrialCell:
    return TrialCell(
        data=cell.data,
        optimizer=cell.optimizer,
        learning_rate=cell.rate,
        verdict=judged.verdict,
        reason=judged.reason,
        first_step=judged.first_step,
        gap=judged.gap,
        band=judged.band,
        farthest=judged.farthest,
        most_repeats=_most_repeats(cell) if by_row and cell.seeds else None,
        curves=[curve for seed, twins in enumerate(cell.seeds) for curve in _curves(seed, twins)],
    )


def _curves(seed: int, twins: judging.Twins) -> list[Curve]:
    named = [
        ("reference", twins.reference),
        *(("control", run) for run in twins.controls),
        ("candidate", twins.candidate),
    ]
    return [Curve(run=name, seed=seed, losses=run.losses, gradient_norms=run.watched_norms) for name, run in named]
