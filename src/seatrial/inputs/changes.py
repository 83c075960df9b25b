"""Changes of values: what a recipe does to one tensor.

A float change takes fp32 or fp64 values of any shape and returns new values of that shape; a change of ids takes
their exclusive upper bound too; a change of a mask returns a mask of the same two values. None of them knows what
the problem computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

Change = Callable[[Tensor, Generator], Tensor]  # fp32 or fp64 values -> new values of the same shape
ChangeIds = Callable[[Tensor, int, Generator], Tensor]  # ids, exclusive upper bound -> new ids
ChangeMask = Callable[[Tensor, "TwoValues", Generator], Tensor]  # a mask and its two values -> a new mask

ZIPF_EXPONENT = 1.1  # word frequencies of running text
OUTLIER_EVERY, OUTLIER_FACTOR = 37, 50.0  # an odd spacing, so that tiles see different channels
SENTINEL = 2.0**8  # bf16 carries 8 bits: beside this element the others vanish in a bf16 sum
MOST_KINDS = 1 << 20  # different ids of a Zipf draw; a range of hash values has no use for more
FEW_ROWS = 4  # different rows of a draw with duplicates
CONFIDENT = 12.0  # sigmas by which a confident model favours its answer
EXCLUDED = -1e4  # of an additive mask: no exp of it is left in any dtype, and every dtype holds it
SMALL_BIASES = (0.5, -0.5, -3.0)  # of an attention bias that is more than a mask; every dtype holds them
MOST_STEPS = 24  # from a bfloat16 number to one whose square rounds as wanted: none is further off than 16
FP8_LIMIT = 480.0  # just beyond 448, the largest e4m3 value

# What implementations of rotary positions get wrong lies beyond these: 8 bits, short tests, fast-math sines.
TELLING_POSITIONS = (0, 1, 40, 255, 257, 1023, 4095, 15962, 131071)


# ---------------------------------------------------------------------------------------------------
# Floats


def sigma_of(values: Tensor) -> Tensor:
    finite = values[values.isfinite()]
    return finite.square().mean().sqrt() if finite.numel() else torch.zeros((), dtype=values.dtype)


def _randn(values: Tensor, generator: Generator) -> Tensor:
    return torch.randn(values.shape, generator=generator, dtype=values.dtype)


def scaled(factor: float) -> Change:
    return lambda values, _: values * factor


def offset(sigmas: float) -> Change:
    """All of a tensor far from nought, by the same amount: the mean of any group outweighs its spread."""
    return lambda values, _: values + sigmas * sigma_of(values)


def exceeds_one(values: object) -> bool:
    """True for a tensor with a value beyond one, as no cosine has."""
    return isinstance(values, Tensor) and values.numel() > 0 and bool(values.abs().max() > 1)


def far_phases(values: Tensor, generator: Generator) -> Tensor:
    """The same angles as far from nought as the last position of a long context."""
    largest = float(values.abs().max())
    return values * max(1.0, (TELLING_POSITIONS[-1] / largest) if largest > 1 else 1.0)


def common_sign(values: Tensor, generator: Generator) -> Tensor:
    return values + 0.5 * sigma_of(values)


def nonunit(values: Tensor, generator: Generator) -> Tensor:
    fresh = _randn(values, generator).reshape(-1)
    places = torch.randperm(fresh.numel(), generator=generator)
    fresh[places[:1]] = 0.0
    fresh[places[1:2]] = -1.0
    return fresh.reshape(values.shape)


def heterogeneous(values: Tensor, generator: Generator) -> Tensor:
    rows = _rows(values).clone()
    rows[rows.shape[0] // 2 :] *= 8.0
    return rows.reshape(values.shape)


def outlier_channels(values: Tensor, generator: Generator) -> Tensor:
    channels = values.shape[-1] if values.dim() else 1
    start = int(torch.randint(0, min(OUTLIER_EVERY, channels), (), generator=generator))
    factor = torch.ones(channels, dtype=values.dtype)
    factor[start::OUTLIER_EVERY] = OUTLIER_FACTOR
    return values * (factor if values.dim() else factor[0])


def shifted(values: Tensor, generator: Generator) -> Tensor:
    rows = values.reshape(-1, values.shape[-1]) if values.dim() else values.reshape(1, 1)
    size = 4.0 + 4.0 * torch.rand((rows.shape[0], 1), generator=generator, dtype=values.dtype)
    sign = torch.randint(0, 2, (rows.shape[0], 1), generator=generator).to(values.dtype) * 2 - 1
    return (rows + size * sign * sigma_of(values)).reshape(values.shape)


def one_sentinel(values: Tensor, generator: Generator) -> Tensor:
    flat = values.reshape(-1).clone()
    flat[int(torch.randint(0, flat.numel(), (), generator=generator))] = SENTINEL * sigma_of(values)
    return flat.reshape(values.shape)


def zero_rows(values: Tensor, generator: Generator) -> Tensor:
    rows = _rows(values).clone()
    count = max(1, rows.shape[0] // 3)
    rows[torch.randperm(rows.shape[0], generator=generator)[:count]] = 0.0
    return rows.reshape(values.shape)


def heavy_tail(values: Tensor, generator: Generator) -> Tensor:
    """Each value over the root of an exponential variate: a normal becomes Student's t with 2 degrees of freedom."""
    mixing = torch.empty(values.shape, dtype=values.dtype).exponential_(generator=generator)
    return values / mixing.clamp(min=2.0**-12).sqrt()


