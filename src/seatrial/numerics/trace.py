"""What the reference itself says about its inputs: indices, masks, sizes, reductions, linear slots.

One native run under a dispatch mode that tags every tensor with the inputs it came from. Nothing is
annotated by hand: an integer input that reaches the index slot of a gather or scatter is an index,
and the indexed dimension is its legal range; one that an accumulating scatter consumes is a
*repeat-count lever*, because choosing it chooses how many terms fall on one output element. An
integer input seen in neither role is structural (positions, cumulative lengths, grid shapes) and
must not be randomised.

The tags work in the manner of taint tracking. Linear slots are found by the homogeneity test,
elementary algebra done in exact small numbers in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from seatrial.errors import InfrastructureError
from seatrial.numerics.schema import bind, name_of

if TYPE_CHECKING:
    from seatrial.model import Value

# What a reference raises when it does not want an input, directly or through the oracle.
REFUSALS = (
    InfrastructureError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Fp64Values(Protocol):
    """The outputs of one fp64 run, in declared order; `faithful` when nothing was rounded on the way."""

    @property
    def values(self) -> Sequence[Tensor]: ...

    @property
    def faithful(self) -> bool: ...


class Fp64Reference(Protocol):
    """What this module needs of `numerics.oracle.Oracle`."""

    def run(self, inputs: Sequence[Value], /) -> Fp64Values: ...


@dataclass(frozen=True)
class Reduction:
    """One operation that adds many numbers into one.

    op       aten name without the namespace ("mm", "sum", "index_add")
    length   terms per result; for a scatter the number of terms that could fall on one element
    dtype    dtype the reference declares for the result (the accumulator of an honest kernel is at
             least fp32 even when this is bfloat16)
    fed_by   names of the inputs that its operands came from
    scatter  True when an index decides where a term falls
    outputs  positions of the reference's outputs that it reaches
    """

    op: str
    length: int
    dtype: torch.dtype
    fed_by: tuple[str, ...]
    scatter: bool = False
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """What one native run of the reference showed.

    index_ranges  index input -> exclusive upper bound that is legal for it
    levers        index input -> positions of the outputs whose terms it gathers (repeat-count levers)
    masks         inputs that select elements (bool, or compared and then used as a mask)
    structural    integer inputs with no such role, or read as Python numbers: leave them as drawn
    notes         what the tracer could not follow
    """

    index_ranges: Mapping[str, int] = field(default_factory=dict)
    levers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    masks: frozenset[str] = frozenset()
    structural: frozenset[str] = frozenset()
    reductions: tuple[Reduction, ...] = ()
    notes: tuple[str, ...] = ()

    def reductions_into(self, output: int) -> tuple[Reduction, ...]:
        """The reductions that reach this output position."""
        return tuple(r for r in self.reductions if output in r.outputs)

    def levers_on(self, output: int) -> tuple[str, ...]:
        """The repeat-count levers of this output position."""
        return tuple(name for name, outputs in self.levers.items() if output in outputs)


def trace(
    reference: Callable[..., Any],
    inputs: Sequence[Value],
    names: Sequence[str],
    *,
    output_names: Sequence[str] = (),
) -> Trace:
    """Run the reference once, natively, on copies of `inputs` and report what it does with each.

    `names` are the input names in positional order. `output_names` orders the outputs of a reference
    that returns a dict; otherwise outputs count in the order in which they are returned.
    Raises only what the reference itself raises on these inputs.
    """
    copies = [v.detach().clone() if isinstance(v, Tensor) else v for v in inputs]
    tracer = _Tracer()
    for name, value in zip(names, copies, strict=True):
        if isinstance(value, Tensor):
            tracer.name_input(name, value)
    with _WatchReads(tracer), tracer:
        returned = reference(*copies)
    outputs = flatten_outputs(returned, output_names)
    return tracer.conclude({n: v for n, v in zip(names, copies, strict=True) if isinstance(v, Tensor)}, outputs)


def flatten_outputs(returned: Any, output_names: Sequence[str] = ()) -> list[Any]:
    """The outputs of a reference as a flat list: by name from a dict, by position otherwise."""
    if isinstance(returned, Mapping):
        order = [n for n in output_names if n in returned] or list(returned)
        return [returned[n] for n in order]
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def linear_slots(
    oracle: Fp64Reference, inputs: Sequence[Value], *, tolerance: float = 1e-9, seed: int = 0
) -> dict[int, tuple[int, ...]]:
    """Input positions in which outputs are homogeneous-linear: {input position: output positions}.

    Checks L(2x + z) = 2 L(x) + L(z) in fp64 on small dyadic numbers that the slot's own dtype (fp8
    included) represents exactly, other inputs as given. Three fp64 runs per float input; an input on
    which the reference refuses to run is left out.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[int, tuple[int, ...]] = {}
    for position, value in enumerate(inputs):
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1:
            outputs = _linear_outputs(oracle, inputs, position, generator, tolerance)
            if outputs:
                found[position] = outputs
    return found


