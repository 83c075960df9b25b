"""Input recipes: the declared draw, changed in one way that production data differ from random numbers.

A recipe keeps every tensor's shape, type and domain (domain.py) and touches only inputs whose role
(roles.py) allows it. It is a function of the declared inputs and a seed. What it does to one tensor is
in changes.py.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from seatrial.errors import ProblemError
from seatrial.inputs import changes
from seatrial.inputs.changes import Change, ChangeIds, ChangeMask, TwoValues
from seatrial.inputs.domain import are_choices, are_free_ids, is_structured, keep_domain
from seatrial.inputs.roles import CARRIES_SIGNAL, Role, roles
from seatrial.model import Problem, Value, Workload

Inputs = Mapping[str, Value]
ChangeScalar = Callable[[Value], Value]

CHEAP_DRAW = 1 << 23  # elements of a workload that is drawn on the side to see which inputs may be changed
MOST_ALONE = 4  # inputs that get a recipe of their own
ADDED_TO_EXCLUDE = -1e3  # an additive mask's lower value is at most this: no softmax keeps anything of it
TELLING = 16  # elements from which the sample says whether a tensor has structure
BEYOND_ANY_CONTEXT = 1 << 17  # exclusive bound of positions that index nothing


@dataclass(frozen=True)
class Recipe:
    """One way to draw the inputs. `words` says what it changes, for a person; `form` the same with {} for the names.

    `apply(inputs, seed)` takes the declared draw by name (tensors on the CPU, left as they are) and
    returns a new dict with the same names, shapes and types. A `risky` recipe may leave what the
    reference defines: whoever uses it drops it where the reference refuses or gives NaN. One that `repeats` another
    with fewer inputs or another draw is for problems where a call costs next to nothing.
    """

    name: str
    words: str
    apply: Callable[[Inputs, int], dict[str, Value]]
    risky: bool = False
    repeats: bool = False
    form: str = ""

    def told_of(self, changed: Sequence[str]) -> str:
        """What it does to the inputs that it really changed: one that has structure, say, stays as it was drawn."""
        return self.form.format(_named(changed)) if self.form and changed else self.words


def recipes(problem: Problem, index_ranges: Mapping[str, int] | None = None) -> tuple[Recipe, ...]:
    """The recipes that may change something in this problem, most likely to expose a fault first.

    `index_ranges` maps the inputs that the reference uses as an index to their exclusive upper bound.
    The first recipe is always `declared`, which changes nothing.
    """
    plan = _Plan(problem, index_ranges or {})
    offered = [recipe for recipe in _all(plan) if recipe is not None]
    return (Recipe("declared", "as the problem declares", lambda inputs, seed: dict(inputs)), *offered)


def _all(plan: _Plan) -> tuple[Recipe | None, ...]:
    c, signals = changes, plan.signals
    return (
        plan.together("hot-id", "half of the ids are one id, gradients share a component ({})"),
        plan.floats("scaled-up-32", "{} times 32", signals, c.scaled(32.0)),
        plan.floats("tiny", "{} times 2^-10", signals, c.scaled(2.0**-10)),
        plan.floats("nonunit-norm", "{} from a normal, with 0 and -1 among them", plan.norms, c.nonunit, pinned=True),
        plan.floats(
            "free-gradient", "{} from a normal, with 0 and -1 among them", plan.flat_gradients, c.nonunit, pinned=True
        ),
        plan.floats(
            "free-weight", "{} from a normal, with 0 and -1 among them", plan.flat_weights, c.nonunit, pinned=True
        ),
        plan.constants("varied-constants", "{} no longer constant"),
        plan.masks("half-masked", "half of {} masked out", c.random_mask(0.5)),
        plan.labels("one-ignored", "one of {} ignored", lambda value: c.ignored(0.0, value)),
        plan.scalars("flipped-flags", "{} the other way round", _is_flag, lambda v: not v, risky=True),
        plan.positions("long-positions", "{} of a long context", c.telling_positions),
        plan.floats("far-phases", "{} of a long context", plan.phases, c.far_phases, pinned=True, risky=True),
        plan.floats("sentinel-per-row", "one element of each row of {} at 256 sigma", signals, c.sentinel_per_row),
        plan.floats("sentinel-at-end", "the end of {} far larger than the rest", signals, c.sentinel_at_end),
        *plan.loud("covered", "large elements in every column of {}", c.covering),
        *plan.loud("leaning", "squares of {} that all round up in bfloat16", c.leaning_squares, "bfloat16"),
        plan.biases("graded-bias", "other small values in {} than its own two"),
        plan.tiny_beside_eps("tiny-other-eps", "{} times 2^-10, {} times 16"),
        *plan.constants_again("varied-constants-again", "{} no longer constant, another draw"),
        plan.floats("shifted", "each row of {} shifted by several sigma", signals, c.shifted),
        plan.floats("far-from-nought", "{} plus 64 sigma", signals, c.offset(64.0), risky=True),
        plan.floats("farther-from-nought", "{} plus 1000 sigma", plan.wide_signals, c.offset(1e3), risky=True),
        plan.floats("uneven-rows", "rows of {} times powers of two", signals, c.uneven_rows),
        plan.ids("one-id", "all ids the same ({})", c.one_id),
        plan.choices("hot-choice", "one id chosen in nearly every row ({})", c.hot_choice),
        plan.logits("confident", "logits favour the label by 12 sigma ({})", c.CONFIDENT),
        plan.scalars("larger-eps", "{} times 1000", _is_eps, _times(1e3)),
        plan.scalars("smaller-cap", "{} / 16", _is_cap, _times(1 / 16)),
        plan.scalars("larger-scalars", "{} times 3", _is_other, _times(3.0)),
        plan.scalars("small-ints", "{} at one", _is_int, _one, risky=True),
        plan.floats("few-rows", "every row of {} one of four, without signs", signals, c.few_rows_of_one_sign),
        plan.floats("growing-rows", "rows of {} grow sixteenfold", signals, c.growing_rows),
        plan.floats("zero-rows", "a third of the rows of {} zero", signals, c.zero_rows, risky=True),
        plan.masks("few-kept", "an eighth of {} kept", c.random_mask(1 / 8)),
        plan.masks("padded", "every row of {} padded on the right to a length of its own", c.prefix_mask),
        plan.labels("most-ignored", "most of {} ignored", lambda value: c.ignored(0.9, value)),
        plan.floats("common-sign", "{} plus half a sigma", plan.gradients or signals, c.common_sign),
        plan.floats("heterogeneous", "second half of {} times 8", signals, c.heterogeneous),
        plan.floats("outlier-channels", "one channel in 37 of {} times 50", signals, c.outlier_channels),
        plan.floats("one-sentinel", "one element of {} at 256 sigma", signals, c.one_sentinel),
        plan.ids("zipf", "ids as frequent as words in running text ({})", c.zipf),
        plan.floats("heavy-tail", "{} with heavy tails", signals, c.heavy_tail),
        plan.floats("uneven-scales", "{} times powers of two", plan.scales, c.uneven_scales, pinned=True),
        plan.floats("to-fp8-limit", "{} up to 480, beyond an e4m3 number", plan.quantised, c.to_fp8_limit),
        plan.floats("one-row", "{} zero but for one row", plan.upstream, c.one_row, pinned=True),
        plan.floats("unnormalised", "rows of {} do not sum to one", plan.targets, c.unnormalised, pinned=True),
        plan.ids("half-one-id", "half of the ids are one id ({})", c.half_one_id),
        plan.ids("edge-ids", "only the first and the last legal id ({})", c.edge_ids),
        plan.positions("late-positions", "{} begin somewhere else in every row", c.late_positions),
        plan.masks("left-padded", "every row of {} padded on the left", c.suffix_mask),
        plan.masks("one-row-masked", "one row of {} masked out", c.empty_row, risky=True),
        plan.floats("scaled-up-2", "{} times 2", signals, c.scaled(2.0)),
        plan.floats("scaled-up", "{} times 8", signals, c.scaled(8.0)),
        plan.floats("scaled-down", "{} / 4", signals, c.scaled(0.25)),
        plan.floats("absolute", "{} without signs", signals, lambda values, _: values.abs()),
        plan.floats("negative", "{} all negative", signals, lambda values, _: -values.abs()),
        plan.floats("ascending", "rows of {} in ascending order", signals, c.ascending),
        plan.floats("tied", "{} rounded to half sigmas", signals, c.tied),
        plan.floats("zero-channels", "columns of {} zero", signals, c.zero_channels, risky=True),
        plan.floats("one-per-row", "one element left in each row of {}", signals, c.one_per_row, risky=True),
        plan.floats("all-zero", "{} all zero", signals, c.all_zero, risky=True),
        plan.logits("mistaken", "logits against the label by 12 sigma ({})", -c.CONFIDENT),
        plan.ids("uniform", "ids equally likely over the legal range ({})", c.uniform_ids),
        plan.scalars("smaller-eps", "{} / 1000", _is_eps, _times(1e-3)),
        plan.scalars("larger-cap", "{} times 3", _is_cap, _times(3.0)),
        plan.scalars("smaller-scalars", "{} times 0.75", _is_other, _times(0.75)),
        plan.scalars("larger-ints", "{} plus one", _is_whole, lambda v: v + 1, risky=True),
    )


class _Plan:
    """Which inputs of one problem may be changed, and how a change becomes a recipe."""

    def __init__(self, problem: Problem, index_ranges: Mapping[str, int]) -> None:
        self.role = roles(problem, index_ranges)
        self._problem = problem
        self._ranges = index_ranges
        self._source = _source_of(problem)
        sample = self._sample = _cheap_sample(problem) or _declared_scalars(problem)
        self.norms = self._floats_with(Role.NORM_WEIGHT)
        self.upstream = self._floats_with(Role.GRADIENT)
        self.gradients = _without_structure(self.upstream, sample)
        self.flat_gradients = tuple(n for n in self.upstream if _is_flat(sample.get(n)))
        self.flat_weights = tuple(n for n in self._floats_with(Role.WEIGHT) if _is_flat(sample.get(n)))
        self.signals = _without_structure(self._floats_with(*CARRIES_SIGNAL), sample) or _without_structure(
            self._floats_with(Role.WEIGHT), sample
        )
        declared = {spec.name: spec.dtype for spec in problem.inputs}
        self.wide_signals = tuple(n for n in self.signals if declared[n] == "float32")
        self.scales = tuple(n for n in self._floats_with(Role.SCALE) if _is_positive(sample.get(n)))
        self.quantised = self.signals if "float8" in self._source else ()
        self.targets = tuple(n for n in self._floats_with(*Role) if re.search("target|label|teacher|soft", n.lower()))
        # Angles grow with the position; tables of cosines and sines do not.
        self.phases = tuple(n for n in self._floats_with(Role.POSITION) if changes.exceeds_one(sample.get(n)))
        fixed = {n for w in problem.workloads for n, rule in w.inputs.items() if rule.kind == "safetensors"}
        ids = (n for n, role in self.role.items() if role is Role.TOKEN_IDS and n not in fixed)
        self.token_ids = tuple(n for n in ids if self._are_free(n, sample))
        loose = (n for n, role in self.role.items() if role is Role.INDICES and n in index_ranges and n not in fixed)
        self.token_ids += tuple(n for n in loose if n in sample and self._are_free(n, sample))
        choosing = (n for n, role in self.role.items() if role in (Role.TOKEN_IDS, Role.INDICES) and n in index_ranges)
        self.chosen = tuple(n for n in choosing if n not in fixed and n not in self.token_ids and self._are_choices(n))
        fixed_roles = (Role.MASK, Role.POSITION, Role.TOKEN_IDS)
        flat = [s for s in problem.inputs if self.role[s.name] not in fixed_roles and _is_flat(sample.get(s.name))]
        self._flat_floats = tuple(
            s.name for s in flat if s.dtype.startswith(("float", "bfloat")) and _is_plain(s.dtype)
        )
        self._flat_integers = tuple(
            s.name for s in flat if s.dtype.startswith(("int", "uint")) and s.name not in index_ranges
        )
        self._masks = tuple(n for n, role in self.role.items() if role is Role.MASK and n not in fixed)
        may_be_bias = self._floats_with(Role.MASK, Role.WEIGHT, Role.ACTIVATION)
        self._additive = tuple(n for n in may_be_bias if n not in fixed and not _is_compared(n, self._source))
        self._positions = tuple(
            spec.name
            for spec in problem.inputs
            if self.role[spec.name] is Role.POSITION and spec.dtype.startswith("int") and spec.name not in fixed
        )

    def _floats_with(self, *wanted: Role) -> tuple[str, ...]:
        return tuple(
            spec.name
            for spec in self._problem.inputs
            if self.role[spec.name] in wanted
            and spec.shape is not None
            and spec.dtype.startswith(("float", "bfloat"))
            and _is_plain(spec.dtype)
        )

    def floats(
        self,
        name: str,
        words: str,
        targets: tuple[str, ...],
        change: Change,
        *,
        pinned: bool = False,
        risky: bool = False,
    ) -> Recipe | None:
        """A recipe that changes float tensors; `pinned` ones are constant in the declared draw and meant to vary."""
        if not targets:
            return None

        def apply(inputs: Inputs, seed: int) -> dict[str, Value]:
            return _change_floats(inputs, targets, change, Generator().manual_seed(seed), pinned=pinned)

        return Recipe(name, words.format(_named(targets)), apply, risky, form=words)

    def constants(self, name: str, words: str, only: str = "", *, repeats: bool = False) -> Recipe | None:
        """Everything at once that the declared draw holds constant, but masks, positions and ids; or one of them."""
        floats = tuple(n for n in self._flat_floats if only in ("", n))
        integers = tuple(n for n in self._flat_integers if only in ("", n))
        if not floats and not integers:
            return None

        def apply(inputs: Inputs, seed: int) -> dict[str, Value]:
            generator = Generator().manual_seed(seed)
            varied = _change_floats(inputs, floats, changes.varied_constant, generator, pinned=True)
            for target in integers:
                old = inputs[target]
                if isinstance(old, Tensor) and old.numel():
                    varied[target] = changes.varied_integers(old, 0, generator).to(old.dtype).contiguous()
            return varied

        named = words.format(_named((*floats, *integers)))
        return Recipe(name, named, apply, risky=True, repeats=repeats, form=words)

    def constants_again(self, name: str, words: str) -> list[Recipe | None]:
        """A second draw of all constants, and each of the first few alone: no fault hangs on a single case."""
        flat = (*self._flat_floats, *self._flat_integers)
        alone = flat[:MOST_ALONE] if len(flat) > 1 else ()
        one_each = [self.constants(f"varied-{n}", "{} alone no longer constant", n, repeats=True) for n in alone]
        return [self.constants(name, words, repeats=True), *one_each]

    def loud(self, name: str, words: str, change: Change, dtype: str = "") -> list[Recipe]:
        """Per signal (of this dtype, if one is given): it is changed, while the other signals are next to nothing."""

        def apply_to(loud: str) -> Callable[[Inputs, int], dict[str, Value]]:
            quiet = tuple(n for n in self.signals if n != loud)

            def apply(inputs: Inputs, seed: int) -> dict[str, Value]:
                generator = Generator().manual_seed(seed)
                changed = _change_floats(inputs, (loud,), change, generator)
                return _change_floats(changed, quiet, changes.scaled(2.0**-10), generator)

            return apply

        declared = {spec.name: spec.dtype for spec in self._problem.inputs}
        chosen = [n for n in self.signals if dtype in ("", declared[n])][:MOST_ALONE]
        beside = ", the other signals next to nothing" if len(self.signals) > 1 else ""
        return [Recipe(f"{name}-{n}", words.format(_named([n])) + beside, apply_to(n)) for n in chosen]

    def tiny_beside_eps(self, name: str, words: str) -> Recipe | None:
        """Signals so small that an epsilon decides, and that epsilon at another value than the declared one."""
        tiny = self.floats(name, "{}", self.signals, changes.scaled(2.0**-10))
        other = self.scalars(name, "{}", _is_eps, _times(16.0))
        if tiny is None or other is None:
            return None

        def apply(inputs: Inputs, seed: int) -> dict[str, Value]:
            return other.apply(tiny.apply(inputs, seed), seed)

        return Recipe(name, words.format(tiny.words, other.words), apply)

    def biases(self, name: str, words: str) -> Recipe | None:
        """Additive masks of two values, which the reference adds and compares with nothing, get other values as well."""
        sample = {n: self._sample.get(n) for n in self._additive}
        may_be_flat = {n for n, role in self.role.items() if role is Role.MASK}
        two = (n for n, value in sample.items() if n in may_be_flat or not _is_flat(value))
        targets = tuple(n for n in two if _is_additive(_two_values(sample[n])))
        if not targets:
            return None

        def apply(inputs: Inputs, seed: int) -> dict[str, Value]:
            generator, changed = Generator().manual_seed(seed), dict(inputs)
            for target in targets:
                mask = inputs[target]
                values = _two_values(mask)
                if isinstance(mask, Tensor) and values is not None and _is_additive(values):
                    changed[target] = changes.graded_bias(mask, values, generator).contiguous()
            return changed

        return Recipe(name, words.format(_named(targets)), apply, risky=True, form=words)

    def ids(self, name: str, words: str, change: ChangeIds) -> Recipe | None:
        if not self.token_ids:
            return None

        def apply(inputs: Inputs, seed: int) -> dict[str, Value]:
            return self._change_ids(inputs, self.token_ids, change, Generator().manual_seed(seed))

        return Recipe(name, words.format(_named(self.token_ids)), apply, form=words)

    def choices(self, name: str, words: str, change: ChangeIds) -> Recipe | None:
        """Rows of ids without repeats, as a top-k gives: they stay without."""
        if not self.chosen:
            return None

        def apply(inputs: Inputs, seed: int) -> dict[str, Value]:
            changed, generator = dict(inputs), Generator().manual_seed(seed)
            for name in self.chosen:
                declared = inputs[name]
                bound = self._bound(name, declared, inputs) if isinstance(declared, Tensor) else 0
                if isinstance(declared, Tensor) and are_choices(declared, bound):
                    changed[name] = change(declared.long(), bound, generator).to(declared.dtype).contiguous()
            return changed

        return Recipe(name, words.format(_named(self.chosen)), apply, form=words)

    def _are_choices(self, name: str) -> bool:
        ids = self._sample.get(name)
        return isinstance(ids, Tensor) and are_choices(ids, self._bound(name, ids, self._sample))

    def together(self, name: str, words: str) -> Recipe | None:
        """Ids and gradients at once: many like-signed terms on one row."""
        targets = self.gradients or self.signals
        if not self.token_ids or not targets:
            return None

        def apply(inputs: Inputs, seed: int) -> dict[str, Value]:
            generator = Generator().manual_seed(seed)
            hot = self._change_ids(inputs, self.token_ids, changes.half_one_id, generator)
            return _change_floats(hot, targets, changes.common_sign, generator)

        return Recipe(name, words.format(_named((*self.token_ids, *targets))), apply, form=words)

    def labels(self, name: str, words: str, change: Callable[[int], ChangeIds]) -> Recipe | None:
        """Some ids become the one that the reference ignores, where it names such an id."""
        value = _ignored_id(self._source)
        named = [n for n, role in self.role.items() if role is Role.SCALAR and "ignore" in n.lower()]
        if not self.token_ids or (value is None and not named):
            return None

        def apply(inputs: Inputs, seed: int) -> dict[str, Value]:
            given = inputs[named[0]] if named else value
            ignored = int(given) if isinstance(given, int | float) else -100
            return self._change_ids(inputs, self.token_ids, change(ignored), Generator().manual_seed(seed))

        return Recipe(name, words.format(_named(self.token_ids)), apply, form=words)

    def masks(self, name: str, words: str, change: ChangeMask, *, risky: bool = False) -> Recipe | None:
        targets = tuple(n for n in self._masks if _two_values(self._sample.get(n)) is not None)
        if not targets:
            return None

        def apply(inputs: Inputs, seed: int) -> dict[str, Value]:
            generator, changed = Generator().manual_seed(seed), dict(inputs)
            for target in targets:
                mask = inputs[target]
                values = _two_values(mask)
                if isinstance(mask, Tensor) and values is not None:
                    changed[target] = change(mask, values, generator).contiguous()
            return changed

        return Recipe(name, words.format(_named(targets)), apply, risky, form=words)

    def positions(self, name: str, words: str, change: ChangeIds) -> Recipe | None:
        """Other positions; how far they may go is what the reference's own tables allow, if it has any."""
        if not self._positions:
            return None

        def apply(inputs: Inputs, seed: int) -> dict[str, Value]:
            generator, changed = Generator().manual_seed(seed), dict(inputs)
            for target in self._positions:
                old = inputs[target]
                if isinstance(old, Tensor) and old.numel():
                    bound = self._bound(target, old, inputs) if target in self._ranges else BEYOND_ANY_CONTEXT
                    changed[target] = change(old.long(), bound, generator).to(old.dtype).contiguous()
            return changed

        return Recipe(name, words.format(_named(self._positions)), apply, risky=True, form=words)

    def logits(self, name: str, words: str, sigmas: float) -> Recipe | None:
        """Scores that speak for (or against) the label of their row, where a float input has a place for each label."""
        pairs = [(i, x) for i in self.token_ids for x in self.signals if self._is_score_of(i, x)]
        if not pairs:
            return None

        def apply(inputs: Inputs, seed: int) -> dict[str, Value]:
            changed = dict(inputs)
            for label, score in pairs:
                ids, scores = inputs[label], changed[score]
                if isinstance(ids, Tensor) and isinstance(scores, Tensor) and ids.numel():
                    wide = scores.float()
                    places = ids.long().clamp(0, wide.shape[-1] - 1).unsqueeze(-1)
                    pull = torch.full(places.shape, sigmas * float(changes.sigma_of(wide)))
                    changed[score] = keep_domain(wide.scatter_add(-1, places, pull), scores)
            return changed

        return Recipe(name, words.format(_named(x for _, x in pairs)), apply, form=words)

    def _is_score_of(self, label: str, score: str) -> bool:
        ids, scores = self._sample.get(label), self._sample.get(score)
        return (
            isinstance(ids, Tensor) and isinstance(scores, Tensor) and scores.shape[:-1] == ids.shape and ids.dim() > 0
        )

    def scalars(
        self, name: str, words: str, chosen: Callable[[str, Value], bool], change: ChangeScalar, *, risky: bool = False
    ) -> Recipe | None:
        """Scalars, be they Python numbers or tensors of one element, at another value than the declared one."""
        targets = tuple(
            n
            for n, value in self._sample.items()
            if (not isinstance(value, Tensor) or (value.numel() == 1 and value.dim() <= 1))
            and self.role[n] not in (Role.TOKEN_IDS, Role.INDICES, Role.MASK)
            and chosen(n, value)
        )
        if not targets:
            return None

        def apply(inputs: Inputs, seed: int) -> dict[str, Value]:
            return {n: _changed_scalar(v, change) if n in targets else v for n, v in inputs.items()}

        return Recipe(name, words.format(_named(targets)), apply, risky, form=words)

    def _change_ids(
        self, inputs: Inputs, targets: tuple[str, ...], change: ChangeIds, generator: Generator
    ) -> dict[str, Value]:
        changed = dict(inputs)
        for name in targets:
            declared = inputs[name]
            if not isinstance(declared, Tensor) or declared.numel() == 0:
                continue
            bound = self._bound(name, declared, inputs)
            if are_free_ids(declared, bound):
                ids = change(declared.long(), bound, generator)
                # A negative id is padding or "ignore this one": it stays where it is.
                changed[name] = torch.where(declared < 0, declared.long(), ids).to(declared.dtype).contiguous()
        return changed

    def _are_free(self, name: str, sample: Inputs) -> bool:
        """False only when the sample shows ids that are sorted or all different, as other indices are."""
        ids = sample.get(name)
        if not isinstance(ids, Tensor) or ids.numel() == 0:
            return True
        return are_free_ids(ids, self._bound(name, ids, sample))

    def _bound(self, name: str, declared: Tensor, inputs: Inputs) -> int:
        """The exclusive upper bound that is legal at the sizes of these inputs.

        A traced bound holds for the sizes it was traced at; where it equals a listed length of a var
        axis, it is taken to be that axis, and follows its length here.
        """
        seen = int(declared.max()) + 1
        bound = self._ranges.get(name, seen)
        lengths = self._lengths(inputs)
        for axis in self._problem.var_axes:
            if axis in lengths and any(w.axes.get(axis) == bound for w in self._problem.workloads):
                bound = min(bound, lengths[axis])
        return max(bound, seen, 1)

    def _lengths(self, inputs: Inputs) -> dict[str, int]:
        found: dict[str, int] = {}
        for spec in self._problem.inputs:
            value = inputs[spec.name]
            if isinstance(value, Tensor) and spec.shape is not None and len(spec.shape) == value.dim():
                found.update(zip(spec.shape, value.shape, strict=True))
        return found


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _change_floats(
    inputs: Inputs, targets: tuple[str, ...], change: Change, generator: Generator, *, pinned: bool = False
) -> dict[str, Value]:
    changed = dict(inputs)
    for name in targets:
        declared = inputs[name]
        if not isinstance(declared, Tensor) or declared.numel() == 0:
            continue
        wide = declared.to(torch.float64 if declared.dtype == torch.float64 else torch.float32)
        if pinned:
            changed[name] = change(wide, generator).to(declared.dtype).contiguous()
        elif not is_structured(declared):
            changed[name] = keep_domain(change(wide, generator), declared)
    return changed


