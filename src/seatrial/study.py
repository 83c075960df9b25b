"""A problem under study: everything about it that no candidate can change, computed once.

Cases are named, and every seed is derived from the master seed and the case's name, never from the order
of work: `--only CHECK --seed N` replays exactly the inputs of the full audit. Inputs, honest envelopes
and native results are kept in a bounded cache, so that a second candidate costs only its own calls.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from seatrial import rows
from seatrial.errors import InfrastructureError, ProblemError
from seatrial.inputs.recipes import Recipe, recipes
from seatrial.inputs.sizes import other_sizes, sizes_beyond
from seatrial.model import Candidate, Growth, OutputSlot, Problem, SourceFile, Value, Workload
from seatrial.policy import Policy

if TYPE_CHECKING:
    from torch import Tensor

    from seatrial.devices.base import Device
    from seatrial.numerics.accumulators import Fingerprint
    from seatrial.numerics.compare import OutputReport
    from seatrial.numerics.envelope import Envelope, Graded
    from seatrial.numerics.growth import GrowthCase
    from seatrial.numerics.oracle import Oracle
    from seatrial.numerics.probes import ProbePlan
    from seatrial.numerics.trace import Trace
    from seatrial.trials.matrix import HonestRuns, Settings

T = TypeVar("T")

CACHE_BYTES = 3 << 30
CPU_ELEMENTS = 1 << 26
CUDA_ELEMENTS = 1 << 29
PROBE_ELEMENTS = 1 << 20
WIDE_BITS = 23  # of an accumulator that keeps what float32 keeps, give or take the rounding of the reading
SAME_AS_NATIVE = 0.25  # of the native reference's own rms error: no other kernel comes so near to its result
NEARLY = 1.5  # times: two runs of one kernel with another choice of algorithm differ by as much
LEANING = 4.0  # the same for mean errors, which are small differences of large ones
SMALL_ELEMENTS = 1 << 17
AIMED = "aimed: "  # begins the name of a recipe that was made for one planted fault
COPIES_IN_CHILD = 3  # as it came over the wire, on the device, and on the way back
PART_ELEMENTS = 1 << 25  # of a case that is cut because its oracle does not fit
PLAIN_BYTES_PER_ELEMENT = 16  # the inputs and outputs of a case that is cut, in the candidate's process and in ours
ORACLE_BYTES_PER_ELEMENT = 8 * 24  # float64 copies that a run with its squares and samples keeps at a time
MOST_PROBE_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Case:
    """One set of inputs: a workload (declared or resized), an input recipe on top, and a seed.

    `part` is a case and a range of its rows when this one is cut from it (rows.py); the workload is then as long.
    """

    workload: Workload
    recipe: str
    seed: int
    part: tuple[Case, int, int] | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Identity for caches; the uuid alone does not name a resized workload."""
        own = (self.workload.uuid, tuple(sorted(self.workload.axes.items())), self.recipe, self.seed)
        return own if self.part is None else (*own, *self.part[1:])


