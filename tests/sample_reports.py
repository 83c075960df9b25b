"""Realistic reports for the tests of the reporters: every verdict, every kind of trouble.

The numbers are drawn by formula, not measured; nothing here is evidence about a kernel.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from seatrial.model import (
    Adequacy,
    BenchmarkRow,
    BenchmarkRule,
    CheckRow,
    Curve,
    Finding,
    Growth,
    GrowthPoint,
    Outcome,
    PlantedFault,
    Report,
    Trial,
    TrialCell,
    Verdict,
    Where,
)

STEPS = 60
PROBLEM = "087_embedding_with_initial_layernorm_backward"
NAN, INF = float("nan"), float("inf")
HOSTILE = (
    "</script></style><script>alert(1)</script><img src=x onerror=alert(2)>"
    "]]>--><!-- \x00\x07\x1b[31mred\x1b[0m \u202eevil\u202c \ufeff\u200b\ud800 `code` ``` | pipe | {{7*7}} {% raw %} "
    "[link](javascript:alert(3)) ![](https://example.invalid/x.png) @everyone שלום &amp; 'quote' \"double\""
)
LONG = "averyveryverylongword" * 60


def _curve(run: str, seed: int, loss: Callable[[int], float], noise: float) -> Curve:
    dice = random.Random(f"{run}{seed}{noise}")
    return Curve(run=run, seed=seed, losses=[loss(step) + dice.gauss(0, noise) for step in range(STEPS)])


def _falls(step: int, start: float = 7.6, end: float = 4.2, pace: float = 16.0) -> float:
    return end + (start - end) * math.exp(-step / pace)


def _cell(
    data: str, optimizer: str, verdict: str, reason: str, candidate: Callable[[int], float], **facts: float
) -> TrialCell:
    floor = {"text": 4.2, "zipf": 5.6, "uniform": 7.2}[data]

    def honest(step: int) -> float:
        return _falls(step, end=floor)

    return TrialCell(
        data=data,
        optimizer=optimizer,
        learning_rate=0.1 if optimizer.startswith("SGD") else 1e-3,
        verdict=verdict,
        reason=reason,
        curves=[
            _curve("reference", 0, honest, 0.02),
            _curve("control", 0, honest, 0.025),
            _curve("candidate", 0, lambda step: candidate(step) + honest(step), 0.03),
        ],
        **facts,  # type: ignore[arg-type]  # a mapping of optional fields, checked by the record itself
    )


def origin_trial() -> Trial:
    """The training matrix of a narrow accumulator: visible under SGD on skewed data, masked elsewhere."""
    masked = "the fault is proven by other checks, yet the loss stays within the honest band"
    return Trial(
        adapter="embedding gradient inside a decoder",
        model="2 layers, width 128, vocabulary 2048, 16 × 256 tokens per step",
        seconds=96.4,
        cells=[
            _cell("text", "SGD + momentum", "diverges", "the loss leaves the band at step 14 and ends as not a number",
                  lambda s: 0.0 if s < 14 else (0.02 * (s - 13) ** 2 if s < 44 else NAN),
                  first_step=14, gap=NAN, band=0.08, most_repeats=1021),
            _cell("zipf", "SGD + momentum", "drifts", "the loss leaves the band at step 22 and ends 0.61 above the reference",
                  lambda s: max(0.0, (s - 20) * 0.016), first_step=22, gap=0.61, band=0.07, most_repeats=498),
            _cell("uniform", "SGD + momentum", "masked", masked, lambda s: 0.0, gap=0.004, band=0.06, most_repeats=9),
            _cell("text", "AdamW", "masked", masked, lambda s: 0.004 * s / STEPS, gap=0.011, band=0.07, most_repeats=1021),
            _cell("zipf", "AdamW", "masked", masked, lambda s: 0.0, gap=-0.003, band=0.06, most_repeats=498),
            _cell("uniform", "AdamW", "masked", masked, lambda s: 0.0, gap=0.002, band=0.05, most_repeats=9),
        ],
    )  # fmt: skip


def honest_trial() -> Trial:
    """The same matrix for an honest kernel: agrees everywhere."""
    agrees = "the loss stays within the band of honest controls at every step"
    return Trial(
        adapter="embedding gradient inside a decoder",
        model="2 layers, width 128, vocabulary 2048, 16 × 256 tokens per step",
        seconds=95.1,
        cells=[
            _cell(data, optimizer, "agrees", agrees, lambda s: 0.0, gap=0.003, band=0.07, most_repeats=498)
            for optimizer in ("SGD + momentum", "AdamW")
            for data in ("text", "zipf", "uniform")
        ],
    )


def origin_growth() -> Growth:
    """Error of a bfloat16 carry: it follows the number of contributions."""
    counts = (1, 8, 64, 512, 4096)
    errors = (0.0016, 0.0021, 0.0098, 0.121, 0.655)
    return Growth(
        output="grad_embedding",
        lever="one token id repeated",
        exponent=1.21,
        points=[GrowthPoint(contributions=n, error=e, floor=0.0013 + 0.0001 * i) for i, (n, e) in enumerate(zip(counts, errors, strict=True))],
    )  # fmt: skip


def honest_growth() -> Growth:
    """Error of an fp32 carry: flat."""
    return Growth(
        output="grad_embedding",
        lever="one token id repeated",
        exponent=0.01,
        points=[GrowthPoint(contributions=n, error=0.0016, floor=0.0017) for n in (1, 8, 64, 512, 4096)],
    )


def benchmark_passes() -> BenchmarkRule:
    """The benchmark's own rule, satisfied four times out of four."""
    rows = [
        BenchmarkRow(
            workload=f"5f0c1d{number:02d}-6a1e-4f7c-9d55-b1f3a7c0e2{number:02d}",
            axes={"batch_size": 1 << number, "seq_len": 512 << number},
            status="PASSED",
            matched_ratio=ratio,
            max_absolute_error=error,
            max_relative_error=1.93,
            atol=1e-5,
            rtol=0.05,
            required_matched_ratio=0.99,
        )
        for number, (ratio, error) in enumerate([(0.99996, 0.0013), (0.99981, 0.0021), (0.9993, 0.0044), (0.9991, 0.0092)])
    ]  # fmt: skip
    return BenchmarkRule(
        name="SOL-ExecBench", passed=True, rows=rows,
        summary="the benchmark draws uniform ids, so no row receives more than 9 contributions",
    )  # fmt: skip


