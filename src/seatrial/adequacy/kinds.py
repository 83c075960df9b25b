"""The kinds of single faults, one small function each, and the table that names them.

A kind applies to certain aten operations; `plant(call)` gives the value that the faulty operation has instead. It must
not write into the call's operands. The same functions run in the reference's own dtypes and, under the oracle's
promotion, in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seatrial.adequacy.carry import (
    LEAST_TERMS,
    TILE,
    carried_matmul,
    carried_scatter,
    carried_sum,
    rounded,
    toward_zero,
)

SMALL_CONSTANT = 1e-2  # below it a constant that is added guards a division or a root


@dataclass(frozen=True)
class Call:
    """One operation of the reference about to be executed.

    op         aten name without namespace and trailing underscore
    arguments  by schema name, defaults filled in
    dtype      dtype of its (first) result in the reference's own run
    seed       chooses the element where a kind needs one
    """

    op: str
    func: Any
    arguments: Mapping[str, Any]
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    seed: int = 0

    def tensor(self, name: str = "self") -> Tensor:
        """An operand that is known to be a tensor."""
        value = self.arguments[name]
        assert isinstance(value, Tensor)
        return value

    def has_tensor(self, name: str) -> bool:
        return isinstance(self.arguments.get(name), Tensor)

    def redo(self, /, **changed: Any) -> Tensor:
        """The (first) result of the operation with other arguments; writes into nothing that is given."""
        values = {**self.arguments, **changed}
        positional, named = [], {}
        for argument in self.func._schema.arguments:
            if argument.name not in values:
                continue
            value = values[argument.name]
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = value.clone()
            if argument.kwarg_only:
                named[argument.name] = value
            else:
                positional.append(value)
        out = self.func(*positional, **named)
        first: Tensor = out if isinstance(out, Tensor) else out[0]
        return first


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    words  what the faulty kernel does, for a person; {op} is the operation
    ops    the operations it applies to
    fits   whether it changes anything there; looks at shapes, dtypes and constants alone
    plant  the faulty value
    carry  the fault is a narrow running sum, which growth and probes see where values do not
    rounds the fault is one rounding, which changes something only where the stored result differs
    """

    name: str
    words: str
    ops: frozenset[str]
    fits: Callable[[Call], bool]
    plant: Callable[[Call], Tensor]
    carry: bool = False
    rounds: bool = False


def _ops(names: str) -> frozenset[str]:
    return frozenset(names.split())


UNARY = _ops("""tanh exp exp2 expm1 rsqrt sqrt sigmoid silu gelu relu abs neg reciprocal log log1p log2 sin cos erf softplus pow
    square clamp clamp_min clamp_max elu leaky_relu hardtanh cumsum hardsigmoid hardswish mish round floor ceil tril triu""")
SUMS = _ops("sum mean")
REDUCTIONS = SUMS | _ops("amax amin logsumexp linalg_vector_norm")
# op -> its two factors
FACTORS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}
MATMULS = frozenset(FACTORS) | _ops("mv dot")
SCATTERS = _ops("index_add scatter_add index_put embedding_dense_backward")
LOOKUPS = {"embedding": "indices", "index_select": "index", "gather": "index"}
ROUNDS = _ops("""add sub mul div pow square sqrt rsqrt exp log tanh sigmoid silu gelu sin cos mean sum reciprocal rsub softplus erf
    cumsum var linalg_vector_norm _softmax _log_softmax log1p logsumexp addcmul lerp""")
CONSTANTS = ("other", "exponent", "min", "max", "alpha", "beta", "value", "eps", "negative_slope", "threshold", "scale")


# -- operands ---------------------------------------------------------------------------------------


def _always(call: Call) -> bool:
    return True


def _floats(call: Call) -> bool:
    return call.dtype is not None and call.dtype.is_floating_point


def _first_is_whole(call: Call) -> bool:
    return _floats(call) and call.has_tensor("self") and tuple(call.tensor().shape) == call.shape


def _other_is_whole(call: Call) -> bool:
    return _floats(call) and call.has_tensor("other") and tuple(call.tensor("other").shape) == call.shape


def _two_tensors(call: Call) -> bool:
    return _floats(call) and call.has_tensor("self") and call.has_tensor("other")


def _reduced(call: Call) -> tuple[int, ...]:
    """The axes that a reduction adds up."""
    x = call.tensor()
    dim = call.arguments.get("dim")
    given = [dim] if isinstance(dim, int) else list(dim or ())
    return tuple(d % x.dim() for d in given) if given else tuple(range(x.dim()))


