"""The score: which planted faults an audit's own cases expose, judged as the checks judge a candidate.

The mutants meet the cases of the policy, case by case, each until one exposes it. One that lives
is hunted with further recipes and with inputs aimed at it; what exposes it becomes a recipe of the audit. Everything
follows from the master seed; only the time budget, where it cuts the work short, does not.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import seatrial.checks  # noqa: F401 - it and seatrial.values import each other, and it has to come first
from seatrial import benchmark_rule
from seatrial.adequacy.aim import Aim, first_aims, movable, nudged, scalars
from seatrial.adequacy.mutants import Mutant, exact_outputs, find_mutants, planted
from seatrial.adequacy.nulls import null_outputs
from seatrial.errors import InfrastructureError
from seatrial.inputs.roles import Role, roles
from seatrial.model import Adequacy, CallRecord, Outcome, PlantedFault, Ran, Value
from seatrial.numerics.dtypes import half_ulp, is_float
from seatrial.numerics.moved import share_changed
from seatrial.numerics.oracle import Oracle
from seatrial.numerics.promote import DeviceRedirect
from seatrial.values import judge_values

if TYPE_CHECKING:
    from seatrial.study import Case, Study

NOTHING = 1e-3  # of (half an ulp plus the honest deviation), on every element: far below what rounding does
SHARE_OF_HARDENING = 0.5  # of the time, kept for what the policy's own cases leave alive
BEFORE_PROBES = 3  # cases that a narrow carry meets before it is probed
MOST_AIMS = 150  # per survivor
MOST_PLACES = 16.0
SHOWN = 4  # survivors in the sentence


@dataclass
class Fate:
    """What became of one mutant so far. `effect` is a change in fp64, in honest deviations: the largest up to `NOTHING`."""

    mutant: Mutant
    by: str = ""
    effect: float = 0.0
    recipes: set[str] = field(default_factory=set)
    survived: set[tuple[object, ...]] = field(default_factory=set)
    benchmark: bool | None = None

    @property
    def alive(self) -> bool:
        return not self.by


class Budget:
    """A stretch of time."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


def measure(study: Study, budget_s: float, *, mutants: int, benchmark: bool = False) -> Adequacy:
    """Plant at most `mutants` faults, judge them, and hunt what lives; `study` gets the recipes that help.

    `benchmark` also says what the benchmark's own inputs and rule expose. Raises InfrastructureError where the
    reference itself does not run.
    """
    started = time.monotonic()
    budget = Budget(budget_s)
    court = Court(study)
    fates = [Fate(m) for m in chosen_mutants(study, mutants)]
    first = Budget(budget_s * (1 - SHARE_OF_HARDENING))
    court.meet_policy(fates, first)
    tried = [f for f in fates if f.by or f.survived]
    extra = harden(court, [f for f in tried if f.alive], budget)
    nulls = court.living_nulls()
    if benchmark:
        for fate in tried:
            fate.benchmark = court.benchmark_exposes(fate.mutant)
    return _conclude(court, fates, tried, extra, nulls, time.monotonic() - started)


def chosen_mutants(study: Study, most: int) -> list[Mutant]:
    """At most so many mutants, kinds in turn, the same ones for the same master seed.

    Raises InfrastructureError when the reference does not run, or when no float64 run can follow it.
    """
    from seatrial.study import reference_boundary

    if study.oracle.opaque:
        raise InfrastructureError(study.oracle.opaque)
    case = study.case(study.smallest)

    def find() -> tuple[Mutant, ...]:
        with DeviceRedirect(torch.device(study.device.name)):
            return find_mutants(
                study.problem.reference,
                study.placed(study.inputs(case)),
                source=study.problem.reference_source,
                seed=study.seed_for("mutants"),
            )

    found = reference_boundary(find, "tracing the reference")
    dice = random.Random(study.seed_for("mutants", "choice"))
    by_kind: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in (*found, *compiled_in(study)):
        by_kind[mutant.name.split(" ")[0]].append(mutant)
    for group in by_kind.values():
        dice.shuffle(group)
    ordered = [
        group[i]
        for i in range(max(map(len, by_kind.values()), default=0))
        for group in by_kind.values()
        if i < len(group)
    ]
    return ordered[:most]