def _without_structure(names: tuple[str, ...], sample: Inputs) -> tuple[str, ...]:
    def shows_structure(value: Value | None) -> bool:
        return isinstance(value, Tensor) and value.numel() >= TELLING and is_structured(value)

    return tuple(name for name in names if not shows_structure(sample.get(name)))


def _is_plain(dtype: str) -> bool:
    return "float4" not in dtype and "e8m0" not in dtype  # those are codes, not numbers


def _is_flat(value: Value | None) -> bool:
    """One value everywhere, zeros included: drawn so for want of a better idea, not because it has to be."""
    return isinstance(value, Tensor) and value.numel() > 1 and bool((value == value.reshape(-1)[0]).all())


def _is_positive(value: Value | None) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1 and bool((value.float() > 0).all())


def _two_values(mask: Value | None) -> TwoValues | None:
    """The values of a mask that may be drawn anew: one value only, or two without a pattern; None of any other."""
    if not isinstance(mask, Tensor) or mask.numel() < 2:
        return None
    low, high = float(mask.float().min()), float(mask.float().max())
    if low == high:
        return _values_of_a_flat_mask(low, mask)
    flat = mask.float()
    rows = (flat == high).float().reshape(-1, flat.shape[-1])
    steps = rows.diff(dim=-1) if rows.shape[1] > 1 else rows.T.diff(dim=-1)
    has_pattern = bool((steps >= 0).all() or (steps <= 0).all())
    if has_pattern or not bool(((flat == low) | (flat == high)).all()):
        return None  # causal, padded or a bias: what it may be is not known
    additive = mask.is_floating_point() and low < 0
    return TwoValues(high, low) if additive or float((flat == high).float().mean()) >= 0.5 else TwoValues(low, high)


