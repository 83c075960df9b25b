"""How far from the oracle an honest kernel may be, measured on the reference itself.

`Envelope.build` runs the reference in float64 a few more times, each with the rounding errors that a
contract permits (numerics/noise.py), and `judge` compares a candidate with the oracle in units of their
spread (numerics/compare.py). `grade` names the tightest contract that explains a candidate's errors.

The native low-precision reference is never the bar: it may be the broken party.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seatrial.model import Value
from seatrial.numerics.compare import ENOUGH, TOO_FEW, OutputReport, TestResult, Yardstick, compare_exactly
from seatrial.numerics.dtypes import coarser, is_float, to_float64
from seatrial.numerics.noise import CONTRACTS, F32, IO, TC, Contract, contract_on
from seatrial.numerics.oracle import Oracle, OracleResult
from seatrial.numerics.promote import Tape
from seatrial.numerics.selections import equally_right

__all__ = [
    "CONTRACTS", "F32", "IO", "TC", "Contract", "Envelope", "Graded", "OutputReport", "TestResult",
    "contribution_deciles", "grade", "grade_outputs", "native_report", "no_worse_than",
]  # fmt: skip

Groups = Mapping[str, Mapping[str, Tensor]]
RANKS = {"F32": 0, "TC": 1, "IO": 2, "REJECT": 3}
_FEW = 8  # samples for outputs of a few elements, which have no neighbours to pool with
_CANCELS = 8.0  # sum|terms| / |sum terms| from which cancellation is worth a word
_COMPUTE_BITS = 23  # an accumulator that reads fewer bits is not float32
_TO_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}


@dataclass(frozen=True)
class _Base:
    """One oracle run that several envelopes share."""

    result: OracleResult
    tape: Tape


@dataclass(frozen=True)
class Envelope:
    """The honest error of every output under one contract, for one set of inputs.

    oracle      the float64 outputs it was built on
    dtypes      the dtype each output is judged in
    why         why nothing can be judged; empty when it can
    conditions  sum|terms| / |sum terms| of the reductions on the way, by op name, the worst of each (rms over
                its elements, and sum|terms| by its bound sqrt(n sum terms^2), which equal terms reach)
    """

    names: tuple[str, ...]
    contract: Contract
    oracle: OracleResult
    dtypes: tuple[torch.dtype, ...]
    yardsticks: tuple[Yardstick | None, ...]
    samples: tuple[tuple[Tensor, ...], ...]
    out_of_range: tuple[float, ...]
    why: str = ""
    conditions: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        oracle: Oracle,
        inputs: Sequence[Value],
        *,
        contract: Contract,
        samples: int,
        seed: int,
        dtypes: Sequence[torch.dtype] | None = None,
        native: Sequence[Tensor] | None = None,
    ) -> Envelope:
        """Measure the envelope from `samples` >= 2 Monte-Carlo runs.

        `dtypes` are the problem's declared output dtypes (the reference's own otherwise). `native` is the
        reference's low-precision result; where it left its own range, nothing is judged. Raises
        OracleUnavailable when the reference does not run.
        """
        if samples < 2:
            raise ValueError(f"samples = {samples}: at least 2 are needed to measure one against the other")
        return cls._from_base(_base(oracle, inputs), oracle, inputs, contract, samples, seed, dtypes, native)

    @classmethod
    def _from_base(
        cls,
        base: _Base,
        oracle: Oracle,
        inputs: Sequence[Value],
        contract: Contract,
        samples: int,
        seed: int,
        dtypes: Sequence[torch.dtype] | None,
        native: Sequence[Tensor] | None,
    ) -> Envelope:
        result, names = base.result, tuple(oracle.names)
        stored = tuple(dtypes) if dtypes is not None else result.dtypes
        if len(stored) != len(names):
            raise ValueError(f"{len(stored)} dtypes for {len(names)} outputs")
        unusable = cls(names, contract, result, stored, (None,) * len(names), (), (0.0,) * len(names))
        if not result.faithful and not result.weaker:
            return _because(unusable, result.why)
        tiny = any(value.numel() < ENOUGH and _is_real_or_complex(value) for value in result.values)
        wide = _is_wide(inputs, stored)
        base.tape.scales.clear()
        runs: list[tuple[Tensor, ...]] = []
        try:
            for number in range(max(samples, _FEW) if tiny else samples):
                if result.weaker:
                    runs.append(oracle.weaker_sample(inputs, seed + number, moved=number > 0))
                    continue
                runs.append(oracle.sample(inputs, contract, seed + number, base.tape, wide=wide, nearest=number == 0))
        except Exception as error:  # noqa: BLE001 - foreign code under noise; without samples nothing is judged
            return _because(
                unusable,
                f"The reference raised under rounding noise ({type(error).__name__}: {error}), so the honest error is unknown.",
            )
        if any(run[i].shape != result.values[i].shape for run in runs for i in range(len(names))):
            return _because(
                unusable, "The shape of an output depends on rounding errors, so the honest error is unknown."
            )
        by_output = tuple(tuple(run[i] for run in runs) for i in range(len(names)))
        kind = {"wide": wide, "nan_is_meant": _has_nan(inputs)}
        yardsticks = tuple(_yardstick(result, i, by_output[i], stored[i], **kind) for i in range(len(names)))
        lost = tuple(_out_of_range(yardsticks[i], native[i] if native is not None else None) for i in range(len(names)))
        return cls(names, contract, result, stored, yardsticks, by_output, lost, "", dict(base.tape.conditions))

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor that is held, those that several parts share counted once."""
        held = [*self.oracle.values, *(t for run in self.samples for t in run)]
        held += [t for yardstick in self.yardsticks if yardstick is not None for t in yardstick.tensors()]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())

    def judge(self, outputs: Sequence[Tensor], *, groups: Groups | None = None) -> tuple[OutputReport, ...]:
        """One report per output, in order.

        `groups` gives, per output name, integer labels >= 0 of elements that belong together (the shape of
        the output or of its leading axes), for instance `contribution_deciles` of how often a row was added to.
        """
        if len(outputs) != len(self.names):
            raise ValueError(f"{len(outputs)} outputs given, {len(self.names)} expected ({', '.join(self.names)})")
        return tuple(self._judge_one(i, out, (groups or {}).get(self.names[i], {})) for i, out in enumerate(outputs))

    def _judge_one(self, i: int, out: Tensor, groups: Mapping[str, Tensor]) -> OutputReport:
        name, expected = self.names[i], self.oracle.values[i]
        report = OutputReport(name, self.dtypes[i], expected.numel(), None)
        if out.shape != expected.shape:
            words = f"the shape is {tuple(out.shape)}, not {tuple(expected.shape)}"
            return _replaced(report, passed=False, tests=(TestResult("shape", 1, 0, True, None, words),))
        if self.why:
            return _replaced(report, why=self.why)
        yardstick = self.yardsticks[i]
        if yardstick is None:
            got = out.detach()
            if not got.is_floating_point() and got.dtype != torch.bool and self.oracle.selections:
                fair = equally_right(self.oracle.selections, expected, got.to(expected.device))
                got = got if fair is None else torch.where(fair, expected, got.to(expected.device))
            test = compare_exactly(name, expected, list(self.samples[i]), got)
            return _replaced(
                report,
                passed=not test.failed,
                tests=(test,),
                worst_index=test.index,
                **_values_at(test.index, out, expected),
            )
        return self._judge_float(report, yardstick, out.detach(), expected, i, groups)

    def _judge_float(
        self,
        report: OutputReport,
        yardstick: Yardstick,
        out: Tensor,
        expected: Tensor,
        i: int,
        groups: Mapping[str, Tensor],
    ) -> OutputReport:
        if out.is_complex():
            out, expected, groups = torch.view_as_real(out.to(torch.complex128)), torch.view_as_real(expected), {}
        elif not is_float(out.dtype):
            out = out.to(torch.float64)
        tests, errors = yardstick.tests(out, groups)
        tail = tests[1]
        slope = yardstick.slope_of(out)
        told = expected.to(out.dtype) if tests[0].failed else expected  # beyond the format's range is infinite in it
        facts = _replaced(
            report,
            tests=tuple(tests),
            worst_index=tests[0].index if tests[0].failed else tail.index,
            **_values_at(tests[0].index if tests[0].failed else tail.index, out, told),
            implied_bits=yardstick.implied_bits(errors),
            slope=slope,
            slope_allowed=yardstick.slope_allowed() if slope is not None else None,
            unjudged=yardstick.unjudged,
            groups={t.name.removeprefix("bias by "): t.measured for t in tests if t.name.startswith("bias by ")},
        )
        if tests[0].failed:  # NaN where every honest run is finite needs no scale
            return _replaced(facts, passed=False)
        why = _not_valid(yardstick, self.out_of_range[i], self.conditions)
        if why:
            return _replaced(facts, passed=None, why=why)
        return _replaced(facts, passed=not any(t.failed for t in tests))


