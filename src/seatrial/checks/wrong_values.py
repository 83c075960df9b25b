"""Values on the declared inputs that no honest kernel of this precision would give.

What it shows      on fresh draws of the declared inputs every output lies as close to the exact result as honest
                   rounding allows, in its tail, in bulk, in signed bias, globally and per group of rows
Why it matters     a tolerance chosen by hand passes kernels that lose terms and fails kernels that are more exact
How                the unmodified reference in fp64 is the oracle; op-granular Monte-Carlo rounding gives each element
                   its scale; what lies beyond the final rounding is compared with that scale
What it misses     what these inputs cannot show: see fitted-inputs, fitted-sizes and narrow-accumulator
Cost               one call per audited workload and seed; about nine fp64 runs of the reference each, shared by all
                   candidates
"""

from __future__ import annotations

from collections.abc import Sequence

from seatrial.bench import Bench
from seatrial.checks.base import Conclusion, Evidence, Example, Job, NotApplicable
from seatrial.study import Study
from seatrial.values import grade_values, judge_values

NAME = "wrong-values"
TITLE = "values on declared inputs, fresh seeds"


def plan(study: Study) -> Sequence[Job] | NotApplicable:
    """Every audited workload with every fresh seed."""
    draws = range(2, 2 + study.policy.seeds)
    return tuple(Job(f"workload {w.uuid}", tuple(study.case(w, draw=d) for d in draws)) for w in study.audited)


def observe(bench: Bench, job: Job) -> Evidence:
    """Call once per case on poisoned outputs."""
    return Evidence(job, tuple(bench.call(case) for case in job.cases))


def judge(study: Study, evidence: Sequence[Evidence]) -> Conclusion:
    """Per output: the worst case speaks. The grade is the worst over all usable cases."""
    calls = [(c, r) for e in evidence for c, r in zip(e.job.cases, e.records, strict=True)]
    findings = judge_values(study, NAME, calls)
    return Conclusion(findings, grade=grade_values(study, calls))


_REFERENCE = "def run(x):\n    return x.sum(-1)\n"
_INPUTS = "import torch\n\ndef make(seed):\n    return {'x': torch.rand(64, 512, generator=torch.Generator().manual_seed(seed))}\n"

ACCEPTS: Example | None = Example(
    _REFERENCE, _INPUTS, "def run(x):\n    n = x.shape[-1]\n    return x[..., :n].sum(-1)\n"
)
REJECTS: Example | None = Example(
    _REFERENCE,
    _INPUTS,
    "def run(x):\n    n = x.shape[-1] - 1\n    return x[..., :n].sum(-1)\n",
    because="wrong beyond rounding",
    also=("fitted-inputs", "fitted-sizes", "narrow-accumulator", "replayed-result"),
)
