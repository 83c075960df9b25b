"""How one output differs from the oracle, in units of what an honest kernel may differ.

A `Yardstick` holds, for one output, the oracle `y`, the honest deviation `sigma` of each element, half an
ulp of the stored dtype, and synthetic honest kernels (the Monte-Carlo samples) that say what is normal.
The statistics look at the excess over the one rounding that nobody can avoid:

    ex = max(0, |out - y| - half_ulp),   w = half_ulp + sigma

tail    max ex/sigma                         one element far off
bulk    rms ex/w against the samples' rms    many elements a little off
bias    mean (out - RN(y)) sign(y) / w       errors that all point one way (truncation, stagnation)
slope   <out, y> / <RN(y), y>                the same, weighted by size

The constants below are calibrated, not tuned per problem; there is no absolute or relative tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from seatrial.numerics.dtypes import FORMATS, half_ulp, round_to, to_float64

TAIL = 6.0  # sigmas
TAIL_OVER_NULL = 1.6  # times the worst honest sample
TAIL_OVER_ROUGH_NULL = 4.0  # the same, when honest samples have outliers themselves
OUTLIERS_OVER_NULL = 3.0  # outliers allowed, times those of the worst honest sample, plus two
BULK = 3.0  # times the honest rms
BULK_FLOOR = 0.02  # of w: an rms excess of a few percent of a rounding is one unlucky element, not a fault
BIAS = 0.10  # of w
BIAS_OVER_NULL = 1.5  # plus this many times the worst honest bias
BIAS_OF_COMPUTING = 2.0  # plus this many roundings of the compute dtype, where they weigh in w (a float32 output)
BIAS_CERTAINTY = 6.0  # standard errors
ENOUGH_LINES = 8  # rows or columns from which the spread between them is meaningful
ENOUGH = 64  # elements from which means and rms are meaningful
ILL_SIGMA = 2.0**-5  # an element with sigma above this share of its size is ill-conditioned
TOO_FEW = 0.5  # of the elements: where no more than these can be judged, the output is not
ALL_ILL = 0.99  # of the elements: mathematically zero, only its absolute scale is known
_MOSTLY = 0.75  # of a row or column
_SLACK = 1 + 2.0**-10  # for the oracle's own rounding at ties
_PRIOR = 8.0  # weight of the pooled variance, in samples
_SAMPLED = 2.0**20  # different random numbers behind a sample
_TOUCH = 2.0**-20  # of the value from which a number overflows: what lies so near may fall either way
_NAN = 3  # as _class_of has it
_FLUSHED = 2.0**-126  # honest kernels may flush subnormals to zero


@dataclass(frozen=True)
class TestResult:
    """One statistic of one output.

    `name` is tail, bulk, bias, slope, nonfinite, exact or shape, or one of them "by rows", "by columns" or
    by a caller's group; `measured` fails beyond `allowed`; `index` is where it is worst.
    """

    __test__ = False  # not a pytest class

    name: str
    measured: float
    allowed: float
    failed: bool
    index: tuple[int, ...] | None = None
    words: str = ""


@dataclass(frozen=True)
class OutputReport:
    """What the envelope says of one output.

    passed         None when this workload cannot judge it; `why` says so
    worst_index    the element with the largest tail, `got` and `expected` its values
    implied_bits   significant bits of an accumulator that would leave such an error; None when there is
                   no error beyond the final rounding
    slope          <out, oracle> / <RN(oracle), oracle>; None when it is not defined
    slope_allowed  how far from 1 an honest kernel's slope may be
    groups         worst bias per kind of group, in units of w
    unjudged       elements that nothing is said about: ill-conditioned, or the reference leaves its range there
    """

    name: str
    dtype: torch.dtype
    elements: int
    passed: bool | None
    tests: tuple[TestResult, ...] = ()
    worst_index: tuple[int, ...] | None = None
    got: float | None = None
    expected: float | None = None
    implied_bits: float | None = None
    slope: float | None = None
    slope_allowed: float | None = None
    groups: Mapping[str, float] = field(default_factory=dict)
    unjudged: int = 0
    why: str = ""

    @property
    def failures(self) -> tuple[TestResult, ...]:
        return tuple(test for test in self.tests if test.failed)


@dataclass
class _Errors:
    """Per-element errors of one candidate (or sample) against one sigma; excluded elements are zero."""

    tail: Tensor
    bulk: Tensor  # squared
    signed: Tensor
    kept: Tensor | None  # None: all of them

    @property
    def count(self) -> int:
        return self.tail.numel() if self.kept is None else int(self.kept.sum())


@dataclass
class _GroupSums:
    """Per group: number of elements, mean and deviation of the signed error, rms of the bulk."""

    count: Tensor
    bias: Tensor
    certainty: Tensor
    rms: Tensor


@dataclass
class _Null:
    """What honest samples show."""

    tail: float
    outliers: int
    bulk: float  # mean square
    bias: float
    slope: float
    groups: dict[str, tuple[float, float]]  # rows and columns: largest bias and rms


class Yardstick:
    """One floating-point output: the oracle, its honest spread, and how to measure against them.

    `oracle` and `samples` are float64 of one shape, the samples before their final rounding; `stored` is
    the dtype in which a kernel hands the output over. Where the reference gives NaN nothing is known of the right
    answer, and nothing is judged, unless `nan_is_meant`: the inputs hold NaN, and it is to be passed on.
    """

    def __init__(
        self,
        oracle: Tensor,
        samples: list[Tensor],
        stored: torch.dtype,
        *,
        excused: Tensor | None = None,
        wide: bool = False,
        nan_is_meant: bool = False,
    ) -> None:
        self._nan_is_meant = nan_is_meant
        self.y = oracle.contiguous()
        self.stored = stored
        self.half = half_ulp(self.y, stored)
        self.rounded = round_to(self.y, stored)
        self._samples = samples
        self._floor = 0.0 if wide else _FLUSHED
        self._total = torch.zeros_like(self.y)
        for sample in samples:
            self._total += self._squared_error(sample)
        variance = self._total / len(samples)
        self._apart = self._ill_of(variance.sqrt())
        self.sigma = _pooled(variance, len(samples), self._apart).sqrt_()
        self._class = _class_of(self.rounded)
        self._all_finite = bool((self._class == 0).all())
        self._unsure = self._where_class_is_open()
        self._out_of_range = excused
        self._excused = self._without_ill(excused)
        self._native: Tensor | None = None
        self._bits = FORMATS[torch.float64 if wide else torch.float32].bits

    def tensors(self) -> list[Tensor]:
        """Everything it keeps in memory."""
        return [*self._samples, *(v for v in vars(self).values() if isinstance(v, Tensor))]

    def _squared_error(self, sample: Tensor) -> Tensor:
        return (sample - self.y).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).square_()

    # -- validity

    def excuse(self, native: Tensor) -> float:
        """Leave out where the reference itself left its range; returns the share of such elements."""
        self._native = native
        lost = (_class_of(native) != 0) & (self._class == 0)
        zeroed = (native == 0) & (self.y.abs() > self.half + TAIL * self.sigma + self._floor)
        self._out_of_range = lost | zeroed
        self._excused = self._without_ill(self._out_of_range)
        return float(self._out_of_range.double().mean()) if native.numel() else 0.0

    def _without_ill(self, excused: Tensor | None) -> Tensor | None:
        """The excused elements and the ill-conditioned ones; what is mathematically zero keeps its absolute scale."""
        if self.ill_share == 0.0 or self.is_nought:
            return excused
        return self._ill if excused is None else self._ill | excused

    @cached_property
    def _ill(self) -> Tensor:
        """Where the honest error is not small against an element's size."""
        return self._ill_of(self.sigma)

    def _ill_of(self, sigma: Tensor) -> Tensor:
        size = self.y.abs().nan_to_num_(posinf=0.0)
        return sigma > ILL_SIGMA * (size + size.square().mean().sqrt())

    @cached_property
    def ill_share(self) -> float:
        """Share of ill-conditioned elements."""
        return 0.0 if self._is_empty else float(self._ill.double().mean())

    @property
    def unjudged(self) -> int:
        """Elements left out: ill-conditioned, NaN in the reference, or beyond its range."""
        nan = (self._class == _NAN) & (not self._nan_is_meant)
        return int((nan if self._excused is None else nan | self._excused).sum())

    @cached_property
    def is_nought(self) -> bool:
        """Mathematically zero: the honest error exceeds the value nearly everywhere."""
        return not self._is_empty and float((self.sigma > self.y.abs()).double().mean()) >= ALL_ILL

    @property
    def _is_empty(self) -> bool:
        return self.y.numel() == 0

    # -- judging

    def tests(self, out: Tensor, groups: Mapping[str, Tensor]) -> tuple[list[TestResult], _Errors]:
        """All statistics of one candidate output (any float dtype, the oracle's shape)."""
        wide = to_float64(out).to(self.y.device)
        errors = self._errors(wide, self.sigma)
        found = [self._nonfinite(wide), self._tail(errors)]
        if errors.count >= ENOUGH and not self.is_nought:
            found += [self._bulk(errors), self._bias(errors), self._slope(wide, errors)]
            for kind, labels in self._groupings(groups):
                found += self._by_group(kind, labels, errors)
        return found, errors

    def slope_of(self, out: Tensor) -> float | None:
        return self._slope_value(to_float64(out).to(self.y.device))

    def slope_allowed(self) -> float:
        """Spread of independent honest errors, plus what samples show of common ones, plus the bias allowance."""
        y, w = self._finite(self.y), self._finite(self.half + self.sigma + self._floor)
        energy = float((y * y).sum())
        if energy == 0.0:
            return math.inf
        independent = math.sqrt(float((y * y * w * w).sum())) / energy
        return (
            max(TAIL * independent, TAIL_OVER_NULL * self._null.slope)
            + self._bias_allowed(0.0) * float((y.abs() * w).sum()) / energy
        )

    def implied_bits(self, errors: _Errors) -> float | None:
        """Bits of an accumulator with this error: sigma is what the compute dtype's would leave."""
        if errors.count == 0:
            return None
        excess = float(errors.tail.square().sum() / errors.count) ** 0.5
        if excess == 0.0 or not math.isfinite(excess):
            return None
        return min(float(self._bits), self._bits - math.log2(excess))

    def _finite(self, values: Tensor) -> Tensor:
        return values if self._all_finite else torch.where(self._class == 0, values, 0.0)

    def _errors(self, out: Tensor, sigma: Tensor) -> _Errors:
        kept = None
        if not self._all_finite or self._excused is not None or not _surely_finite(out):
            kept = torch.isfinite(out) & (self._class == 0)
            kept = kept if self._excused is None else kept & ~self._excused
        spread = sigma + self._floor
        excess = (out - self.y).abs_().sub_(self.half * _SLACK + self._floor).clamp_(min=0)
        w = self.half + spread
        signed = (out - self.rounded).mul_(self.y.sign()).div_(w)
        bulk = (excess / w).square_()
        tail = excess.div_(spread) if self._floor else _ratio(excess, spread)
        if kept is not None:
            tail, bulk, signed = (torch.where(kept, values, 0.0) for values in (tail, bulk, signed))
        return _Errors(tail, bulk, signed, kept)

    @cached_property
    def _null(self) -> _Null:
        tails, outliers, bulks, biases, slopes = [0.0], [0], [0.0], [0.0], [0.0]
        axes = dict(self._axes())
        groups = dict.fromkeys(axes, (0.0, 0.0))
        for rounded, errors in self._honest():
            if errors.count == 0:
                continue
            tails.append(float(errors.tail.max()))
            outliers.append(int((errors.tail > TAIL).sum()) if tails[-1] > TAIL else 0)
            bulks.append(float(errors.bulk.sum()) / errors.count)
            biases.append(abs(float(errors.signed.sum()) / errors.count))
            slopes.append(abs((self._slope_value(rounded) or 1.0) - 1.0))
            groups = {kind: self._worse_group(groups[kind], errors, axis) for kind, axis in axes.items()}
        mean_square = sum(bulks) / max(1, len(bulks) - 1)
        return _Null(max(tails), max(outliers), mean_square, max(biases), max(slopes), groups)

    def _honest(self) -> Iterator[tuple[Tensor, _Errors]]:
        """Each sample as a kernel would store it, measured against the spread of the others."""
        count = len(self._samples)
        for sample in self._samples:
            variance = (self._total - self._squared_error(sample)).clamp_(min=0) / (count - 1)
            others = _pooled(variance, count - 1, self._apart).sqrt_()
            rounded = round_to(sample, self.stored)
            yield rounded, self._errors(rounded, others)
        if self._native is not None:
            errors = self._errors(self._native, self.sigma)
            # Whose every element is within honest reach is honest, and shows the leanings that real roundings have.
            # A reference that is itself the broken party is far out of reach, and says nothing here.
            if errors.count and float(errors.tail.max()) <= TAIL:
                yield self._native, errors

    def _where_class_is_open(self) -> Tensor:
        """Where honest kernels may disagree on finite, infinite or NaN."""
        largest = torch.tensor(FORMATS[self.stored].largest, dtype=self.y.dtype, device=self.y.device)
        overflows = largest + half_ulp(largest, self.stored)
        unsure = ((self.y.abs() - overflows).abs() <= TAIL * self.sigma + _TOUCH * overflows) & torch.isfinite(self.y)
        if self._all_finite and all(_surely_finite(sample) for sample in self._samples):
            return unsure
        for sample in self._samples:
            unsure = unsure | (_class_of(round_to(sample, self.stored)) != self._class)
        return unsure

    def _nonfinite(self, out: Tensor) -> TestResult:
        if self._all_finite and _surely_finite(out):
            return TestResult("nonfinite", 0, 0, False)
        wrong = (_class_of(out) != self._class) & ~self._unsure
        if not self._nan_is_meant:
            wrong = wrong & (self._class != _NAN)
        if self._out_of_range is not None:
            wrong = wrong & ~self._out_of_range
        count = int(wrong.sum())
        index = _unravel(int(wrong.flatten().to(torch.uint8).argmax()), self.y) if count else None
        return TestResult(
            "nonfinite",
            count,
            0,
            count > 0,
            index,
            f"{count} elements are NaN or infinite where the right answer is not, or the other way round",
        )

    @property
    def _reach(self) -> float:
        """How much further the worst of this many honest elements lies than the samples can show.

        The largest of n normal errors grows as sqrt(2 ln n). Samples follow it up to the 2^20 numbers that they are
        read from (noise.py); beyond, the bounds grow by the same law. Measured with four samples and errors of
        exactly the modelled size: worst sigma 5.6 at 10^6 elements, 5.9 at 10^7, 6.4 at 10^8; samples 5.3, 5.6, 5.7.
        """
        return math.sqrt(max(1.0, math.log(max(2, self.y.numel())) / math.log(_SAMPLED)))

    def _tail(self, errors: _Errors) -> TestResult:
        if self._is_empty:
            return TestResult("tail", 0.0, TAIL, False)
        worst = float(errors.tail.max())
        index = _unravel(int(errors.tail.argmax()), self.y)
        allowed = max(TAIL, TAIL_OVER_NULL * self._null.tail) * self._reach
        if self._null.outliers == 0:
            return TestResult(
                "tail",
                worst,
                allowed,
                worst > allowed,
                index,
                f"the worst element is {worst:.3g} honest deviations beyond the final rounding",
            )
        beyond = TAIL * self._reach
        outliers = int((errors.tail > beyond).sum())
        limit = max(TAIL, TAIL_OVER_ROUGH_NULL * self._null.tail) * self._reach
        many = OUTLIERS_OVER_NULL * self._null.outliers + 2
        words = (
            f"{outliers} elements beyond {beyond:.3g} honest deviations ({many:g} allowed), the worst at {worst:.3g}"
        )
        return TestResult("tail", worst, limit, outliers > many or worst > limit, index, words)

    def _bulk(self, errors: _Errors) -> TestResult:
        mean_square = float(errors.bulk.sum()) / errors.count
        ratio = math.sqrt(mean_square + BULK_FLOOR**2) / math.sqrt(self._null.bulk + BULK_FLOOR**2)
        return TestResult(
            "bulk",
            ratio,
            BULK,
            not ratio <= BULK,
            None,
            f"the rms error beyond the final rounding is {ratio:.3g} times an honest kernel's",
        )

    @cached_property
    def _computing(self) -> float:
        """One rounding of the compute dtype in units of w, on average: next to nothing beside a 16-bit store.

        Few distinct values, or a constant's reciprocal, make honest roundings of a float32 result lean alike.
        """
        if self._is_empty:
            return 0.0
        unit = self._finite(self.y).abs() * 2.0**-self._bits
        return float((unit / (self.half + self.sigma + self._floor + unit)).mean())

    def _bias_allowed(self, null_bias: float) -> float:
        return BIAS + BIAS_OVER_NULL * null_bias + BIAS_OF_COMPUTING * self._computing

    def _bias(self, errors: _Errors) -> TestResult:
        count = errors.count
        bias = float(errors.signed.sum()) / count
        spread = math.sqrt(max(0.0, float(errors.signed.square().sum()) / count - bias * bias))
        certainty = abs(bias) / (spread / math.sqrt(count) + 1e-30)
        allowed = self._bias_allowed(self._null.bias)
        failed = abs(bias) > allowed and certainty > BIAS_CERTAINTY
        failed = failed and self._certainty_over_lines(errors) > BIAS_CERTAINTY
        return TestResult(
            "bias",
            bias,
            allowed,
            failed,
            None,
            f"errors lean {'away from' if bias > 0 else 'towards'} zero by {abs(bias):.3g} of the honest error",
        )

    def _certainty_over_lines(self, errors: _Errors) -> float:
        """Standard errors of the bias when a whole row or column may share one error; infinite where there are few.

        A table of sines has one inverse frequency a column: its rounding leans all of the column one way, and only
        the columns are independent of each other.
        """
        certainties = [math.inf]
        for _, axis in self._axes():
            sums = self._group_sums(errors, axis)
            means = sums.bias[sums.count >= ENOUGH]
            if means.numel() >= ENOUGH_LINES:
                spread = float(means.std()) / math.sqrt(means.numel())
                certainties.append(abs(float(means.mean())) / (spread + 1e-30))
        return min(certainties)

    def _slope_value(self, out: Tensor) -> float | None:
        y = self._finite(self.y)
        base = float((self._finite(self.rounded) * y).sum())
        value = float((out * y).sum()) if self._all_finite else float(torch.where(self._class == 0, out * y, 0.0).sum())
        return value / base if base and math.isfinite(value / base) else None

    def _slope(self, out: Tensor, errors: _Errors) -> TestResult:
        allowed = self.slope_allowed()
        slope = (
            self._slope_value(out)
            if errors.kept is None
            else self._slope_value(torch.where(errors.kept, out, self.rounded))
        )
        off = abs(slope - 1.0) if slope is not None else 0.0
        return TestResult(
            "slope",
            off,
            allowed,
            off > allowed,
            None,
            f"on average the output is off by {(slope if slope is not None else math.nan) - 1:+.2g} of the right answer",
        )

    # -- groups

    def _axes(self) -> Iterator[tuple[str, int]]:
        """Rows and columns, where they are long enough to mean something; the axis that each sums over."""
        if self.y.dim() >= 2:
            columns = self.y.shape[-1]
            rows = self.y.numel() // max(1, columns)
            if columns >= ENOUGH and rows > 1:
                yield "rows", 1
            if rows >= ENOUGH and columns > 1:
                yield "columns", 0

    def _groupings(self, groups: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor | int]]:
        """Rows, columns and the caller's labels."""
        yield from self._axes()
        for kind, labels in groups.items():
            shaped = labels.reshape(labels.shape + (1,) * (self.y.dim() - labels.dim())).expand(self.y.shape)
            yield kind, shaped.to(self.y.device).reshape(-1).long()

    def _by_group(self, kind: str, labels: Tensor | int, errors: _Errors) -> list[TestResult]:
        mine = self._group_sums(errors, labels)
        null_bias, null_rms = self._group_null(kind, labels)
        allowed = self._bias_allowed(null_bias)
        large = mine.count >= ENOUGH
        biased = large & (mine.bias.abs() > allowed) & (mine.certainty > BIAS_CERTAINTY)
        worst = int(torch.where(large, mine.bias.abs(), -1.0).argmax())
        ratios = (mine.rms.square() + BULK_FLOOR**2).sqrt() / math.sqrt(null_rms**2 + BULK_FLOOR**2)
        ratios = torch.where(large, ratios, 0.0)
        roughest = int(ratios.argmax())
        where = int(biased.to(torch.uint8).argmax()) if bool(biased.any()) else worst
        bias, ratio = float(mine.bias[where]), float(ratios[roughest])
        return [
            TestResult(f"bias by {kind}", bias, allowed, bool(biased.any()), (where,), f"in group {where} of {kind} errors lean by {bias:.3g} of the honest error"),
            TestResult(f"bulk by {kind}", ratio, BULK, not ratio <= BULK, (roughest,), f"in group {roughest} of {kind} the rms error is {ratio:.3g} times the worst honest group's"),
        ]  # fmt: skip

    def _group_null(self, kind: str, labels: Tensor | int) -> tuple[float, float]:
        """Largest bias and rms of any honest group; known already for rows and columns, which never change."""
        if isinstance(labels, int):
            return self._null.groups[kind]
        worst = (0.0, 0.0)
        for _, errors in self._honest():
            worst = self._worse_group(worst, errors, labels)
        return worst

    def _worse_group(self, known: tuple[float, float], errors: _Errors, labels: Tensor | int) -> tuple[float, float]:
        sums = self._group_sums(errors, labels)
        large = sums.count >= ENOUGH
        bias, rms = torch.where(large, sums.bias.abs(), 0.0).max(), torch.where(large, sums.rms, 0.0).max()
        return max(known[0], float(bias)), max(known[1], float(rms))

    def _group_sums(self, errors: _Errors, labels: Tensor | int) -> _GroupSums:
        parts = (errors.signed, errors.signed.square(), errors.bulk)
        if isinstance(labels, int):
            shape = (-1, self.y.shape[-1])
            size = self.y.numel() // self.y.shape[-1] if labels == 0 else self.y.shape[-1]
            first, second, bulk = (part.reshape(shape).sum(labels) for part in parts)
            count = (
                torch.full_like(first, size) if errors.kept is None else errors.kept.reshape(shape).sum(labels).double()
            )
        else:
            groups = int(labels.max()) + 1 if labels.numel() else 1
            first, second, bulk = (torch.bincount(labels, part.reshape(-1), minlength=groups) for part in parts)
            ones = torch.ones_like(errors.signed) if errors.kept is None else errors.kept.double()
            count = torch.bincount(labels, ones.reshape(-1), minlength=groups)
        known = count.clamp(min=1)
        bias = first / known
        spread = (second / known - bias.square()).clamp_(min=0).sqrt_()
        return _GroupSums(count, bias, bias.abs() / (spread / known.sqrt() + 1e-30), (bulk / known).sqrt())


