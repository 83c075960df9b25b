"""From the loss curves of one cell to its verdict. Pure: numbers in, words out.

The rule. Write R for the reference's losses, C for those of the honest controls, X for the candidate's;
all were trained from the same start on the same batches, so their difference step by step is the effect
of the kernel and nothing else.

1. The distance of two runs at step t is the mean of |difference of losses| over the last SMOOTH steps.
2. The honest spread at t is the largest distance, up to t, of any two honest runs of one seed, over all
   seeds. It never shrinks: training that was once thrown apart by rounding may be so again.
3. The band is `factor` x the honest spread + a floor. The factor is 3 when the honest pairs agree on how
   far apart they are and grows to 6 as they disagree (largest against median; 6 when there is one pair
   only): few pairs that differ widely say little about the next honest kernel. The floor is a tenth of
   the reference's own step-to-step noise (median |loss(t+1) - loss(t)| over the second half) plus a
   thousandth of the starting loss: less than that nobody sees in a training run, and it keeps the band
   open when the honest runs are bit-identical.
4. The candidate drifts when its distance to R is outside the band in LONG steps, or in a quarter of a
   shorter run. One spike does not count, a curve that finds back after a long way round does: given time,
   most runs end at much the same loss, so the end of a curve says less than the way there.
5. It diverges when a loss or gradient is NaN or infinite, when the loss rises to loop.BLOWN_UP times
   where it started, or when the run ends a tenth above its start, while every honest run does none of these.
6. When an honest run does one of these itself, the cell says nothing and is not verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean, median

from seatrial.trials.loop import Run

SMOOTH = 5
FACTOR = 3.0
FLOOR = 0.1
LONG = 10  # steps
UNSEEN = 1e-3  # of the starting loss: a difference nobody would act on, whatever the step-to-step noise
TOGETHER = 0.005  # honest runs that lie farther apart than this share of the starting loss train chaotically
RISEN = 1.1  # times the starting loss; uniform ids have nothing to learn and may end a hair above their start
RESTLESS = "an honest run does not train stably here, so the candidate's run would prove nothing"


@dataclass(frozen=True)
class Judged:
    """What one cell showed. `gap` and `band` are in nats, at the end of the run; `farthest` over all of it."""

    verdict: str
    reason: str
    first_step: int | None = None
    gap: float | None = None
    band: float | None = None
    farthest: float | None = None


@dataclass(frozen=True)
class Twins:
    """All runs of one seed: the reference, the honest controls, and the candidate."""

    reference: Run
    controls: tuple[Run, ...]
    candidate: Run

    @property
    def honest(self) -> tuple[Run, ...]:
        return (self.reference, *self.controls)


def is_stable(run: Run) -> bool:
    """True when a run stays finite, does not blow up and does not end above where it started."""
    return run.finite and not run.blew_up and _end(run) <= RISEN * run.losses[0]


def stay_together(runs: Sequence[Run]) -> bool:
    """True when honest runs of one seed are stable and never lie farther apart than TOGETHER allows."""
    farthest = max((max(distances(a, b)) for a, b in combinations(runs, 2)), default=0.0)
    return all(map(is_stable, runs)) and farthest <= TOGETHER * runs[0].losses[0]


def distances(a: Run, b: Run) -> list[float]:
    """Trailing mean of |loss difference| over SMOOTH steps, for the steps that both runs have."""
    apart = [abs(x - y) for x, y in zip(a.losses, b.losses, strict=False)]
    return [fmean(apart[max(0, t - SMOOTH + 1) : t + 1]) for t in range(len(apart))]


def band_of(seeds: Sequence[Sequence[Run]]) -> list[float]:
    """Half width of the band at every step, from the honest runs of every seed (the reference first)."""
    pairs = [distances(a, b) for runs in seeds for a, b in combinations(runs, 2)]
    floor = max(FLOOR * step_noise(runs[0]) + UNSEEN * runs[0].losses[0] for runs in seeds)
    steps = min(len(run.losses) for runs in seeds for run in runs)
    widest = [max((pair[t] for pair in pairs), default=0.0) for t in range(steps)]
    factor = FACTOR * (1.0 + disagreement([pair[:steps] for pair in pairs]))
    return [factor * max(widest[: t + 1]) + floor for t in range(steps)]


def disagreement(pairs: Sequence[Sequence[float]]) -> float:
    """How unlike the honest pairs are: 0 when all were equally far apart at their farthest, towards 1 when one stands out.

    1 when there is one pair only, for then nothing is known about it.
    """
    farthest = [max(pair) for pair in pairs]
    top = max(farthest, default=0.0)
    if len(farthest) < 2:
        return 1.0
    return 0.0 if top == 0.0 else 1.0 - median(farthest) / top


def step_noise(run: Run) -> float:
    """Median |loss(t+1) - loss(t)| over the second half of a run."""
    late = run.losses[len(run.losses) // 2 :]
    return median([abs(b - a) for a, b in pairwise(late)] or [0.0])


def leaves(outside: Sequence[bool]) -> int | None:
    """First step outside when LONG steps are, or a quarter of a shorter run; else None."""
    enough = max(1, min(LONG, len(outside) // 4))
    return outside.index(True) if sum(outside) >= enough else None


def judge(seeds: Sequence[Twins]) -> Judged:
    """The verdict on one cell, from one or more seeds; the worst seed speaks."""
    restless = [run for twins in seeds for run in twins.honest if not is_stable(run)]
    if restless:
        return Judged("not verified", RESTLESS)
    band = band_of([twins.honest for twins in seeds])
    return max((_judge_one(twins, band) for twins in seeds), key=_severity)


def _severity(judged: Judged) -> tuple[int, float]:
    return ("agrees", "drifts", "diverges").index(judged.verdict), abs(judged.gap or 0.0)


def _judge_one(twins: Twins, band: list[float]) -> Judged:
    candidate, reference = twins.candidate, twins.reference
    apart = distances(candidate, reference)
    outside = [d > b for d, b in zip(apart, band, strict=False)]
    if not is_stable(candidate):
        first = outside.index(True) if True in outside else len(candidate.losses) - 1
        return Judged(
            "diverges", _how_it_diverged(candidate, reference), first, _gap(twins), band[-1], max(apart, default=None)
        )
    first_step = leaves(outside)
    gap = _gap(twins)
    if first_step is None:
        return Judged(
            "agrees",
            f"the loss stays within {band[-1]:.3g} of the reference's, as honest kernels do",
            None,
            gap,
            band[-1],
            max(apart),
        )
    reason = (
        f"outside the band of honest kernels in {sum(outside)} of {len(outside)} steps, from step {first_step} on: "
        f"{max(apart):.3g} from the reference at its farthest, {apart[-1]:.3g} at the end ({band[-1]:.3g} allowed)"
    )
    return Judged("drifts", reason, first_step, gap, band[-1], max(apart))


def _how_it_diverged(candidate: Run, reference: Run) -> str:
    step, end = len(candidate.losses) - 1, _end(reference)
    if not candidate.finite:
        return f"the loss or its gradient is not finite by step {step}, while the reference trains on to {end:.3g}"
    top = max(candidate.losses[-SMOOTH:])
    return f"the loss started at {candidate.losses[0]:.3g} and stands at {top:.3g} at step {step}, while the reference trains on to {end:.3g}"


def _end(run: Run) -> float:
    return fmean(run.losses[-SMOOTH:])


def _gap(twins: Twins) -> float:
    steps = len(twins.candidate.losses)
    return _end(twins.candidate) - fmean(twins.reference.losses[:steps][-SMOOTH:])
