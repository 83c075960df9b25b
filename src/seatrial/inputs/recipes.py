"""Input recipes: the declared draw, changed in one way that production data differ from random numbers.

A recipe keeps every tensor's shape, type and domain (domain.py) and touches only inputs whose role
(roles.py) allows it. It is a function of the declared inputs and a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from seatrial.errors import ProblemError
from seatrial.inputs.domain import are_free_ids, is_structured, keep_domain
from seatrial.inputs.roles import CARRIES_SIGNAL, Role, roles
from seatrial.model import Problem, Value, Workload

Inputs = Mapping[str, Value]
Change = Callable[[Tensor, Generator], Tensor]  # fp32 or fp64 values -> new values of the same shape
ChangeIds = Callable[[Tensor, int, Generator], Tensor]  # ids, exclusive upper bound -> new ids

ZIPF_EXPONENT = 1.1  # word frequencies of running text
OUTLIER_EVERY, OUTLIER_FACTOR = 37, 50.0  # an odd spacing, so that tiles see different channels
SENTINEL = 2.0**8  # bf16 carries 8 bits: beside this element the others vanish in a bf16 sum
MOST_KINDS = 1 << 20  # different ids of a Zipf draw; a range of hash values has no use for more
CHEAP_DRAW = 1 << 20  # elements of a workload that is drawn on the side to see which inputs may be changed
TELLING = 16  # elements from which the sample says whether a tensor has structure


@dataclass(frozen=True)
class Recipe:
    """One way to draw the inputs. `words` says what it changes, for a person.

    `apply(inputs, seed)` takes the declared draw by name (tensors on the CPU, left as they are) and
    returns a new dict with the same names, shapes and types.
    """

    name: str
    words: str
    apply: Callable[[Inputs, int], dict[str, Value]]


def recipes(problem: Problem, index_ranges: Mapping[str, int] | None = None) -> tuple[Recipe, ...]:
    """The recipes that may change something in this problem, most likely to expose a fault first.

    `index_ranges` maps the inputs that the reference uses as an index to their exclusive upper bound.
    The first recipe is always `declared`, which changes nothing.
    """
    plan = _Plan(problem, index_ranges or {})
    offered = [recipe for recipe in _all(plan) if recipe is not None]
    return (Recipe("declared", "as the problem declares", lambda inputs, seed: dict(inputs)), *offered)


def _all(plan: _Plan) -> tuple[Recipe | None, ...]:
    signals = plan.signals
    return (
        plan.together("hot-id", "half of the ids are one id, gradients share a component", _half_one_id, _common_sign),
        plan.floats("scaled-up-32", "{} times 32", signals, _scaled(32.0)),
        plan.floats("tiny", "{} times 2^-10", signals, _scaled(2.0**-10)),
        plan.floats("nonunit-norm", "{} from a normal, with 0 and -1 among them", plan.norms, _nonunit, pinned=True),
        plan.ids("one-id", "all ids the same", _one_id),
        plan.floats("common-sign", "{} plus half a sigma", plan.gradients or signals, _common_sign),
        plan.floats("heterogeneous", "second half of {} times 8", signals, _heterogeneous),
        plan.floats("outlier-channels", "one channel in 37 of {} times 50", signals, _outlier_channels),
        plan.floats("shifted", "each row of {} shifted by several sigma", signals, _shifted),
        plan.floats("one-sentinel", "one element of {} at 256 sigma", signals, _one_sentinel),
        plan.ids("zipf", "ids as frequent as words in running text", _zipf),
        plan.scalars("larger-eps", "eps times 1000", _is_eps, 1e3),
        plan.scalars("smaller-cap", "cap / 16", _is_cap, 1 / 16),
        plan.floats("zero-rows", "a third of the rows of {} zero", signals, _zero_rows),
        plan.floats("heavy-tail", "{} with heavy tails", signals, _heavy_tail),
        plan.ids("half-one-id", "half of the ids are one id", _half_one_id),
        plan.floats("scaled-up", "{} times 8", signals, _scaled(8.0)),
        plan.floats("absolute", "{} without signs", signals, lambda values, _: values.abs()),
        plan.floats("tied", "{} rounded to half sigmas", signals, _tied),
        plan.ids("uniform", "ids equally likely over the legal range", _uniform_ids),
        plan.scalars("smaller-eps", "eps / 1000", _is_eps, 1e-3),
        plan.scalars("other-scalars", "other numbers times 0.75", _is_other, 0.75),
    )


class _Plan:
    """Which inputs of one problem may be changed, and how a change becomes a recipe."""

    def __init__(self, problem: Problem, index_ranges: Mapping[str, int]) -> None:
        self.role = roles(problem, index_ranges)
        self._problem = problem
        self._ranges = index_ranges
        sample = _cheap_sample(problem) or {}
        self.norms = self._floats_with(Role.NORM_WEIGHT)
        self.gradients = _without_structure(self._floats_with(Role.GRADIENT), sample)
        self.signals = _without_structure(self._floats_with(*CARRIES_SIGNAL), sample) or _without_structure(
            self._floats_with(Role.WEIGHT), sample
        )
        fixed = {n for w in problem.workloads for n, rule in w.inputs.items() if rule.kind == "safetensors"}
        ids = (n for n, role in self.role.items() if role is Role.TOKEN_IDS and n not in fixed)
        self.token_ids = tuple(n for n in ids if self._are_free(n, sample))

    def _floats_with(self, *wanted: Role) -> tuple[str, ...]:
        return tuple(
            spec.name
            for spec in self._problem.inputs
            if self.role[spec.name] in wanted and "float" in spec.dtype and not spec.dtype.startswith("float4")
        )

    def floats(
        self, name: str, words: str, targets: tuple[str, ...], change: Change, *, pinned: bool = False
    ) -> Recipe | None:
        """A recipe that changes float tensors; `pinned` ones are constant in the declared draw and meant to vary."""
        if not targets:
            return None

        def apply(inputs: Inputs, seed: int) -> dict[str, Value]:
            return _change_floats(inputs, targets, change, Generator().manual_seed(seed), pinned=pinned)

        return Recipe(name, words.format(", ".join(targets)), apply)

    def ids(self, name: str, words: str, change: ChangeIds) -> Recipe | None:
        if not self.token_ids:
            return None

        def apply(inputs: Inputs, seed: int) -> dict[str, Value]:
            return self._change_ids(inputs, change, Generator().manual_seed(seed))

        return Recipe(name, f"{words} ({', '.join(self.token_ids)})", apply)

    def together(self, name: str, words: str, change_ids: ChangeIds, change: Change) -> Recipe | None:
        """Ids and gradients at once: many like-signed terms on one row."""
        targets = self.gradients or self.signals
        if not self.token_ids or not targets:
            return None

        def apply(inputs: Inputs, seed: int) -> dict[str, Value]:
            generator = Generator().manual_seed(seed)
            return _change_floats(self._change_ids(inputs, change_ids, generator), targets, change, generator)

        return Recipe(name, words, apply)

    def scalars(self, name: str, words: str, chosen: Callable[[str], bool], factor: float) -> Recipe | None:
        targets = [n for n, role in self.role.items() if role is Role.SCALAR and chosen(n)]
        if not targets:
            return None

        def apply(inputs: Inputs, seed: int) -> dict[str, Value]:
            return {n: v * factor if n in targets and isinstance(v, float) else v for n, v in inputs.items()}

        return Recipe(name, f"{words} ({', '.join(targets)})", apply)

    def _change_ids(self, inputs: Inputs, change: ChangeIds, generator: Generator) -> dict[str, Value]:
        changed = dict(inputs)
        for name in self.token_ids:
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


def _cheap_sample(problem: Problem) -> dict[str, Value] | None:
    """The declared draw of the smallest workload, when it is small enough to draw on the side."""
    smallest = min(problem.workloads, key=lambda w: _elements(problem, w), default=None)
    if smallest is None or _elements(problem, smallest) > CHEAP_DRAW:
        return None
    try:
        return problem.draw(smallest, 0, "cpu")
    except ProblemError:
        return None  # it cannot be drawn here; whoever audits it will say so


def _elements(problem: Problem, workload: Workload) -> int:
    sizes = problem.sizes(workload.axes)
    lengths = ([int(axis) if axis.isdigit() else sizes[axis] for axis in spec.shape or ()] for spec in problem.inputs)
    return sum(map(math.prod, lengths))


# ---------------------------------------------------------------------------------------------------
# Changes of float values. Each takes fp32 or fp64 values of any shape.


def _sigma(values: Tensor) -> Tensor:
    finite = values[values.isfinite()]
    return finite.square().mean().sqrt() if finite.numel() else torch.zeros((), dtype=values.dtype)


def _randn(values: Tensor, generator: Generator) -> Tensor:
    return torch.randn(values.shape, generator=generator, dtype=values.dtype)


def _scaled(factor: float) -> Change:
    return lambda values, _: values * factor


def _common_sign(values: Tensor, generator: Generator) -> Tensor:
    return values + 0.5 * _sigma(values)


def _nonunit(values: Tensor, generator: Generator) -> Tensor:
    fresh = _randn(values, generator).reshape(-1)
    places = torch.randperm(fresh.numel(), generator=generator)
    fresh[places[:1]] = 0.0
    fresh[places[1:2]] = -1.0
    return fresh.reshape(values.shape)


def _heterogeneous(values: Tensor, generator: Generator) -> Tensor:
    rows = _rows(values).clone()
    rows[rows.shape[0] // 2 :] *= 8.0
    return rows.reshape(values.shape)


def _outlier_channels(values: Tensor, generator: Generator) -> Tensor:
    channels = values.shape[-1] if values.dim() else 1
    start = int(torch.randint(0, min(OUTLIER_EVERY, channels), (), generator=generator))
    factor = torch.ones(channels, dtype=values.dtype)
    factor[start::OUTLIER_EVERY] = OUTLIER_FACTOR
    return values * (factor if values.dim() else factor[0])


def _shifted(values: Tensor, generator: Generator) -> Tensor:
    rows = values.reshape(-1, values.shape[-1]) if values.dim() else values.reshape(1, 1)
    size = 4.0 + 4.0 * torch.rand((rows.shape[0], 1), generator=generator, dtype=values.dtype)
    sign = torch.randint(0, 2, (rows.shape[0], 1), generator=generator).to(values.dtype) * 2 - 1
    return (rows + size * sign * _sigma(values)).reshape(values.shape)


def _one_sentinel(values: Tensor, generator: Generator) -> Tensor:
    flat = values.reshape(-1).clone()
    flat[int(torch.randint(0, flat.numel(), (), generator=generator))] = SENTINEL * _sigma(values)
    return flat.reshape(values.shape)


def _zero_rows(values: Tensor, generator: Generator) -> Tensor:
    rows = _rows(values).clone()
    count = max(1, rows.shape[0] // 3)
    rows[torch.randperm(rows.shape[0], generator=generator)[:count]] = 0.0
    return rows.reshape(values.shape)


def _heavy_tail(values: Tensor, generator: Generator) -> Tensor:
    """Each value over the root of an exponential variate: a normal becomes Student's t with 2 degrees of freedom."""
    mixing = torch.empty(values.shape, dtype=values.dtype).exponential_(generator=generator)
    return values / mixing.clamp(min=2.0**-12).sqrt()


