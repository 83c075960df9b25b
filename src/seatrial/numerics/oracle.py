"""The right answer: an unmodified PyTorch reference, run in float64 on the same low-precision inputs.

`Oracle(reference, names).run(inputs)` gives float64 outputs, the dtypes the reference declares for them,
and whether the run was faithful, with the reason when it was not. Where it was not, the native result stands
in (numerics/weaker.py) and `kind` says so. A reference that does not run at all raises `OracleUnavailable`;
it never yields a value.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seatrial.errors import InfrastructureError
from seatrial.model import Value
from seatrial.numerics import weaker
from seatrial.numerics.dtypes import NARROW, is_float, to_float64
from seatrial.numerics.noise import Contract, Noise, io_dtype
from seatrial.numerics.promote import WIDE, DeclaredDtypes, DeviceRedirect, Promotion, Tape, whole_storage
from seatrial.numerics.selections import Selection

_JITTER = 1e-9  # far below float32, far above float64
_FLOAT64 = "float64"
_NO_ANSWER = "The reference draws random numbers, so no single answer is right."
_PUSH = 2.0**-6  # large enough to move any value that depends on the inputs


class OracleUnavailable(InfrastructureError):
    """The reference does not run here; `reason` says why in one sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class OracleResult:
    """What the reference computes.

    values     one tensor per output name, on the device of the inputs: float64 (complex128) for floats,
               the integer or bool dtype otherwise. An fp8 output is given before its last rounding.
    dtypes     what the reference declares each output to be
    faithful   True when nothing on the way was rounded that a float64 run should not round
    why        the reason when it is not faithful; empty otherwise
    selections what the reference chose by value, where an output holds integers: equals may be named in any order
    kind       "float64"; "native, because …" for the weaker oracle; "none, because …" when no answer is right
    """

    values: tuple[Tensor, ...]
    dtypes: tuple[torch.dtype, ...]
    faithful: bool = True
    why: str = ""
    kind: str = _FLOAT64
    selections: tuple[Selection, ...] = ()

    @property
    def weaker(self) -> bool:
        """The values are native ones, to be judged against how far native results move (numerics/weaker.py)."""
        return self.kind.startswith("native")


