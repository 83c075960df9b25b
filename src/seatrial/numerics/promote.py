"""Run an unmodified PyTorch reference in float64.

`Promotion` is a dispatch mode: every float16, bfloat16 and float32 value becomes a float64 value, casts
between them lose nothing, and a ledger keeps the dtype that each value *would* have had ("declared").
Quantising casts (fp8, integers) keep their meaning. `DeclaredDtypes` is the matching function mode: it
makes `tensor.dtype` answer the declared dtype and sends device="cuda" to where the inputs are.

Facts are kept per storage, so that views, in-place writes and the shallow copies that autograd makes
share them without bookkeeping.

With a `Perturbation` the same run becomes one Monte-Carlo sample of an honest low-precision execution
(op-granular Monte-Carlo arithmetic, after Verificarlo and CADNA, which do it per scalar operation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from seatrial.numerics.dtypes import FP4, FP8, NARROW, NARROW_COMPLEX, finer, is_float, round_to, to_float64
from seatrial.numerics.scaled import only_known_swizzles, rows_of, scaled_rows
from seatrial.numerics.selections import Selection, selection_of

WIDE = torch.float64


def op_names(listed: str) -> frozenset[str]:
    """Aten names, without namespace and overload, from a text with blanks between them."""
    return frozenset(listed.split())


# Ops whose result holds only values that were already there: they round nothing.
EXACT = op_names("""view _unsafe_view reshape expand permute transpose t slice select squeeze unsqueeze as_strided alias detach
    unbind split split_with_sizes chunk narrow diagonal unfold movedim view_as_real view_as_complex _reshape_alias
    lift_fresh lift clone contiguous copy_ cat stack concat repeat repeat_interleave flip roll gather index
    index_select embedding take where masked_fill masked_fill_ masked_scatter masked_scatter_ scatter scatter_
    index_copy index_copy_ index_fill index_fill_ select_scatter slice_scatter tril triu tril_ triu_
    constant_pad_nd zeros zeros_like ones ones_like empty empty_like new_empty new_zeros new_ones new_full full
    full_like fill_ zero_ arange eye max min amax amin aminmax maximum minimum clamp clamp_min clamp_max clamp_
    clamp_min_ clamp_max_ relu relu_ abs abs_ neg neg_ sort topk argmax argmin argsort sign max_pool2d_with_indices
    nonzero masked_select scalar_tensor eq ne lt le gt ge logical_and logical_or logical_not isnan isinf isfinite
    any all set_ resize_ _to_copy diag_embed reflection_pad1d reflection_pad2d replication_pad1d
    replication_pad2d upsample_nearest2d floor ceil round trunc floor_ ceil_ round_ trunc_ empty_strided
    new_empty_strided heaviside cummax cummin kthvalue mode bucketize searchsorted tril_indices triu_indices
    threshold threshold_backward hardtanh unsafe_split unsafe_split_with_sizes view_copy im2col _local_scalar_dense
    isneginf isposinf fmax fmin copysign bitwise_and bitwise_or bitwise_not slice_backward select_backward
    rot90 pixel_shuffle pixel_unshuffle channel_shuffle signbit frexp""")
DRAWS = op_names("""rand randn randint bernoulli bernoulli_ native_dropout rand_like randn_like randint_like randperm normal_
    uniform_ normal multinomial exponential_ random_ log_normal_ cauchy_ geometric_""")
# Factories with values of their own, which would be rounded to the default dtype.
_FILLS = op_names("full linspace logspace arange")
# Ops that store constants, which their declared dtype may round.
_CONSTANTS = _FILLS | op_names("new_full full_like fill_ scalar_tensor")
# Where a value may jump although its argument moved by a rounding error.
DISCONTINUOUS = op_names("""sort topk argmax argmin argsort floor ceil round trunc sign eq ne lt le gt ge bucketize searchsorted
    floor_divide remainder fmod kthvalue nonzero masked_select heaviside floor_ ceil_ round_ trunc_""")
_PUTS = op_names("index_put index_put_ _index_put_impl_")
_SIDE_RESULTS_IN_FP32 = frozenset({"native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm"})
MATMULS = op_names("mm bmm addmm baddbmm mv addmv dot vdot")
# Ops that this module understands; anything else is someone's own kernel.
_KNOWN_LIBRARIES = frozenset({"aten", "prim", "prims", "profiler"})
_SCALED_MATMULS = frozenset({"_scaled_mm", "_scaled_mm_v2"})


@dataclass
class Fact:
    """What is known about one storage.

    declared   the dtype the reference believes it has
    grid       the coarsest format whose values it is known to hold (a bfloat16 input cast to float32
               still lies on the bfloat16 grid, so casting it back rounds nothing)
    given      it is one of the problem's inputs
    moved      its values depend on Monte-Carlo noise
    twin       the same storage before the last rounding to the declared dtype, when there was one
    """

    owner: StorageWeakRef
    declared: torch.dtype
    grid: torch.dtype
    given: bool = False
    moved: bool = False
    twin: Tensor | None = None


class Ledger:
    """Facts by storage. Holding a weak reference keeps the address from being used again."""

    def __init__(self) -> None:
        self._facts: dict[int, Fact] = {}
        self._countdown = 64

    def of(self, tensor: Tensor) -> Fact | None:
        return self._facts.get(_unwrapped(tensor).untyped_storage()._cdata)

    def declare(
        self, tensor: Tensor, declared: torch.dtype, *, grid: torch.dtype | None = None, given: bool = False
    ) -> Fact:
        storage = tensor.untyped_storage()
        fact = Fact(StorageWeakRef(storage), declared, grid or declared, given=given)  # type: ignore[no-untyped-call]
        self._facts[storage._cdata] = fact
        self._countdown -= 1
        if self._countdown == 0:
            self._forget_the_dead()
        return fact

    def _forget_the_dead(self) -> None:
        self._facts = {key: fact for key, fact in self._facts.items() if not fact.owner.expired()}  # type: ignore[no-untyped-call]
        self._countdown = max(64, len(self._facts))

    def declared(self, tensor: Tensor) -> torch.dtype:
        fact = self.of(tensor)
        return (
            tensor.dtype if fact is None or not (tensor.is_floating_point() or tensor.is_complex()) else fact.declared
        )

    def grid(self, tensor: Tensor) -> torch.dtype:
        fact = self.of(tensor)
        return tensor.dtype if fact is None else fact.grid

    def moved(self, tensor: Tensor) -> bool:
        fact = self.of(tensor)
        return fact is not None and fact.moved

    def given(self, tensor: Tensor) -> bool:
        fact = self.of(tensor)
        return fact is not None and fact.given

    def twin(self, tensor: Tensor) -> Tensor | None:
        """The tensor as it was before its last rounding, or None when nothing rounded it."""
        fact = self.of(tensor)
        if fact is None or fact.twin is None:
            return None
        return fact.twin.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def writable_twin(self, tensor: Tensor) -> Tensor | None:
        """Like `twin`, made when missing, so that a write can be mirrored into it."""
        fact = self.of(tensor)
        if fact is None:
            return None
        if fact.twin is None:
            fact.twin = whole_storage(tensor).clone()
        return self.twin(tensor)

    def set_twin(self, tensor: Tensor, unrounded: Tensor) -> None:
        """Remember a freshly made tensor before rounding; skipped when the two are laid out differently."""
        fact = self.of(tensor)
        alike = unrounded.stride() == tensor.stride() and unrounded.storage_offset() == tensor.storage_offset()
        same_size = unrounded.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
        if fact is not None:
            fact.twin = whole_storage(unrounded) if alike and same_size else None


def _unwrapped(tensor: Tensor) -> Tensor:
    """The tensor behind the wrappers that torch.func puts around it (they have no storage to ask)."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def whole_storage(tensor: Tensor) -> Tensor:
    """A 1-D tensor over all of the storage behind `tensor` (trailing bytes that fill no element left out)."""
    plain = tensor.detach()
    count = plain.untyped_storage().nbytes() // plain.element_size()
    return plain.new_empty(0).set_(plain.untyped_storage(), 0, (count,), (1,))


