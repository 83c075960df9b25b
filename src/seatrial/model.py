"""The nouns that travel between load, plan, run, judge and report.

Records with tensors are frozen dataclasses and live in memory only. What leaves the process (Finding,
Report and what they hold) is a frozen pydantic model: its JSON form is the public one, its schema is
generated from here, and NaN and infinity survive it as strings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from torch import Tensor

Value: TypeAlias = "Tensor | int | float | bool"

# ---------------------------------------------------------------------------------------------------
# The problem: what must be computed


@dataclass(frozen=True)
class TensorSpec:
    """One declared input or output.

    `shape` holds axis names or digit strings; `()` is a 0-D tensor and None a Python scalar.
    `dtype` is the field's name for it ("bfloat16", "float8_e4m3fn", "int64", …).
    """

    name: str
    shape: tuple[str, ...] | None
    dtype: str
    description: str = ""


@dataclass(frozen=True)
class Tolerance:
    """The benchmark's own allowance, kept for the benchmark rule only; seatrial never judges by it."""

    max_atol: float = 1e-2
    max_rtol: float = 1e-2
    required_matched_ratio: float = 0.99
    max_error_cap: float | None = None
    allow_negative_inf: bool = False


@dataclass(frozen=True)
class InputRule:
    """How a workload says an input is made: kind is random, scalar, safetensors or custom."""

    kind: str
    value: int | float | bool | None = None
    path: str | None = None
    tensor_key: str | None = None


@dataclass(frozen=True)
class Workload:
    """One declared case: sizes of the var axes and how each input is made."""

    uuid: str
    axes: Mapping[str, int]
    inputs: Mapping[str, InputRule]
    tolerance: Tolerance = Tolerance()


@dataclass(frozen=True)
class Problem:
    """What must be computed.

    reference   the unmodified reference; takes the inputs positionally in declared order and returns
                the outputs (a tensor, a scalar, a sequence or a dict). Trusted: it runs in the parent.
    draw        draw(workload, seed, device) -> inputs by name, exactly as the benchmark would make
                them. Works at any `workload.axes` when `resizable`.
    sizes       sizes(axes) -> every axis name to its length: const, var and expr resolved; raises
                ProblemError when an expression does not come out as a whole number >= 0.
    var_axes    the names of the axes a workload may set.
    """

    name: str
    format: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    workloads: tuple[Workload, ...]
    reference: Callable[..., Any]
    draw: Callable[[Workload, int, str], dict[str, Value]]
    sizes: Callable[[Mapping[str, int]], dict[str, int]]
    var_axes: tuple[str, ...] = ()
    resizable: bool = True
    op_type: str = ""
    description: str = ""
    reference_source: str = ""
    path: str = ""
    has_benchmark_rule: bool = False
    oddities: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------------
# The candidate: what claims to compute it


@dataclass(frozen=True)
class SourceFile:
    """A file of the candidate; `path` is relative, without '..'."""

    path: str
    content: str


@dataclass(frozen=True)
class Candidate:
    """A kernel that claims to compute the problem. Never imported by the parent.

    entry_point           "file.py::function", or empty when `pickled` is set
    destination_passing   fn(*inputs, *outputs) when true, outputs = fn(*inputs) otherwise
    pickled               cloudpickle bytes of a plain callable (made in the user's own process)
    """

    name: str
    languages: tuple[str, ...]
    entry_point: str
    destination_passing: bool
    sources: tuple[SourceFile, ...] = ()
    definition: str = ""
    author: str = ""
    path: str = ""
    pickled: bytes = b""
    import_paths: tuple[str, ...] = ()
    needs_cuda: bool = False
    not_built: str = ""  # a true reason why this source language cannot be built yet; empty when it can


# ---------------------------------------------------------------------------------------------------
# One run: what became of it


class Ran(StrEnum):
    """What became of loading or calling a candidate. Says nothing about right or wrong."""

    RETURNED = "returned"
    RAISED = "raised"  # a Python exception; the process lives on
    CRASHED = "crashed"  # killed by a signal of its own making
    EXITED = "exited"  # left the process by itself (os._exit, sys.exit)
    TIMED_OUT = "timed-out"
    OUT_OF_MEMORY = "out-of-memory"
    LOST = "lost"  # our own machinery failed, or the process was already gone before the call


@dataclass(frozen=True)
class OutputSlot:
    """A declared output at concrete sizes. `shape` None means a Python scalar."""

    name: str
    shape: tuple[int, ...] | None
    dtype: str