def _terms(call: Call) -> int:
    """Terms behind one result of a reduction or matmul."""
    if call.op in FACTORS:
        return int(call.tensor(FACTORS[call.op][0]).shape[-1])
    if call.op in ("mv", "dot"):
        return int(call.tensor().shape[-1])
    return math.prod(call.tensor().shape[d] for d in _reduced(call))


def _longest(call: Call) -> int:
    """The longest of the axes that a reduction adds up."""
    x = call.tensor()
    return max(_reduced(call), key=lambda d: x.shape[d])


def _can_halve(call: Call) -> bool:
    return _floats(call) and _terms(call) >= 2 and (call.op in MATMULS or call.tensor().shape[_longest(call)] >= 2)


def _shortened(call: Call, keep: Callable[[int], int]) -> Tensor:
    """A reduction or matmul over the first keep(n) of its n terms along one axis."""
    if call.op in FACTORS:
        left, right = FACTORS[call.op]
        n = keep(int(call.tensor(left).shape[-1]))
        return call.redo(**{left: call.tensor(left)[..., :n], right: call.tensor(right)[..., :n, :]})
    if call.op in ("mv", "dot"):
        other = "vec" if call.op == "mv" else "tensor"
        n = keep(int(call.tensor().shape[-1]))
        return call.redo(self=call.tensor()[..., :n], **{other: call.tensor(other)[:n]})
    axis = _longest(call)
    return call.redo(self=call.tensor().narrow(axis, 0, keep(call.tensor().shape[axis])))


def _without(call: Call, place: Callable[[int], int]) -> Tensor:
    """A sum (mean, norm, matmul) in which the terms at one place count as zero; the divisor stays."""
    name = FACTORS[call.op][0] if call.op in FACTORS else "self"
    x = call.tensor(name)
    axis = x.dim() - 1 if call.op in MATMULS else _longest(call)
    keep = torch.ones(x.shape[axis], dtype=x.dtype, device=x.device)
    keep[place(x.shape[axis])] = 0
    return call.redo(**{name: torch.where(_along(keep, axis, x.dim()) != 0, x, torch.zeros_like(x))})


def _along(values: Tensor, axis: int, dims: int) -> Tensor:
    return values.reshape([-1 if d == axis else 1 for d in range(dims)])


def _index_of(call: Call) -> Tensor | None:
    """The indices of a scatter as one tensor; None where it has several or a mask."""
    if call.op == "index_put":
        indices = call.arguments["indices"]
        first = indices[0] if indices else None
        whole = len(indices) == 1 and isinstance(first, Tensor) and first.dtype != torch.bool
        return first if whole and call.arguments.get("accumulate") else None
    return call.tensor("indices" if call.op == "embedding_dense_backward" else "index")


# -- the faults -------------------------------------------------------------------------------------


def _first(call: Call) -> Tensor:
    return call.tensor().clone()


def _second(call: Call) -> Tensor:
    return call.tensor("other").clone()


def _is_guard(call: Call) -> bool:
    name = _constant(call)
    return name in ("other", "min", "eps") and abs(call.arguments[name]) < SMALL_CONSTANT


def _constant(call: Call) -> str | None:
    """The argument that holds a number worth getting wrong: finite, and neither nought nor one."""
    for name in CONSTANTS:
        value = call.arguments.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if math.isfinite(value) and abs(value) not in (0, 1):
            return name
    return None


def _has_constant(call: Call) -> bool:
    return _floats(call) and _constant(call) is not None


def _scaled_constant(call: Call) -> Tensor:
    name = _constant(call)
    assert name is not None
    return call.redo(**{name: call.arguments[name] * 1.25})


def _no_guard(call: Call) -> Tensor:
    name = _constant(call)
    assert name is not None
    return call.redo(**{name: 0.0})


def _is_spread(call: Call) -> bool:
    return _spread_operand(call) is not None


def _spread_operand(call: Call) -> str | None:
    """An operand of several values that is spread over a larger result: a weight, a bias, a row's scale."""
    if not _two_tensors(call):
        return None
    total = math.prod(call.shape)
    return next((n for n in ("other", "self") if 1 < call.tensor(n).numel() < total), None)


def _one_for_all(call: Call) -> Tensor:
    name = _spread_operand(call)
    assert name is not None
    operand = call.tensor(name)
    return call.redo(**{name: operand.reshape(-1)[:1].expand(operand.numel()).reshape(operand.shape)})


def _swapped(call: Call) -> Tensor:
    return call.redo(self=call.tensor("other"), other=call.tensor())