@dataclass
class OpCall:
    """One aten call as the noise model sees it: promoted arguments, and the ledger to ask about them."""

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ledger: Ledger
    declared: torch.dtype
    in_place: bool
    position: int  # running number of the call; the key into the tape
    fast_matmul_dtype: torch.dtype | None = None  # set inside autocast

    @property
    def exact(self) -> bool:
        """Whether the op only moves values."""
        if self.name in _PUTS:
            return not (self.args[3] if len(self.args) > 3 else self.kwargs.get("accumulate", False))
        return self.name in EXACT

    def tensors(self) -> Iterator[Tensor]:
        yield from (leaf for leaf in tree_flatten((self.args, self.kwargs))[0] if isinstance(leaf, Tensor))


class Perturbation(Protocol):
    """What turns an oracle run into a Monte-Carlo sample (numerics/noise.py)."""

    def prepare(self, call: OpCall) -> OpCall:
        """The call with operands as an honest kernel may round them first."""

    def disturb(self, call: OpCall, result: Tensor, which: int) -> Tensor:
        """The op's result with the arithmetic error an honest kernel may make in it."""

    def store(self, value: Tensor, declared: torch.dtype, *, carry: bool = False) -> Tensor:
        """The value rounded to the declared dtype; the very same object when nothing is rounded.

        `carry` says that it goes back into a buffer that was written before (an accumulator).
        """

    def constant(self, value: Tensor, declared: torch.dtype) -> Tensor:
        """Constants as their declared dtype may hold them; the very same object when it holds them exactly."""


@dataclass
class Tape:
    """Kept between the runs of one envelope: expensive results that do not depend on the noise.

    A later run may use a result or scale only while it has made the very same calls (`path`) so far.
    `admitted` holds the float64 inputs, until a run writes into them; `conditions` is the worst
    sum|terms| / |sum terms| of each kind of reduction.
    """

    path: list[int] = field(default_factory=list)
    results: dict[int, Tensor] = field(default_factory=dict)
    scales: dict[int, Tensor] = field(default_factory=dict)
    admitted: dict[tuple[int, torch.dtype], tuple[Any, Tensor]] = field(default_factory=dict)
    conditions: dict[str, float] = field(default_factory=dict)
    recorded: bool = False