def _tied(values: Tensor, generator: Generator) -> Tensor:
    step = (0.5 * _sigma(values)).clamp(min=torch.finfo(values.dtype).tiny)
    return (values / step).round() * step


def _rows(values: Tensor) -> Tensor:
    """Rows along the last axis; of a vector, each element is a row."""
    return values.reshape(-1, values.shape[-1]) if values.dim() >= 2 else values.reshape(-1, 1)


# ---------------------------------------------------------------------------------------------------
# Changes of ids


def _uniform_ids(ids: Tensor, bound: int, generator: Generator) -> Tensor:
    return torch.randint(0, bound, ids.shape, generator=generator)


def _one_id(ids: Tensor, bound: int, generator: Generator) -> Tensor:
    return torch.randint(0, bound, (), generator=generator).expand(ids.shape).clone()


def _half_one_id(ids: Tensor, bound: int, generator: Generator) -> Tensor:
    hot = torch.rand(ids.shape, generator=generator) < 0.5
    return torch.where(hot, _one_id(ids, bound, generator), ids)


def _zipf(ids: Tensor, bound: int, generator: Generator) -> Tensor:
    kinds = min(bound, MOST_KINDS)
    share = torch.arange(1, kinds + 1, dtype=torch.float64).pow(-ZIPF_EXPONENT).cumsum(0)
    drawn = torch.rand(ids.shape, generator=generator, dtype=torch.float64) * share[-1]
    ranks = torch.searchsorted(share, drawn).clamp(max=kinds - 1)
    if kinds < bound:
        return torch.randint(0, bound, (kinds,), generator=generator)[ranks]
    return torch.randperm(bound, generator=generator)[ranks]


# ---------------------------------------------------------------------------------------------------
# Scalars by name


def _is_eps(name: str) -> bool:
    return "eps" in name.lower()


def _is_cap(name: str) -> bool:
    return "cap" in name.lower().replace("capacity", "")


def _is_other(name: str) -> bool:
    return not _is_eps(name) and not _is_cap(name)