def compiled_in(study: Study) -> Iterator[Mutant]:
    """Scalars at their declared value whatever is given, and axes of which only the listed length is read."""
    declared = study.inputs(study.case(study.smallest))
    for place, (spec, value) in enumerate(zip(study.problem.inputs, declared, strict=True)):
        if spec.shape is None and isinstance(value, int | float):
            yield Mutant(
                f"compiled-in-scalar {spec.name}",
                f"has {spec.name} = {value} compiled in",
                change=lambda given, p=place, v=value: [v if i == p else g for i, g in enumerate(given)],  # type: ignore[misc]
            )
    for axis in study.problem.var_axes if study.problem.resizable else ():
        most = max(w.axes.get(axis, 0) for w in study.problem.workloads)
        places = [(i, s.shape.index(axis)) for i, s in enumerate(study.problem.inputs) if s.shape and axis in s.shape]
        if places:
            yield Mutant(
                f"compiled-in-size {axis}",
                f"reads no further than {axis} = {most}, the largest length listed",
                change=lambda given, where=tuple(places), n=most: _cut(given, where, n),  # type: ignore[misc]
                axis=axis,
            )


def _cut(given: Sequence[Value], where: Sequence[tuple[int, int]], length: int) -> list[Value]:
    """Inputs with zeros beyond a length of one axis."""
    changed = list(given)
    for place, dim in where:
        value = changed[place]
        if isinstance(value, Tensor) and value.shape[dim] > length:
            changed[place] = value.clone()
            value = changed[place]
            assert isinstance(value, Tensor)
            value.narrow(dim, length, value.shape[dim] - length).zero_()
    return changed


# -- judging ----------------------------------------------------------------------------------------