def tied(values: Tensor, generator: Generator) -> Tensor:
    step = (0.5 * sigma_of(values)).clamp(min=torch.finfo(values.dtype).tiny)
    return (values / step).round() * step


def _rows(values: Tensor) -> Tensor:
    """Rows along the last axis; of a vector, each element is a row."""
    return values.reshape(-1, values.shape[-1]) if values.dim() >= 2 else values.reshape(-1, 1)


def uneven_rows(values: Tensor, generator: Generator) -> Tensor:
    """Each row times a power of two between 1/64 and 64."""
    rows = _rows(values)
    powers = torch.randint(-6, 7, (rows.shape[0], 1), generator=generator).to(values.dtype)
    return (rows * powers.exp2()).reshape(values.shape)


def sentinel_per_row(values: Tensor, generator: Generator) -> Tensor:
    """One element at a random place of every row at 256 sigma: whoever skips data loses some of them."""
    rows = (values.reshape(-1, values.shape[-1]) if values.dim() else values.reshape(1, 1)).clone()
    places = torch.randint(0, rows.shape[1], (rows.shape[0], 1), generator=generator)
    return rows.scatter_(1, places, SENTINEL * float(sigma_of(values))).reshape(values.shape)


def covering(values: Tensor, generator: Generator) -> Tensor:
    """As few elements a row as together stand in every column, at 256 to 512 sigma, one at least.

    Whoever loses one element of a sum over a row changes it, in some row, by the share of one among few.
    """
    rows = (values.reshape(-1, values.shape[-1]) if values.dim() else values.reshape(1, 1)).clone()
    count, columns = rows.shape
    turns = torch.arange(max(columns, count))
    row, column = turns % count, torch.randperm(columns, generator=generator)[turns % columns]
    size = SENTINEL * sigma_of(values) * (1 + torch.rand(row.shape, generator=generator, dtype=values.dtype))
    rows[row, column] = torch.where(rows[row, column] < 0, -size, size)
    return rows.reshape(values.shape)


def leaning_squares(values: Tensor, generator: Generator) -> Tensor:
    """The next larger bfloat16 numbers whose squares round up in bfloat16, by a quarter ulp or more.

    Such roundings do not cancel in a sum of squares: whoever squares in bfloat16 is off by their mean.
    """
    chosen = values.bfloat16().to(values.dtype)
    for _ in range(MOST_STEPS):
        square = chosen.square()
        ulp = 2.0 ** (square.clamp(min=2.0**-100).log2().floor() - 7)
        fits = square.bfloat16().to(values.dtype) - square >= 0.25 * ulp
        chosen = torch.where(fits, chosen, (chosen * (1 + 2.0**-7)).bfloat16().to(values.dtype))
    return chosen


def sentinel_at_end(values: Tensor, generator: Generator) -> Tensor:
    """The last row times 32 and the last element at 256 sigma: what a sample of the beginning does not see."""
    rows = _rows(values).clone()
    rows[-1] *= 32.0
    flat = rows.reshape(-1)
    flat[-1] = SENTINEL * sigma_of(values)
    return flat.reshape(values.shape)


def few_rows(values: Tensor, generator: Generator) -> Tensor:
    """Every row is one of four: repeated maxima, equal keys, low rank."""
    rows = _rows(values)
    kinds = min(FEW_ROWS, rows.shape[0])
    return rows[torch.randint(0, kinds, (rows.shape[0],), generator=generator)].reshape(values.shape)


def few_rows_of_one_sign(values: Tensor, generator: Generator) -> Tensor:
    """As few_rows, and without signs: errors that point one way cannot cancel."""
    return few_rows(values, generator).abs()


def ascending(values: Tensor, generator: Generator) -> Tensor:
    """Rows in ascending order: the largest element comes last."""
    return values.sort(-1).values if values.dim() else values