def exact_outputs(oracle: Fp64Reference, inputs: Sequence[Value]) -> Sequence[Tensor] | None:
    """Outputs in fp64; None where the reference refuses the inputs or its fp64 run is not one."""
    try:
        result = oracle.run(inputs)
    except REFUSALS:
        return None
    return result.values if result.faithful else None


def replaced(inputs: Sequence[Value], position: int, value: Value) -> list[Value]:
    """A copy of the list of inputs with one of them exchanged."""
    return [value if p == position else v for p, v in enumerate(inputs)]


def _linear_outputs(
    oracle: Fp64Reference, inputs: Sequence[Value], position: int, generator: torch.Generator, tolerance: float
) -> tuple[int, ...]:
    slot = inputs[position]
    assert isinstance(slot, Tensor)
    x, z = (_small_dyadic(slot, generator) for _ in range(2))
    runs = []
    for value in (x, z, 2 * x + z):
        outputs = exact_outputs(oracle, replaced(inputs, position, value.to(slot.dtype).to(slot.device)))
        if outputs is None:
            return ()
        runs.append(outputs)
    return tuple(o for o, (a, b, c) in enumerate(zip(*runs, strict=True)) if _is_combination(a, b, c, tolerance))


def _small_dyadic(like: Tensor, generator: torch.Generator) -> Tensor:
    """Non-integers wherever the dtype allows, so that rounding operations do not pass as linear."""
    if like.element_size() == 1:
        return torch.randint(1, 3, like.shape, generator=generator) * _signs(like.shape, generator) / 4.0
    return torch.randint(1, 21, like.shape, generator=generator) * _signs(like.shape, generator) / 16.0


def _signs(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, tuple(shape), generator=generator) * 2 - 1


def _is_combination(a: Tensor, b: Tensor, c: Tensor, tolerance: float) -> bool:
    if not isinstance(a, Tensor) or not a.is_floating_point() or a.numel() == 0 or a.shape != c.shape:
        return False
    scale = float(a.abs().max() + b.abs().max())
    miss = float((c - (2 * a + b)).abs().max())
    return math.isfinite(scale) and scale > 0 and miss <= tolerance * scale


# ---------------------------------------------------------------------------------------------------
# Tags


class _Tags(NamedTuple):
    """Where a tensor came from. `exact` holds the inputs whose values it still holds unchanged."""

    exact: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()
    fed: frozenset[str] = frozenset()
    levers: frozenset[str] = frozenset()
    selects: frozenset[str] = frozenset()
    reductions: frozenset[int] = frozenset()

    def joined(self, other: _Tags) -> _Tags:
        return _Tags(
            self.exact | other.exact,
            self.values | other.values,
            self.fed | other.fed,
            self.levers | other.levers,
            self.selects | other.selects,
            self.reductions | other.reductions,
        )


_NOTHING = _Tags()

# op -> name of the argument that holds the index
_INDEX_ARGUMENT = {
    "embedding": "indices",
    "embedding_dense_backward": "indices",
    "_embedding_bag": "indices",
    "index": "indices",
    "_unsafe_index": "indices",
    "index_put": "indices",
    "_index_put_impl": "indices",
    "_unsafe_index_put": "indices",
    "index_select": "index",
    "gather": "index",
    "scatter": "index",
    "scatter_add": "index",
    "scatter_reduce": "index",
    "index_add": "index",
    "index_copy": "index",
    "index_fill": "index",
    "index_reduce": "index",
    "take": "index",
    "put": "index",
    "nll_loss_forward": "target",
    "nll_loss_backward": "target",
    "nll_loss2d_forward": "target",
    "nll_loss2d_backward": "target",
    "bincount": "self",
}
_ACCUMULATING = {
    "embedding_dense_backward",
    "scatter_add",
    "scatter_reduce",
    "index_add",
    "index_reduce",
    "bincount",
}
_ACCUMULATING_ON_REQUEST = {"index_put", "_index_put_impl", "_unsafe_index_put", "put"}
_MASK_ARGUMENT = {"where": "condition", "masked_fill": "mask", "masked_scatter": "mask", "masked_select": "mask"}
# These hand the very values on, in another shape, place or width.
_KEEPS_VALUES = set(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "expand",
        "permute",
        "transpose",
        "t",
        "slice",
        "select",
        "squeeze",
        "unsqueeze",
        "as_strided",
        "alias",
        "detach",
        "unbind",
        "split",
        "split_with_sizes",
        "unfold",
        "diagonal",
        "_reshape_alias",
        "clone",
        "contiguous",
        "_to_copy",
        "lift_fresh",
        "copy",
        "flip",
        "repeat",
        "repeat_interleave",
        "cat",
        "stack",
        "roll",
        "sort",
        "view_copy",
        "narrow",
        "unsafe_split",
        "to",
    ]
)