class Court:
    """Judges mutants on cases of one study, as the checks judge a candidate's calls."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.names = [s.name for s in study.problem.outputs]
        self._fair: dict[tuple[object, ...], bool] = {}
        self._seconds_per_element = 0.0

    def meet_policy(self, fates: Sequence[Fate], budget: Budget) -> None:
        """Let the mutants meet the cases of the policy, each until one exposes it.

        Case by case: all that is known of one (its inputs, its honest samples) is made once and may then be forgotten,
        and no mutant meets all cases before every one has met some.
        """
        for case in self.policy_cases:
            for fate in (f for f in fates if f.alive):
                if budget.left <= 0:
                    return
                if not self.affords(case, budget) or not self.is_fair(case):
                    break
                self.meet(fate, case)
                if fate.alive and fate.mutant.is_carry and len(fate.survived) == BEFORE_PROBES:
                    self._probes_expose(fate)

    @property
    def policy_cases(self) -> list[Case]:
        """The cases of wrong-values, fitted-inputs and fitted-sizes under this policy, one of each first."""
        if not hasattr(self, "_cases"):
            study = self.study
            seeds = range(2, 2 + study.policy.seeds)
            declared = [study.case(w, draw=d) for w in study.audited for d in seeds]
            declared.sort(key=lambda c: (c.workload is not study.middle, study.elements(c.workload)))
            drawn = [study.case(study.middle, name) for name in study.tried_recipes]
            sized = [study.case(w) for w in study.outside_sizes()] if study.problem.resizable else []
            self._cases = declared[:1] + drawn[:4] + sized[:2] + drawn[4:] + sized[2:] + declared[1:]
        return self._cases

    def is_fair(self, case: Case) -> bool:
        """Whether the case is defined and the reference as it is passes it; otherwise it exposes nothing."""
        if case.key not in self._fair:
            started = time.monotonic()
            self._fair[case.key] = self._passes(case)
            spent = time.monotonic() - started
            size = self.study.elements(case.workload)
            self._seconds_per_element = max(self._seconds_per_element, spent / max(size, 1 << 14))
        return self._fair[case.key]

    def _passes(self, case: Case) -> bool:
        recipe = self.study.recipes.get(case.recipe)
        try:
            if recipe is not None and recipe.risky and not self.study.is_defined(case):
                return False
            return self.study.reference_accepts(case) and not self._objections(case, self.study.native(case))
        except InfrastructureError:
            return False

    def affords(self, case: Case, budget: Budget) -> bool:
        """Whether a case that was not judged before is likely to fit into the time."""
        return case.key in self._fair or self._seconds_per_element * self.study.elements(case.workload) <= budget.left

    def meet(self, fate: Fate, case: Case) -> bool:
        """One mutant on one case; True when it is exposed."""
        outputs = self.outputs(fate.mutant, case)
        fate.recipes.add(case.recipe)
        if outputs is None:
            fate.by = f"{case_words(case)} (it raises)"
        elif not _identical(outputs, self.study.native(case)) and self._objections(case, outputs):
            fate.by = case_words(case)
        else:
            if fate.effect <= NOTHING:  # more is not needed to know that it changes something
                fate.effect = max(fate.effect, self._effect(fate.mutant, case, outputs))
            fate.survived.add(case.key)
            return False
        return True

    def outputs(self, mutant: Mutant, case: Case) -> tuple[Tensor, ...] | None:
        """What the mutant computes, in the reference's dtypes; None when it raises."""
        return self._call(mutant, self.study.inputs(case))

    def _call(self, mutant: Mutant, inputs: Sequence[Value]) -> tuple[Tensor, ...] | None:
        faulty = Oracle(planted(self.study.problem.reference, mutant), self.names)
        try:
            return tuple(t.cpu() for t in faulty.native(self.study.placed(inputs)))
        except InfrastructureError:
            return None

    def _objections(self, case: Case, outputs: tuple[Tensor, ...]) -> bool:
        findings = judge_values(self.study, "adequacy", [(case, CallRecord(Ran.RETURNED, outputs=outputs))])
        return any(f.outcome is Outcome.FAILED for f in findings)

    def _effect(self, mutant: Mutant, case: Case, outputs: tuple[Tensor, ...]) -> float:
        """Largest change of any element in fp64, in (half an ulp plus the honest deviation)."""
        study = self.study
        if mutant.is_rounding:  # of two roundings in a row the first may well change nothing
            return 0.0 if _identical(outputs, study.native(case)) else float("inf")
        try:
            faulty = exact_outputs(
                planted(study.problem.reference, mutant), study.placed(study.inputs(case)), self.names
            )
        except Exception:  # noqa: BLE001 - whatever the altered reference raises is a change
            return float("inf")
        envelope = study.envelope(case)
        changes = [
            _largest_change(f, o, d, None if y is None else y.sigma)
            for f, o, d, y in zip(faulty, envelope.oracle.values, envelope.dtypes, envelope.yardsticks, strict=True)
        ]
        return max(changes, default=0.0)

    def _probes_expose(self, fate: Fate) -> None:
        from seatrial.numerics.accumulators import too_narrow
        from seatrial.numerics.probes import fingerprints, read_probes

        study = self.study
        if study.too_large_to_probe or not study.probe_plan.sums:
            return
        readings = read_probes(study.probe_plan, lambda inputs: self._call(fate.mutant, inputs))
        narrow = [
            too_narrow(f, native=study.native_fingerprints.get(f.output), capability=study.capability)
            for f in fingerprints(readings)
        ]
        if any(n.fault for n in narrow):
            fate.by = "swamping probes"

    # -- beside the faults

    def living_nulls(self) -> list[str]:
        """Null candidates that no case rejects."""
        fair = [c for c in self.policy_cases if self._fair.get(c.key)]
        living: dict[str, None] = {}
        for case in fair[:1]:
            for words, outputs in null_outputs(self.study, case):
                if not self._objections(case, outputs):
                    living[words] = None
        return list(living)

    def benchmark_exposes(self, mutant: Mutant) -> bool:
        """Whether the benchmark's rule on its own inputs fails the mutant, on any audited workload."""
        for workload in self.study.audited:
            case = self.study.case(workload, draw=90)
            outputs = self.outputs(mutant, case)
            if outputs is None:
                return True
            row = benchmark_rule.judge_workload(workload, outputs, self.study.native(case))
            if row.status != "PASSED":
                return True
        return False