@dataclass
class _Run:
    promotion: Promotion
    outputs: tuple[Tensor, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass
class Oracle:
    """A reference, and how to run it in float64 (see the module docstring).

    reference   takes the inputs positionally; returns a tensor, a Python scalar, a sequence or a mapping
    names       its output names, in order
    opaque      why float64 cannot follow what the reference does (it launches kernels of its own, say); empty
                otherwise. Its native result then stands in, marked as unfaithful

    After the first run, `kind` says what the values are (as `OracleResult.kind` does; what one run found stands), and `draws_randomness`
    whether they depend on random numbers that the reference draws: a candidate must then draw the very same.
    """

    reference: Callable[..., Any]
    names: Sequence[str]
    opaque: str = ""
    kind: str = field(default=_FLOAT64, init=False, repr=False)
    draws_randomness: bool = field(default=False, init=False, repr=False)
    _leak: str | None = field(default=None, init=False, repr=False)
    _float32_runs: bool | None = field(default=None, init=False, repr=False)

    def run(self, inputs: Sequence[Value]) -> OracleResult:
        """Float64 outputs for these inputs (tensors of any dtype on one device, and Python scalars).

        The first call also looks for hidden roundings (`leak_test`). When the float64 run raises, the
        native result is given instead and marked as unfaithful. Raises OracleUnavailable when the
        reference raises natively as well, or returns something that does not fit the names.
        """
        if self.opaque:
            return self._native_result(inputs, self.opaque)
        try:
            run = self._promoted_run(inputs)
        except OracleUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - the reference is foreign code; its native run decides what this means
            return self._native_instead(inputs, error)
        return self._vouched(run, inputs)

    def native(self, inputs: Sequence[Value]) -> tuple[Tensor, ...]:
        """The reference as it is, in its own dtypes, on private copies of the inputs.

        Device literals are redirected as in `run`. Raises OracleUnavailable when it raises.
        """
        copies = [_private(value) for value in inputs]
        try:
            with _quiet_torch(_home(inputs)), DeviceRedirect(_home(inputs)):
                returned = self.reference(*copies)
        except Exception as error:
            raise OracleUnavailable(f"The reference raises on these inputs: {_in_words(error)}") from error
        return tuple(_as_tensor(value, _home(inputs)) for value in self._by_name(returned))

    def written(self, inputs: Mapping[str, Value]) -> set[str]:
        """Names of the tensor inputs that a native run changes; empty where it does not run."""
        copies = {name: _private(value) for name, value in inputs.items()}
        home = _home(list(inputs.values()))
        try:
            with _quiet_torch(home), DeviceRedirect(home):
                self.reference(*copies.values())
        except Exception:  # noqa: BLE001 - foreign code; whoever needs its values learns what it raised
            return set()
        pairs = ((name, value, copies[name]) for name, value in inputs.items())
        return {n for n, v, c in pairs if isinstance(v, Tensor) and isinstance(c, Tensor) and not _same_bytes(v, c)}

    def sample(
        self, inputs: Sequence[Value], contract: Contract, seed: int, tape: Tape, *, wide: bool, nearest: bool = False
    ) -> tuple[Tensor, ...]:
        """One Monte-Carlo sample of an honest low-precision run: float64 outputs before their final rounding."""
        noise = Noise(contract, seed, io=io_dtype(_float_dtypes(inputs)), wide=wide, tape=tape, nearest=nearest)
        return self._promoted_run(inputs, noise, tape).outputs

    def base(self, inputs: Sequence[Value], tape: Tape) -> OracleResult:
        """Like `run`, and records on the tape what later samples may use again."""
        if self.opaque:
            return self.run(inputs)
        try:
            run = self._promoted_run(inputs, None, tape)
        except Exception:  # noqa: BLE001 - run() meets the same error and names it
            tape.path.clear()
            tape.admitted.clear()
            tape.recorded = True  # an empty path: nothing on it is used again
            return self.run(inputs)
        tape.recorded = True
        return self._vouched(run, inputs)

    def weaker_sample(self, inputs: Sequence[Value], seed: int, *, moved: bool) -> tuple[Tensor, ...]:
        """One native result, in float64, of inputs that moved a little or not at all: the floor of the weaker oracle.

        Raises OracleUnavailable when the reference raises on moved inputs.
        """
        given = weaker.moved(inputs, seed, as_float32=bool(self._float32_runs)) if moved else list(inputs)
        return weaker.with_store_noise(self.native(given), seed)

    def leak_test(self, inputs: Sequence[Value]) -> str:
        """Why the float64 run is not one, or an empty string.

        With inputs off the float32 grid, an output that still lies on it was rounded somewhere. Constants
        lie there too, and so do quantised, compared or clamped values; they are told apart by what moves
        when the inputs do.
        """
        if self._answer_is_random(inputs):
            return _NO_ANSWER
        if not any(_is_float_tensor(value) for value in inputs):
            return ""
        try:
            return self._hidden_rounding(inputs)
        except OracleUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - foreign code that refuses inputs a little off the given ones
            return f"The reference refuses inputs that moved a little ({_in_words(error)}), so hidden roundings cannot be ruled out."

    def _hidden_rounding(self, inputs: Sequence[Value]) -> str:
        near = self._promoted_run([_jittered(v, _JITTER, 1) for v in inputs])
        suspects = [
            i
            for i, out in enumerate(near.outputs)
            if out.dtype == WIDE and near.dtypes[i] != WIDE and _on_float32_grid(out).all()
        ]
        if not suspects or near.promotion.events.quantised or near.promotion.events.jumps:
            return ""
        far = self._promoted_run([_jittered(v, _PUSH, 2) for v in inputs])
        again = self._promoted_run([_jittered(v, _JITTER, 3) for v in inputs])
        for i in suspects:
            if far.outputs[i].shape != near.outputs[i].shape or not _repeatable(near.outputs[i], again.outputs[i]):
                continue
            moved = (
                (far.outputs[i] != near.outputs[i]) & torch.isfinite(far.outputs[i]) & torch.isfinite(near.outputs[i])
            )
            if bool(moved.any()) and bool(_on_float32_grid(far.outputs[i])[moved].all()):
                return f"Output {self.names[i]!r} follows the inputs but stays on the float32 grid: something in the reference rounds where the oracle cannot see it."
        return ""

    # -- running

    def _vouched(self, run: _Run, inputs: Sequence[Value]) -> OracleResult:
        """The float64 run, or the weaker oracle when something in it was out of float64's reach."""
        outside = run.promotion.events.outside
        if outside:
            return self._native_result(inputs, outside[0])
        if self._leak is None:
            self._leak = self.leak_test(inputs)
        leak = self._leak or _known_leak(run)
        if leak == _NO_ANSWER:
            self.kind = "none, because the reference draws random numbers"
            return OracleResult(run.outputs, run.dtypes, faithful=False, why=leak, kind=self.kind)
        if leak:
            return self._native_result(inputs, leak)
        whole = any(not o.is_floating_point() and not o.is_complex() for o in run.outputs)
        return OracleResult(run.outputs, run.dtypes, selections=tuple(run.promotion.events.selections) if whole else ())

    def _answer_is_random(self, inputs: Sequence[Value]) -> bool:
        """Whether the outputs depend on draws that differ from run to run; notes whether on any draws at all."""
        first = self._promoted_run(inputs)
        if not first.promotion.events.draws:
            return False
        self.draws_randomness = not _alike(first, self._promoted_run(inputs, redraw=True))
        if not self.draws_randomness:
            return False
        home = _home(inputs)
        with _quiet_torch(home):
            torch.rand(1, device=home)  # each run starts from the state it finds
            return not _alike(first, self._promoted_run(inputs))

    def _promoted_run(
        self, inputs: Sequence[Value], noise: Noise | None = None, tape: Tape | None = None, *, redraw: bool = False
    ) -> _Run:
        home = _home(inputs)
        promotion = Promotion(noise, tape, redraw=redraw)
        if noise is not None:
            noise.on_tape = lambda: promotion.on_tape
        admitted = [promotion.admit(value) for value in inputs]
        with _quiet_torch(home), promotion, DeclaredDtypes(promotion, home):
            returned = self.reference(*admitted)
        raw = [_as_tensor(promotion.admit_late(value), home) for value in self._by_name(returned)]
        dtypes = tuple(promotion.ledger.declared(value) for value in raw)
        outputs = tuple(promotion.unrounded(value).detach() for value in raw)
        return _Run(promotion, outputs, dtypes)

    def _native_instead(self, inputs: Sequence[Value], error: Exception) -> OracleResult:
        return self._native_result(
            inputs,
            f"The float64 run of the reference raised ({_in_words(error)}); the native result stands in for it.",
        )

    def _native_result(self, inputs: Sequence[Value], why: str) -> OracleResult:
        self.kind = f"native, because {why.rstrip('.')}"
        declared = self.native(inputs)
        native = self._native_in_float32(inputs, declared)
        values = tuple(to_float64(value) if value.dtype in NARROW else value for value in native)
        return OracleResult(values, tuple(v.dtype for v in declared), faithful=False, why=why, kind=self.kind)

    def _native_in_float32(self, inputs: Sequence[Value], declared: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The native result on float32 inputs, if the reference takes them and computes the same; `declared` otherwise."""
        self._float32_runs = False
        try:
            wide = self.native(weaker.in_float32(inputs))
        except OracleUnavailable:
            return declared
        self._float32_runs = weaker.same_computation(declared, wide)
        return wide if self._float32_runs else declared

    def _by_name(self, returned: Any) -> list[Any]:
        if isinstance(returned, Mapping):
            missing = [name for name in self.names if name not in returned]
            if not missing:
                return [returned[name] for name in self.names]
            returned = list(returned.values())
        values = list(returned) if isinstance(returned, list | tuple) else [returned]
        if len(values) != len(self.names):
            raise OracleUnavailable(
                f"The reference returned {len(values)} values for {len(self.names)} outputs ({', '.join(self.names)})."
            )
        return values


def _alike(first: _Run, second: _Run) -> bool:
    pairs = zip(first.outputs, second.outputs, strict=True)
    return all(a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def _known_leak(run: _Run) -> str:
    leaks = run.promotion.events.leaks
    return f"An op of the reference kept to a narrow dtype inside the float64 run ({leaks[0]})." if leaks else ""


@contextlib.contextmanager
def _quiet_torch(home: torch.device) -> Iterator[None]:
    """Compiled decorators run eagerly, and random draws leave the caller's generators as they were."""
    devices = [] if home.type == "cpu" else [home]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices, device_type=home.type if devices else "cuda"))
        if "torch._dynamo" in sys.modules:  # nothing is compiled before it is imported, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _home(inputs: Sequence[Value]) -> torch.device:
    return next((value.device for value in inputs if isinstance(value, Tensor)), torch.device("cpu"))