class Study:
    """The reference side of an audit. Nothing here ever runs candidate code."""

    def __init__(self, problem: Problem, policy: Policy, device: Device, seed: int) -> None:
        self.problem = problem
        self.policy = policy
        self.device = device
        self.seed = seed
        self.extra_recipes: list[str] = []  # what exposed faults that the policy's own inputs did not
        self.extra_sizes: list[Workload] = []
        self._cache: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._parts: dict[Any, list[Case]] = {}

    # -- seeds and cases ----------------------------------------------------------------------------

    def seed_for(self, *words: object) -> int:
        """A seed that depends on the master seed and on these words alone."""
        text = "\x1f".join(str(w) for w in (self.seed, *words))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") & 0x7FFFFFFF

    def case(self, workload: Workload, recipe: str = "declared", draw: int = 0) -> Case:
        """The draw-th fresh case of this workload and recipe."""
        return Case(workload, recipe, self.seed_for(workload.uuid, sorted(workload.axes.items()), recipe, draw))

    @cached_property
    def audited(self) -> tuple[Workload, ...]:
        """Declared workloads under audit: smallest and largest first, then a spread between them."""
        ordered = sorted(self.problem.workloads, key=self.elements)
        wanted = min(self.policy.workloads, len(ordered))
        if wanted <= 1:
            return tuple(ordered[:wanted])
        places = sorted({round(i * (len(ordered) - 1) / (wanted - 1)) for i in range(wanted)})
        return tuple(ordered[i] for i in places)

    @cached_property
    def smallest(self) -> Workload:
        """The declared workload with the fewest elements."""
        return self.audited[0]

    @cached_property
    def middle(self) -> Workload:
        """The audited workload that most checks beyond plain values use: not the largest."""
        return self.audited[(len(self.audited) - 1) // 2]

    @cached_property
    def recipes(self) -> dict[str, Recipe]:
        """Input recipes of this problem by name, most likely to expose a fault first; `adopt` adds to them."""
        offered = recipes(self.problem, self.trace.index_ranges)
        return {r.name: r for r in offered if not r.repeats or self.is_cheap}

    @property
    def is_cheap(self) -> bool:
        """True when a call of the middle workload costs next to nothing."""
        return self.elements(self.middle) <= SMALL_ELEMENTS

    @property
    def tried_recipes(self) -> list[str]:
        """Names of the recipes that this audit tries: those of its policy, and those that exposed planted faults."""
        own = self.recipes_of(self.policy)
        return own + [n for n in self.extra_recipes if n not in own]

    def recipes_of(self, policy: Policy) -> list[str]:
        """Names of the recipes that a policy tries; four times as many where a call costs next to nothing."""
        allowed = policy.recipes * (4 if self.is_cheap else 1)
        return [n for n in self.recipes if n != "declared" and not n.startswith(AIMED)][:allowed]

    @property
    def drawn_cases(self) -> list[Case]:
        """One case per recipe that this policy tries; a risky one only where the reference defines it."""
        cases = [self.case(self.middle, name) for name in self.tried_recipes]
        return [case for case in cases if not self.recipes[case.recipe].risky or self.is_defined(case)]

    def adopt(self, recipe: Recipe) -> None:
        """Have the checks use one more recipe."""
        self.recipes[recipe.name] = recipe
        if recipe.name not in self.extra_recipes:
            self.extra_recipes.append(recipe.name)

    def is_defined(self, case: Case) -> bool:
        """True when the reference computes this case, and gives no NaN that the declared draw does not give."""

        def has_nan(of: Case) -> bool:
            return any(t.is_floating_point() and bool(t.isnan().any()) for t in self.exact(of))

        try:
            sizes = [t.shape for t in self.exact(case)]
            declared = self.case(case.workload)
            same = [s.shape for s in self.slots(case.workload)] == [tuple(s) for s in sizes]
            return same and (not has_nan(case) or has_nan(declared))
        except InfrastructureError:
            return False

    def told_inputs(self, case: Case) -> str:
        """ "`x` times 32 (recipe scaled-up-32)": what the case's recipe changed of its declared draw; empty for none."""
        if case.recipe == "declared":
            return ""
        drawn, changed = self.inputs(replace(case, recipe="declared")), self.inputs(case)
        names = [s.name for s, a, b in zip(self.problem.inputs, drawn, changed, strict=True) if not _same(a, b)]
        told = self.recipes[case.recipe].told_of(names)
        if case.recipe.startswith(AIMED):
            return told
        return f"{told[:-1]}, recipe {case.recipe})" if told.endswith(")") else f"{told} (recipe {case.recipe})"

    @cached_property
    def never_varied(self) -> list[str]:
        """Tensor inputs that hold one value in the declared draw and in every recipe that this policy tries."""
        return sorted(n for n, values in self._few_valued.items() if len(values) == 1)

    @cached_property
    def varied_between_two(self) -> dict[str, tuple[float, float]]:
        """Float inputs that hold the same two values, lower first, in the declared draw and in every recipe tried."""
        floats = {s.name for s in self.problem.inputs if s.dtype.startswith(("float", "bfloat"))}
        pairs = {n: sorted(v) for n, v in self._few_valued.items() if len(v) == 2 and n in floats}
        return {n: (low, high) for n, (low, high) in sorted(pairs.items())}

    @cached_property
    def _few_valued(self) -> dict[str, set[float]]:
        """Tensor inputs that hold one or two values in the declared draw, and no other in any recipe tried."""
        drawn = self._by_name(self.case(self.smallest))
        few = {n: found for n, v in drawn.items() if (found := _one_or_two_values(v))}
        for case in self.drawn_cases if few else []:
            changed = self.recipes[case.recipe].apply(drawn, 0)
            few = {n: known for n, known in few.items() if changed[n] is drawn[n] or _holds_only(changed[n], known)}
        return few

    def _by_name(self, case: Case) -> dict[str, Value]:
        return {s.name: v for s, v in zip(self.problem.inputs, self.inputs(case), strict=True)}

    def outside_sizes(self) -> tuple[Workload, ...]:
        """Workloads at sizes that the problem does not list."""
        ceiling = CUDA_ELEMENTS if self.device.name.startswith("cuda") else CPU_ELEMENTS
        largest = max(self.elements(w) for w in self.audited)
        others = other_sizes(
            self.problem,
            count=self.policy.sizes,
            seed=self.seed_for("sizes"),
            ceiling_elements=min(ceiling, max(2 * largest + 1024, SMALL_ELEMENTS)),
        )
        beyond = sizes_beyond(self.problem, others, ceiling_elements=ceiling)
        return (*others, *beyond, *self.extra_sizes)

    def _afford(self, workload: Workload) -> None:
        """Raises TooLarge before this machine runs out of memory: the operating system would kill us without a word."""
        if self._fits(workload):
            return
        need, free = self.elements(workload) * ORACLE_BYTES_PER_ELEMENT, self.device.free_memory()
        by_rows = self.elements(workload) * PLAIN_BYTES_PER_ELEMENT <= free and self.row_axis is not None
        if by_rows and self.rows_at_a_time(workload):
            return
        raise TooLarge(
            f"workload {workload.uuid} needs about {need / 2**30:.0f} GiB for its float64 oracle, and "
            f"{free / 2**30:.0f} GiB are free on {self.device.name}; run on a larger machine"
        )

    def _fits(self, workload: Workload) -> bool:
        return self.elements(workload) * ORACLE_BYTES_PER_ELEMENT <= self.device.free_memory()

    @cached_property
    def row_axis(self) -> str | None:
        """The axis along which cases too large for their oracle may be cut; None where the reference mixes rows."""
        return rows.row_axis(self)

    def rows_at_a_time(self, workload: Workload) -> int:
        """Of a workload cut along `row_axis`; 0 when not even one fits."""
        assert self.row_axis is not None
        one_row = max(1, self.elements(workload) // max(1, workload.axes[self.row_axis]))
        affordable = self.device.free_memory() // 2 // ORACLE_BYTES_PER_ELEMENT
        return min(PART_ELEMENTS, affordable) // one_row or int(affordable >= one_row)

    def parts(self, case: Case) -> list[Case]:
        """The case itself, or what it is cut into because its oracle does not fit into this machine."""
        if case.key not in self._parts:  # decided once: what is free changes with what is kept of earlier cases
            self._parts[case.key] = self._cut(case)
        return self._parts[case.key]

    def _cut(self, case: Case) -> list[Case]:
        if case.part is not None or self._fits(case.workload):
            return [case]
        self._afford(case.workload)
        axis = self.row_axis
        assert axis is not None
        ranges = rows.steps(case.workload.axes[axis], self.rows_at_a_time(case.workload))
        return [
            replace(case, workload=replace(case.workload, axes={**case.workload.axes, axis: b - a}), part=(case, a, b))
            for a, b in ranges
        ]

    def elements(self, workload: Workload) -> int:
        """Elements of all inputs and outputs of a workload together."""
        sizes = self.problem.sizes(workload.axes)
        specs = (*self.problem.inputs, *self.problem.outputs)
        return sum(math.prod(sizes[a] if a in sizes else int(a) for a in s.shape or ()) for s in specs)

    @cached_property
    def largest_call_mib(self) -> int:
        """What a child holds of the inputs and outputs of the largest workload, in MiB; sizes outside the list double it."""
        return 2 * COPIES_IN_CHILD * max(self._bytes(w) for w in self.audited) >> 20

    def _bytes(self, workload: Workload) -> int:
        sizes = self.problem.sizes(workload.axes)
        specs = (*self.problem.inputs, *self.problem.outputs)
        counts = (math.prod(sizes[a] if a in sizes else int(a) for a in s.shape or ()) for s in specs)
        return sum(n * int(self._dtype(s.dtype).itemsize) for n, s in zip(counts, specs, strict=True))

    # -- inputs and native results ------------------------------------------------------------------

    def inputs(self, case: Case) -> list[Value]:
        """The inputs of a case in declared order; tensors on the CPU. Treat them as read-only."""
        return self._cached(("inputs", case.key), lambda: self._draw(case))

    def _draw(self, case: Case) -> list[Value]:
        if case.part is not None:
            whole, start, stop = case.part
            assert self.row_axis is not None
            return rows.cut(self, self.row_axis, self.inputs(whole), start, stop)
        self.parts(case)
        drawn = reference_boundary(
            lambda: self.problem.draw(case.workload, case.seed, self.device.name), "drawing the declared inputs"
        )
        named = {k: v.cpu() if hasattr(v, "cpu") else v for k, v in drawn.items()}
        if case.recipe != "declared":
            named = self.recipes[case.recipe].apply(named, self.seed_for("recipe", case.recipe, case.seed))
        return [named[spec.name] for spec in self.problem.inputs]

    def slots_for(self, inputs: Sequence[Value], base: Workload | None = None) -> tuple[OutputSlot, ...]:
        """The declared outputs at the sizes that these inputs imply (a trial chooses its own sizes).

        Axes that no input has keep the size of `base`.

        Raises ProblemError when the inputs' shapes do not fit the declaration.
        """
        axes: dict[str, int] = dict(base.axes) if base else {}
        for spec, value in zip(self.problem.inputs, inputs, strict=True):
            for axis, length in zip(spec.shape or (), getattr(value, "shape", ()), strict=True):
                if axis in self.problem.var_axes:
                    axes[axis] = int(length)
        return self.slots(Workload("implied", axes, {}))

    def slots(self, workload: Workload) -> tuple[OutputSlot, ...]:
        """The declared outputs at the sizes of this workload."""
        from seatrial.formats.dtypes import stored_shape

        sizes = self.problem.sizes(workload.axes)
        return tuple(
            OutputSlot(spec.name, None if spec.shape is None else stored_shape(spec, sizes), spec.dtype)
            for spec in self.problem.outputs
        )

    def native(self, case: Case) -> tuple[Tensor, ...]:
        """What the reference gives in its own precision on the judged device; tensors on the CPU.

        Raises OracleUnavailable when it does not run here.
        """
        parts = self.parts(case)
        if len(parts) > 1:
            return rows.joined([self.native(p) for p in parts])
        return self._cached(
            ("native", case.key), lambda: tuple(t.cpu() for t in self.oracle.native(self.placed(self.inputs(case))))
        )

    def placed(self, inputs: Sequence[Value]) -> list[Value]:
        """The inputs on the judged device. Whoever may write into them makes copies first."""
        from torch import Tensor

        return [self.device.to_device(v) if isinstance(v, Tensor) else v for v in inputs]

    def takes(self, inputs: Sequence[Value]) -> bool:
        """True when the reference computes these inputs on the judged device in the layout that they have here."""
        from torch import Tensor

        from seatrial.workers.tensors import moved

        try:
            self.oracle.native([moved(v, self.device.name) if isinstance(v, Tensor) else v for v in inputs])
        except InfrastructureError:
            return False
        return True

    # -- oracle, envelope, structure ----------------------------------------------------------------

    @cached_property
    def oracle(self) -> Oracle:
        """The unmodified reference in fp64."""
        from seatrial.numerics.oracle import Oracle

        return Oracle(self.problem.reference, [s.name for s in self.problem.outputs], opaque=self._opaque())

    def _opaque(self) -> str:
        """Why float64 cannot follow the reference: kernels of its own compute in the dtypes they were written for."""
        import ast

        from seatrial.formats.python_file import imports_gpu_language

        if self.problem.reference_source and imports_gpu_language(ast.parse(self.problem.reference_source)):
            return "the reference launches GPU kernels of its own, which a float64 run cannot follow"
        return ""

    def oracle_limits(self) -> list[str]:
        """What the oracle could not vouch for in the cases so far, one sentence each."""
        limits: list[str] = []
        if self.oracle.kind.startswith("native"):
            limits.append(
                f"values were judged by a weaker oracle ({self.oracle.kind}): only errors well above one rounding of "
                "the inputs were looked for"
            )
        if self.oracle.draws_randomness:
            limits.append("the reference draws random numbers, and its outputs depend on them")
        return limits

    @cached_property
    def trace(self) -> Trace:
        """Structure of the reference: index inputs, repeat-count levers, reductions."""
        import torch

        from seatrial.numerics.promote import DeviceRedirect
        from seatrial.numerics.trace import trace

        inputs = self.placed(self.inputs(self.case(self.smallest)))
        names, outputs = [s.name for s in self.problem.inputs], [s.name for s in self.problem.outputs]

        def traced() -> Trace:
            with DeviceRedirect(torch.device(self.device.name)):
                return trace(self.problem.reference, inputs, names, output_names=outputs)

        return reference_boundary(traced, "tracing the reference")

    @cached_property
    def probe_case(self) -> Case:
        """The case whose sums are probed: the middle one of the declared workloads that are cheap to call often."""
        cheap = sorted((w for w in self.problem.workloads if self.elements(w) <= PROBE_ELEMENTS), key=self.elements)
        return self.case(cheap[len(cheap) // 2] if cheap else self.smallest, draw=20)

    @property
    def too_large_to_probe(self) -> bool:
        """True when one call of the probe case is so large that a hundred of them would take minutes."""
        return self.elements(self.probe_case.workload) > MOST_PROBE_ELEMENTS

    @cached_property
    def probe_plan(self) -> ProbePlan:
        """Swamping probes of every sum that the oracle confirms; made once, read on any number of kernels."""
        from seatrial.numerics.probes import plan_probes

        return reference_boundary(
            lambda: plan_probes(
                self.oracle,
                self.placed(self.inputs(self.probe_case)),
                trace=self.trace,
                output_names=[s.name for s in self.problem.outputs],
                input_names=[s.name for s in self.problem.inputs],
                output_dtypes=self.stored_dtypes,
                input_axes=[s.shape for s in self.problem.inputs],
                placements=self.policy.probes,
                seed=self.seed_for("probes"),
            ),
            "planning the probes",
        )

    @cached_property
    def native_fingerprints(self) -> dict[str, Fingerprint]:
        """The same probes read on the native reference, by output name; empty where it does not run."""
        from seatrial.numerics.probes import fingerprints, read_probes

        return {f.output: f for f in fingerprints(read_probes(self.probe_plan, self.native_kernel))}

    def native_kernel(self, inputs: Sequence[Value]) -> tuple[Tensor, ...] | None:
        """The native reference as a function of inputs (CPU tensors in and out); None where it refuses."""
        try:
            return tuple(t.cpu() for t in self.oracle.native(self.placed(inputs)))
        except InfrastructureError:
            return None

    def envelope(self, case: Case, contract: str = "TC") -> Envelope:
        """What an honest kernel achieves on this case under a rounding contract."""
        return self._cached(("envelope", contract, case.key), lambda: self._build_envelope(case, contract))

    def _build_envelope(self, case: Case, contract: str) -> Envelope:
        if len(self.parts(case)) > 1:
            raise TooLarge(f"the oracle of workload {case.workload.uuid} fits into {self.device.name} by rows alone")
        from seatrial.numerics.envelope import Envelope
        from seatrial.numerics.noise import contract_on

        return Envelope.build(
            self.oracle,
            self.placed(self.inputs(case)),
            contract=contract_on(contract, self.capability, self.inputs(case)),
            samples=self.policy.samples,
            seed=self.seed_for("envelope", *case.key),
            dtypes=self.stored_dtypes,
            native=self._native_or_none(case),
        )

    def _native_or_none(self, case: Case) -> tuple[Tensor, ...] | None:
        try:
            return tuple(self.device.to_device(t) for t in self.native(case))
        except InfrastructureError:
            return None  # the oracle stands on its own; the range gate is then not available

    @property
    def stored_dtypes(self) -> list[Any]:
        """The torch dtype of every declared output."""
        return [self._dtype(spec.dtype) for spec in self.problem.outputs]

    @staticmethod
    def _dtype(name: str) -> Any:
        from seatrial.formats.dtypes import torch_dtype

        return torch_dtype(name)

    def judge(self, case: Case, outputs: Sequence[Tensor], contract: str = "TC") -> tuple[OutputReport, ...]:
        """Compare outputs (CPU tensors) with the oracle against the honest floor of this case."""
        parts = self.parts(case)
        if len(parts) > 1:
            judged = [(p, self.judge(p, _rows_of(outputs, p), contract)) for p in parts]
            of_output = zip(*([(p.part[1], r) for r in reports] for p, reports in judged if p.part), strict=True)
            return tuple(rows.merged(list(reports)) for reports in of_output)
        placed = [self.device.to_device(t) for t in outputs]
        return self.envelope(case, contract).judge(placed, groups=self.contribution_groups(case))

    def judge_inputs(self, inputs: Sequence[Value], outputs: Sequence[Tensor], words: str) -> tuple[OutputReport, ...]:
        """The same for inputs of no case; `words` name them, for the seed of the honest samples."""
        from seatrial.numerics.envelope import Envelope
        from seatrial.numerics.noise import contract_on

        placed = self.placed(inputs)
        native = self.native_kernel(inputs)
        envelope = Envelope.build(
            self.oracle,
            placed,
            contract=contract_on("TC", self.capability, inputs),
            samples=self.policy.samples,
            seed=self.seed_for("envelope", words),
            dtypes=self.stored_dtypes,
            native=None if native is None else [self.device.to_device(t) for t in native],
        )
        return envelope.judge([self.device.to_device(t) for t in outputs])

    @cached_property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of the judged GPU; None where the device is none."""
        major, dot, minor = self.device.facts().get("capability", "").partition(".")
        return (int(major), int(minor)) if dot else None

    def written_by_reference(self, case: Case) -> set[str]:
        """Names of the inputs that the reference itself writes into; a kernel may then do so too."""
        return self._cached(("written", case.key), lambda: self.oracle.written(self._named(case)))

    def _named(self, case: Case) -> dict[str, Value]:
        return {s.name: v for s, v in zip(self.problem.inputs, self.placed(self.inputs(case)), strict=True)}

    def native_falls_short(self, case: Case) -> bool:
        """True when the native reference itself fails the honest floor of this case."""
        return self._cached(("native falls short", case.key), lambda: self._judge_native(case))

    def _judge_native(self, case: Case) -> bool:
        try:
            return any(r.passed is False for r in self._native_reports(case))
        except InfrastructureError:
            return False

    def _native_reports(self, case: Case) -> tuple[OutputReport, ...]:
        return self._cached(("native reports", case.key), lambda: self.judge(case, self.native(case)))

    def _native_graded(self, case: Case) -> Graded:
        return self._cached(("native graded", case.key), lambda: self.graded(case, self.native(case)))

    def excuses(self, case: Case, outputs: Sequence[Tensor]) -> list[bool]:
        """Per output: no worse than a native reference that falls short itself, and bounded.

        Bounded is what the roundings of a contract explain; or a native reference that is right on the declared inputs
        or whose sums the probes read as wide, where the candidate lies as near to the oracle as it does (a convolution
        by transforms; an attention that takes a row's mean from its rounded output), or where rounding every
        intermediate to the I/O dtype moves a result so far that neither can be told from it (a mean saved in bfloat16,
        of inputs far from nought). Where the candidate gives what the native reference gives, it is enough that the
        probes read no carry whose error grows.
        """
        from seatrial.numerics.envelope import no_worse_than

        parts = self.parts(case)
        if len(parts) > 1:
            failing = [p for p in parts if any(r.passed is False for r in self.judge(p, _rows_of(outputs, p)))]
            flags = [self.excuses(p, _rows_of(outputs, p)) for p in failing if self.native_falls_short(p)]
            return [len(flags) == len(failing) and all(one[i] for one in flags) for i in range(len(outputs))]
        native, candidate = self._native_graded(case), self.graded(case, outputs)
        beside = zip(self.judge(case, outputs), self._native_reports(case), strict=True)
        return [
            no_worse_than(_only(native, i), _only(candidate, i))
            or (
                _as_near_as(own, theirs)
                and (
                    self._native_is_bounded(case, own.name, same=self._gives(case, outputs, i))
                    or self.judge(case, outputs, "IO")[i].passed is None
                )
            )
            for i, (own, theirs) in enumerate(beside)
        ]

    def _gives(self, case: Case, outputs: Sequence[Tensor], i: int) -> bool:
        """The native reference's own result, but for a part of that one's error."""
        native, exact = self.native(case)[i].double(), self.exact(case)[i].double()
        own, theirs = outputs[i].double() - native, native - exact
        return _rms(own) <= SAME_AS_NATIVE * _rms(theirs)

    def _native_is_bounded(self, case: Case, output: str, *, same: bool = False) -> bool:
        """Not by a carry: that is a fault in whoever has it, and grows."""
        if self.too_large_to_probe:
            return self._native_is_right_as_declared(case, output)
        found = self.native_fingerprints.get(output)
        if found is None:
            return same or self._native_is_right_as_declared(case, output)
        return not found.unbounded and (same or found.bits is None or found.bits >= WIDE_BITS)

    def _native_is_right_as_declared(self, case: Case, output: str) -> bool:
        declared = self.case(case.workload, draw=2)
        reports = {r.name: r.passed for r in self._native_reports(declared)}
        return case.recipe != "declared" and reports[output] is True

    def graded(self, case: Case, outputs: Sequence[Tensor]) -> Graded:
        """The tightest contract that explains each output of this case."""
        from seatrial.numerics.envelope import grade_outputs

        return grade_outputs(
            self.oracle,
            self.placed(self.inputs(case)),
            [self.device.to_device(t) for t in outputs],
            samples=self.policy.samples,
            seed=self.seed_for("envelope", *case.key),
            dtypes=self.stored_dtypes,
            groups=self.contribution_groups(case),
            capability=self.capability,
        )

    def exact(self, case: Case) -> tuple[Tensor, ...]:
        """The oracle's values of a case; tensors on the CPU. Raises OracleUnavailable."""
        parts = self.parts(case)
        if len(parts) > 1:
            return rows.joined([self.exact(p) for p in parts])
        return self._cached(
            ("exact", case.key),
            lambda: tuple(t.cpu() for t in self.oracle.run(self.placed(self.inputs(case))).values),
        )

    def reference_accepts(self, case: Case) -> bool:
        """True when the reference computes this case at all; its refusal bounds the declared domain."""
        try:
            self.exact(case)
        except InfrastructureError:
            return False
        return True

    def contribution_groups(self, case: Case) -> dict[str, dict[str, Tensor]]:
        """Output name -> label per row by how many inputs were summed into it, where an index input says so."""
        import torch

        from seatrial.numerics.envelope import contribution_deciles

        groups: dict[str, dict[str, Tensor]] = {}
        slots = self.slots(case.workload)
        for position, spec in enumerate(self.problem.inputs):
            ids, bound = self.inputs(case)[position], self.trace.index_ranges.get(spec.name, 0)
            if not bound or not isinstance(ids, torch.Tensor) or ids.numel() == 0 or int(ids.min()) < 0:
                continue
            for out in self.trace.levers.get(spec.name, ()):
                shape = slots[out].shape or (0,)
                if shape[0] == bound and int(ids.max()) < bound:
                    counts = torch.bincount(ids.reshape(-1).long(), minlength=bound)
                    groups[slots[out].name] = {"contributions": self.device.to_device(contribution_deciles(counts))}
        return groups

    @cached_property
    def trial_settings(self) -> Settings:
        """Sizes of the training trial under this policy."""
        from seatrial.trials.matrix import Settings

        return Settings(seeds=self.policy.trial_seeds, data=self.policy.trial_data)

    @cached_property
    def honest_runs(self) -> HonestRuns:
        """Training runs of the reference and the controls: they belong to the problem and serve every candidate."""
        from seatrial.trials.matrix import HonestRuns

        return HonestRuns()

    @cached_property
    def growth_cases(self) -> tuple[GrowthCase, ...]:
        """Inputs that let the number of contributions to an element grow: repeats where ids decide, length elsewhere."""
        from seatrial.numerics.growth import repeat_cases
        from seatrial.numerics.trace import linear_slots

        inputs = self.placed(self.inputs(self.probe_case))
        cases = reference_boundary(
            lambda: repeat_cases(
                inputs,
                trace=self.trace,
                input_names=[s.name for s in self.problem.inputs],
                output_shapes=[s.shape or () for s in self.slots(self.probe_case.workload)],
                slots=linear_slots(self.oracle, inputs),
                points=self.policy.growth,
                seed=self.seed_for("growth"),
            ),
            "repeating indices",
        )
        return cases or self._length_cases()

    def _length_cases(self) -> tuple[GrowthCase, ...]:
        from seatrial.numerics.growth import length_cases

        given = self.probe_case.workload.axes
        for axis in self.problem.var_axes if self.problem.resizable else ():
            sizes = [max(1, given[axis] * 2**k // 4) for k in range(self.policy.growth)]
            largest = Workload("growth", {**given, axis: sizes[-1]}, self.probe_case.workload.inputs)
            if self.elements(largest) > 4 * PROBE_ELEMENTS:
                continue

            def draw_at(size: int, axis: str = axis) -> list[Value] | None:
                resized = Workload("growth", {**given, axis: size}, self.probe_case.workload.inputs)
                try:
                    return self.placed(self.inputs(self.case(resized)))
                except (InfrastructureError, ProblemError):
                    return None

            cases = reference_boundary(
                lambda draw=draw_at, sizes=sizes, axis=axis: length_cases(  # type: ignore[misc]
                    self.problem.reference,
                    draw,
                    sizes,
                    input_names=[s.name for s in self.problem.inputs],
                    output_names=[s.name for s in self.problem.outputs],
                    axis=axis,
                    seed=self.seed_for("growth", axis),
                ),
                "lengthening a reduction",
            )
            if cases:
                return cases
        return ()

    def growth(self, kernel: Callable[[Sequence[Value]], tuple[Tensor, ...] | None]) -> tuple[Growth, ...]:
        """Error of a kernel against the number of contributions, per output that has a lever."""
        from seatrial.numerics.growth import measure_growth

        return measure_growth(
            self.oracle,
            self.growth_cases,
            kernel,
            output_names=[s.name for s in self.problem.outputs],
            output_dtypes=self.stored_dtypes,
        )

    # -- the control --------------------------------------------------------------------------------

    def reference_as_candidate(self) -> Candidate:
        """The reference in a candidate's clothes: the control that must be accepted."""
        if self.problem.reference_source:
            return Candidate(
                name="reference",
                languages=("pytorch",),
                entry_point="reference.py::run",
                destination_passing=False,
                sources=(SourceFile("reference.py", self.problem.reference_source),),
            )
        from seatrial.formats.plain import candidate_from_callable

        return replace(candidate_from_callable(self.problem.reference), name="reference")

    # -- cache --------------------------------------------------------------------------------------

    def _cached(self, key: Any, make: Callable[[], T]) -> T:
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key][0]  # type: ignore[no-any-return]
        value = make()
        self._cache[key] = (value, _bytes_of(value))
        while len(self._cache) > 1 and sum(size for _, size in self._cache.values()) > CACHE_BYTES:
            self._cache.popitem(last=False)
        return value


def _as_near_as(own: OutputReport, native: OutputReport) -> bool:
    """In every kind of test the candidate goes beyond its bound by little more than the native reference does."""

    def worst(report: OutputReport) -> dict[str, float]:
        found: dict[str, float] = {}
        for test in report.tests:
            kind = test.name.split(" by ")[0]
            share = abs(test.measured) / test.allowed if test.allowed else float(test.failed) * float("inf")
            found[kind] = max(found.get(kind, 0.0), share)
        return found

    theirs = worst(native)
    factor = {"bias": LEANING, "slope": LEANING}
    return all(
        share <= factor.get(kind, NEARLY) * max(1.0, theirs.get(kind, 0.0)) for kind, share in worst(own).items()
    )


def _same(a: Value, b: Value) -> bool:
    import torch

    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a is b or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    return bool(a == b)


def _rms(error: Tensor) -> float:
    """Of the finite elements; 0 when there are none."""
    finite = error[error.isfinite()]
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def _rows_of(outputs: Sequence[Tensor], part: Case) -> list[Tensor]:
    assert part.part is not None
    return [t[part.part[1] : part.part[2]] for t in outputs]


def _only(graded: Graded, i: int) -> Graded:
    one = slice(i, i + 1)
    return replace(graded, names=graded.names[one], grades=graded.grades[one], reports=graded.reports[one])


def _one_or_two_values(value: Value) -> set[float]:
    """The different values of a tensor of several elements; empty when there are more than two, or NaN."""
    import torch

    if not isinstance(value, torch.Tensor) or value.numel() < 2 or value.is_complex():
        return set()
    flat = value.reshape(-1).to(torch.float64 if value.is_floating_point() else torch.int64)
    low, high = flat.min(), flat.max()
    return {float(low), float(high)} if bool(((flat == low) | (flat == high)).all()) else set()


def _holds_only(value: Value, known: set[float]) -> bool:
    found = _one_or_two_values(value)
    return bool(found) and found <= known


def _bytes_of(value: Any) -> int:
    import torch

    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_bytes_of(v) for v in value)
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    return 64


class Clock:
    """The time budget of one candidate's audit, in seconds."""

    def __init__(self, budget_s: float) -> None:
        self.started = time.monotonic()
        self.budget_s = budget_s

    @property
    def spent(self) -> float:
        """Seconds since the audit began."""
        return time.monotonic() - self.started

    @property
    def over(self) -> bool:
        """True when the budget is used up; what is left is then not verified."""
        return self.spent > self.budget_s


class TooLarge(InfrastructureError):
    """A case whose oracle does not fit into this machine's memory; it is not verified."""


class ReferenceUnusable(InfrastructureError):
    """The problem's own code could not be run on this machine; nothing can be judged against it."""


def reference_boundary(call: Callable[[], T], doing: str) -> T:
    """Run problem code. Whatever it raises, it is a fact about the problem: ReferenceUnusable, never a verdict."""
    try:
        return call()
    except InfrastructureError:
        raise
    except Exception as error:
        words = str(error).strip().splitlines()
        raise ReferenceUnusable(
            f"{doing} failed: {type(error).__name__}: {words[0] if words else 'no message'}"
        ) from error