def _is_additive(values: TwoValues | None) -> bool:
    """Nothing is added where it is kept, and so much elsewhere that nothing is left of it."""
    return values is not None and values.kept == 0.0 and values.other <= ADDED_TO_EXCLUDE


def _is_compared(name: str, source: str) -> bool:
    """Whether the reference asks which of its values an input holds: it is then a mask, and no number."""
    asks = rf"\b{name}\s*(?:[<>]|[=!]=)|(?:[<>]=?|[=!]=)\s*{name}\b"
    casts = rf"\b{name}\.(bool\(|isinf|isneginf|eq\(|ne\(|lt\(|gt\(|le\(|ge\(|to\(torch\.bool)"
    functions = rf"\b(isinf|isneginf|isfinite|logical_not|eq|ne|lt|gt|le|ge|bool)\(\s*{name}\b"
    return re.search(f"{asks}|{casts}|{functions}|~{name}\\b", source) is not None


def _values_of_a_flat_mask(value: float, mask: Tensor) -> TwoValues | None:
    if value == 0.0:
        return TwoValues(0.0, changes.EXCLUDED) if mask.is_floating_point() else TwoValues(0.0, 1.0)
    return TwoValues(1.0, 0.0) if value == 1.0 else None


def _source_of(problem: Problem) -> str:
    if problem.reference_source:
        return problem.reference_source
    try:
        return inspect.getsource(problem.reference)
    except (OSError, TypeError):
        return ""  # a callable without a source file: nothing is known of its words


