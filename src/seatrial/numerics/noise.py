"""How large a rounding error each aten op may legitimately make: one Monte-Carlo sample per `Noise`.

Linear reductions get a data-aware accumulator error. For n terms with sum S and sum of squares Q, adding
them in random order in an accumulator of unit roundoff u leaves an error of about
u * sqrt(n/3 S^2 + n/6 Q): the mean square of the partial sums. It equals the sqrt(n) u sum|t| scale of
Higham and Mary for terms of one sign and stays sqrt(n) below it for zero-mean terms. S is the result,
Q the same op on squared operands.

Matmuls whose operands may run on tensor cores add a drift towards zero (their alignment truncates) that
grows with n u. Everything opaque is run again on inputs moved by one rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from seatrial.numerics.dtypes import FP8, HALF, coarser, is_float, round_to, unit_roundoff
from seatrial.numerics.promote import MATMULS, WIDE, OpCall, Tape, op_names

_STORE_SPREAD = 0.75  # a uniform error of 0.75 u has the deviation 0.43 u that rounding to nearest has
_FUNCTION_ULPS = 4.0  # exp, tanh, … of an honest math library, in units of the roundoff
_CHUNK = 256  # steps of a recurrence that kernels take at a time, at most (Mamba-2, arXiv 2405.21060, default)
_MOST_DECAYS = 1 << 22  # elements of a result of exp that is remembered
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, odd: spreads keys (Knuth, TAOCP 6.4)
_POOL = 1 << 20
_FP8_BITS, _FP8_BLOCK = 13, 128  # of Hopper's units: bits below the largest term; terms until the sum is promoted


@dataclass(frozen=True)
class Contract:
    """Which roundings an honest kernel may make.

    round_operands        matmul operands may be rounded to the I/O dtype (tensor-core practice); a
                          float32 input of the problem may not
    round_intermediates   every intermediate may be rounded to the I/O dtype once; sums stay float32
    tf32                  matmul operands of a float32 problem may be rounded to TF32
    fp8_units             products of float8 operands may be added up in 14 bits, by at most 128 terms at a time
                          (Hopper's units; DeepSeek-V3 report, arXiv 2412.19437, §3.3.2)
    """

    name: str
    round_operands: bool = False
    round_intermediates: bool = False
    tf32: bool = False
    fp8_units: bool = False


F32 = Contract("F32")
TC = Contract("TC", round_operands=True)
IO = Contract("IO", round_operands=True, round_intermediates=True, tf32=True)
CONTRACTS = {c.name: c for c in (F32, TC, IO)}


def contract_on(name: str, capability: tuple[int, int] | None, inputs: Sequence[object]) -> Contract:
    """The contract of this name for a problem with these inputs on a GPU of this compute capability (None: no GPU)."""
    contract = CONTRACTS[name]
    float8 = sum(isinstance(value, Tensor) and value.dtype in FP8 for value in inputs)
    hopper = capability is not None and capability[0] == 9
    return replace(contract, fp8_units=hopper and float8 >= 2 and contract is not F32)


def io_dtype(inputs: tuple[torch.dtype, ...]) -> torch.dtype | None:
    """The narrow format a problem's inputs travel in; None when they are all float32 or wider."""
    narrow: torch.dtype | None = None
    for dtype in inputs:
        if dtype in HALF:
            narrow = dtype if narrow is None else coarser(narrow, dtype)
    if narrow is None and any(dtype in FP8 for dtype in inputs):
        return torch.bfloat16
    return narrow


@lru_cache(maxsize=4)
def _pool(kind: str, device: str) -> Tensor:
    """2^20 random numbers, made once: samples read it from random offsets, which is 20 times cheaper."""
    generator = torch.Generator(device).manual_seed(20240229)
    if kind == "normal":
        return torch.randn(_POOL, generator=generator, dtype=WIDE, device=device)
    return torch.rand(_POOL, generator=generator, dtype=WIDE, device=device).mul_(2).sub_(1)


class Noise:
    """One sample of honest rounding errors under a contract; a `promote.Perturbation`.

    `io` is the problem's I/O dtype (see `io_dtype`), `wide` says that the problem itself is float64, and
    `tape` holds the error scales between the samples of one envelope. With `nearest`, narrow stores really
    round to nearest instead of at random: few distinct values rounded alike give whole rows a lean that
    random errors never show.
    """

    def __init__(
        self, contract: Contract, seed: int, *, io: torch.dtype | None, wide: bool, tape: Tape, nearest: bool = False
    ) -> None:
        self._contract = contract
        self._random = torch.Generator().manual_seed(seed)
        self._io = io
        self._wide = wide
        self._tape = tape
        self._nearest = nearest
        self._prefer = 1.0 if seed % 2 else -1.0
        # Measured on an H200 (benchmarks/gpu_constants.py): 0.1 to 0.5 of u·n/4 for TF32, bf16 and fp16 products.
        self._drift = 0.1 + 0.5 * float(torch.rand((), generator=self._random))
        self._prefixes: dict[tuple[int, ...], tuple[int, Tensor]] = {}  # steps, and sum of |log decay| so far
        self._decays: dict[int, Tensor] = {}  # by storage; kept, so that no address is given twice
        self.on_tape: Callable[[], bool] = lambda: False

    # -- promote.Perturbation

    def prepare(self, call: OpCall) -> OpCall:
        if call.name in _ORDERS_TIES_FREELY and not call.kwargs.get("stable"):
            return self._with_ties_broken(call)
        if call.name not in _MATMULS or (self._wide and call.declared == WIDE):
            return call
        first = _first_operand(call)
        args = list(call.args)
        args[first : first + 2] = [self._rounded_operand(call, operand) for operand in args[first : first + 2]]
        return replace(call, args=tuple(args))

    def _with_ties_broken(self, call: OpCall) -> OpCall:
        """Equal values come in no promised order: every second sample prefers the first of them, the others the last."""
        values = call.args[0]
        if not isinstance(values, Tensor) or values.dtype != WIDE or not values.numel() or not values.dim():
            return call
        at = _ORDERS_TIES_FREELY[call.name]
        dim = call.args[at] if len(call.args) > at else call.kwargs.get("dim", -1)
        n = values.shape[dim]
        place = torch.arange(n, dtype=WIDE, device=values.device) / n
        place = place.view([n if d == dim % values.dim() else 1 for d in range(values.dim())])
        size = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()
        moved = torch.where(torch.isfinite(values), values + self._prefer * _TIE * size * place, values)
        return replace(call, args=(moved, *call.args[1:]))

    def disturb(self, call: OpCall, result: Tensor, which: int) -> Tensor:
        if result.is_complex():
            return self._disturb_complex(call, result)
        if result.dtype != WIDE:
            return result
        if call.name in _SCALES and which == 0:
            return self._disturb_reduction(call, result)
        if call.name in _DECAYS:
            return self._as_a_decay(self._disturb_opaque(call, result, which))
        if call.name in _ONE_ROUNDING or (call.name == "pow" and _is_square(call.args[1])):
            if self._decays and call.name in {"mul", "mul_"}:
                result = self._times_one_of_the_decays(call, result)
            return self._with_rounded_constants(call, self._times_one_plus(result, self._roundoff(call)))
        if "fft" in call.name:
            return result + 4 * self._roundoff(call) * (result * result).mean(-1, keepdim=True).sqrt() * self._normal(
                result
            )
        return self._disturb_opaque(call, result, which)

    def store(self, value: Tensor, declared: torch.dtype, *, carry: bool = False) -> Tensor:
        target = declared
        if self._contract.round_intermediates and self._io is not None and not carry and is_float(declared):
            target = coarser(declared, self._io)
        if target not in HALF or value.dtype != WIDE:
            return value
        if self._nearest:
            return round_to(value, target)
        return self._times_one_plus_alike(value, _STORE_SPREAD * unit_roundoff(target))

    def constant(self, value: Tensor, declared: torch.dtype) -> Tensor:
        """Constants are rounded once, alike wherever they are used; an honest kernel may keep them exact."""
        if value.dtype != WIDE or self._wide or not is_float(declared):
            return value
        target = coarser(declared, self._io) if self._contract.round_intermediates and self._io else declared
        error = (round_to(value, target) - value).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        if not bool(error.any()):
            return value
        return value + error * (1.0 if self._nearest else 2 * float(torch.rand((), generator=self._random)) - 1)

    # -- kinds of error

    def _roundoff(self, call: OpCall) -> float:
        return 2.0**-53 if self._wide and call.declared == WIDE else 2.0**-24

    def _as_a_decay(self, result: Tensor) -> Tensor:
        """A factor exp(x) at one step of a recurrence; chunked kernels make it from differences of prefix sums of x.

        Such a sum is rounded at its own size, which is that of all steps of the chunk (gated linear attention,
        arXiv 2312.06635, §4.3). Steps are told by calls on one shape; a single call is no recurrence.
        """
        made = self._by_prefix(result, result, tuple(result.shape))
        if 1 < made.numel() <= _MOST_DECAYS:
            self._decays[made.untyped_storage().data_ptr()] = made
        return made

    def _times_one_of_the_decays(self, call: OpCall, result: Tensor) -> Tensor:
        """A product with one step of factors that were all made at once."""
        for factor in call.tensors():
            place = factor.untyped_storage().data_ptr()
            decays = self._decays.get(place)
            if decays is not None and 0 < factor.numel() <= decays.numel() // 2:
                return self._by_prefix(result, factor, (place, *factor.shape))
        return result

    def _by_prefix(self, result: Tensor, decay: Tensor, key: tuple[int, ...]) -> Tensor:
        steps, before = self._prefixes.get(key, (0, torch.zeros_like(decay)))
        if steps % _CHUNK == 0:
            before = torch.zeros_like(decay)
        size = before + decay.log().abs().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self._prefixes[key] = (steps + 1, size)
        if steps == 0 or self._wide:
            return result
        return result * (1 + 2.0**-24 * size * self._uniform(decay))

    def _times_one_plus(self, value: Tensor, size: float) -> Tensor:
        one = torch.ones((), dtype=WIDE, device=value.device)
        return torch.add(one, self._uniform(value), alpha=size).mul_(value)  # keeps infinities

    def _times_one_plus_alike(self, value: Tensor, size: float) -> Tensor:
        """The same error for equal values, as rounding gives it: rows that repeat are off together.

        Equal means to 16 significant bits, which is finer than what is rounded here and coarser than the noise that is
        on the values already.
        """
        salt = int(torch.randint(_POOL, (), generator=self._random))
        key = value.contiguous().view(torch.int64).add(1 << 35).bitwise_right_shift_(36)
        key = key.mul_(_ODD).bitwise_right_shift_(30).bitwise_and_(_POOL - 1).bitwise_xor_(salt)
        drawn = _pool("uniform", str(value.device))[key]
        one = torch.ones((), dtype=WIDE, device=value.device)
        return torch.add(one, drawn, alpha=size).mul_(value)

    def _with_rounded_constants(self, call: OpCall, result: Tensor) -> Tensor:
        """A Python constant is rounded once, which moves every element alike."""
        if self._wide:
            return result
        for constant in (a for a in call.args[1:] if isinstance(a, float) and math.isfinite(a) and a):
            error = float(torch.tensor(constant, dtype=torch.float32)) - constant
            if not self._nearest:
                error *= 2 * float(torch.rand((), generator=self._random)) - 1
            if call.name.startswith(("add", "sub", "rsub")):
                result = result + error
            elif abs(error) < abs(constant):
                result = result.mul_(1 + (error if not call.name.startswith("div") else -error) / constant)
        return result

    def _disturb_reduction(self, call: OpCall, result: Tensor) -> Tensor:
        deviation = self._tape.scales.get(call.position) if self.on_tape() else None
        if deviation is None or deviation.shape != result.shape:
            deviation = self._deviation(call, result)
            if self.on_tape():
                self._tape.scales[call.position] = deviation
        disturbed = torch.addcmul(result, deviation, self._normal(result))
        if call.name in _MATMULS and self._on_tensor_cores(call):
            terms = _matmul_length(call)
            disturbed = disturbed.mul_(1 - self._drift * self._roundoff(call) * terms / 4)
        if self._contract.fp8_units and call.name in _MATMULS and self._is_fp8(call, self._operands(call)):
            disturbed = self._through_fp8_units(call, result, disturbed)
        return disturbed

    @staticmethod
    def _is_fp8(call: OpCall, operands: tuple[Tensor, Tensor]) -> bool:
        """Both hold float8 values, or these times a scale: no other narrow format, and no input that is wider."""
        grids = [call.ledger.grid(t) for t in operands]
        return all(
            grid in FP8 or (grid not in HALF and not call.ledger.given(t))
            for grid, t in zip(grids, operands, strict=True)
        )

    def _through_fp8_units(self, call: OpCall, result: Tensor, disturbed: Tensor) -> Tensor:
        """Every product is cut to 2^-13 of the running sum of its block: half of that per term, towards zero, at most."""
        terms, squares = _SCALES[call.name](call, result)
        assert squares is not None
        terms = max(1.0, float(terms))  # a matrix product has one length for all
        block = min(terms, _FP8_BLOCK)
        running = ((result * (block / 2 / terms)).square() + squares * (block / 2 / terms)).sqrt_()
        spread = running.mul_(2.0**-_FP8_BITS * math.sqrt(terms / 3)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        drift = float(torch.rand((), generator=self._random)) * 2.0 ** -(_FP8_BITS + 1) * block / 2
        return torch.addcmul(disturbed - result * drift, spread, self._normal(result))

    def _deviation(self, call: OpCall, result: Tensor) -> Tensor:
        terms, squares = _SCALES[call.name](call, result)
        if squares is None:  # no accumulation: one rounding
            return result.abs() * self._roundoff(call)
        u = self._roundoff(call)
        s2 = result * result
        self._note_condition(call.name, (squares * terms).nan_to_num(posinf=0.0).sum(), s2.nan_to_num(posinf=0.0).sum())
        deviation = (s2 * (terms / 3 + 1) + squares * (terms / 6 + 1)).sqrt_().mul_(u)
        if call.name in _MATMULS and self._on_tensor_cores(call):
            deviation.add_(squares.sqrt(), alpha=u * _matmul_length(call) / 32)
        return deviation.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _note_condition(self, name: str, sizes: Tensor, sums: Tensor) -> None:
        """Keep the worst sum|terms| / |sum terms|; n times the sum of squares bounds the square of sum|terms|."""
        if float(sums) > 0:
            condition = math.sqrt(float(sizes) / float(sums))
            self._tape.conditions[name] = max(condition, self._tape.conditions.get(name, 0.0))

    def _operands(self, call: OpCall) -> tuple[Tensor, Tensor]:
        first = _first_operand(call)
        return call.args[first], call.args[first + 1]

    def _on_tensor_cores(self, call: OpCall) -> bool:
        """Operands that are, or may be made, narrow."""
        if call.declared == WIDE and self._wide:
            return False
        narrow = all(self._is_narrow(call.ledger.grid(t)) for t in self._operands(call))
        return narrow or call.fast_matmul_dtype is not None or self._operand_target() is not None

    @staticmethod
    def _is_narrow(dtype: torch.dtype) -> bool:
        return dtype in HALF or dtype in FP8

    def _operand_target(self) -> float | None:
        """Unit roundoff of the format that the contract lets operands be rounded to."""
        if self._contract.round_operands and self._io is not None:
            return unit_roundoff(self._io)
        return 2.0**-11 if self._contract.tf32 and not self._wide else None

    def _rounded_operand(self, call: OpCall, operand: Tensor) -> Tensor:
        """The operand as the contract lets a kernel round it; itself when it holds no more bits than that.

        Rounded before the matmul, because the error of one operand is common to a whole row of results.
        """
        grid = call.ledger.grid(operand)
        allowed = self._operand_format(call, operand)
        if allowed is None or not is_float(grid) or unit_roundoff(grid) >= allowed:
            return operand
        if self._nearest:
            mantissa, exponent = torch.frexp(operand)
            return torch.ldexp((mantissa / allowed).round_().mul_(allowed), exponent)
        return self._times_one_plus_alike(operand, _STORE_SPREAD * allowed)

    def _operand_format(self, call: OpCall, operand: Tensor) -> float | None:
        allowed = self._operand_target()
        is_wide_input = call.ledger.given(operand) and call.ledger.declared(operand) == torch.float32
        if self._io is not None and is_wide_input:
            allowed = None
        if call.fast_matmul_dtype is not None:
            allowed = max(allowed or 0.0, unit_roundoff(call.fast_matmul_dtype))
        return allowed

    def _disturb_opaque(self, call: OpCall, result: Tensor, which: int) -> Tensor:
        u = self._roundoff(call)
        if call.name in _OF_AN_ANGLE:
            disturbed = self._times_one_plus(result, _FUNCTION_ULPS * u)
            return disturbed.add_(self._uniform(result), alpha=_FUNCTION_ULPS * u)
        terms = _reduction_length(call, result)
        if not call.in_place:
            result = self._rerun_on_moved_inputs(call, result, which, u * math.sqrt(1 + terms / 6))
        if call.name in _SHIFTED_BY_ROW:
            return self._shift_rows(call, result, u)
        disturbed = self._times_one_plus(result, _FUNCTION_ULPS * u)
        if call.name in _THROUGH_EXP:
            size = call.args[0].abs() if call.name in _TIMES_INPUT else 1.0
            return disturbed.add_(self._uniform(result) * size, alpha=_FUNCTION_ULPS * u)
        if call.name in _BACKWARD_THROUGH_EXP:
            size = call.args[0].abs() * (1 + call.args[1].abs())
            return disturbed.add_(self._uniform(result) * size, alpha=_FUNCTION_ULPS * u)
        if call.name in _SCALED_BY_ROW:
            spread: float | Tensor = u * math.sqrt(_row_length(call) / 3)
            if "softmax" in call.name:  # kernels that stream take exp(x - logsumexp): the latter is rounded at its size
                spread = spread + u * _row_size(call)
            return disturbed.mul_(1 + self._per_row(call, result) * spread)
        if terms > 1:
            disturbed.mul_(1 + self._normal(result) * (u * math.sqrt(terms / 3)))
        return disturbed

    def _rerun_on_moved_inputs(self, call: OpCall, result: Tensor, which: int, size: float) -> Tensor:
        moved: tuple[Any, Any] = tree_map(
            lambda t: (
                self._times_one_plus(t, size)
                if isinstance(t, Tensor) and t.dtype == WIDE and not _is_saved(call, t)
                else t
            ),
            (call.args, call.kwargs),
        )
        again = tree_flatten(call.func(*moved[0], **moved[1]))[0][which]
        return again if isinstance(again, Tensor) and again.shape == result.shape else result

    def _per_row(self, call: OpCall, result: Tensor) -> Tensor:
        dims = _row_dims(call, result)
        shape = [1 if d in dims else size for d, size in enumerate(result.shape)]
        return self._normal(result.new_empty(shape))

    def _shift_rows(self, call: OpCall, result: Tensor, u: float) -> Tensor:
        """Results that are offsets from a row's sum: the sum's error is absolute and common to the row."""
        disturbed = self._times_one_plus(result, u)
        if call.name in {"_log_softmax", "logsumexp"}:
            rows = self._per_row(call, result) if call.name == "_log_softmax" else self._normal(result)
            return disturbed.add_(rows, alpha=u * math.sqrt(_row_length(call) / 3 + 1))
        gradient, output, dim = call.args[:3]
        weights = output if call.name == "_softmax_backward_data" else output.exp()
        summed = gradient * output if call.name == "_softmax_backward_data" else gradient
        n = summed.shape[dim] if summed.dim() else 1
        total, squares = summed.sum(dim, keepdim=True), (summed * summed).sum(dim, keepdim=True)
        deviation = (total * total * (n / 3 + 1) + squares * (n / 6 + 1)).sqrt_()
        return disturbed.add_(weights * deviation * self._normal(deviation), alpha=u)

    def _disturb_complex(self, call: OpCall, result: Tensor) -> Tensor:
        parts = torch.view_as_real(result)
        disturbed = self._times_one_plus(parts, 2 * self._roundoff(call))
        if "fft" in call.name:
            row = result.abs().square().mean(-1, keepdim=True).sqrt().unsqueeze(-1)
            disturbed.add_(row * self._normal(parts), alpha=4 * self._roundoff(call))
        return torch.view_as_complex(disturbed)

    # -- random numbers

    def _normal(self, like: Tensor) -> Tensor:
        return self._read("normal", like)

    def _uniform(self, like: Tensor) -> Tensor:
        return self._read("uniform", like)

    def _read(self, kind: str, like: Tensor) -> Tensor:
        pool, count = _pool(kind, str(like.device)), like.numel()
        start = int(torch.randint(_POOL, (), generator=self._random))
        if start + count > _POOL:
            whole, rest = divmod(max(0, start + count - _POOL), _POOL)
            pool = torch.cat([pool[start:], *([pool] * whole), pool[:rest]])
            return pool.view(like.shape)
        return pool[start : start + count].view(like.shape)


# ---------------------------------------------------------------------------------------------------
# What aten's ops are

_MATMULS = MATMULS | {"convolution"}
_ONE_ROUNDING = op_names(
    "add sub mul div add_ sub_ mul_ div_ rsub square reciprocal sqrt rsqrt square_ sqrt_ rsqrt_ reciprocal_"
)
_DECAYS = op_names("exp exp_ exp2 exp2_ sigmoid sigmoid_")
_SCALED_BY_ROW = frozenset({"_softmax", "native_layer_norm", "native_group_norm", "_fused_rms_norm", "_safe_softmax"})
# A kernel computes these from exp: 1 - 2/(1 + exp(2x)) is off by roundings of 1, not of the (smaller) result.
_TIE = 1e-12  # of the largest value: parts equals and nothing else
_ORDERS_TIES_FREELY = {"topk": 2, "sort": 1}  # and where their `dim` stands
# A math library reduces the angle that it is given exactly; rounded once more, 131071 would be off by 0.008.
_OF_AN_ANGLE = frozenset({"sin", "cos"})
_TIMES_INPUT = frozenset({"gelu", "mish", "silu"})
_THROUGH_EXP = frozenset({"tanh", "erf", "softplus", "log_sigmoid_forward", "sigmoid"}) | _TIMES_INPUT
# Their gradients come of the same exp, and are off by roundings of the upstream gradient (times the input).
_BACKWARD_THROUGH_EXP = frozenset({"tanh_backward", "sigmoid_backward", "silu_backward", "gelu_backward"})
_SHIFTED_BY_ROW = frozenset({"_log_softmax", "logsumexp", "_softmax_backward_data", "_log_softmax_backward_data"})
# Arguments that an earlier op saved for its backward: moving them apart from their origin would be double counting.
_SAVED = frozenset({"native_layer_norm_backward", "native_group_norm_backward"})

_Terms = float | Tensor
_Scale = tuple[_Terms, Tensor | None]  # number of terms, sum of their squares (None: nothing is summed)


def _row_size(call: OpCall) -> Tensor:
    """Size of the largest input of each row of a softmax, which is nearly that of its logsumexp."""
    values, dim = call.args[0], call.args[1]
    if not isinstance(values, Tensor) or not values.dim():
        return torch.zeros(())
    return values.amax(dim, keepdim=True).abs().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _is_square(exponent: Any) -> bool:
    return isinstance(exponent, int | float) and exponent == 2


def _is_saved(call: OpCall, tensor: Tensor) -> bool:
    return call.name in _SAVED and any(tensor is a for a in call.args[3:5])


def _first_operand(call: OpCall) -> int:
    return 1 if call.name in {"addmm", "baddbmm", "addmv"} else 0


def _matmul_length(call: OpCall) -> int:
    if call.name == "convolution":
        return int(call.args[1][0].numel())
    return int(call.args[_first_operand(call)].shape[-1])


def _reduction_length(call: OpCall, result: Tensor) -> float:
    """How many terms an opaque op sums into each of its results; 1 when it does not shrink anything."""
    if call.name.startswith("nll_loss") and "backward" not in call.name:
        return float(call.args[1].numel() / max(1, result.numel()))
    largest = max((t.numel() for t in call.tensors() if t.is_floating_point()), default=0)
    return max(1.0, largest / max(1, result.numel()))


def _row_dims(call: OpCall, result: Tensor) -> set[int]:
    if call.name in {"_softmax", "_log_softmax", "_safe_softmax"}:
        return {call.args[1] % result.dim()} if result.dim() else set()
    count = len(call.args[1]) if call.name in {"native_layer_norm", "_fused_rms_norm"} else 1
    return set(range(result.dim() - count, result.dim()))


def _row_length(call: OpCall) -> float:
    x = call.args[0]
    if call.name == "logsumexp":
        dims = call.args[1] if isinstance(call.args[1], list | tuple) else [call.args[1]]
        return float(math.prod(x.shape[d] for d in dims)) if x.dim() else 1.0
    if call.name == "native_group_norm":
        return float(x.numel() / max(1, x.shape[0] * call.args[6]))
    return float(math.prod(x.shape[d] for d in _row_dims(call, x)))


def _matmul_scale(call: OpCall, result: Tensor) -> _Scale:
    first = _first_operand(call)
    a, b = call.args[first], call.args[first + 1]
    (left, rows), (right, columns) = _squared(a, -1), _squared(b, -2 if b.dim() > 1 else -1)
    squares = (left @ right).to(WIDE)
    if b.dim() == 1:
        rows, columns = rows.squeeze(-1), columns.squeeze(-1)
    squares = squares.mul_(rows).mul_(columns)
    alpha = call.kwargs.get("alpha", 1)
    return float(a.shape[-1]), squares if alpha == 1 else squares.mul_(alpha * alpha)


def _squared(operand: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Squares in float32, which is plenty for a scale, and what they were divided by to stay in its range."""
    if operand.numel() == 0:
        return operand.float(), operand.new_ones((1, 1))
    peaks = operand.abs().amax(dim, keepdim=True)
    if bool(((peaks == 0) | ((peaks > 1e-12) & (peaks < 1e12))).all()):
        return operand.float().square_(), operand.new_ones([1] * operand.dim())
    peaks.clamp_(min=1e-280)
    return (operand / peaks).float().square_(), peaks.square_()


def _convolution_scale(call: OpCall, result: Tensor) -> _Scale:
    x, weight = call.args[0], call.args[1]
    peak_x, peak_w = x.abs().max().clamp(min=1e-280), weight.abs().max().clamp(min=1e-280)
    squares = call.func(
        (x / peak_x).float().square_(), (weight / peak_w).float().square_(), None, *call.args[3:], **call.kwargs
    )
    return float(weight[0].numel()), squares.to(WIDE) * (peak_x * peak_w).square()


def _sum_scale(call: OpCall, result: Tensor) -> _Scale:
    x = call.args[0]
    terms = max(1, x.numel() // max(1, result.numel()))
    squares = call.func(x * x, *call.args[1:], **call.kwargs)
    return float(terms), squares / terms if call.name == "mean" else squares


def _cumsum_scale(call: OpCall, result: Tensor) -> _Scale:
    x, dim = call.args[0], call.args[1]
    if not x.dim():
        return 1.0, x * x
    shape = [1] * x.dim()
    shape[dim] = -1
    return torch.arange(1, x.shape[dim] + 1, dtype=WIDE, device=x.device).view(shape), torch.cumsum(x * x, dim)


def _embedding_backward_scale(call: OpCall, result: Tensor) -> _Scale:
    gradient, rest = call.args[0], call.args[1:]
    return call.func(torch.ones_like(gradient), *rest, **call.kwargs), call.func(
        gradient * gradient, *rest, **call.kwargs
    )


def _scatter_scale(call: OpCall, result: Tensor) -> _Scale:
    dim, index, source = call.args[1:4]
    zeros = torch.zeros_like(result)
    if call.name.startswith("scatter_reduce") and call.args[4] != "sum":
        return 1.0, None
    add = torch.index_add if call.name.startswith("index_add") else torch.scatter_add
    squares, counts = add(zeros, dim, index, source * source), add(zeros, dim, index, torch.ones_like(source))
    alpha = call.kwargs.get("alpha", 1)
    return counts, squares * alpha * alpha


def _index_put_scale(call: OpCall, result: Tensor) -> _Scale:
    indices, values = call.args[1], call.args[2]
    zeros = torch.zeros_like(result)
    put = torch.ops.aten.index_put.default
    return put(zeros, indices, torch.ones_like(values), True), put(zeros, indices, values * values, True)


_SCALES: dict[str, Callable[[OpCall, Tensor], _Scale]] = {
    **dict.fromkeys(MATMULS, _matmul_scale),
    "convolution": _convolution_scale,
    **dict.fromkeys(("sum", "mean"), _sum_scale),
    **dict.fromkeys(("cumsum", "cumsum_"), _cumsum_scale),
    "embedding_dense_backward": _embedding_backward_scale,
    **dict.fromkeys(("index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"), _scatter_scale),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), _index_put_scale),
}  # fmt: skip