def growing_rows(values: Tensor, generator: Generator) -> Tensor:
    """Rows grow from a quarter of their size to four times it: the largest scores come in a late tile."""
    rows = _rows(values)
    return (rows * torch.linspace(-2, 2, rows.shape[0], dtype=values.dtype).exp2()[:, None]).reshape(values.shape)


def all_zero(values: Tensor, generator: Generator) -> Tensor:
    """Nothing but zeros."""
    return torch.zeros_like(values)


def zero_channels(values: Tensor, generator: Generator) -> Tensor:
    """A third of the columns zero, or in wide rows one half: whole blocks of a quantiser among them."""
    width = values.shape[-1] if values.dim() else 1
    kept = torch.rand(width, generator=generator) >= 1 / 3
    if width >= 256:
        kept = torch.arange(width) >= width // 2
    return values * (kept.to(values.dtype) if values.dim() else 1.0)


def one_per_row(values: Tensor, generator: Generator) -> Tensor:
    """One element of each row is left, the others are zero."""
    rows = values.reshape(-1, values.shape[-1]) if values.dim() else values.reshape(1, 1)
    places = torch.randint(0, rows.shape[1], (rows.shape[0], 1), generator=generator)
    return torch.zeros_like(rows).scatter_(1, places, rows.gather(1, places)).reshape(values.shape)


def one_row(values: Tensor, generator: Generator) -> Tensor:
    """One row of a normal draw, the others zero: an upstream gradient that only one token has."""
    fresh = _rows(_randn(values, generator))
    kept = int(torch.randint(0, fresh.shape[0], (), generator=generator))
    return torch.where(torch.arange(fresh.shape[0])[:, None] == kept, fresh, 0.0).reshape(values.shape)


def to_fp8_limit(values: Tensor, generator: Generator) -> Tensor:
    """Scaled so that the largest element is 480, just beyond what an e4m3 number holds."""
    return values * (FP8_LIMIT / values.abs().max().clamp(min=torch.finfo(values.dtype).tiny))


def uneven_scales(values: Tensor, generator: Generator) -> Tensor:
    """Each element times a power of two between 1/8 and 8."""
    return values * torch.randint(-3, 4, values.shape, generator=generator).to(values.dtype).exp2()


def varied_constant(values: Tensor, generator: Generator) -> Tensor:
    """A normal draw in place of zeros, positive numbers about its value in place of any other constant."""
    constant = values.reshape(-1)[0]
    fresh = _randn(values, generator)
    return fresh if float(constant) == 0.0 else constant * (0.5 * fresh).exp()


def unnormalised(values: Tensor, generator: Generator) -> Tensor:
    """Rows that sum to a half instead of one, and the first to nothing."""
    rows = _rows(values) * 0.5
    rows[:1] = 0.0
    return rows.reshape(values.shape)


# ---------------------------------------------------------------------------------------------------
# Ids and positions


def uniform_ids(ids: Tensor, bound: int, generator: Generator) -> Tensor:
    return torch.randint(0, bound, ids.shape, generator=generator)


def one_id(ids: Tensor, bound: int, generator: Generator) -> Tensor:
    return torch.randint(0, bound, (), generator=generator).expand(ids.shape).clone()


def hot_choice(ids: Tensor, bound: int, generator: Generator) -> Tensor:
    """One id stands in nearly every row, in the place of another; no row repeats an id."""
    rows = ids.reshape(-1, ids.shape[-1]).clone()
    hot = int(torch.randint(0, bound, (), generator=generator))
    lacking = (rows != hot).all(-1) & (torch.rand(len(rows), generator=generator) < 0.95)
    places = torch.randint(0, rows.shape[-1], (len(rows),), generator=generator)
    rows[lacking, places[lacking]] = hot
    return rows.reshape(ids.shape)


def half_one_id(ids: Tensor, bound: int, generator: Generator) -> Tensor:
    hot = torch.rand(ids.shape, generator=generator) < 0.5
    return torch.where(hot, one_id(ids, bound, generator), ids)


def zipf(ids: Tensor, bound: int, generator: Generator) -> Tensor:
    kinds = min(bound, MOST_KINDS)
    share = torch.arange(1, kinds + 1, dtype=torch.float64).pow(-ZIPF_EXPONENT).cumsum(0)
    drawn = torch.rand(ids.shape, generator=generator, dtype=torch.float64) * share[-1]
    ranks = torch.searchsorted(share, drawn).clamp(max=kinds - 1)
    if kinds < bound:
        return torch.randint(0, bound, (kinds,), generator=generator)[ranks]
    return torch.randperm(bound, generator=generator)[ranks]