_IGNORES = re.compile(r"ignore_index\s*(?::\s*int\s*)?=\s*(-?\d+)|[!=]=\s*(-\d+)|IGNORE\w*\s*=\s*(-?\d+)")


def _ignored_id(source: str) -> int | None:
    """The id that the reference says it ignores: an `ignore_index`, or a negative number that it compares with."""
    found = _IGNORES.search(source)
    return int(next(group for group in found.groups() if group)) if found else None


def _cheap_sample(problem: Problem) -> dict[str, Value] | None:
    """The declared draw of the smallest workload, when it is small enough to draw on the side."""
    smallest = min(problem.workloads, key=lambda w: _elements(problem, w), default=None)
    if smallest is None or _elements(problem, smallest) > CHEAP_DRAW:
        return None
    try:
        return problem.draw(smallest, 0, "cpu")
    except ProblemError:
        return None  # it cannot be drawn here; whoever audits it will say so


def _declared_scalars(problem: Problem) -> dict[str, Value]:
    rules = problem.workloads[0].inputs if problem.workloads else {}
    return {name: rule.value for name, rule in rules.items() if rule.value is not None}


def _elements(problem: Problem, workload: Workload) -> int:
    sizes = problem.sizes(workload.axes)
    lengths = ([int(axis) if axis.isdigit() else sizes[axis] for axis in spec.shape or ()] for spec in problem.inputs)
    return sum(map(math.prod, lengths))


