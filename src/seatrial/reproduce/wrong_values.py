"""Do the outputs of these calls still show wrong values? The honest floor of these very inputs decides.

A case on which the native reference itself falls short shows nothing. Single elements prove a fault best; where none
is far off, a statistic of the whole output may.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from seatrial.checks.mutated_input import changed_elements
from seatrial.model import Value
from seatrial.reproduce.nouns import Answer, Point, Situation, Statistic, Symptom

if TYPE_CHECKING:
    from torch import Tensor

    from seatrial.numerics.compare import OutputReport, Yardstick
    from seatrial.numerics.envelope import Envelope
    from seatrial.study import Study

MOST_POINTS = 8
STATISTIC_OVER_HONEST = 2.0  # a whole output differs when its statistic is this many times the worst honest sample's


def judge_values(study: Study, situation: Situation, outputs: Sequence[Tensor]) -> Answer:
    """The output at fault against the honest floor of these inputs."""
    assert situation.output is not None
    i = situation.output
    placed = study.placed(situation.inputs_of(study.problem, 0))
    native = study.oracle.native(placed)
    if _same_bits(outputs[i], native[i].cpu()):
        return Answer()  # what the native reference gives is no fault of the candidate, and no envelope is needed
    envelope = _envelope(study, placed, native)
    report = envelope.judge([study.device.to_device(t) for t in outputs])[i]
    if report.passed is None:
        return Answer(unable=report.why)
    if report.passed or envelope.judge(native)[i].passed is False:
        return Answer()
    family = family_of(report)
    if situation.family and family != situation.family:
        return Answer()
    points = _points(envelope, i, report, outputs[i], family)
    if situation.least > 1.0 and not any(p.times_allowed >= situation.least for p in points):
        return Answer()
    statistic = _statistic(envelope, i, outputs[i]) if family == "finite" and not points else None
    failed = max((t for t in report.tests if t.failed), key=lambda t: t.name == "tail")
    return Answer(Symptom(failed.words, family, points, statistic))


def family_of(report: OutputReport) -> str:
    """Which kind of difference a failed report shows; shrinking never changes one into another."""
    failed = {t.name for t in report.tests if t.failed}
    for name in ("shape", "exact", "nonfinite"):
        if name in failed:
            return name
    return "finite"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and changed_elements(a, b) == 0


def _envelope(study: Study, placed: Sequence[Value], native: Sequence[Tensor]) -> Envelope:
    from seatrial.formats.dtypes import torch_dtype
    from seatrial.numerics.envelope import Envelope
    from seatrial.numerics.noise import contract_on

    return Envelope.build(
        study.oracle,
        placed,
        contract=contract_on("TC", study.capability, placed),
        samples=study.policy.samples,
        seed=study.seed_for("reproducer"),
        dtypes=[torch_dtype(s.dtype) for s in study.problem.outputs],
        native=native,
    )


def _points(envelope: Envelope, i: int, report: OutputReport, out: Tensor, family: str) -> tuple[Point, ...]:
    yardstick = envelope.yardsticks[i]
    if family in ("nonfinite", "exact") and report.worst_index is not None:
        allowed = 0.0 if yardstick is None else float(_allowed(yardstick, report)[report.worst_index])
        expected = float(envelope.oracle.values[i][report.worst_index])
        return (Point(report.worst_index, float(out[report.worst_index].double()), expected, allowed),)
    if yardstick is None or out.is_complex() or family != "finite":
        return ()
    return _far_elements(yardstick, report, out)


def _far_elements(yardstick: Yardstick, report: OutputReport, out: Tensor) -> tuple[Point, ...]:
    """The elements beyond what an honest kernel may leave, the farthest first; none when the tail test held."""
    import torch

    if not any(t.name == "tail" and t.failed for t in report.tests):
        return ()
    got = out.double().to(yardstick.y.device)
    allowed = _allowed(yardstick, report)
    over = ((got - yardstick.y).abs() / allowed.clamp(min=1e-300)).nan_to_num_(0.0, 0.0, 0.0).reshape(-1)
    ratios, flat = over.topk(min(MOST_POINTS, over.numel()))
    places = [(int(f), float(r)) for f, r in zip(flat, ratios, strict=True) if float(r) > 1.0]
    return tuple(
        Point(
            tuple(int(x) for x in torch.unravel_index(torch.tensor(f), yardstick.y.shape)),
            float(got.reshape(-1)[f]),
            float(yardstick.y.reshape(-1)[f]),
            float(allowed.reshape(-1)[f]),
        )
        for f, _ in places
    )


def _allowed(yardstick: Yardstick, report: OutputReport) -> Tensor:
    """Per element: the final rounding, plus as many honest deviations as the tail test allows."""
    from seatrial.numerics.compare import TAIL

    sigmas = max((t.allowed for t in report.tests if t.name == "tail"), default=TAIL)
    return yardstick.half * (1 + 2.0**-10) + sigmas * yardstick.sigma + 2.0**-126


def _statistic(envelope: Envelope, i: int, out: Tensor) -> Statistic | None:
    from seatrial.numerics.dtypes import round_to

    yardstick = envelope.yardsticks[i]
    if yardstick is None or out.is_complex():
        return None
    y, got = yardstick.y, out.double().to(yardstick.y.device)
    honest = [round_to(sample, yardstick.stored) for sample in (*envelope.samples[i], y)]
    for name in ("rms", "signed mean"):
        allowed = STATISTIC_OVER_HONEST * max(statistic(name, h, y) for h in honest)
        measured = statistic(name, got, y)
        if measured > STATISTIC_OVER_HONEST * allowed:
            return Statistic(name, measured, allowed, y.cpu())
    return None


def statistic(name: str, got: Tensor, expected: Tensor) -> float:
    """The rms of got - expected, or its mean in the direction of growing size; both in the output's own unit."""
    error = (got - expected).nan_to_num(0.0, 0.0, 0.0)
    if name == "rms":
        return float(error.square().mean().sqrt())
    return abs(float((error * expected.sign()).mean()))