@dataclass(frozen=True)
class CallRecord:
    """What one call of the candidate showed. Everything here came from an untrusted process.

    outputs    one CPU tensor per declared output, in order; empty unless ran is RETURNED and nothing
               in `breaches`
    breaches   ways in which the outputs break the declared contract, in the words for a person
               (count, shape, dtype, device, tensor subclass)
    echoed     the tensor inputs as they stood after the call, in order (None for scalars), when asked
    error      the candidate's own words: last lines of its traceback, or how the process ended
    printed    tail of what it wrote to stdout and stderr (bounded)
    seconds    wall time of the call itself, inside the child
    facts      what else the child saw: see workers/child.py
    """

    ran: Ran
    outputs: tuple[Tensor, ...] = ()
    breaches: tuple[str, ...] = ()
    echoed: tuple[Tensor | None, ...] = ()
    error: str = ""
    printed: str = ""
    seconds: float = float("nan")
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """True when there are outputs to judge."""
        return self.ran is Ran.RETURNED and not self.breaches


# ---------------------------------------------------------------------------------------------------
# What we conclude


_NUMBERS_JSON_LACKS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def _every_leaf(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {_every_leaf(key, change): _every_leaf(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_every_leaf(item, change) for item in value]
    return change(value)


def _speakable(leaf: Any) -> Any:
    # A candidate may print bytes that are no text; JSON has no word for a lone surrogate.
    return leaf.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(leaf, str) else leaf


def _number_again(leaf: Any) -> Any:
    return _NUMBERS_JSON_LACKS.get(leaf, leaf) if type(leaf) is str else leaf


def _numbers_again(details: dict[str, Any]) -> dict[str, Any]:
    # Free-form values have no declared type, so the three words are always numbers, in memory as in JSON.
    return {key: _every_leaf(item, _number_again) for key, item in details.items()}


class _Public(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    @model_validator(mode="before")
    @classmethod
    def _text_is_speakable(cls, data: Any) -> Any:
        return _every_leaf(data, _speakable)


class Outcome(StrEnum):
    """What a check concluded."""

    HELD = "held"
    FAILED = "failed"
    LIMITED = "limited"  # right wherever it agrees to run, refuses part of the domain with an error
    NOTED = "noted"  # worth a person's attention, changes no verdict
    NOT_APPLICABLE = "not-applicable"
    NOT_VERIFIED = "not-verified"


class Verdict(StrEnum):
    """May this kernel ship?"""

    ACCEPTED = "accepted"
    ACCEPTED_WITH_LIMITS = "accepted-with-limits"
    REJECTED = "rejected"
    INCONCLUSIVE = "inconclusive"

    def exit_code(self, *, strict: bool = False) -> int:
        """Process exit code for this verdict; `strict` makes limits count as a rejection."""
        if self is Verdict.ACCEPTED_WITH_LIMITS:
            return 1 if strict else 0
        return {Verdict.ACCEPTED: 0, Verdict.REJECTED: 1, Verdict.INCONCLUSIVE: 3}[self]


class Where(_Public):
    """The place of a finding: enough to go back to it."""

    workload: str = ""
    axes: dict[str, int] = Field(default_factory=dict)
    inputs: str = ""  # the input recipe, in words
    seed: int | None = None
    index: list[int] | None = None  # element of the output
    note: str = ""


class Finding(_Public):
    """One conclusion of one check, about one output or about the candidate as a whole.

    `reason` is one sentence for a person; `cause` a short machine-readable class of fault (for
    instance "accumulator:bfloat16"); `measured` against `allowed`, in `unit`; `advice` what to do.
    """

    check: str
    output: str | None = None
    outcome: Outcome
    reason: str
    cause: str = ""
    measured: float | None = None
    allowed: float | None = None
    unit: str = ""
    where: Where = Where()
    reproducer: str = ""
    advice: str = ""
    details: Annotated[dict[str, Any], AfterValidator(_numbers_again)] = Field(default_factory=dict)


class BenchmarkRow(_Public):
    """The benchmark's own rule on one declared workload."""

    workload: str
    axes: dict[str, int]
    status: str  # PASSED, INCORRECT_NUMERICAL, INCORRECT_SHAPE, INCORRECT_DTYPE, RUNTIME_ERROR, TIMEOUT
    matched_ratio: float | None = None
    max_absolute_error: float | None = None
    max_relative_error: float | None = None
    atol: float | None = None
    rtol: float | None = None
    required_matched_ratio: float | None = None
    message: str = ""


class BenchmarkRule(_Public):
    """What the benchmark itself would say: its inputs, its tolerances."""

    name: str
    passed: bool
    summary: str
    rows: list[BenchmarkRow] = Field(default_factory=list)


class GrowthPoint(_Public):
    """Error of one output at one number of contributions to an element."""

    contributions: int
    error: float  # rms of (got - oracle) relative to the rms of the oracle, over the elements of that count
    floor: float  # the same for an honest kernel of the declared precision


class Growth(_Public):
    """Error against the number of contributions: the plot that explains a narrow accumulator."""

    output: str
    lever: str  # what was repeated or lengthened, in words
    points: list[GrowthPoint]
    exponent: float | None = None  # slope of log error on log contributions


class Curve(_Public):
    """The loss of one training run, step by step."""

    run: str  # "reference", "control", "candidate"
    seed: int
    losses: list[float]
    gradient_norms: list[float] = Field(default_factory=list)


class TrialCell(_Public):
    """One cell of the training matrix: data x optimizer."""

    data: str
    optimizer: str
    learning_rate: float
    verdict: str  # "agrees", "drifts", "diverges", "masked", "not verified"
    reason: str
    first_step: int | None = None  # first step outside the band of honest controls
    gap: float | None = None  # final loss of the candidate minus that of the reference
    band: float | None = None  # half width of the band of honest controls at the end
    farthest: float | None = None  # largest smoothed distance from the reference's loss, over all steps
    most_repeats: int | None = None  # most contributions to one row in one step, measured
    curves: list[Curve] = Field(default_factory=list)


class Trial(_Public):
    """Twin training runs, reference against candidate, under real conditions."""

    adapter: str
    model: str  # sizes, in words
    cells: list[TrialCell]
    seconds: float


class CheckRow(_Public):
    """One line of the per-check table."""

    check: str
    title: str
    outcome: Outcome
    calls: int
    seconds: float
    summary: str = ""


class PlantedFault(_Public):
    """One fault planted in the reference, and what became of it."""

    words: str  # what the faulty reference does and where, for a person
    exposed: bool
    by: str = ""  # the inputs that exposed it
    equivalent: bool = False  # changes nothing on any input tried; counted with neither side
    benchmark_exposed: bool | None = None  # by the benchmark's own inputs and rule; None where that was not measured


class Adequacy(_Public):
    """How strong the audit's inputs are: single faults planted in the reference and judged as candidates."""

    sentence: str
    planted: int = 0  # faults that change something
    exposed: int = 0
    equivalent: int = 0
    not_tried: int = 0  # left over when the time was up
    benchmark_exposed: int | None = None
    survivors: list[str] = Field(default_factory=list)
    extra_inputs: list[str] = Field(default_factory=list)  # found by aiming at survivors; used on the candidate too
    null_survivors: list[str] = Field(default_factory=list)  # candidates that compute nothing and were not rejected
    faults: list[PlantedFault] = Field(default_factory=list)
    seconds: float = 0.0


class Report(_Public):
    """The verdict on one candidate, with everything that supports it."""

    schema_version: int = 1
    seatrial: str
    problem: str
    problem_path: str = ""
    candidate: str
    candidate_path: str = ""
    verdict: Verdict
    headline: str  # the verdict in one sentence for a person
    grade: str = ""  # F32, TC, IO, REJECT, or empty when no float output could be graded
    findings: list[Finding] = Field(default_factory=list)
    checks: list[CheckRow] = Field(default_factory=list)
    limits: list[str] = Field(
        default_factory=list, description="What this verdict does not cover, whatever the policy; one sentence each."
    )
    policy_limits: list[str] = Field(
        default_factory=list,
        description="What the policy does not look at, and which policy would; one sentence each.",
    )
    oddities: list[str] = Field(default_factory=list)
    benchmark_rule: BenchmarkRule | None = None
    growth: list[Growth] = Field(default_factory=list)
    trial: Trial | None = None
    adequacy: Adequacy | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    seeds: dict[str, int] = Field(default_factory=dict)
    policy: str = ""
    device: str = ""
    seconds: float = Field(
        default=0.0, description="Wall time spent on this candidate, in seconds: its processes, checks and reproducers."
    )
    audit_seconds: float = Field(
        default=0.0,
        description="Wall time of the whole audit, in seconds: start of the program, control, planted faults and every "
        "candidate of the batch. The same in every report of a batch; 0 when it was not measured.",
    )
    replay: str = ""

    def to_json(self) -> str:
        """JSON text; NaN and infinities are the strings "NaN", "Infinity", "-Infinity"."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read back what `to_json` wrote, non-finite numbers included."""
        return cls.model_validate_json(text)