ENVIRONMENT = {
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "triton": "not installed",
    "machine": "Linux x86_64, 2 cores",
    "isolation": "fresh process, own session, address-space limit, no network",
}
CHECKS = [
    CheckRow(check="contract", title="Shapes, dtypes and count of the outputs", outcome=Outcome.HELD, calls=8, seconds=0.61),
    CheckRow(check="stale-output", title="Output that was there before the kernel ran", outcome=Outcome.HELD, calls=8, seconds=0.44),
    CheckRow(check="error-beyond-honest", title="More error than an honest kernel makes", outcome=Outcome.FAILED, calls=44, seconds=12.8,
             summary="1 of 2 outputs, on 7 of 22 input recipes"),
    CheckRow(check="narrow-accumulator", title="An accumulator narrower than declared", outcome=Outcome.FAILED, calls=6, seconds=0.9,
             summary="stops absorbing at 256 contributions"),
    CheckRow(check="training-divergence", title="Training that leaves the honest band", outcome=Outcome.FAILED, calls=720, seconds=96.4),
    CheckRow(check="changed-input", title="An input changed by the call", outcome=Outcome.HELD, calls=8, seconds=0.31),
    CheckRow(check="other-device", title="A second device", outcome=Outcome.NOT_APPLICABLE, calls=0, seconds=0.0, summary="one device only"),
]  # fmt: skip