def varied_integers(values: Tensor, bound: int, generator: Generator) -> Tensor:
    """Another value everywhere: 1 to 3 in place of zeros, less in place of a larger constant (zero points, lengths)."""
    constant = int(values.reshape(-1)[0])
    low, high = (1, 4) if constant == 0 else (1, constant) if constant > 1 else (constant + 1, constant + 3)
    return torch.randint(low, high, values.shape, generator=generator)


def edge_ids(ids: Tensor, bound: int, generator: Generator) -> Tensor:
    """Only the first and the last legal id."""
    return torch.randint(0, 2, ids.shape, generator=generator) * (bound - 1)


def ignored(share: float, value: int) -> ChangeIds:
    """About this share of the ids become `value`, which the problem ignores; one is kept, and one ignored."""

    def change(ids: Tensor, bound: int, generator: Generator) -> Tensor:
        flat = ids.reshape(-1)
        gone = torch.rand(flat.shape, generator=generator) < share
        places = torch.randperm(flat.numel(), generator=generator)
        gone[places[:1]] = True
        gone[places[-1:]] = False
        return torch.where(gone, value, flat).reshape(ids.shape)

    return change


def telling_positions(positions: Tensor, bound: int, generator: Generator) -> Tensor:
    """Positions of a long context, below `bound`, in no order and different in every row."""
    legal = torch.tensor([p for p in TELLING_POSITIONS if p < bound] + [bound - 1])
    return legal[torch.randint(0, legal.numel(), positions.shape, generator=generator)]


def late_positions(positions: Tensor, bound: int, generator: Generator) -> Tensor:
    """Consecutive positions that begin somewhere else in every row, as after a cache or left padding."""
    rows = positions.reshape(-1, positions.shape[-1]) if positions.dim() else positions.reshape(1, 1)
    room = max(1, bound - int(rows.max()))
    start = torch.randint(0, room, (rows.shape[0], 1), generator=generator)
    return (rows + start).reshape(positions.shape)


# ---------------------------------------------------------------------------------------------------
# Masks: two values, `kept` and the other one. No change leaves a row without a kept element but `empty_row`.


@dataclass(frozen=True)
class TwoValues:
    """The two values of a mask; `kept` is the one a draw without any masking has."""

    kept: float
    other: float


def random_mask(share: float) -> ChangeMask:
    """About this share of the elements are kept."""

    def change(mask: Tensor, values: TwoValues, generator: Generator) -> Tensor:
        rows = mask.reshape(-1, mask.shape[-1]) if mask.dim() else mask.reshape(1, 1)
        kept = torch.rand(rows.shape, generator=generator) < share
        kept.scatter_(1, torch.randint(0, rows.shape[1], (rows.shape[0], 1), generator=generator), value=True)
        return _two_valued(kept, values, mask)

    return change


def prefix_mask(mask: Tensor, values: TwoValues, generator: Generator) -> Tensor:
    """Every row keeps a prefix of its own length: padding on the right."""
    rows = mask.reshape(-1, mask.shape[-1]) if mask.dim() else mask.reshape(1, 1)
    lengths = torch.randint(1, rows.shape[1] + 1, (rows.shape[0], 1), generator=generator)
    return _two_valued(torch.arange(rows.shape[1]) < lengths, values, mask)


def suffix_mask(mask: Tensor, values: TwoValues, generator: Generator) -> Tensor:
    """Every row keeps a suffix of its own length: padding on the left."""
    return prefix_mask(mask, values, generator).flip(-1) if mask.dim() else mask


def graded_bias(mask: Tensor, values: TwoValues, generator: Generator) -> Tensor:
    """Of an additive mask: half of the elements become one of a few small finite numbers, in no pattern."""
    graded = torch.tensor(SMALL_BIASES)[torch.randint(0, len(SMALL_BIASES), mask.shape, generator=generator)]
    kept = torch.rand(mask.shape, generator=generator) < 0.5
    return torch.where(kept, mask, graded.to(mask.dtype))


def empty_row(mask: Tensor, values: TwoValues, generator: Generator) -> Tensor:
    """As random_mask, and one row keeps nothing."""
    changed = random_mask(0.5)(mask, values, generator)
    rows = changed.reshape(-1, changed.shape[-1]) if changed.dim() else changed.reshape(1, 1)
    rows[int(torch.randint(0, rows.shape[0], (), generator=generator))] = values.other
    return rows.reshape(mask.shape)


def _two_valued(kept: Tensor, values: TwoValues, like: Tensor) -> Tensor:
    two = torch.where(kept, torch.tensor(values.kept), torch.tensor(values.other))
    return two.to(like.dtype).reshape(like.shape)