def _because(envelope: Envelope, why: str) -> Envelope:
    return Envelope(**{**vars(envelope), "why": why})


def _replaced(report: OutputReport, **changes: object) -> OutputReport:
    return OutputReport(**{**vars(report), **changes})


def _base(oracle: Oracle, inputs: Sequence[Value]) -> _Base:
    tape = Tape()
    return _Base(oracle.base(inputs, tape), tape)


def _is_real_or_complex(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _has_nan(inputs: Sequence[Value]) -> bool:
    return any(isinstance(v, Tensor) and is_float(v.dtype) and bool(to_float64(v).isnan().any()) for v in inputs)


def _is_wide(inputs: Sequence[Value], stored: Sequence[torch.dtype]) -> bool:
    wide = {torch.float64, torch.complex128}
    return any(isinstance(v, Tensor) and v.dtype in wide for v in inputs) or any(d in wide for d in stored)


def _yardstick(
    result: OracleResult, i: int, samples: tuple[Tensor, ...], stored: torch.dtype, *, wide: bool, nan_is_meant: bool
) -> Yardstick | None:
    """None for outputs that are compared exactly."""
    value, own = result.values[i], result.dtypes[i]
    if not _is_real_or_complex(value):
        return None
    if value.is_complex():
        value, samples = torch.view_as_real(value), tuple(torch.view_as_real(s) for s in samples)
    stored, own = _TO_REAL.get(stored, stored), _TO_REAL.get(own, own)
    if not is_float(stored):
        return None
    # when the reference itself stores fewer bits than the problem declares, its rounding is permitted
    return Yardstick(
        value, list(samples), coarser(stored, own) if is_float(own) else stored, wide=wide, nan_is_meant=nan_is_meant
    )


def _out_of_range(yardstick: Yardstick | None, native: Tensor | None) -> float:
    if yardstick is None or native is None or not _is_real_or_complex(native):
        return 0.0
    real = torch.view_as_real(native.to(torch.complex128)) if native.is_complex() else to_float64(native)
    return yardstick.excuse(real.to(yardstick.y.device)) if real.shape == yardstick.y.shape else 0.0


def _not_valid(yardstick: Yardstick, out_of_range: float, conditions: Mapping[str, float]) -> str:
    """Why too few elements are left to judge; empty when there are enough."""
    if yardstick.unjudged <= TOO_FEW * yardstick.y.numel():
        return ""
    if out_of_range > yardstick.ill_share:
        return f"The reference itself leaves its range on {out_of_range:.0%} of this output."
    words = f"{yardstick.ill_share:.0%} of this output is ill-conditioned here: honest rounding alone changes it by more than 3 %."
    worst = max(conditions, key=lambda name: conditions[name], default="")
    if worst and conditions[worst] > _CANCELS:
        words += f" The terms of `{worst}` cancel to 1/{conditions[worst]:.3g} of their size."
    return words


def _values_at(index: tuple[int, ...] | None, out: Tensor, expected: Tensor) -> dict[str, float | None]:
    if index is None or out.numel() == 0:
        return {"got": None, "expected": None}
    return {"got": float(out[index]), "expected": float(expected[index])}


def contribution_deciles(counts: Tensor) -> Tensor:
    """Labels 0..9 for `judge(groups=…)`: elements by how many contributions were summed into them."""
    order = counts.reshape(-1).double()
    if order.numel() == 0:
        return counts.long()
    edges = torch.quantile(
        order[:: max(1, order.numel() // 1_000_000)],
        torch.linspace(0.1, 0.9, 9, dtype=torch.float64, device=order.device),
    )
    return torch.bucketize(order, edges).reshape(counts.shape)


# ---------------------------------------------------------------------------------------------------
# Grades


@dataclass(frozen=True)
class Graded:
    """The tightest contract that explains each output.

    grades     "F32", "TC", "IO" or "REJECT" per output; "" where this workload cannot judge it
    reports    per output, the report under that contract (under TC for "REJECT" and "")
    """

    names: tuple[str, ...]
    grades: tuple[str, ...]
    reports: tuple[OutputReport, ...]

    @property
    def worst(self) -> str:
        """The loosest grade of any judged output; "" when none was judged."""
        return max((g for g in self.grades if g), key=RANKS.__getitem__, default="")


def grade_outputs(
    oracle: Oracle, inputs: Sequence[Value], outputs: Sequence[Tensor], *, samples: int, seed: int,
    dtypes: Sequence[torch.dtype] | None = None, native: Sequence[Tensor] | None = None, groups: Groups | None = None,
    capability: tuple[int, int] | None = None,
) -> Graded:  # fmt: skip
    """Grade every output: TC first, then F32 for what passed and IO for what did not.

    A weaker oracle (`OracleResult.weaker`) vouches for IO at best. IO cannot see a *short* narrow accumulation; whoever accepts IO must also know that the accumulator
    has at least 23 bits (probes), or use long reductions.
    """
    base = _base(oracle, inputs)

    def judged(name: str) -> tuple[OutputReport, ...]:
        contract = contract_on(name, capability, inputs)
        envelope = Envelope._from_base(base, oracle, inputs, contract, max(2, samples), seed, dtypes, native)
        return envelope.judge(outputs, groups=groups)

    reports = list(judged("TC"))
    grades = [{True: "TC", False: "IO", None: ""}[r.passed] for r in reports]
    if "TC" in grades:
        for i, report in enumerate(judged("F32")):
            if grades[i] == "TC" and report.passed:
                grades[i], reports[i] = "F32", report
    if "IO" in grades:
        for i, report in enumerate(judged("IO")):
            if grades[i] == "IO":
                grades[i] = "IO" if report.passed else "REJECT"
                reports[i] = report if report.passed else reports[i]
    if base.result.weaker:  # its floor is that of the storage type, whatever the contract
        grades = ["IO" if g in ("F32", "TC") else g for g in grades]
    return Graded(tuple(oracle.names), tuple(grades), tuple(reports))


def grade(
    oracle: Oracle, inputs: Sequence[Value], outputs: Sequence[Tensor], *, samples: int = 4, seed: int = 0,
    dtypes: Sequence[torch.dtype] | None = None, native: Sequence[Tensor] | None = None, groups: Groups | None = None,
) -> str:  # fmt: skip
    """ "F32", "TC", "IO" or "REJECT": the worst grade of any output; "" when nothing could be judged."""
    return grade_outputs(
        oracle, inputs, outputs, samples=samples, seed=seed, dtypes=dtypes, native=native, groups=groups
    ).worst


def native_report(
    oracle: Oracle, inputs: Sequence[Value], *, samples: int, seed: int, dtypes: Sequence[torch.dtype] | None = None
) -> Graded:
    """Grade the native reference itself. "REJECT" means that the reference is deficient here.

    Raises OracleUnavailable when it does not run.
    """
    return grade_outputs(oracle, inputs, oracle.native(inputs), samples=samples, seed=seed, dtypes=dtypes)


def no_worse_than(native: Graded, candidate: Graded, *, carry_bits: float | None = None) -> bool:
    """Whether the candidate's roundings are bounded and no looser than those the native reference makes.

    For policies that accept what the hardware default does. A grade of REJECT is never excused, whatever
    the native reference does: it is an error that no bounded rounding explains. `carry_bits` is the
    narrowest accumulator that probes read, where they could; below 23 a grade of IO is not excused either.
    """
    for own, theirs in zip(candidate.grades, native.grades, strict=True):
        if not own or own == "REJECT" or (own == "IO" and carry_bits is not None and carry_bits < _COMPUTE_BITS):
            return False
        if RANKS[own] > max(RANKS["TC"], RANKS.get(theirs, -1)):
            return False
    return True