def origin() -> Report:
    """Rejected by seatrial, passed by its benchmark: the case that the whole product is about."""
    return Report(
        seatrial="0.1.0",
        problem=PROBLEM,
        problem_path="examples/embedding_backward",
        candidate="fast_embedding_backward",
        candidate_path="examples/embedding_backward/candidates/bf16_accumulator.json",
        verdict=Verdict.REJECTED,
        headline="The gradient of a token that occurs often is wrong by up to 65 %, because its contributions are summed in bfloat16.",
        grade="REJECT",
        findings=[
            Finding(
                check="narrow-accumulator", output="grad_embedding", outcome=Outcome.FAILED, cause="accumulator:bfloat16",
                reason="Sums of equal terms stop growing at 256: the accumulator of grad_embedding keeps 8 bits, the width of bfloat16.",
                measured=8, allowed=24, unit="bits",
                where=Where(workload="5f0c1d03-6a1e-4f7c-9d55-b1f3a7c0e203", axes={"batch_size": 8, "seq_len": 4096}, seed=7712309441,
                            inputs="one token id repeated, gradient of ones", index=[17, 0]),
                reproducer="seatrial check examples/embedding_backward examples/embedding_backward/candidates/bf16_accumulator.json --only narrow-accumulator --seed 7712309441",
                advice="Accumulate in float32 and round once, when the row is finished.",
                details={"stalls at": 256, "probe": "2^k plus ones", "placements": [0, 1, 4095]},
            ),
            Finding(
                check="error-beyond-honest", output="grad_embedding", outcome=Outcome.FAILED, cause="accumulator:bfloat16",
                reason="The hottest row of grad_embedding carries 45 times the error of an honest kernel.",
                measured=0.0584, allowed=0.0013, unit="relative error",
                where=Where(workload="5f0c1d02-6a1e-4f7c-9d55-b1f3a7c0e202", axes={"batch_size": 4, "seq_len": 2048}, seed=991823,
                            inputs="token ids by Zipf's law, gradient with a common component", index=[0, 113]),
                reproducer="seatrial check examples/embedding_backward examples/embedding_backward/candidates/bf16_accumulator.json --only error-beyond-honest --seed 991823",
                advice="Compare row by row against float64, ordered by the number of contributions; a matched ratio hides one bad row among thousands.",
            ),
            Finding(
                check="training-divergence", outcome=Outcome.FAILED, cause="training:diverges",
                reason="Trained on text with SGD, the loss leaves the band of honest kernels at step 14 and ends as not a number.",
                measured=NAN, allowed=0.08, unit="loss",
                where=Where(inputs="text, SGD + momentum", seed=3, note="4 of 6 cells mask the fault: AdamW rescales each row, uniform ids repeat too rarely"),
                reproducer="seatrial trial examples/embedding_backward examples/embedding_backward/candidates/bf16_accumulator.json --seed 3",
                advice="Do not use this kernel for training; an AdamW run that looks fine is no evidence.",
            ),
            Finding(check="contract", outcome=Outcome.NOTED, reason="The kernel was built with fast-math contractions."),
        ],
        checks=CHECKS,
        limits=["Only the CPU was available: races and launch configuration were not exercised.", "Lengths above 4096 were extrapolated, not run."],
        oddities=["1 of 4 workloads touches less than 1 % of the rows, so the benchmark's ratio checks nothing there."],
        benchmark_rule=benchmark_passes(),
        growth=[origin_growth()],
        trial=origin_trial(),
        adequacy=Adequacy(
            sentence="44 of 45 faults planted in the reference were exposed; the one that was not: leaves out tanh at line 7",
            planted=45, exposed=44, survivors=["leaves out tanh at line 7"],
            faults=[PlantedFault(words="leaves out tanh at line 7", exposed=False)],
        ),
        environment=ENVIRONMENT,
        seeds={"master": 18446744073709551557, "trial": 3},
        policy="standard",
        device="cpu",
        seconds=141.7,
        replay="seatrial check examples/embedding_backward examples/embedding_backward/candidates/bf16_accumulator.json --seed 18446744073709551557",
    )  # fmt: skip