def _other_sign(call: Call) -> Tensor:
    return call.redo(alpha=-call.arguments.get("alpha", 1))


def _wrong_divisor(call: Call) -> Tensor:
    n = _terms(call)
    return call.redo() * (n / (n - 1))


def _has_correction(call: Call) -> bool:
    return call.has_tensor("self") and "correction" in call.arguments


def _other_correction(call: Call) -> Tensor:
    given = call.arguments.get("correction")
    return call.redo(correction=0 if given is None or given == 1 else 1)


def _softmax_without_maximum(call: Call) -> Tensor:
    x = call.tensor()
    powers = x.to(torch.float32).exp() if call.dtype == torch.float32 else x.exp()
    shares: Tensor = powers / powers.sum(call.arguments["dim"], keepdim=True)
    logarithm: Tensor = shares.log()
    return shares if call.op == "_softmax" else logarithm


def _is_long(call: Call) -> bool:
    if not _floats(call):
        return False
    if call.op in SCATTERS:
        index = _index_of(call)
        simple = call.op != "scatter_add" and index is not None and (call.op != "index_put" or index.dim() == 1)
        return simple and index is not None and index.numel() >= LEAST_TERMS
    return call.op in SUMS | frozenset(FACTORS) and _terms(call) >= LEAST_TERMS


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _carried(dtype: torch.dtype, tile: int = 1) -> Callable[[Call], Tensor]:
    def plant(call: Call) -> Tensor:
        if call.op in FACTORS:
            left, right = (_wide(call.tensor(n)) for n in FACTORS[call.op])
            product = carried_matmul(left, right, dtype, tile)
            if call.op in ("mm", "bmm"):
                return product
            beta, alpha = float(call.arguments.get("beta", 1)), float(call.arguments.get("alpha", 1))
            return beta * _wide(call.tensor()) + alpha * product
        if call.op in SCATTERS:
            return _carried_scatter(call, dtype)
        x, axes = _wide(call.tensor()), _reduced(call)
        rest = [d for d in range(x.dim()) if d not in axes]
        total = carried_sum(x.permute(*rest, *axes).reshape([x.shape[d] for d in rest] + [-1]), dtype, tile)
        total = total / _terms(call) if call.op == "mean" else total
        return total.reshape(call.redo().shape)

    return plant


def _carried_scatter(call: Call, dtype: torch.dtype) -> Tensor:
    index = _index_of(call)
    assert index is not None
    if call.op == "embedding_dense_backward":
        grad = _wide(call.tensor("grad_output"))
        kept = index.reshape(-1) != call.arguments["padding_idx"]
        rows = grad.reshape(-1, grad.shape[-1])[kept]
        base = torch.zeros((call.arguments["num_weights"], grad.shape[-1]), dtype=grad.dtype, device=grad.device)
        return carried_scatter(base, index.reshape(-1)[kept], rows, dtype)
    if call.op == "index_put":
        base, rows = _wide(call.tensor()), _wide(call.tensor("values"))
        return carried_scatter(base, index % base.shape[0], rows.expand(index.shape[0], *base.shape[1:]), dtype)
    axis = call.arguments["dim"]
    base, rows = _wide(call.tensor()).movedim(axis, 0), _wide(call.tensor("source")).movedim(axis, 0)
    rows = rows * call.arguments.get("alpha", 1)
    return carried_scatter(base.contiguous(), index.reshape(-1), rows, dtype).movedim(0, axis)


def _scatters_simply(call: Call) -> bool:
    index = _index_of(call) if _floats(call) else None
    return index is not None and index.numel() > 1


def _overwritten(call: Call) -> Tensor:
    """Each of several contributions to one place starts from the old value: the last one wins."""
    index = _index_of(call)
    assert index is not None
    if call.op == "embedding_dense_backward":
        grad = call.tensor("grad_output")
        flat, rows = index.reshape(-1), grad.reshape(-1, grad.shape[-1])
        kept = flat != call.arguments["padding_idx"]
        base = torch.zeros((call.arguments["num_weights"], rows.shape[-1]), dtype=grad.dtype, device=grad.device)
        return base.index_copy(0, flat[kept], rows[kept])
    x = call.tensor()
    if call.op == "index_put":
        return call.redo(values=x[index] + call.tensor("values"), accumulate=False)
    axis = call.arguments["dim"]
    if call.op == "scatter_add":
        return x.scatter(axis, index, x.gather(axis, index) + call.tensor("src"))
    added = call.tensor("source") * call.arguments.get("alpha", 1)
    return x.index_copy(axis, index.reshape(-1), x.index_select(axis, index.reshape(-1)) + added.to(x.dtype))


