"""Every knob, declared once: its unit, default and reason.

The command line, the docs and the report are made from these fields. There is no tolerance here: the
bar is measured per problem (numerics/envelope.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Policy:
    """How thorough an audit is. Counts, seconds and mebibytes; nothing that moves the bar."""

    name: str = "standard"
    workloads: int = 4  # declared workloads audited: smallest, largest and a spread between
    seeds: int = 2  # fresh draws of each audited workload
    samples: int = 4  # Monte-Carlo rounding samples that set the honest floor (rank-one shrinkage makes 4 enough)
    recipes: int = 99  # input recipes tried beyond the declared generator
    sizes: int = 6  # sizes tried outside the declared list
    probes: int = 3  # placements per swamping probe
    growth: int = 5  # points on the error-growth curve
    trial: bool = True  # run the training matrix
    trial_seeds: int = 1  # seeds per cell of the training matrix
    trial_data: tuple[str, ...] = ("text", "zipf", "uniform")  # token streams of the training matrix
    mutants: int = 48  # faults planted in the reference to see how strong the inputs are
    adequacy_s: float = 25.0  # time for that, once per problem
    load_timeout_s: float = 120.0  # importing and building the candidate
    call_timeout_s: float = 60.0  # one call, first-call compilation included
    memory_mib: int = 8192  # address space a candidate may add on CPU
    printed_kib: int = 64  # kept of what a candidate prints
    budget_s: float = 600.0  # audit of one candidate; what is left over then is not verified
    shrink_s: float = 6.0  # search for the smallest case of one finding, when reproducers are written
    shrink_calls: int = 400  # calls of that search
    grades: tuple[str, ...] = ("F32", "TC")  # grades that pass
    layouts: int = 4  # layouts of the inputs tried beyond the declared one
    any_layout: bool = False  # a wrong value on inputs of another layout rejects (else it is a limit of the verdict)


QUICK = Policy(
    name="quick", workloads=2, seeds=1, recipes=4, sizes=3, probes=2, growth=4, trial=False,
    mutants=12, adequacy_s=4.0, layouts=2,
    load_timeout_s=60.0, call_timeout_s=30.0, budget_s=120.0, shrink_s=1.5, shrink_calls=150,
)  # fmt: skip
STANDARD = Policy()
DEEP = replace(
    STANDARD,
    name="deep",
    workloads=16,
    seeds=4,
    samples=8,
    sizes=12,
    probes=6,
    growth=8,
    trial_seeds=3,
    mutants=400,
    adequacy_s=300.0,
    budget_s=3600.0,
    shrink_s=60.0,
    shrink_calls=4000,
)

# The origin case in half the time: the training cells that show its fault and those that hide it, and fewer draws.
DEMO = replace(STANDARD, name="demo", workloads=2, seeds=1, trial_data=("text", "uniform"), mutants=24)

LADDER = (QUICK, STANDARD, DEEP)  # each at least as thorough as the one before
POLICIES = {p.name: p for p in (*LADDER, DEMO)}
KNOBS = tuple(f.name for f in fields(Policy))