@dataclass
class Events:
    """What happened in a run that the leak test and the report want to know.

    outside      what the reference does that this run cannot follow, in words
    selections   what it chose by value: indices that may name any of several equals
    """

    leaks: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    quantised: int = 0
    jumps: int = 0
    draws: int = 0


@dataclass
class _Bits:
    """A float tensor and what `view(dtype)` showed of it: two storages here, one memory in the reference."""

    source: Tensor
    shown: Tensor


class Promotion(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replace narrow floats by float64 in everything that is dispatched while active."""

    def __init__(
        self, perturbation: Perturbation | None = None, tape: Tape | None = None, *, redraw: bool = False
    ) -> None:
        """With `redraw`, every random op draws other numbers than it would: what depends on them then shows."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger()
        self.events = Events()
        self.autocast_dtype: torch.dtype | None = None
        self.on_tape = tape is not None
        self._perturbation = perturbation
        self._tape = tape
        self._redraw = redraw
        self._position = 0
        self._bits: dict[int, list[_Bits]] = {}  # by either storage
        self._promoted: dict[
            tuple[int, torch.dtype], tuple[Any, Tensor]
        ] = {}  # narrow storage -> (it, its float64 copy)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler (seconds) only to keep it away from this mode; nothing here compiles."""
        return False

    # -- inputs and outputs (called outside the mode)

    def admit(self, value: Any) -> Any:
        """A private float64 copy of an input with the same layout; tensors that share memory still do."""
        if not isinstance(value, Tensor):
            return value
        wide = self._wide(value.detach(), given=True)
        pretended = getattr(value, "seatrial_declared", None)  # a float64 tensor that stands for a narrow input
        if pretended is not None:
            self.ledger.declare(wide, pretended, given=True)
        return wide

    def admit_late(self, value: Any) -> Any:
        """An output that the reference took from outside the run (a module constant), made wide."""
        return self._wide(value) if isinstance(value, Tensor) else value

    def unrounded(self, output: Tensor) -> Tensor:
        """The output before its final rounding to the declared dtype."""
        twin = self.ledger.twin(output)
        return output if twin is None else twin

    def _wide(self, tensor: Tensor, *, given: bool = False) -> Tensor:
        narrow = tensor.dtype in NARROW or tensor.dtype in NARROW_COMPLEX
        if not narrow and not given:
            return tensor
        key = (tensor.untyped_storage()._cdata, tensor.dtype)
        held = self._promoted.get(key)
        if held is None and given and self._tape is not None and key in self._tape.admitted:
            held = self._promoted[key] = self._tape.admitted[key]
            self.ledger.declare(held[1], tensor.dtype, given=True)
        if held is None:
            base = _widen(whole_storage(tensor)) if narrow else whole_storage(tensor).clone()
            self.ledger.declare(base, tensor.dtype, given=given)
            held = self._promoted[key] = (tensor.untyped_storage(), base)
            if given and self._tape is not None:
                self._tape.admitted[key] = held
        return held[1].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    # -- dispatch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            result = self._dispatch(func, args, kwargs or {})
            if self._perturbation is None:
                self._note_selection(func, args, kwargs or {}, result)
            if self._bits:
                self._keep_bits_alike(func, args, kwargs or {})
            return result

    def _note_selection(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        found = selection_of(func._schema.name.removeprefix("aten::"), args, kwargs, result)
        if found is not None:
            self.events.selections.append(found)

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if func.namespace not in _KNOWN_LIBRARIES:
            self.events.outside.append(f"the reference calls {func._schema.name}, an op that is not torch's own")
        if torch.autograd.forward_ad._current_level >= 0 and not self.events.outside:
            self.events.outside.append("the reference differentiates in forward mode")
        if name in DRAWS and self._redraw:
            return self._draw_others(name, func, args, kwargs)
        if name in DRAWS:
            return self._draw(name, func, args, kwargs)
        if name == "view" and func._overloadname == "dtype":
            return self._reinterpret(func, *args)
        args, asked = _widen_dtypes(args)
        kwargs, asked_by_name = _widen_dtypes_by_name(kwargs)
        target = asked or asked_by_name
        args, kwargs = tree_map(self._wide_leaf, args), tree_map(self._wide_leaf, kwargs)
        writes = _written_arguments(func, args, kwargs)
        call = OpCall(
            name,
            func,
            args,
            kwargs,
            self.ledger,
            self._declared_result(name, args, kwargs, target),
            bool(writes),
            self._step(name, args),
            self.autocast_dtype,
        )
        if name == "_local_scalar_dense" and any(self.ledger.moved(t) for t in call.tensors()):
            self.on_tape = False  # Python may now take another path
        if name in DISCONTINUOUS and any(t.is_floating_point() for t in call.tensors()):
            self.events.jumps += 1
        if name in _FILLS and target is None and func(*args, **kwargs).dtype in NARROW:
            kwargs = {**kwargs, "dtype": WIDE}
            call = replace(call, kwargs=kwargs, declared=torch.get_default_dtype())
        if name == "_to_copy" and target is not None and args[0].is_floating_point() and is_float(target):
            return self._cast(args[0], target, kwargs)
        if self._tape is not None and any(self.ledger.given(t) for t in writes):
            self._tape.admitted.clear()
        if name == "_grouped_mm":
            return self._grouped_matmul(**_by_name(func, args, kwargs))
        if name in _SCALED_MATMULS:
            return self._scaled_matmul(name, func, args, kwargs, target)
        if name == "copy_" and self.ledger.declared(args[0]) in FP8 and args[1].is_floating_point():
            self._mirror(call, writes)
            self.events.quantised += 1
            args = (args[0], round_to(args[1], self.ledger.declared(args[0])), *args[2:])
            return func(*args, **kwargs)
        if writes and call.exact:
            self._mirror(call, writes)
        result = self._evaluate(call)
        return self._account(call, result, writes)

    def _wide_leaf(self, leaf: Any) -> Any:
        return self._wide(leaf) if isinstance(leaf, Tensor) else leaf

    def _step(self, name: str, args: tuple[Any, ...]) -> int:
        """Number the call, and notice when this run leaves the path of the recorded one."""
        position = self._position
        self._position += 1
        if self._tape is not None and self.on_tape:
            signature = hash((name, tuple(tuple(a.shape) for a in args if isinstance(a, Tensor))))
            if not self._tape.recorded:
                self._tape.path.append(signature)
            elif position >= len(self._tape.path) or self._tape.path[position] != signature:
                self.on_tape = False
        return position

    def _evaluate(self, call: OpCall) -> Any:
        moved = any(self.ledger.moved(t) for t in call.tensors())
        if self._perturbation is not None:
            prepared = self._perturbation.prepare(call)
            moved = moved or any(a is not b for a, b in zip(prepared.args, call.args, strict=True))
            call = prepared
        if self._tape is None or not self.on_tape or call.name not in MATMULS or moved or call.in_place:
            return call.func(*call.args, **call.kwargs)
        if call.position not in self._tape.results:
            self._tape.results[call.position] = call.func(*call.args, **call.kwargs)
        return self._tape.results[call.position].clone()

    def _account(self, call: OpCall, result: Any, writes: list[Tensor]) -> Any:
        """Widen, declare and (in a sample) disturb what an op returned."""
        moved = any(self.ledger.moved(t) for t in call.tensors())
        argument_storages = {t.untyped_storage()._cdata for t in call.tensors()}
        leaves, structure = tree_flatten(result)
        for which, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if leaf.untyped_storage()._cdata in argument_storages:
                if writes and any(leaf is w for w in writes):
                    leaves[which] = self._settle_write(call, leaf, which, moved=moved)
                continue
            leaves[which] = self._settle_new(call, leaf, which, moved=moved)
        if writes and not leaves:
            for written in writes:
                self._settle_write(call, written, 0, moved=moved)
        return tree_unflatten(leaves, structure)

    def _settle_new(self, call: OpCall, value: Tensor, which: int, *, moved: bool) -> Tensor:
        declared = call.declared if (value.is_floating_point() or value.is_complex()) else value.dtype
        if value.dtype in NARROW or value.dtype in NARROW_COMPLEX:
            if any(t.dtype == WIDE for t in call.tensors()):
                self.events.leaks.append(f"{call.name} returned {value.dtype}")
            declared = value.dtype
            value = _widen(value)
        if which and call.name in _SIDE_RESULTS_IN_FP32 and declared != WIDE:
            declared = torch.float32
        grid = declared
        if call.exact and is_float(declared):
            grid = self._common_grid(call, declared)
        disturbed = value
        if self._perturbation is not None and not call.exact and value.numel():
            disturbed = self._perturbation.disturb(call, value, which)
        stored = disturbed
        if self._perturbation is not None and call.name in _CONSTANTS and value.dtype == WIDE:
            stored = self._perturbation.constant(value, declared)
        elif self._perturbation is not None and not call.exact and value.dtype == WIDE:
            stored = self._perturbation.store(disturbed, declared)
        fact = self.ledger.declare(stored, declared, grid=grid)
        fact.moved = moved or stored is not value
        if stored is not disturbed:
            self.ledger.set_twin(stored, disturbed)
        elif call.exact:
            self._carry_twin(call, stored, which)
        return stored

    def _settle_write(self, call: OpCall, target: Tensor, which: int, *, moved: bool) -> Tensor:
        fact = self.ledger.of(target)
        if fact is None or target.dtype != WIDE or self._perturbation is None:
            if fact is not None:
                fact.moved = fact.moved or moved
            return target
        fact.moved = fact.moved or moved
        if call.name == "fill_":
            stored = self._perturbation.constant(target, fact.declared)
            if stored is not target:
                target.copy_(stored)
                fact.moved = True
            return target
        if call.exact:
            source = call.args[-1] if call.name == "copy_" and len(call.args) == 2 else None
            rounds = (
                isinstance(source, Tensor)
                and is_float(self.ledger.grid(source))
                and finer(fact.declared, self.ledger.grid(source)) != fact.declared
            )
            if rounds:
                rounded = self._perturbation.store(target, fact.declared)
                if rounded is not target:
                    target.copy_(rounded)
                    fact.moved = True
            return target
        disturbed = self._perturbation.disturb(call, target, which)
        rounded = self._perturbation.store(disturbed, fact.declared, carry=True)
        if rounded is not disturbed or fact.twin is not None:
            mirror = self.ledger.writable_twin(target)
            assert mirror is not None
            mirror.copy_(disturbed)
        if rounded is not target:
            target.copy_(rounded)
            fact.moved = True
        fact.grid = fact.declared
        return target

    # -- twins through exact ops

    def _carry_twin(self, call: OpCall, result: Tensor, which: int) -> None:
        if result.dtype != WIDE or all(self.ledger.twin(t) is None for t in call.tensors()):
            return
        args, kwargs = tree_map(self._twin_leaf, call.args), tree_map(self._twin_leaf, call.kwargs)
        twin = tree_flatten(call.func(*args, **kwargs))[0][which]
        self.ledger.set_twin(result, twin)

    def _twin_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        twin = self.ledger.twin(leaf)
        return leaf if twin is None else twin

    def _mirror(self, call: OpCall, writes: list[Tensor]) -> None:
        """Repeat an exact in-place write on the unrounded twins, before it happens on the real ones."""
        rounds = call.name in {"copy_", "fill_"} and self._perturbation is not None
        quantises = call.name == "copy_" and self.ledger.declared(call.args[0]) in FP8
        if not (rounds or quantises) and all(self.ledger.twin(t) is None for t in call.tensors()):
            return
        if any(w.dtype != WIDE or self.ledger.writable_twin(w) is None for w in writes):
            return
        args, kwargs = tree_map(self._twin_leaf, call.args), tree_map(self._twin_leaf, call.kwargs)
        call.func(*args, **kwargs)

    # -- special ops

    def _cast(self, source: Tensor, target: torch.dtype, kwargs: dict[str, Any]) -> Tensor:
        """A cast between float formats: rounds nothing, except to fp8, where rounding is the point."""
        origin = self.ledger.of(source)
        grid, given = self.ledger.grid(source), self.ledger.given(source)
        unrounded = self.ledger.twin(source)
        plain: Tensor = source.clone() if kwargs.get("device") is None else source.to(kwargs["device"], copy=True)
        value = plain
        if target in FP8:
            self.events.quantised += 1
            value = round_to(plain, target)
        elif self._perturbation is not None and is_float(grid) and finer(target, grid) != target:
            value = self._perturbation.store(plain, target)
        narrowed = target in FP8 or (is_float(grid) and finer(target, grid) != target)
        fact = self.ledger.declare(value, target, grid=target if narrowed else grid, given=given and not narrowed)
        fact.moved = (origin is not None and origin.moved) or (value is not plain and target not in FP8)
        if value is not plain or unrounded is not None:
            self.ledger.set_twin(
                value, plain if unrounded is None else unrounded.contiguous() if value.is_contiguous() else unrounded
            )
        return value

    def _reinterpret(self, func: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """`view(dtype)`: show the bits that the value would have had in its declared dtype."""
        native = tensor.to(self.ledger.declared(tensor)) if tensor.dtype == WIDE else tensor
        if tensor.dtype == WIDE and native.dtype != WIDE and not bool(_same(to_float64(native), tensor).all()):
            self.events.quantised += 1
        shown: Tensor = func(native, dtype)
        if shown.dtype in NARROW:
            declared = shown.dtype
            shown = to_float64(shown)
            self.ledger.declare(shown, declared).moved = self.ledger.moved(tensor)
        if shown.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
            pair = _Bits(tensor, shown)
            for one in (tensor, shown):
                self._bits.setdefault(one.untyped_storage()._cdata, []).append(pair)
        return shown

    def _keep_bits_alike(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After a write to a tensor or to what `view(dtype)` showed of it, bring the other one up to date."""
        for written in _written_arguments(func, args, kwargs):
            written = self._wide(written)
            key = written.untyped_storage()._cdata
            for pair in self._bits.get(key, ()):
                if pair.shown.untyped_storage()._cdata == key:
                    self._show(pair.shown, pair.source)
            for pair in self._bits.get(key, ()):
                if pair.source.untyped_storage()._cdata == key:
                    self._show(pair.source, pair.shown)

    def _show(self, changed: Tensor, other: Tensor) -> None:
        """Write the bits of one tensor, in its declared dtype, into the other."""
        native = changed.to(self.ledger.declared(changed)) if changed.dtype == WIDE else changed
        bits = native.contiguous().view(self.ledger.declared(other)).view(other.shape)
        wide = _widen(bits) if bits.dtype in NARROW else bits
        other.copy_(wide)
        twin = self.ledger.twin(other)
        if twin is not None:
            twin.copy_(wide)

    def _draw(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Random ops run in the declared dtype, so that they use up the generator as they would natively."""
        self.events.draws += 1
        if name == "native_dropout":
            return self._dropout(func, *args, **kwargs)
        if func._schema.arguments and func._schema.arguments[0].alias_info is not None and args[0].dtype == WIDE:
            narrow = torch.empty_like(args[0], dtype=self.ledger.declared(args[0]))
            args[0].copy_(func(narrow, *tree_map(self._native_leaf, args[1:]), **tree_map(self._native_leaf, kwargs)))
            twin = self.ledger.twin(args[0])
            if twin is not None:
                twin.copy_(args[0])
            return args[0]
        drawn = func(*tree_map(self._native_leaf, args), **tree_map(self._native_leaf, kwargs))
        return tree_map(self._wide_result, drawn)

    def _draw_others(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plain = {key: None if key == "generator" else value for key, value in kwargs.items()}
        with torch.random.fork_rng():
            torch.manual_seed(1_000_003 + self.events.draws)
            return self._draw(name, func, args, plain)

    def _dropout(self, func: Any, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:  # noqa: FBT001, FBT002 - aten's own signature
        """The mask is drawn as it would be natively; what it keeps is scaled in float64."""
        x = self._wide(x)
        _, kept = func(torch.ones_like(x, dtype=self.ledger.declared(x)), p, train)
        factor = kept.to(WIDE).mul_(0.0 if p >= 1 else 1 / (1 - p) if train or train is None else 1.0)
        self.ledger.declare(factor, self.ledger.declared(x))
        return self._dispatch(torch.ops.aten.mul.Tensor, (x, factor), {}), kept

    def _native_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dtype == WIDE:
            return leaf.to(self.ledger.declared(leaf))
        return leaf

    def _wide_result(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dtype in NARROW:
            wide = to_float64(leaf)
            self.ledger.declare(wide, leaf.dtype)
            return wide
        return leaf

    def stored_constant(self, value: Tensor, declared: torch.dtype) -> Tensor:
        """A constant from Python, float64, as the reference stores it (called outside of dispatch)."""
        with _disable_current_modes():  # our own arithmetic is not the reference's
            return self._stored_constant(value, declared)

    def _stored_constant(self, value: Tensor, declared: torch.dtype) -> Tensor:
        stored = value if self._perturbation is None else self._perturbation.constant(value, declared)
        self.ledger.declare(stored, declared).moved = stored is not value
        if stored is not value:
            self.ledger.set_twin(stored, value)
        return stored

    # -- scaled matmuls

    def _scaled_matmul(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: torch.dtype | None
    ) -> Tensor:
        """Decode both operands, multiply as any matmul, round once to the output dtype."""
        given = _by_name(func, args, kwargs)
        a, b = rows_of(given["self_"]), rows_of(given["mat2"].t())
        packed = given["self_"].dtype == FP4
        if name == "_scaled_mm":
            a, b = self._scaled(a, given["scale_a"], packed), self._scaled(b, given["scale_b"].t(), packed)
        else:
            for i, recipe in enumerate(given["recipe_a"]):
                a = self._scaled(a, given["scale_a"][i], packed, recipe, only_known_swizzles(given["swizzle_a"][i:]))
            for i, recipe in enumerate(given["recipe_b"]):
                scale = given["scale_b"][i]
                b = self._scaled(b, scale.t(), packed, recipe, only_known_swizzles(given["swizzle_b"][i:]))
        moved = any(self.ledger.moved(t) for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor))
        for operand in (a, b):
            self.ledger.declare(operand, torch.float32, grid=torch.float8_e4m3fn).moved = moved
        out: Tensor = self._dispatch(torch.ops.aten.mm.default, (a, b.t()), {})
        if given.get("bias") is not None:
            out = self._dispatch(torch.ops.aten.add.Tensor, (out, given["bias"]), {})
        if given.get("scale_result") is not None:
            out = self._dispatch(torch.ops.aten.mul.Tensor, (out, given["scale_result"]), {})
        out = self._cast(out, target or self.ledger.declared(given["self_"]), {})
        if given.get("out") is None:
            return out
        self._dispatch(torch.ops.aten.copy_.default, (given["out"], out), {})
        return given["out"]  # type: ignore[no-any-return]

    def _grouped_matmul(self, *, self_: Tensor, mat2: Tensor, offs: Tensor | None = None, **more: Any) -> Tensor:
        """One matmul a group; `offs` says where each group ends along the axis that has no group axis of its own."""
        aten = torch.ops.aten
        if offs is None:
            return self._dispatch(aten.bmm.default, (self_, mat2), {})  # type: ignore[no-any-return]
        ends: list[int] = offs.tolist()
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        parts: list[Tensor] = []
        for group, (start, end) in enumerate(spans):
            a = self_[group] if self_.dim() == 3 else self_[start:end] if mat2.dim() == 3 else self_[:, start:end]
            b = mat2[group] if mat2.dim() == 3 else mat2[:, start:end] if self_.dim() == 3 else mat2[start:end]
            parts.append(self._dispatch(aten.mm.default, (a, b), {}))
        if self_.dim() == mat2.dim() == 2:
            return self._dispatch(aten.stack.default, (parts,), {})  # type: ignore[no-any-return]
        return self._dispatch(aten.cat.default, (parts, 0 if mat2.dim() == 3 else 1), {})  # type: ignore[no-any-return]

    def _scaled(
        self, values: Tensor, scale: Tensor, packed: bool, recipe: int | None = None, swizzled: bool | None = None,  # noqa: FBT001
    ) -> Tensor:  # fmt: skip
        declared = self.ledger.declared(scale)
        return scaled_rows(values, scale, declared, packed=packed, recipe=recipe, swizzled=swizzled)

    # -- declared dtypes

    def _declared_result(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: torch.dtype | None
    ) -> torch.dtype:
        if target is not None:
            return target
        if self.autocast_dtype is not None and name in MATMULS | {"convolution"}:
            return self.autocast_dtype
        dimensioned: torch.dtype | None = None
        scalar: torch.dtype | None = None
        for leaf in tree_flatten((args, kwargs))[0]:
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                declared = self.ledger.declared(leaf)
                if leaf.dim():
                    dimensioned = _promoted(dimensioned, declared)
                else:
                    scalar = _promoted(scalar, declared)
        return dimensioned or scalar or torch.get_default_dtype()

    def _common_grid(self, call: OpCall, declared: torch.dtype) -> torch.dtype:
        grid: torch.dtype | None = None
        for tensor in call.tensors():
            if tensor.is_floating_point() and is_float(self.ledger.grid(tensor)):
                held = self.ledger.grid(tensor)
                grid = held if grid is None else finer(grid, held)
        return declared if grid is None or finer(declared, grid) == grid else grid


def _promoted(known: torch.dtype | None, new: torch.dtype) -> torch.dtype:
    if known is None or known == new:
        return new
    if known in FP8 or new in FP8:  # torch has no promotion rule for fp8
        return new if known in FP8 else known
    return torch.promote_types(known, new)


def _widen(tensor: Tensor) -> Tensor:
    if tensor.dtype in NARROW_COMPLEX:
        return tensor.to(torch.complex128)
    return to_float64(tensor)


def _widen_dtype(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        if value in NARROW:
            return WIDE
        if value in NARROW_COMPLEX:
            return torch.complex128
    return value


def _widen_dtypes(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], torch.dtype | None]:
    asked = next((a for a in args if isinstance(a, torch.dtype)), None)
    return tuple(_widen_dtype(a) for a in args), asked


def _widen_dtypes_by_name(kwargs: dict[str, Any]) -> tuple[dict[str, Any], torch.dtype | None]:
    asked = next((v for v in kwargs.values() if isinstance(v, torch.dtype)), None)
    return {key: _widen_dtype(value) for key, value in kwargs.items()}, asked


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    written: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        written += [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
    return written


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = {**{a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}, **kwargs}
    return {"self_" if name == "self" else name: value for name, value in given.items()}


def _same(first: Tensor, second: Tensor) -> Tensor:
    return (first == second) | (first.isnan() & second.isnan())


# ---------------------------------------------------------------------------------------------------
# What Python code in the reference sees

_DTYPE_GETTER = torch.Tensor.dtype
_GRAD_GETTER = torch.Tensor.grad
_NAMED_CASTS: dict[Any, torch.dtype] = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.double: torch.float64,
}


_LEAVES_TORCH = frozenset({
    torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__, torch.Tensor.data_ptr,
})  # fmt: skip
_FROM_PYTHON = frozenset({torch.tensor, torch.as_tensor, torch.Tensor.new_tensor})


def _only_numbers(data: Any) -> bool:
    if isinstance(data, list | tuple):
        return all(_only_numbers(entry) for entry in data)
    return isinstance(data, int | float)


def _is_getter(func: Any, descriptor: Any) -> bool:
    return getattr(func, "__self__", None) is descriptor


class DeviceRedirect(TorchFunctionMode):
    """Send device="cuda" to the device of the inputs when they are not on CUDA."""

    def __init__(self, home: torch.device) -> None:
        super().__init__()
        self._home = home

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._call(*self.redirected(func, args, kwargs or {}))

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def redirected(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The call with every CUDA device replaced; `.cuda()` becomes `.to(home)`."""
        if self._home.type == "cuda":
            return func, args, kwargs
        if func is torch.Tensor.cuda:
            return torch.Tensor.to, (args[0], self._home), {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._at_home(kwargs["device"])}
        if func is torch.Tensor.to:
            args = tuple(self._at_home(a) if isinstance(a, str | torch.device) else a for a in args)
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func, args, kwargs

    def _at_home(self, device: Any) -> Any:
        names_cuda = isinstance(device, str | torch.device) and str(device).startswith("cuda")
        return self._home if names_cuda or (isinstance(device, int) and not isinstance(device, bool)) else device


class DeclaredDtypes(DeviceRedirect):
    """Make Python see declared dtypes. Enter it together with its `Promotion`."""

    def __init__(self, promotion: Promotion, home: torch.device) -> None:
        super().__init__(home)
        self._promotion = promotion
        self._ledger = promotion.ledger

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_getter(func, _DTYPE_GETTER):
            return self._ledger.declared(args[0])
        if _is_getter(func, _GRAD_GETTER):
            gradient = func(*args, **kwargs)
            if gradient is not None:
                self._inherit(gradient, args[0])
            return gradient
        if func is torch.autograd.grad:
            return self._gradients(func, args, kwargs)
        if func in _LEAVES_TORCH and args[0].is_floating_point():
            name = getattr(func, "__name__", "data_ptr")
            self._promotion.events.outside.append(f"the reference takes a tensor out of torch ({name})")
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            with _disable_current_modes():
                return torch.empty(0, dtype=self._ledger.declared(args[0]), device=args[0].device).type()
        if func in _FROM_PYTHON:
            return self._constant(func, args, kwargs)
        if func in (torch.Tensor.element_size, torch.Tensor.itemsize):
            return self._ledger.declared(args[0]).itemsize
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _plain_attention(self._ledger, *args, **kwargs)
        if func is torch.nn.functional.rms_norm:
            return func(*self._with_native_eps(*args, **kwargs))
        target = self._cast_target(func, args, kwargs)
        if target is not None:
            return self._cast(func, target, args, kwargs)
        with _AutocastSeen(self._promotion):
            return func(*args, **kwargs)

    def _constant(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """A tensor made of Python numbers: in float64, with the dtype that it would have had."""
        made: Tensor = func(*args, **kwargs)
        declared = self._ledger.declared(made)
        if func is torch.Tensor.new_tensor and kwargs.get("dtype") is None:
            declared = self._ledger.declared(args[0])
        numbers = args[1] if func is torch.Tensor.new_tensor else kwargs.get("data", args[0] if args else None)
        if declared not in NARROW or declared in FP8 or not _only_numbers(numbers):
            return made
        exact = torch.tensor(numbers, dtype=WIDE, device=made.device)
        return self._promotion.stored_constant(exact, declared).requires_grad_(made.requires_grad)

    def _inherit(self, gradient: Tensor, source: Tensor) -> None:
        fact = self._ledger.of(gradient)
        if fact is not None and gradient.dtype == WIDE:
            fact.declared = self._ledger.declared(source)

    def _gradients(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gradients = func(*args, **kwargs)
        sources = args[1] if len(args) > 1 else kwargs["inputs"]
        for gradient, source in zip(gradients, (sources,) if isinstance(sources, Tensor) else sources, strict=True):
            if gradient is not None:
                self._inherit(gradient, source)
        return gradients

    def _with_native_eps(self, x: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> tuple[Any, ...]:
        """Without eps, torch takes that of its compute type: float32 for all narrow inputs."""
        compute = WIDE if self._ledger.declared(x) == WIDE else torch.float32
        return x, shape, weight, torch.finfo(compute).eps if eps is None else eps

    def _cast_target(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
        if func in _NAMED_CASTS:
            return _NAMED_CASTS[func]
        if func is torch.Tensor.type_as:
            return self._ledger.declared(args[1])
        if func not in (torch.Tensor.to, torch.Tensor.type) or not args[0].is_floating_point():
            return None
        for value in (*args[1:], *kwargs.values()):
            if isinstance(value, torch.dtype):
                return value
            if isinstance(value, Tensor):
                return self._ledger.declared(value)
        return None

    def _cast(self, func: Any, target: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Casts that C++ would mistake for no-ops, or for copies, because everything is float64."""
        tensor = args[0]
        asks_copy = bool(kwargs.get("copy")) or (len(args) > 3 and args[3] is True)
        device = next((v for v in (*args[1:], *kwargs.values()) if isinstance(v, str | torch.device)), tensor.device)
        device = next(
            (v.device for v in args[1:] if isinstance(v, Tensor) and func is torch.Tensor.to), torch.device(device)
        )
        stays = device.type == tensor.device.type and (device.index is None or device.index == tensor.device.index)
        if not is_float(target) or tensor.dtype != WIDE:
            return func(*args, **kwargs) if func is not torch.Tensor.type_as else tensor.to(target)
        if stays and self._ledger.declared(tensor) == target and not asks_copy:
            return tensor
        if target == WIDE:
            copied = tensor.clone() if stays else tensor.to(device, copy=True)
            self._ledger.declare(copied, WIDE, grid=self._ledger.grid(tensor)).moved = self._ledger.moved(tensor)
            return copied
        return tensor.to(target) if stays else tensor.to(device, target)


class _AutocastSeen:
    """Tell the dispatch mode which dtype autocast would use: below this level torch hides it."""

    def __init__(self, promotion: Promotion) -> None:
        self._promotion = promotion

    def __enter__(self) -> None:
        self._promotion.autocast_dtype = None
        for kind in ("cuda", "cpu"):
            if torch.is_autocast_enabled(kind):
                self._promotion.autocast_dtype = torch.get_autocast_dtype(kind)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._promotion.autocast_dtype = None


def _plain_attention(
    ledger: Ledger, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,  # noqa: FBT001, FBT002 - torch's signature
) -> Tensor:  # fmt: skip
    """Attention written out with float32 scores, so that the noise model sees its two matmuls and its softmax."""
    if dropout_p:
        raise NotImplementedError("dropout inside a reference has no single right answer")
    declared = ledger.declared(query)
    inner = WIDE if declared == WIDE else torch.float32
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    # Both operands carry a root of the scale, as in torch's own plain attention: a contract that lets operands
    # be rounded then covers kernels that hand the tensor cores a scaled query, a scaled key or both.
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    root = math.sqrt(abs(scale))
    scores = (query.to(inner) * math.copysign(root, scale)) @ (key.to(inner) * root).transpose(-2, -1)
    if is_causal:
        allowed = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = torch.softmax(scores, -1)
    out = weights @ (value if declared == inner else value.to(inner))
    return out if declared == inner else out.to(declared)