def _float_dtypes(inputs: Sequence[Value]) -> tuple[torch.dtype, ...]:
    return tuple(value.dtype for value in inputs if _is_float_tensor(value) and isinstance(value, Tensor))


def _is_float_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and is_float(value.dtype)


def _same_bytes(before: Tensor, after: Tensor) -> bool:
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (before, after))
    return a.shape == b.shape and bool((a == b).all())


def _private(value: Value) -> Value:
    """A copy with the same layout, so that a reference that writes into its inputs writes into nobody else's."""
    if not isinstance(value, Tensor):
        return value
    return whole_storage(value).clone().as_strided(value.size(), value.stride(), value.storage_offset())


def _jittered(value: Value, size: float, seed: int) -> Value:
    """A float64 input off every narrow grid, still declared to be what it was (see Promotion.admit)."""
    if not _is_float_tensor(value):
        return value
    assert isinstance(value, Tensor)
    generator = torch.Generator(value.device).manual_seed(seed)
    wide = to_float64(value)
    pattern = torch.randn(min(65521, wide.numel()), generator=generator, dtype=WIDE, device=wide.device)
    repeated = pattern.repeat(-(-wide.numel() // max(1, pattern.numel())))[: wide.numel()].view(wide.shape)
    moved = wide * (1 + size * repeated)
    moved.seatrial_declared = value.dtype  # type: ignore[attr-defined]
    return moved


def _repeatable(first: Tensor, second: Tensor) -> bool:
    """False for what is left where everything cancels: digits that a jitter replaces altogether."""
    return first.shape == second.shape and bool(
        (first - second).nan_to_num().norm() <= 1e-3 * first.nan_to_num().norm()
    )


def _on_float32_grid(values: Tensor) -> Tensor:
    return (values.to(torch.float32).to(WIDE) == values) | ~torch.isfinite(values)


def _as_tensor(value: Any, home: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=WIDE if isinstance(value, float) else None, device=home)
    raise OracleUnavailable(f"The reference returned a {type(value).__name__} where a tensor or a number was expected.")


def _in_words(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