def _identical(outputs: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(
        a.shape == b.shape and a.dtype == b.dtype and share_changed(a, b) == 0.0
        for a, b in zip(outputs, others, strict=True)
    )


def _largest_change(faulty: Tensor, right: Tensor, stored: torch.dtype, sigma: Tensor | None) -> float:
    if faulty.shape != right.shape:
        return float("inf")
    if sigma is None or not is_float(stored) or not right.is_floating_point():
        return 0.0 if torch.equal(faulty, right) else float("inf")
    change = (faulty.double() - right.double()).abs()
    change = torch.where(faulty == right, torch.zeros_like(change), change)  # infinities that agree
    share = change / (half_ulp(right, stored) + sigma)
    share = torch.where(right.isfinite(), share, torch.where(change == 0, 0.0, torch.inf))
    return float(share.nan_to_num(nan=float("inf")).max()) if share.numel() else 0.0


def case_words(case: Case) -> str:
    """The inputs of a case, for a person."""
    sizes = ", ".join(f"{k} {v}" for k, v in case.workload.axes.items())
    return f"{case.recipe} inputs" + (f" at {sizes}" if sizes else "")


# -- hardening --------------------------------------------------------------------------------------


def harden(court: Court, living: Sequence[Fate], budget: Budget) -> list[str]:
    """Hunt what lives with the recipes left over and with aimed inputs; the recipes that exposed something, by name."""
    study = court.study
    helpful: list[str] = []
    cheapest_first = sorted(living, key=lambda fate: not fate.mutant.axis)  # one call says all there is to a size
    for number, fate in enumerate(cheapest_first):
        mine = Budget(budget.left / max(1, len(living) - number))
        if fate.mutant.axis:
            _beyond_the_list(court, fate, mine)
            continue
        recipe = _known_recipe(court, fate, helpful, mine) or _aimed_recipe(court, fate, mine)
        if recipe and recipe not in helpful:
            helpful.append(recipe)
            study.adopt(study.recipes[recipe])
    return helpful


def _beyond_the_list(court: Court, fate: Fate, budget: Budget) -> None:
    """One more than the largest listed length of an axis, at the smallest other sizes that the reference accepts."""
    study, axis = court.study, fate.mutant.axis
    most = max(w.axes.get(axis, 0) for w in study.problem.workloads)
    for workload in sorted(study.problem.workloads, key=study.elements):
        axes = {**workload.axes, axis: most + 1}
        longer = replace(workload, uuid=f"{axis} {most + 1}", axes=axes)
        case = study.case(longer)
        if budget.left <= 0 or not court.affords(case, budget):
            return
        if court.is_fair(case) and court.meet(fate, case):
            study.extra_sizes.append(longer)
            return


def _known_recipe(court: Court, fate: Fate, helpful: Sequence[str], budget: Budget) -> str:
    study = court.study
    left = [n for n in study.recipes if n != "declared" and n not in study.tried_recipes]
    for name in dict.fromkeys([*helpful, *left]):
        case = study.case(study.middle, name)
        if budget.left <= 0:
            return ""
        if court.affords(case, budget) and court.is_fair(case) and court.meet(fate, case):
            return name
    return ""


def _aimed_recipe(court: Court, fate: Fate, budget: Budget) -> str:
    """Climb: keep a change of the inputs when the fault shows more in the outputs, and judge it there."""
    study = court.study
    named = dict(zip((s.name for s in study.problem.inputs), study.inputs(study.case(study.middle)), strict=True))
    free = scalars(study.problem, named)
    names = movable(study.problem, named) + free
    norms = frozenset(n for n, role in roles(study.problem).items() if role is Role.NORM_WEIGHT)
    if not names:
        return ""
    dice = random.Random(study.seed_for("aim", fate.mutant.name))
    best, shown = Aim(), 0.0
    first = first_aims(tuple(n for n in names if n not in free), free)
    begun = len(first)
    for attempt in range(MOST_AIMS):
        if budget.left <= 0:
            break
        started_from = best if attempt % 4 else Aim()
        aim = first.pop(0) if first else nudged(started_from, names, norms, frozenset(free), dice)
        if aim.name in study.recipes:
            continue
        study.recipes[aim.name] = aim.recipe()
        case = study.case(study.middle, aim.name)
        visible = _visible(court, fate.mutant, case)
        if visible > shown or (visible > 0 and attempt < begun):
            best, shown = (aim, visible) if visible > shown else (best, shown)
            if court.affords(case, budget) and court.is_fair(case) and court.meet(fate, case):
                return aim.name
        del study.recipes[aim.name]
    return ""


def _visible(court: Court, mutant: Mutant, case: Case) -> float:
    """How much a mutant's outputs differ from those of the reference as it is; 0 where either fails."""
    try:
        right = court.study.native(case)
    except InfrastructureError:
        return 0.0
    outputs = court.outputs(mutant, case)
    if outputs is None or any(a.shape != b.shape for a, b in zip(outputs, right, strict=True)):
        return 0.0
    shares = [_distance(a.double(), b.double(), b.dtype) for a, b in zip(outputs, right, strict=True)]
    return max(shares, default=0.0)


def _distance(faulty: Tensor, right: Tensor, stored: torch.dtype) -> float:
    """Mean difference in units of the last place, of which no element counts for more than `MOST_PLACES`."""
    if not bool(right.isfinite().all()) or right.numel() == 0:
        return 0.0
    places = (faulty - right).abs() / (2 * half_ulp(right, stored)) if is_float(stored) else (faulty != right).double()
    return float(places.nan_to_num(nan=MOST_PLACES).clamp(max=MOST_PLACES).mean())


# -- the conclusion ---------------------------------------------------------------------------------


def _conclude(
    court: Court,
    fates: Sequence[Fate],
    tried: Sequence[Fate],
    extra: Sequence[str],
    nulls: Sequence[str],
    seconds: float,
) -> Adequacy:
    every = {n for n in court.study.recipes if not court.study.recipes[n].risky}
    faults = [_fault(f, equivalent=is_equivalent(f, every)) for f in tried]
    real = [f for f in faults if not f.equivalent]
    survivors = [f.words for f in real if not f.exposed]
    exposed = sum(f.exposed for f in real)
    equivalent, left = len(faults) - len(real), len(fates) - len(tried)
    known = [f.benchmark_exposed for f in real if f.benchmark_exposed is not None]
    return Adequacy(
        sentence=sentence(exposed, survivors, equivalent, left, nulls),
        planted=len(real),
        exposed=exposed,
        equivalent=equivalent,
        not_tried=left,
        benchmark_exposed=sum(known) if known else None,
        survivors=survivors,
        extra_inputs=[*(court.study.recipes[n].words for n in extra), *(w.uuid for w in court.study.extra_sizes)],
        null_survivors=list(nulls),
        faults=faults,
        seconds=round(seconds, 3),
    )


def is_equivalent(fate: Fate, recipes: set[str]) -> bool:
    """A living mutant that moved nothing, on any input of this problem's own recipes or beyond."""
    return fate.alive and fate.effect <= NOTHING and len(fate.recipes & recipes) >= 0.9 * len(recipes)


def _fault(fate: Fate, *, equivalent: bool) -> PlantedFault:
    return PlantedFault(
        words=fate.mutant.words,
        exposed=not fate.alive,
        by=fate.by,
        equivalent=equivalent,
        benchmark_exposed=fate.benchmark,
    )


def sentence(exposed: int, survivors: Sequence[str], equivalent: int, left: int, nulls: Sequence[str]) -> str:
    """The score in one sentence for a person."""
    total = exposed + len(survivors)
    if not total:
        text = "no fault could be planted in the reference, so how strong the inputs are is not known"
    else:
        text = f"{exposed} of {total} faults planted in the reference were exposed"
    if survivors:
        rest = f" and {len(survivors) - SHOWN} more" if len(survivors) > SHOWN else ""
        word = "the one that was not" if len(survivors) == 1 else f"the {len(survivors)} that were not"
        text += f"; {word}: {'; '.join(survivors[:SHOWN])}{rest}"
    if equivalent:
        text += f"; {equivalent} more changed nothing on any input tried"
    if left:
        text += f"; for {left} more there was no time"
    if nulls:
        text += f"; a candidate that computes nothing was not rejected: {', '.join(nulls)}"
    return text