# ---------------------------------------------------------------------------------------------------
# Scalars by name and by type


def _is_eps(name: str, value: Value) -> bool:
    return _is_real(value) and "eps" in name.lower()


def _is_cap(name: str, value: Value) -> bool:
    return _is_real(value) and "cap" in name.lower().replace("capacity", "")


def _is_other(name: str, value: Value) -> bool:
    return _is_real(value) and not _is_eps(name, value) and not _is_cap(name, value)


def _is_flag(name: str, value: Value) -> bool:
    return isinstance(value, bool)


def _is_int(name: str, value: Value) -> bool:
    return _is_whole(name, value) and bool(value > 1)


def _is_whole(name: str, value: Value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0 and "ignore" not in name.lower()


def _is_real(value: Value) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


def _times(factor: float) -> ChangeScalar:
    """Times a factor; what is zero, and would stay it, becomes a tenth."""

    def change(value: Value) -> Value:
        if isinstance(value, Tensor):
            return torch.where(value == 0, torch.full_like(value, 0.1), value * factor)
        return value * factor if value else 0.1

    return change


def _one(value: Value) -> Value:
    return 1


def _changed_scalar(value: Value, change: ChangeScalar) -> Value:
    changed = change(value)
    return (
        changed.to(value.dtype).contiguous() if isinstance(value, Tensor) and isinstance(changed, Tensor) else changed
    )