def compare_exactly(name: str, oracle: Tensor, samples: list[Tensor], out: Tensor) -> TestResult:
    """Integers and bools: equal everywhere, except where honest samples disagree among themselves.

    Where rounding decides (quantised codes, indices of close values) each sample, too, differs from the
    rest at places of its own; that many differences of the kind are allowed, as for tail outliers.
    """
    out = out.to(oracle.device)
    settled = [sample == oracle for sample in samples]
    agreed = torch.stack(settled).all(0) if settled else torch.ones_like(oracle, dtype=torch.bool)
    wrong = (out != oracle) & agreed
    alone = 0
    for position in range(len(settled)):
        others = torch.stack(settled[:position] + settled[position + 1 :]).all(0)
        alone = max(alone, int((~settled[position] & others).sum()))
    allowed = OUTLIERS_OVER_NULL * alone + 2 if alone else 0.0
    count = int(wrong.sum())
    index = _unravel(int(wrong.flatten().to(torch.uint8).argmax()), oracle) if count else None
    return TestResult(
        "exact",
        count,
        allowed,
        count > allowed,
        index,
        f"{count} of {oracle.numel()} elements of {name} differ from the exact answer",
    )


def _surely_finite(values: Tensor) -> bool:
    """One pass instead of several; an overflowing sum only costs the slower way."""
    return math.isfinite(float(values.sum()))


