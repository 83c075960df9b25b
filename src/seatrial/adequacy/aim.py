"""Inputs aimed at one fault: float inputs get other shapes and sizes, step by step, as long as the fault shows more.

An aim is a form and a power of two per input. It is the declared draw changed within its domain, as a recipe is, and
touches only inputs whose role allows other values.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from seatrial.inputs import changes
from seatrial.inputs.changes import Change
from seatrial.inputs.domain import is_structured, keep_domain
from seatrial.inputs.recipes import Recipe
from seatrial.inputs.roles import CARRIES_SIGNAL, Role, roles
from seatrial.model import Problem, Value
from seatrial.study import AIMED

MOVABLE = (*CARRIES_SIGNAL, Role.WEIGHT, Role.NORM_WEIGHT)
LOW, HIGH = -10, 6  # powers of two
COVERED = 4.0  # large elements per column of a sparse draw, on average


def sparse(values: Tensor, generator: Generator) -> Tensor:
    """A few large elements per row among small ones, so that each column holds one somewhere."""
    columns = values.shape[-1] if values.dim() else 1
    rows = max(1, values.numel() // max(1, columns))
    share = min(0.5, max(COVERED / rows, 1.0 / max(1, columns)))
    large = torch.rand(values.shape, generator=generator) < share
    return torch.where(large, values * changes.SENTINEL, values)


def one_large_per_row(values: Tensor, generator: Generator) -> Tensor:
    """One element of each row so large that the row's sums are that element alone, of any mantissa."""
    rows = values.reshape(-1, values.shape[-1]) if values.dim() else values.reshape(1, 1)
    place = torch.randint(0, rows.shape[1], (rows.shape[0], 1), generator=generator)
    return rows.scatter(1, place, rows.gather(1, place) * 2 * changes.SENTINEL).reshape(values.shape)


def _as_drawn(values: Tensor, generator: Generator) -> Tensor:
    return values


def _absolute(values: Tensor, generator: Generator) -> Tensor:
    return values.abs()


FORMS: Mapping[str, Change] = {
    "as drawn": _as_drawn,
    "sparse": sparse,
    "one large per row": one_large_per_row,
    "without signs": _absolute,
    "heavy-tailed": changes.heavy_tail,
    "shifted": changes.shifted,
    "outliers": changes.outlier_channels,
    "few rows": changes.few_rows_of_one_sign,
    "uneven rows": changes.uneven_rows,
    "from a normal": changes.nonunit,
}


@dataclass(frozen=True)
class Aim:
    """Per input: a form and a power of two. `salt` draws the same form anew."""

    forms: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    salt: int = 0

    @property
    def name(self) -> str:
        parts = [f"{name}{_form_words(form, power)}" for name, (form, power) in self.forms.items()]
        return AIMED + ", ".join(parts) + (f", draw {self.salt}" if self.salt else "")

    def recipe(self) -> Recipe:
        """The aim as a recipe."""

        def apply(inputs: Mapping[str, Value], seed: int) -> dict[str, Value]:
            generator = Generator().manual_seed(seed)
            changed = dict(inputs)
            for name, (form, power) in self.forms.items():
                changed[name] = _changed(inputs[name], form, power, generator)
            return changed

        return Recipe(self.name, self.name.removeprefix(AIMED), apply)


def _form_words(form: str, power: int) -> str:
    return (f" {form}" if form != "as drawn" or not power else "") + (f" times 2^{power}" if power else "")


def _changed(declared: Value, form: str, power: int, generator: Generator) -> Value:
    if isinstance(declared, float):
        return declared * 2.0**power
    if not isinstance(declared, Tensor) or declared.numel() == 0:
        return declared
    wide = declared.to(torch.float64 if declared.dtype == torch.float64 else torch.float32)
    moved = FORMS[form](wide, generator) * 2.0**power
    if form == "from a normal":
        return moved.to(declared.dtype).contiguous()
    return keep_domain(moved, declared)


def movable(problem: Problem, drawn: Mapping[str, Value]) -> tuple[str, ...]:
    """Float inputs that an aim may change."""
    role = roles(problem)
    return tuple(
        spec.name
        for spec in problem.inputs
        if role[spec.name] in MOVABLE
        and spec.dtype.startswith(("float16", "float32", "float64", "bfloat"))
        and isinstance(value := drawn[spec.name], Tensor)
        and value.numel() > 1
        and (role[spec.name] is Role.NORM_WEIGHT or not is_structured(value))
    )


def scalars(problem: Problem, drawn: Mapping[str, Value]) -> tuple[str, ...]:
    """Float scalars, which have a size and no form."""
    return tuple(s.name for s in problem.inputs if s.shape is None and type(drawn[s.name]) is float and drawn[s.name])


def first_aims(names: tuple[str, ...], free: tuple[str, ...]) -> list[Aim]:
    """Where a climb begins: one input carries a few large elements, or a scalar is large, and the others fall silent."""
    starts = [(name, form, 0) for form in ("one large per row", "sparse") for name in names]
    starts += [(name, "as drawn", HIGH) for name in free]
    return [
        Aim({name: (form, power), **{other: ("as drawn", LOW) for other in names if other != name}})
        for name, form, power in starts
    ]


def nudged(aim: Aim, names: tuple[str, ...], norms: frozenset[str], free: frozenset[str], dice: random.Random) -> Aim:
    """A neighbour of an aim: another form or size for one input, or another draw.

    `norms` are weights of a norm, which any value becomes; `free` are scalars, which have no form.
    """
    if dice.random() < 0.15:
        return replace(aim, salt=dice.randrange(1, 1000))
    name = dice.choice(names)
    form, power = aim.forms.get(name, ("as drawn", 0))
    if name not in free and dice.random() < 0.5:
        form = dice.choice([f for f in FORMS if f != "from a normal" or name in norms])
    else:
        power = min(HIGH, max(LOW, power + dice.choice((-5, -3, -2, -1, 1, 2, 3))))
    return replace(aim, forms={**aim.forms, name: (form, power)})
