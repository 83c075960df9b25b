"""Names of accumulators, the one line that is said about them, and which of them a contract allows.

A `Fingerprint` is what `probes.py` read off a kernel. `too_narrow` is the verdict rule, `ALLOWANCES` the
policy by architecture: the only accumulators narrower than float32 that pass without the native
reference doing the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOAT64 = "float64"
FLOAT32 = "float32"
FP8_TENSOR_CORE = "14-bit (FP8 tensor core)"
FLOAT16 = "float16"
BFLOAT16 = "bfloat16"
TF32_OPERANDS = "TF32 operands"
FLOAT16_OPERANDS = "float16 operands"
BFLOAT16_OPERANDS = "bfloat16 operands"
FP8_OPERANDS = "fp8 operands"
NOT_DETERMINED = "not determined"

EVERY_CONTRIBUTION = "every contribution"
EVERY_BLOCK = "every block"
PARTIAL_SUMS = "partial sums"
INSIDE_BLOCKS = "inside blocks"
IN_LANES = "in lanes"
IN_A_TREE = "in a tree"
COMPENSATED = "compensated"
OPERANDS = "operands"
WHEN_DISGUISED = "when disguised"

CERTAIN, LIKELY = "certain", "likely"

FLOAT64_BITS = 31  # as far as the probes reach; less was lost somewhere
FLOAT32_BITS = 23  # fp32 keeps 24; one is left for the rounding of a non-dyadic weight
SLACK_BITS = 3  # further bits that rounding of neighbouring terms may cost an honest fp32 sum
NARROW_BITS = FLOAT32_BITS - SLACK_BITS  # a float32 sum reads this many at least
_FLOAT64_REACH = 28  # a probe that reaches this far and loses nothing saw more than fp32
_BY_BITS = ((6, 9, BFLOAT16), (10, 12, FLOAT16), (13, 15, FP8_TENSOR_CORE), (NARROW_BITS, 27, FLOAT32))
_UNBOUNDED = (EVERY_CONTRIBUTION, EVERY_BLOCK, IN_LANES, WHEN_DISGUISED)


@dataclass(frozen=True)
class Allowance:
    """An accumulator narrower than float32 that the hardware leaves no way around.

    major          compute capability, the part before the dot
    itemsize       bytes of an operand
    accumulator    what is allowed
    every          terms after which the narrow sum must have been added to a float32 one
    source         where this is written
    """

    major: int
    itemsize: int
    accumulator: str
    every: int
    source: str


# Blackwell (10.x, 12.x) is reported to keep 25 bits (deepseek-ai/DeepGEMM #176), so nothing is allowed there; nor is
# it on Ada (8.9), for want of a source that says what its fp8 tensor cores can do.
ALLOWANCES = (
    Allowance(
        major=9,
        itemsize=1,
        accumulator=FP8_TENSOR_CORE,
        every=128,
        source="DeepSeek-V3 report (arXiv 2412.19437) §3.3.2 and §3.5.2; deepseek-ai/DeepGEMM #37 and #50",
    ),
)


@dataclass(frozen=True)
class Fingerprint:
    """The accumulator behind one output, as the probes saw it.

    over         the axes that are summed over, or the name of the slot where they have no names
    accumulator  one of the names above; NOT_DETERMINED where the readings fit none
    bits         least effective bits of any placement; None when nothing was lost or could be read
    at_least     bits that no placement lost, when `bits` is None; None when nothing could be read
    rounds       where bits are dropped, one of the codes above; "" for full width or not determined
    every        terms of a block, where blocks were found
    confidence   CERTAIN, LIKELY or NOT_DETERMINED; of the name and the place, not of the bits
    unbounded    the error grows with the number of contributions (a running sum is held in few bits)
    stops_at     the number of equal contributions at which the sum stands still
    wrong        some answer was wrong even where no accumulator of any width could have lost it
    """

    output: str
    slot: str
    over: str
    accumulator: str
    bits: int | None
    at_least: int | None
    rounds: str
    every: int | None
    confidence: str
    contributions: int
    unbounded: bool
    stops_at: int | None
    wrong: bool
    sentence: str
    slot_dtype: torch.dtype | None = None

    @property
    def form(self) -> str:
        """The class in words: "bfloat16 carry every 64 terms", "TF32 operands", "float32"."""
        return form_of(self.accumulator, self.rounds, self.every)


@dataclass(frozen=True)
class Narrowness:
    """The verdict rule on one fingerprint: is this accumulator narrower than the contract allows?

    `verified` is False when nothing could be read: then neither a fault nor its absence is shown.
    """

    verified: bool
    fault: bool
    reference_deficient: bool
    reason: str


def name_of(bits: int | None, at_least: int | None) -> str:
    """The accumulator that keeps so many bits; FLOAT64 where nothing was lost as far as probes see."""
    if bits is None:
        return FLOAT64 if at_least is not None and at_least >= _FLOAT64_REACH else NOT_DETERMINED
    return next((name for low, high, name in _BY_BITS if low <= bits <= high), NOT_DETERMINED)


def operands_of(bits: int, *, short_range: bool | None) -> str:
    """What operands of so many bits are. 11 bits are float16's with its range (`short_range`), TF32's without."""
    if bits <= 5:
        return FP8_OPERANDS
    if 7 <= bits <= 9:
        return BFLOAT16_OPERANDS
    if 10 <= bits <= 12:
        return FLOAT16_OPERANDS if short_range else TF32_OPERANDS
    return NOT_DETERMINED


def is_unbounded(rounds: str) -> bool:
    """Whether the error of a sum that rounds there grows with the number of terms."""
    return rounds in _UNBOUNDED


def form_of(accumulator: str, rounds: str, every: int | None) -> str:
    """An accumulator and where it rounds, in words that fit behind "sums … with a"."""
    name = {NOT_DETERMINED: "narrow", FP8_TENSOR_CORE: "14-bit"}.get(accumulator, accumulator)
    blocks = f"{every} terms" if every else "several terms"
    return {
        EVERY_CONTRIBUTION: f"{name} carry every contribution",
        EVERY_BLOCK: f"{name} carry every {blocks}" if every else f"{name} carry between blocks",
        PARTIAL_SUMS: f"{name} partial sums of {blocks}",
        INSIDE_BLOCKS: f"{name} carry inside blocks of {blocks}, wider between them",
        IN_LANES: f"{name} carry in each lane, wider between lanes",
        IN_A_TREE: f"{name} tree",
        COMPENSATED: f"compensated {name} carry",
        OPERANDS: accumulator if accumulator != NOT_DETERMINED else "narrow operands",
        WHEN_DISGUISED: f"{name} accumulator that is used only where the input does not look like a probe",
    }.get(rounds, f"{name} accumulator")


def sentence_of(seen: Fingerprint, why_not: str) -> str:
    """The one line about a fingerprint; `why_not` says why nothing was read."""
    sums = f"`{seen.output}` sums over {seen.over}"
    if seen.accumulator == FLOAT64:
        return f"{sums} without loss on any probe: float64, or an exact order"
    if seen.at_least is not None:
        return f"{sums} with {seen.at_least} significant bits or more, which is all that its inputs can show"
    if seen.bits is None:
        why = why_not or "+M and −M met first on every placement"
        return f"the accumulator of `{seen.output}` over {seen.over} could not be read: {why}"
    if seen.accumulator == FLOAT32 and not seen.rounds:
        return f"{sums} in float32"
    likely = " (likely)" if seen.confidence == LIKELY else ""
    if seen.rounds == OPERANDS:
        with_ = f" with {seen.form}{likely}, {seen.bits} significant bits, in a float32 sum"
    elif seen.accumulator == NOT_DETERMINED:
        with_ = f" with about {seen.bits} significant bits; which accumulator that is was not determined"
    else:
        article = "" if seen.rounds == PARTIAL_SUMS else "a "
        with_ = f" with {article}{seen.form}{likely}"
    stall = f", which stops growing after {seen.stops_at} equal contributions" if seen.stops_at is not None else ""
    return f"{sums}{with_}{stall}"


def allowance_for(seen: Fingerprint, capability: tuple[int, int] | None) -> Allowance | None:
    """The row of the policy table that allows this accumulator on that architecture, if there is one."""
    return next((a for a in ALLOWANCES if _covers(a, seen, capability)), None)


def _covers(allowance: Allowance, seen: Fingerprint, capability: tuple[int, int] | None) -> bool:
    return (
        capability is not None
        and capability[0] == allowance.major
        and seen.slot_dtype is not None
        and seen.slot_dtype.itemsize == allowance.itemsize
        and seen.accumulator == allowance.accumulator
        and seen.rounds == INSIDE_BLOCKS
        and seen.every is not None
        and seen.every <= allowance.every
    )


def too_narrow(
    fingerprint: Fingerprint,
    *,
    native: Fingerprint | None = None,
    declared: torch.dtype = torch.float32,
    capability: tuple[int, int] | None = None,
) -> Narrowness:
    """The verdict rule on one output's accumulator. It looks at bits; a name that is not determined changes nothing.

    `declared` is the accumulation dtype that the reference's contract states: float32 for sums in
    fp32 and, because PyTorch sums bfloat16 and float16 in fp32, for those too. `native` is the same
    reading on the native reference. Fewer bits than both the contract and the native reference is a
    fault. A native reference that is as narrow is deficient: then a bounded loss is excused, but a
    carry whose error grows with the number of terms is a fault whatever the native reference does.
    `capability` is the compute capability of the GPU that ran the kernel (None: not a GPU), for ALLOWANCES.
    """
    if fingerprint.bits is None:
        return Narrowness(fingerprint.at_least is not None, False, False, fingerprint.sentence)
    contract = FLOAT64_BITS if declared == torch.float64 else FLOAT32_BITS
    floor = contract - SLACK_BITS
    native_bits = native.bits if native is not None and native.bits is not None else contract
    deficient = native_bits < floor
    if fingerprint.bits >= floor:
        return Narrowness(True, False, deficient, fingerprint.sentence)
    allowed = allowance_for(fingerprint, capability)
    if allowed is not None:
        reason = f"{fingerprint.sentence}; this GPU's tensor cores do so with fp8, and up to {allowed.every} terms are allowed"
        return Narrowness(True, False, deficient, reason)
    if not deficient or fingerprint.bits < native_bits - 1:
        return Narrowness(True, True, deficient, fingerprint.sentence)
    if fingerprint.unbounded:
        reason = f"{fingerprint.sentence}; the native reference does so too, but such an error has no bound"
        return Narrowness(True, True, True, reason)
    reason = f"{fingerprint.sentence}; the native reference is as narrow, and the loss is bounded"
    return Narrowness(True, False, True, reason)