def _same_shape_dimension(call: Mapping[str, Any]) -> int:
    return int(call["self"].shape[call["dim"]]) if call["self"].dim() else 1


def _nll_classes(call: Mapping[str, Any]) -> int:
    scores = call["self"]
    return int(scores.shape[1] if scores.dim() > 1 else scores.shape[0])


# op -> exclusive upper bound of its index, from the bound arguments
_BOUND: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "embedding": lambda c: int(c["weight"].shape[0]),
    "_embedding_bag": lambda c: int(c["weight"].shape[0]),
    "embedding_dense_backward": lambda c: int(c["num_weights"]),
    "take": lambda c: int(c["self"].numel()),
    "put": lambda c: int(c["self"].numel()),
    "bincount": lambda c: int(c["minlength"]),
    **dict.fromkeys(
        [
            "index_select",
            "gather",
            "scatter",
            "scatter_add",
            "scatter_reduce",
            "index_add",
            "index_copy",
            "index_fill",
            "index_reduce",
        ],
        _same_shape_dimension,
    ),
    **dict.fromkeys(
        ["nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"], _nll_classes
    ),
}


def _shrinkage(call: Mapping[str, Any], out: Tensor) -> int:
    return int(call["self"].numel() // max(1, out.numel()))


def _along_dim(call: Mapping[str, Any], out: Tensor) -> int:
    source = call["self"] if "self" in call else call["grad_output"]
    return int(source.shape[call["dim"]]) if source.dim() else 1


def _rows_behind(call: Mapping[str, Any], out: Tensor) -> int:
    return int(math.prod(call["normalized_shape"]))


def _keys(call: Mapping[str, Any], out: Tensor) -> int:
    return int(call["key"].shape[-2])


# op -> number of terms behind one result
_LENGTH: dict[str, Callable[[Mapping[str, Any], Tensor], int]] = {
    **dict.fromkeys(
        [
            "sum",
            "mean",
            "var",
            "var_mean",
            "std",
            "std_mean",
            "norm",
            "linalg_vector_norm",
            "logsumexp",
            "prod",
            "nansum",
        ],
        _shrinkage,
    ),
    **dict.fromkeys(
        [
            "_softmax",
            "_log_softmax",
            "cumsum",
            "cumprod",
            "logcumsumexp",
            "_softmax_backward_data",
            "_log_softmax_backward_data",
        ],
        _along_dim,
    ),
    **dict.fromkeys(["mm", "bmm", "mv", "dot", "_scaled_mm", "_int_mm"], lambda c, o: int(c["self"].shape[-1])),
    "addmm": lambda c, o: int(c["mat1"].shape[-1]),
    "addmv": lambda c, o: int(c["mat"].shape[-1]),
    "baddbmm": lambda c, o: int(c["batch1"].shape[-1]),
    "convolution": lambda c, o: int(c["weight"][0].numel()),
    "convolution_backward": lambda c, o: int(c["grad_output"].numel() // max(1, c["grad_output"].shape[1])),
    **dict.fromkeys(["native_layer_norm", "_fused_rms_norm", "native_layer_norm_backward"], _rows_behind),
    **dict.fromkeys(
        [
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
        ],
        _keys,
    ),
}


def _written(func: Any, call: Mapping[str, Any]) -> list[Tensor]:
    """Tensors that the operation writes to."""
    written = []
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _tensors(call.get(argument.name))
    return written


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for t in tree_flatten(value)[0] if isinstance(t, Tensor)]


def _is_integer(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


# ---------------------------------------------------------------------------------------------------
# The tracer


class _WatchReads(TorchFunctionMode):
    """Sees `tolist()` and `numpy()`, which read memory without an operation."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__) and args and isinstance(args[0], Tensor):
            self._tracer.read_as_number(args[0])
        return func(*args, **(kwargs or {}))


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its mode untyped
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tags: Any = WeakTensorKeyDictionary()
        # A view made under autograd can be another tensor object than the one seen here, and a write
        # through a view changes its base: the storage carries the tags in both cases. The weak
        # reference keeps the storage's address from being used again.
        self._storages: dict[int, tuple[StorageWeakRef, _Tags]] = {}
        self._written_storages: dict[int, tuple[StorageWeakRef, _Tags]] = {}
        self._bounds: dict[str, list[int | None]] = {}
        self._masks: set[str] = set()
        self._numbers_exact: set[str] = set()
        self._numbers: set[str] = set()
        self._reductions: list[Reduction] = []
        self._notes: dict[str, None] = {}

    # -- tags

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler (seconds) only to keep it away from this mode; nothing here compiles."""
        return False

    def name_input(self, name: str, value: Tensor) -> None:
        only = frozenset([name])
        self._tag(value, _Tags(exact=only, values=only, fed=only))

    def _tag(self, t: Tensor, tags: _Tags) -> None:
        self._tags[t] = tags
        key = _storage_of(t)
        if key is not None:
            before = self._storages.get(key.cdata, (key, _NOTHING))[1]
            self._storages[key.cdata] = (key, before.joined(tags))

    def _tag_written(self, t: Tensor, tags: _Tags) -> None:
        # The written tensor no longer holds an input's own values.
        tags = tags._replace(exact=frozenset())
        self._tags[t] = self._tags.get(t, _NOTHING).joined(tags)._replace(exact=frozenset())
        key = _storage_of(t)
        if key is not None:
            before = self._written_storages.get(key.cdata, (key, _NOTHING))[1]
            self._written_storages[key.cdata] = (key, before.joined(tags))

    def _of(self, t: Tensor) -> _Tags:
        key = _storage_of(t)
        cdata = key.cdata if key is not None else -1
        tags: _Tags | None = self._tags.get(t)
        if tags is None:
            tags = self._storages.get(cdata, (None, _NOTHING))[1]
        if cdata in self._written_storages:
            tags = tags.joined(self._written_storages[cdata][1])
        return tags

    def _of_all(self, tensors: Iterable[Tensor]) -> _Tags:
        merged = _NOTHING
        for t in tensors:
            merged = merged.joined(self._of(t))
        return merged

    # -- one operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        op, call = name_of(func), bind(func, args, kwargs)
        if op == "_local_scalar_dense":
            self.read_as_number(args[0])
        else:
            self._follow(func, op, call, _tensors(out))
        return out

    def _follow(self, func: Any, op: str, call: Mapping[str, Any], outs: Sequence[Tensor]) -> None:
        index, rest = self._split_operands(op, call)
        chosen, passed = self._of_all(index), self._of_all(rest)
        accumulates = op in _ACCUMULATING or (op in _ACCUMULATING_ON_REQUEST and bool(call.get("accumulate")))
        self._note_index(op, call)
        self._note_mask(op, call)
        self._note_stranger(func, op, call)
        result = _Tags(
            exact=passed.exact if op in _KEEPS_VALUES else frozenset(),
            values=passed.values,
            fed=passed.fed | chosen.fed,
            levers=passed.levers | (chosen.values if accumulates else frozenset()),
            selects=passed.selects | (chosen.values if _writes_constant(func, op) else frozenset()),
            reductions=passed.reductions | chosen.reductions,
        )
        result = self._note_reduction(op, call, outs, result, scatter=accumulates)
        written = _written(func, call)
        for t in written:
            self._tag_written(t, result)
        for t in outs:
            if not any(t is w for w in written):
                self._tag(t, result)

    def _split_operands(self, op: str, call: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors that choose a place, and tensors whose values flow into the result."""
        where = _INDEX_ARGUMENT.get(op), _MASK_ARGUMENT.get(op)
        index = [t for name in where if name is not None for t in _tensors(call.get(name))]
        rest = [t for name, value in call.items() if name not in where for t in _tensors(value)]
        return index, rest

    # -- what it teaches

    def _note_index(self, op: str, call: Mapping[str, Any]) -> None:
        argument = _INDEX_ARGUMENT.get(op)
        if argument is None:
            return
        if argument == "indices" and isinstance(call["indices"], (list, tuple)):
            self._note_advanced_index(call)
            return
        bound = _BOUND[op](call)
        self._note_range(call[argument], bound if bound > 0 else None)

    def _note_advanced_index(self, call: Mapping[str, Any]) -> None:
        dimension = 0
        for part in call["indices"]:
            if part is None:
                dimension += 1
            elif part.dtype in (torch.bool, torch.uint8):
                self._masks |= self._of(part).values
                dimension += part.dim()
            else:
                self._note_range(part, int(call["self"].shape[dimension]))
                dimension += 1

    def _note_range(self, index: Tensor, bound: int | None) -> None:
        tags = self._of(index)
        for name in tags.values:
            # After arithmetic the indexed size says nothing certain about the input itself.
            self._bounds.setdefault(name, []).append(bound if name in tags.exact else None)

    def _note_mask(self, op: str, call: Mapping[str, Any]) -> None:
        argument = _MASK_ARGUMENT.get(op)
        if argument is not None:
            self._masks |= self._of_all(_tensors(call.get(argument))).values
        elif op == "nonzero":
            self._masks |= self._of(call["self"]).values

    def _note_stranger(self, func: Any, op: str, call: Mapping[str, Any]) -> None:
        if func.namespace not in ("aten", "prim", "prims"):
            self._notes[
                f"operation {func.namespace}::{op} is not known; what it does with its inputs is not traced"
            ] = None
        if op in _INDEX_ARGUMENT or op in _KEEPS_VALUES:
            return
        for name in ("index", "indices"):
            if any(_is_integer(t) for t in _tensors(call.get(name))):
                self._notes[f"operation {op} takes an index in a way that is not known; its range is not traced"] = None

    def _note_reduction(
        self, op: str, call: Mapping[str, Any], outs: Sequence[Tensor], tags: _Tags, *, scatter: bool
    ) -> _Tags:
        if not outs or not (scatter or op in _LENGTH):
            return tags
        try:
            length = _scatter_length(op, call) if scatter else _LENGTH[op](call, outs[0])
        except (KeyError, IndexError, TypeError, AttributeError):
            self._notes[f"operation {op} was called in a way whose reduction length is not known"] = None
            return tags
        mine = frozenset([len(self._reductions)])
        self._reductions.append(Reduction(op, length, outs[0].dtype, tuple(sorted(tags.fed)), scatter))
        return tags._replace(reductions=tags.reductions | mine, levers=tags.levers | tags.selects)

    def read_as_number(self, t: Tensor) -> None:
        """An element became a Python number: it may decide a size or a branch."""
        if t.dtype == torch.bool:
            return
        tags = self._of(t)
        self._numbers |= tags.values
        self._numbers_exact |= tags.exact

    # -- the conclusion

    def conclude(self, named: Mapping[str, Tensor], outputs: Sequence[Any]) -> Trace:
        reach = [self._of_all(_tensors(o)) for o in outputs]
        ranges = {n: self._range(t, self._bounds[n]) for n, t in named.items() if n in self._bounds and _is_integer(t)}
        return Trace(
            index_ranges=ranges,
            levers={
                n: places for n in ranges if (places := tuple(o for o, tags in enumerate(reach) if n in tags.levers))
            },
            masks=frozenset(n for n in self._masks & named.keys() if not named[n].is_floating_point()),
            structural=self._structural(named, ranges),
            reductions=tuple(self._with_reach(number, r, reach) for number, r in enumerate(self._reductions)),
            notes=tuple(self._notes),
        )

    def _range(self, value: Tensor, bounds: Sequence[int | None]) -> int:
        seen = int(value.max()) + 1 if value.numel() else 1
        return max(1, min(seen if bound is None else bound for bound in bounds))

    def _structural(self, named: Mapping[str, Tensor], ranges: Mapping[str, int]) -> frozenset[str]:
        integers = {n for n, t in named.items() if _is_integer(t)}
        without_role = integers - ranges.keys() - self._masks
        # `ids.max()` read as a number is a range check; the ids themselves read one by one are sizes.
        return frozenset(without_role | (integers & self._numbers_exact) | ((integers & self._numbers) - ranges.keys()))

    def _with_reach(self, number: int, r: Reduction, reach: Sequence[_Tags]) -> Reduction:
        outputs = tuple(o for o, tags in enumerate(reach) if number in tags.reductions)
        return Reduction(r.op, r.length, r.dtype, r.fed_by, r.scatter, outputs)


def _storage_of(t: Tensor) -> StorageWeakRef | None:
    if t.layout is not torch.strided:
        return None
    return StorageWeakRef(t.untyped_storage())  # type: ignore[no-untyped-call]


def _writes_constant(func: Any, op: str) -> bool:
    """One-hot: a constant scattered by index, which a later product turns into a selection."""
    return op == "scatter" and func._overloadname.startswith("value")


def _scatter_length(op: str, call: Mapping[str, Any]) -> int:
    index = call[_INDEX_ARGUMENT[op]]
    parts = [t for t in _tensors(index) if t.dtype != torch.bool]
    return max((t.numel() for t in parts), default=0)