def accepted() -> Report:
    """The honest twin of `origin`."""
    checks = [
        row
        if row.outcome is Outcome.NOT_APPLICABLE
        else row.model_copy(update={"outcome": Outcome.HELD, "summary": ""})
        for row in CHECKS
    ]
    return origin().model_copy(
        update={
            "candidate": "fp32_accumulator", "verdict": Verdict.ACCEPTED, "grade": "F32", "findings": [], "checks": checks,
            "candidate_path": "examples/embedding_backward/candidates/fp32_accumulator.json",
            "headline": "Every planned check ran and held, on inputs shown to be adequate.",
            "growth": [honest_growth()], "trial": honest_trial(), "seconds": 139.2,
            "replay": "seatrial check examples/embedding_backward examples/embedding_backward/candidates/fp32_accumulator.json --seed 18446744073709551557",
        }
    )  # fmt: skip


def accepted_with_limits() -> Report:
    """Right wherever it agrees to run, but refuses odd lengths."""
    limit = Finding(
        check="refused-shape", output=None, outcome=Outcome.LIMITED, cause="shape:multiple-of-8",
        reason="Refuses every seq_len that is no multiple of 8, with a clear error.",
        where=Where(axes={"batch_size": 1, "seq_len": 513}, seed=4), advice="Guard the call, or pad to a multiple of 8.",
        reproducer="seatrial check problem candidate.json --only refused-shape --seed 4",
    )  # fmt: skip
    row = CheckRow(check="refused-shape", title="Sizes outside the list", outcome=Outcome.LIMITED, calls=6, seconds=0.7)
    return accepted().model_copy(
        update={
            "candidate": "padded_kernel", "verdict": Verdict.ACCEPTED_WITH_LIMITS, "findings": [limit], "trial": None, "growth": [],
            "headline": "Right wherever it agrees to run; it refuses lengths that are no multiple of 8.", "checks": [*accepted().checks, row],
            "limits": ["seq_len must be a multiple of 8."],
        }
    )  # fmt: skip


def inconclusive() -> Report:
    """No GPU: the kernel could not run at all."""
    gap = Finding(
        check="contract", outcome=Outcome.NOT_VERIFIED, reason="The kernel needs CUDA and this machine has no GPU.",
        advice="Run the same command on a machine with a GPU.", reproducer="seatrial check problem cuda_kernel.json",
    )  # fmt: skip
    row = CheckRow(
        check="contract",
        title="Shapes, dtypes and count of the outputs",
        outcome=Outcome.NOT_VERIFIED,
        calls=0,
        seconds=0.0,
        summary="needs CUDA",
    )
    return Report(
        seatrial="0.1.0", problem=PROBLEM, candidate="cuda_kernel", candidate_path="cuda_kernel.json", verdict=Verdict.INCONCLUSIVE,
        headline="Nothing could be verified: the kernel needs CUDA and this machine has no GPU.", findings=[gap], checks=[row],
        benchmark_rule=BenchmarkRule(name="SOL-ExecBench", passed=False, summary="not run"), device="cpu", policy="quick", seconds=0.4,
        environment=ENVIRONMENT, seeds={"master": 1}, replay="seatrial check problem cuda_kernel.json --seed 1",
    )  # fmt: skip


def empty() -> Report:
    """The least that a report can hold."""
    return Report(seatrial="0.1.0", problem="", candidate="", verdict=Verdict.INCONCLUSIVE, headline="")


def _changed(finding: Finding, **changes: object) -> Finding:
    return Finding.model_validate({**dict(finding), **changes})