def _contribution_lost(call: Call) -> Tensor:
    """One of the contributions counts as zero."""
    name = {"embedding_dense_backward": "grad_output", "index_put": "values", "scatter_add": "src"}.get(
        call.op, "source"
    )
    index, terms = _index_of(call), call.tensor(name)
    assert index is not None
    axis = call.arguments.get("dim", 0) if call.op in ("index_add", "scatter_add") else 0
    if call.op == "embedding_dense_backward":
        flat = terms.reshape(-1, terms.shape[-1])
    else:
        flat = terms.expand(index.shape[0], *call.tensor().shape[1:]) if call.op == "index_put" else terms
    keep = torch.ones(flat.shape[axis], dtype=torch.bool, device=flat.device)
    keep[call.seed % flat.shape[axis]] = False
    changed = torch.where(_along(keep, axis % flat.dim(), flat.dim()), flat, torch.zeros_like(flat))
    return call.redo(**{name: changed.reshape(terms.shape) if call.op == "embedding_dense_backward" else changed})


def _rows_of(call: Call) -> int:
    axis = {"embedding": 0}.get(call.op, call.arguments.get("dim", 0))
    source = call.tensor("weight" if call.op == "embedding" else "self")
    return int(source.shape[axis])


def _has_rows(call: Call) -> bool:
    if call.op != "index":
        return _rows_of(call) >= 2 and call.tensor(LOOKUPS[call.op]).numel() > 0
    parts = [p for p in call.arguments["indices"] if p is not None]
    return bool(parts) and all(p.dtype not in (torch.bool, torch.uint8) for p in parts) and call.tensor().shape[0] >= 2


def _looked_up(call: Call, change: Callable[[Tensor, int], Tensor]) -> Tensor:
    if call.op != "index":
        name = LOOKUPS[call.op]
        return call.redo(**{name: change(call.tensor(name), _rows_of(call))})
    parts: Sequence[Tensor | None] = call.arguments["indices"]
    place = next(i for i, p in enumerate(parts) if p is not None)
    chosen = parts[place]
    assert chosen is not None
    rows = int(call.tensor().shape[place])
    changed = change(chosen % rows, rows)
    return call.redo(indices=[changed if i == place else p for i, p in enumerate(parts)])


def _off_by_one(call: Call) -> Tensor:
    return _looked_up(call, lambda index, rows: (index + 1).clamp(max=rows - 1))


def _never_the_last(call: Call) -> Tensor:
    return _looked_up(call, lambda index, rows: index.clamp(max=rows - 2))


def _branch(name: str) -> Callable[[Call], Tensor]:
    def plant(call: Call) -> Tensor:
        taken = call.arguments[name]
        value = taken if isinstance(taken, Tensor) else torch.tensor(taken)
        return value.expand(call.shape).clone()

    return plant


def _has_branch(name: str) -> Callable[[Call], bool]:
    return lambda call: _floats(call) and (call.has_tensor(name) or isinstance(call.arguments.get(name), int | float))


def _shifted_diagonal(call: Call) -> Tensor:
    return call.redo(diagonal=call.arguments.get("diagonal", 0) + (1 if call.op == "tril" else -1))


_NEIGHBOUR: dict[str, Callable[[Any, Any], Tensor]] = {
    "ge": torch.gt, "gt": torch.ge, "le": torch.lt, "lt": torch.le,
}  # fmt: skip


def _compares_integers(call: Call) -> bool:
    return call.has_tensor("self") and not call.tensor().is_floating_point()


def _neighbouring_comparison(call: Call) -> Tensor:
    return _NEIGHBOUR[call.op](call.tensor(), call.arguments["other"])


def _stores_narrow(call: Call) -> bool:
    return (
        call.dtype in (torch.bfloat16, torch.float16)
        and call.has_tensor("self")
        and call.tensor().dtype in (torch.float32, torch.float64)
    )


def _truncated(call: Call) -> Tensor:
    assert call.dtype is not None
    return toward_zero(call.tensor(), call.dtype)


def _is_wide(call: Call) -> bool:
    return call.dtype in (torch.float32, torch.float64)


def _narrow_intermediate(call: Call) -> Tensor:
    return rounded(call.redo(), torch.bfloat16)


