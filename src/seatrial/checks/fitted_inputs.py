"""A kernel that is right only for inputs drawn the way the benchmark draws them.

What it shows      values hold for skewed and repeated ids, common-sign gradients, scaled, tiny, shifted and
                   heavy-tailed activations, outlier channels, norm weights away from one, other masks, ignored
                   labels, positions of a long context, other scalars and flags
Why it matters     real text repeats a few tokens thousands of times; real activations have outliers; a soft cap bends
                   only where logits are large
How                each input gets a role from its declaration and from how the reference uses it; recipes for that role
                   change the declared draw, the judgement is that of wrong-values
What it misses     distributions that none of the recipes resembles
Cost               one call per recipe
"""

from __future__ import annotations

from collections.abc import Sequence

from seatrial.bench import Bench
from seatrial.checks.base import Conclusion, Evidence, Example, Job, NotApplicable
from seatrial.study import Study
from seatrial.values import judge_values

NAME = "fitted-inputs"
TITLE = "values on inputs of other distributions"


def plan(study: Study) -> Sequence[Job] | NotApplicable:
    """The recipes of this problem's roles, most likely to expose a fault first."""
    cases = study.drawn_cases
    if not cases:
        return NotApplicable("no input of this problem may be drawn differently")
    return tuple(Job(f"inputs {case.recipe}", (case,)) for case in cases)


def observe(bench: Bench, job: Job) -> Evidence:
    """Call once per recipe."""
    return Evidence(job, tuple(bench.call(case) for case in job.cases))


def judge(study: Study, evidence: Sequence[Evidence]) -> Conclusion:
    """As wrong-values; the finding says which inputs the recipe of the worst case changed, and how."""
    calls = [(c, r) for e in evidence for c, r in zip(e.job.cases, e.records, strict=True)]
    return Conclusion(judge_values(study, NAME, calls))


_REFERENCE = "import torch\n\ndef run(x):\n    return 5 * torch.tanh(x / 5)\n"
_INPUTS = (
    "import torch\n\ndef make(seed):\n"
    "    return {'x': 1e-2 * torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()}\n"
)

ACCEPTS: Example | None = Example(
    _REFERENCE, _INPUTS, "import torch\n\ndef run(x):\n    return 5 * torch.tanh(x / 5)\n"
)
REJECTS: Example | None = Example(
    _REFERENCE, _INPUTS, "import torch\n\ndef run(x):\n    return 5 * (x / 5)\n", because="wrong beyond rounding"
)