def hostile() -> Report:
    """Every string that a candidate, a path or a problem may bring along, at its worst."""
    text = HOSTILE + LONG
    finding = Finding(
        check="narrow-accumulator", output=text, outcome=Outcome.FAILED, reason=text, cause=text, measured=2.0, allowed=1.0, unit=text,
        where=Where(workload=text, axes={text: 1}, inputs=text, seed=1, index=[0], note=text), reproducer=text + "\nsecond line ```` end",
        advice=text, details={text: text},
    )  # fmt: skip
    cell = TrialCell(
        data=text,
        optimizer=text,
        learning_rate=0.1,
        verdict=text,
        reason=text,
        curves=[Curve(run=text, seed=0, losses=[1.0, 2.0])],
    )
    return Report(
        seatrial=text, problem=text, problem_path=text, candidate=text, candidate_path=text, verdict=Verdict.REJECTED, headline=text, grade=text,
        findings=[finding, _changed(finding, check=text, outcome=Outcome.LIMITED), _changed(finding, outcome=Outcome.NOTED)],
        checks=[CheckRow(check=text, title=text, outcome=Outcome.FAILED, calls=1, seconds=1.0, summary=text)],
        limits=[text], oddities=[text], growth=[Growth(output=text, lever=text, points=[GrowthPoint(contributions=1, error=1.0, floor=0.5), GrowthPoint(contributions=9, error=2.0, floor=0.5)])],
        benchmark_rule=BenchmarkRule(name=text, passed=True, summary=text, rows=[BenchmarkRow(workload=text, axes={text: 3}, status=text, message=text)]),
        trial=Trial(adapter=text, model=text, cells=[cell], seconds=1.0), environment={text: text}, seeds={text: 1}, policy=text, device=text, replay=text, adequacy=Adequacy(sentence=text, survivors=[text]),
    )  # fmt: skip


def not_finite() -> Report:
    """NaN and infinity wherever a number may stand."""
    finding = Finding(
        check="error-beyond-honest", output="y", outcome=Outcome.FAILED, reason="The output is not finite.", measured=NAN, allowed=INF, unit="ulp",
        details={"a": NAN, "b": [INF, {"c": -INF}], "d": 1.5},
    )  # fmt: skip
    curves = [
        Curve(run="reference", seed=0, losses=[2.0, 1.5, 1.2, 1.1]),
        Curve(run="control", seed=0, losses=[NAN, NAN, NAN, NAN]),
        Curve(run="candidate", seed=0, losses=[2.0, INF, NAN, 1.0], gradient_norms=[1.0, INF, NAN, -INF]),
        Curve(run="candidate", seed=1, losses=[]),
    ]
    cells = [
        TrialCell(data="text", optimizer="SGD", learning_rate=NAN, verdict="diverges", reason="", gap=INF, band=NAN, first_step=1, curves=curves),
        TrialCell(data="zipf", optimizer="SGD", learning_rate=0.1, verdict="not verified", reason="no control", curves=[]),
        TrialCell(data="text", optimizer="AdamW", learning_rate=0.1, verdict="diverges", reason="x", curves=[Curve(run="candidate", seed=0, losses=[INF, -INF])]),
    ]  # fmt: skip
    points = [
        GrowthPoint(contributions=n, error=e, floor=f)
        for n, e, f in ((0, 0.0, 0.0), (1, NAN, 0.1), (2, INF, 0.1), (4, 0.3, -INF), (8, 0.6, 0.1))
    ]
    return origin().model_copy(
        update={
            "candidate": "not_finite", "findings": [finding], "seconds": NAN, "trial": Trial(adapter="a", model="m", cells=cells, seconds=INF),
            "growth": [Growth(output="y", lever="length", points=points, exponent=NAN), Growth(output="z", lever="length", points=[GrowthPoint(contributions=3, error=NAN, floor=NAN)]), Growth(output="none", lever="", points=[])],
            "benchmark_rule": BenchmarkRule(name="b", passed=False, summary="", rows=[BenchmarkRow(workload="w", axes={}, status="INCORRECT_NUMERICAL", matched_ratio=NAN, max_absolute_error=INF, max_relative_error=NAN, atol=INF, rtol=0.1)]),
            "checks": [CheckRow(check="error-beyond-honest", title="t", outcome=Outcome.FAILED, calls=1, seconds=NAN)],
        }
    )  # fmt: skip


SAMPLES: dict[str, Callable[[], Report]] = {
    "origin": origin,
    "accepted": accepted,
    "accepted-with-limits": accepted_with_limits,
    "inconclusive": inconclusive,
    "empty": empty,
    "hostile": hostile,
    "not-finite": not_finite,
}