def _ratio(excess: Tensor, spread: Tensor) -> Tensor:
    """excess / spread, where nothing over nothing is nothing."""
    return torch.where(excess > 0, excess / spread, 0.0)


def _pooled(variance: Tensor, samples: int, apart: Tensor) -> Tensor:
    """Variances from few samples, pulled towards row mean x column mean / overall mean (rank one).

    The few elements that are `apart` (ill-conditioned by themselves) stay out of the means of lines that are
    otherwise sound: one wild column would make every row look wild.
    """
    if variance.dim() == 0 or variance.numel() == 1:
        return variance.clone()
    sound = ~apart.reshape(-1, variance.shape[-1]) if bool(apart.any()) and not bool(apart.all()) else None
    if variance.dim() == 1:
        mean = variance.mean() if sound is None else variance[sound.reshape(-1)].mean()
        prior = torch.minimum(mean, 4 * variance + 0.05 * mean)
        return (samples * variance + _PRIOR * prior) / (samples + _PRIOR)
    flat = variance.reshape(-1, variance.shape[-1])
    rows, columns = _line_means(flat, sound, 1), _line_means(flat, sound, 0)
    overall = flat.mean() if sound is None else flat[sound].mean()
    prior = rows * (columns / (overall + 1e-300))
    return (prior.mul_(_PRIOR).add_(flat, alpha=samples).div_(samples + _PRIOR)).reshape(variance.shape)


def _line_means(variance: Tensor, sound: Tensor | None, dim: int) -> Tensor:
    """Means along `dim`, over the sound elements where those are most of the line."""
    plain = variance.mean(dim, keepdim=True)
    if sound is None:
        return plain
    count = sound.sum(dim, keepdim=True)
    of_sound = torch.where(sound, variance, 0.0).sum(dim, keepdim=True) / count.clamp(min=1)
    return torch.where(count >= _MOSTLY * variance.shape[dim], of_sound, plain)


def _class_of(values: Tensor) -> Tensor:
    """0 finite, 1 +inf, 2 -inf, 3 NaN."""
    return (
        torch.isposinf(values).to(torch.uint8)
        + 2 * torch.isneginf(values).to(torch.uint8)
        + 3 * torch.isnan(values).to(torch.uint8)
    )


def _unravel(flat: int, like: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), like.shape)) if like.dim() else ()