KINDS: tuple[Kind, ...] = (
    Kind("no-operation", "leaves out {op}", UNARY, _first_is_whole, _first),
    Kind("no-factor", "leaves out a factor ({op})", _ops("mul div"), _first_is_whole, _first),
    Kind("no-first-factor", "leaves out the first factor", _ops("mul"),
         lambda c: _other_is_whole(c) and not _first_is_whole(c), _second),
    Kind("no-term", "leaves out a term ({op})", _ops("add sub"), lambda c: _first_is_whole(c) and c.has_tensor("other"), _first),
    Kind("no-first-term", "leaves out the first term", _ops("add"), _other_is_whole, _second),
    Kind("wrong-constant", "has a constant of {op} a quarter too large", ROUNDS | UNARY | _ops("masked_fill native_layer_norm"),
         _has_constant, _scaled_constant),
    Kind("no-guard", "has no epsilon ({op})", _ops("add clamp clamp_min clamp_max native_layer_norm _fused_rms_norm native_group_norm"),
         lambda c: _floats(c) and _is_guard(c), _no_guard),
    Kind("half-the-data", "takes {op} over half of the data", REDUCTIONS | MATMULS, _can_halve,
         lambda c: _shortened(c, lambda n: n // 2)),
    Kind("no-tail", "leaves out the last element ({op})", SUMS | MATMULS | _ops("linalg_vector_norm"), _can_halve,
         lambda c: _without(c, lambda n: n - 1)),
    Kind("lost-term", "leaves out one element of all ({op})", SUMS | frozenset(FACTORS), _can_halve,
         lambda c: _without(c, lambda n: c.seed % n)),
    Kind("lost-contribution", "loses one contribution ({op})", SCATTERS, _scatters_simply, _contribution_lost),
    Kind("bf16-carry", "carries the sum in bfloat16 ({op})", SUMS | frozenset(FACTORS) | SCATTERS, _is_long,
         _carried(torch.bfloat16), carry=True),
    Kind("bf16-carry-of-tiles", "carries the sum of tiles in bfloat16 ({op})", SUMS | frozenset(FACTORS),
         lambda c: _is_long(c) and _terms(c) >= 4 * TILE, _carried(torch.bfloat16, TILE), carry=True),
    Kind("fp16-carry", "carries the sum in float16 ({op})", SUMS | frozenset(FACTORS) | SCATTERS, _is_long,
         _carried(torch.float16), carry=True),
    Kind("wrong-divisor", "divides by n - 1 ({op})", _ops("mean"), lambda c: _floats(c) and _terms(c) > 1, _wrong_divisor),
    Kind("wrong-correction", "divides the variance by another count ({op})", _ops("var var_mean std"), _has_correction,
         _other_correction),
    Kind("one-for-all", "uses one value of an operand for all ({op})", _ops("add sub mul div"), _is_spread, _one_for_all),
    Kind("swapped", "swaps the operands of {op}", _ops("sub div"), _two_tensors, _swapped),
    Kind("wrong-sign", "has the sign of a term wrong ({op})", _ops("add sub"),
         lambda c: _floats(c) and c.has_tensor("other"), _other_sign),
    Kind("no-maximum", "does not subtract the maximum ({op})", _ops("_softmax _log_softmax"), _floats, _softmax_without_maximum),
    Kind("no-mask", "ignores the mask ({op})", _ops("masked_fill"), _first_is_whole, _first),
    Kind("all-true", "takes the mask for all true ({op})", _ops("where"), _has_branch("self"), _branch("self")),
    Kind("all-false", "takes the mask for all false ({op})", _ops("where"), _has_branch("other"), _branch("other")),
    Kind("mask-off-by-one", "has its triangle one off ({op})", _ops("tril triu"), _always, _shifted_diagonal),
    Kind("border-off-by-one", "compares one off ({op})", frozenset(_NEIGHBOUR), _compares_integers, _neighbouring_comparison),
    Kind("index-off-by-one", "looks one row too far ({op})", frozenset(LOOKUPS) | {"index"}, _has_rows, _off_by_one),
    Kind("index-clamped", "never reaches the last row ({op})", frozenset(LOOKUPS) | {"index"}, _has_rows, _never_the_last),
    Kind("overwritten", "overwrites where it should add ({op})", SCATTERS, _scatters_simply, _overwritten),
    Kind("truncated", "cuts off instead of rounding at a store", _ops("_to_copy"), _stores_narrow, _truncated, rounds=True),
    Kind("narrow-value", "rounds the result of {op} to bfloat16", ROUNDS, _is_wide, _narrow_intermediate, rounds=True),
)  # fmt: skip
BY_NAME = {kind.name: kind for kind in KINDS}
