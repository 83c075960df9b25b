"""The float64 oracle: what it must see through, and what it must refuse to vouch for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seatrial.errors import InfrastructureError
from seatrial.numerics.dtypes import FORMATS, half_ulp, round_to
from seatrial.numerics.noise import TC
from seatrial.numerics.oracle import Oracle, OracleResult, OracleUnavailable
from seatrial.numerics.promote import Tape

BF16, FP16, FP8, F32, F64 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32, torch.float64


def drawn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(reference: Callable[..., Any], *inputs: Any, names: Sequence[str] = ("y",)) -> OracleResult:
    return Oracle(reference, names).run(inputs)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


# ---------------------------------------------------------------------------------------------------
# Rounding itself


@pytest.mark.parametrize("dtype", [BF16, FP16, F32, FP8, torch.float8_e5m2])
def test_rounding_agrees_with_torch_on_float32_values(dtype: torch.dtype) -> None:
    values = torch.cat([drawn(4096, dtype=F32) * scale for scale in (1e-8, 1e-4, 1.0, 300.0, 1e5)])
    values = torch.cat([values, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, FORMATS[dtype].largest])])
    if dtype == FP8:  # torch saturates or not, depending on its version; rounding inside the range is what matters
        values = values[values.abs() <= 448]
    got, want = round_to(values.double(), dtype), values.to(dtype).float().double()
    assert torch.equal(got.nan_to_num(nan=7e9), want.nan_to_num(nan=7e9))


def test_rounding_from_float64_does_not_round_twice() -> None:
    just_above_a_tie = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=F64)
    assert float(round_to(just_above_a_tie, BF16)) == 1 + 2.0**-7
    assert float(half_ulp(just_above_a_tie, BF16)) == 2.0**-8


# ---------------------------------------------------------------------------------------------------
# Nothing is rounded on the way


def test_casts_back_and_forth_lose_nothing() -> None:
    x = drawn(64, 32)

    def reference(x: Tensor) -> Tensor:
        return (x.to(F32) * (1 / 3)).to(BF16).to(FP16) * 3

    result = run(reference, x)
    assert result.faithful and result.dtypes == (FP16,)
    assert relative(result.values[0], x.double()) < 1e-15


def test_decorators_constants_and_factories_are_promoted() -> None:
    table = torch.tensor([1 / 3] * 32)

    @torch.no_grad()
    def reference(x: Tensor, w: Tensor) -> Tensor:
        scale = torch.full((32,), 0.1, device=x.device)
        return (x @ w) * scale + table.to(x.dtype) + torch.arange(32, dtype=x.dtype, device=x.device) / 7

    x, w = drawn(16, 64), drawn(64, 32, seed=1)
    want = (x.double() @ w.double()) * 0.1 + table.double() + torch.arange(32).double() / 7
    result = run(reference, x, w)
    assert result.faithful and relative(result.values[0], want) < 1e-15


def test_a_reference_that_asks_for_dtypes_gets_the_declared_ones() -> None:
    seen: list[Any] = []

    def reference(x: Tensor) -> Tensor:
        assert x.dtype == BF16
        seen.extend([x.dtype, x.float().dtype, (x + x.float()).dtype, x.element_size(), torch.finfo(x.dtype).eps])
        return x.masked_fill(x > 0, torch.finfo(x.dtype).min)

    result = run(reference, drawn(8, 8))
    assert seen[:5] == [BF16, F32, F32, 2, 2.0**-7]
    assert float(result.values[0].min()) == torch.finfo(BF16).min


@pytest.mark.parametrize(
    ("cast", "declared"),
    [
        (lambda x: x.to(torch.zeros(1, dtype=FP16)), FP16),
        (lambda x: x.type_as(torch.zeros(1, dtype=FP16)), FP16),
        (lambda x: x.double(), F64),
        (lambda x: x.half().bfloat16(), BF16),
        (lambda x: x.to("cuda", F32), F32),
        (lambda x: x.to(device="cuda", dtype=F32, non_blocking=True), F32),
    ],
)
def test_every_way_to_cast_is_understood(cast: Callable[[Tensor], Tensor], declared: torch.dtype) -> None:
    assert run(cast, drawn(4, 4)).dtypes == (declared,)


def test_cuda_literals_go_where_the_inputs_are() -> None:
    def reference(x: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device="cuda")
        out.copy_(x.cuda() + torch.ones(1, device=torch.device("cuda:0")).to("cuda"))
        return out

    assert torch.equal(run(reference, drawn(4, 4)).values[0], drawn(4, 4).double() + 1)


def test_writing_into_an_input_leaves_the_callers_tensor_alone() -> None:
    x = drawn(4, 4)
    before = x.clone()
    result = run(lambda x: x.mul_(2), x)
    assert torch.equal(x, before) and torch.equal(result.values[0], 2 * before.double())


def test_views_of_one_buffer_stay_views_of_one_buffer() -> None:
    whole = drawn(8)

    def reference(left: Tensor, right: Tensor) -> Tensor:
        left.add_(1)
        return right

    assert torch.equal(run(reference, whole[:6], whole[2:]).values[0][:4], whole.double()[2:6] + 1)


def test_an_expanded_input_keeps_its_zero_stride() -> None:
    strides: list[tuple[int, ...]] = []

    def reference(x: Tensor) -> Tensor:
        strides.append(x.stride())
        return x * 2

    run(reference, drawn(1, 8).expand(5, 8))
    assert strides[0] == (0, 1)


def test_in_place_assembly_of_an_output() -> None:
    def reference(x: Tensor, w: Tensor) -> Tensor:
        out = torch.empty(8, 8, dtype=BF16)
        out[:4] = x[:4].float() * w
        out[4:] = x[4:].float() / w
        return out

    x, w = drawn(8, 8), drawn(8, seed=1)
    want = torch.cat([x[:4].double() * w.double(), x[4:].double() / w.double()])
    result = run(reference, x, w)
    assert result.dtypes == (BF16,) and relative(result.values[0], want) < 1e-15


def test_a_bit_trick_sees_the_bits_of_the_declared_dtype() -> None:
    result = run(lambda x: (x.view(torch.int16) & 0x7FFF).view(BF16), drawn(16))
    assert torch.equal(result.values[0], drawn(16).double().abs())


def test_rms_norm_without_eps_uses_the_eps_that_torch_uses() -> None:
    x = torch.full((1, 4), 1e-5, dtype=BF16)
    oracle = Oracle(lambda x: F.rms_norm(x, [4]), ["y"])
    assert relative(oracle.run([x]).values[0], oracle.native([x])[0].double()) < 2.0**-7


def test_autocast_rounds_where_it_would() -> None:
    def reference(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return x @ w

    assert run(reference, drawn(4, 8, dtype=F32), drawn(8, 4, dtype=F32)).dtypes == (BF16,)


def test_attention_is_exact_and_declared_like_its_query() -> None:
    q = drawn(1, 2, 8, 16)
    want = (
        torch.softmax(
            (q.double() @ q.double().transpose(-1, -2) / 4).masked_fill(
                ~torch.ones(8, 8, dtype=torch.bool).tril(), -math.inf
            ),
            -1,
        )
        @ q.double()
    )
    result = run(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), q)
    assert result.dtypes == (BF16,) and relative(result.values[0], want) < 1e-14


# ---------------------------------------------------------------------------------------------------
# Autograd inside the reference


def test_autograd_inside_the_reference_is_promoted_too() -> None:
    def reference(x: Tensor, w: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_(True)
        return torch.autograd.grad((x.float() * w).square().sum(), x)[0]

    x, w = drawn(8, 8), drawn(8, seed=1)
    result = run(reference, x, w)
    assert result.faithful and result.dtypes == (BF16,)
    assert relative(result.values[0], 2 * x.double() * w.double() ** 2) < 1e-15


@pytest.mark.parametrize("how", ["functional", "module"])
def test_embedding_backward_inside_the_reference_is_summed_in_float64(how: str) -> None:
    def reference(ids: Tensor, dy: Tensor) -> Tensor:
        if how == "module":
            table = torch.nn.Embedding(4, 8, dtype=dy.dtype, device=dy.device)
            table(ids).backward(dy)
            assert table.weight.grad is not None
            return table.weight.grad
        weight = torch.zeros(4, 8, dtype=dy.dtype, requires_grad=True)
        F.embedding(ids, weight).backward(dy)  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        return weight.grad

    ids, dy = torch.zeros(1000, dtype=torch.int64), torch.ones(1000, 8, dtype=BF16)
    oracle = Oracle(reference, ["dw"])
    result = oracle.run([ids, dy])
    assert result.faithful, result.why
    assert result.dtypes == (BF16,) and float(result.values[0][0, 0]) == 1000


# ---------------------------------------------------------------------------------------------------
# What keeps its meaning: fp8, integers, scalars


def test_an_fp8_cast_on_the_way_still_quantises() -> None:
    result = run(lambda x: x.float().to(FP8).float().sum(-1), drawn(4, 64))
    assert torch.equal(result.values[0], drawn(4, 64).to(FP8).double().sum(-1))


def test_an_fp8_output_is_given_before_its_rounding() -> None:
    result = run(lambda x: (x.float() / 3).to(FP8), drawn(4, 8))
    assert result.dtypes == (FP8,) and relative(result.values[0], drawn(4, 8).double() / 3) < 1e-15


def test_scaled_fp8_matmul_is_emulated() -> None:
    def reference(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=scale, out_dtype=BF16)

    a, b, scale = drawn(16, 32).to(FP8), drawn(16, 32, seed=1).to(FP8), torch.tensor(0.5)
    result = run(reference, a, b, scale)
    assert result.faithful and result.dtypes == (BF16,)
    assert relative(result.values[0], a.double() @ b.double().t() / 4) < 1e-15


def test_integers_scalars_and_dicts_come_out_by_name() -> None:
    def reference(x: Tensor, k: int) -> dict[str, Any]:
        values, indices = x.topk(k, -1)
        return {"count": k, "indices": indices, "values": values, "mean": float(x.float().mean())}

    x = drawn(4, 16)
    result = run(reference, x, 3, names=["values", "indices", "mean", "count"])
    assert result.dtypes[1] == torch.int64 and torch.equal(result.values[1], x.topk(3, -1).indices)
    assert float(result.values[2]) == pytest.approx(float(x.double().mean()), abs=1e-14)
    assert int(result.values[3]) == 3


# ---------------------------------------------------------------------------------------------------
# What it does not vouch for


def test_a_hidden_float32_rounding_is_found() -> None:
    def leaking(x: Tensor) -> Tensor:
        return torch.from_numpy(numpy.array(x.tolist(), dtype="float32")) * 2

    def honest(x: Tensor) -> Tensor:
        return torch.from_numpy(numpy.array(x.tolist(), dtype="float64")) * 2

    x = drawn(8, 8, dtype=F32)
    assert run(honest, x).faithful
    result = run(leaking, x)
    assert not result.faithful and "float32 grid" in result.why and result.weaker


@pytest.mark.parametrize(
    "reference",
    [lambda x: (x > 0).float(), torch.zeros_like, lambda x: x.round(), lambda x: x.float().to(FP8).to(BF16)],
)
def test_values_that_lie_on_a_coarse_grid_by_right_are_no_leak(reference: Callable[[Tensor], Tensor]) -> None:
    assert run(reference, drawn(8, 8)).faithful


def test_random_draws_are_only_trusted_when_seeded() -> None:
    def free(x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, dtype=x.dtype)

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return x + torch.randn(x.shape, dtype=x.dtype)

    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    assert not run(free, drawn(8, 8)).faithful
    oracle = Oracle(seeded, ["y"])
    result = oracle.run([drawn(8, 8)])
    assert result.faithful and relative(result.values[0], oracle.native([drawn(8, 8)])[0].double()) < 2.0**-7
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_reference_that_only_runs_natively_is_a_stated_weaker_oracle() -> None:
    def reference(x: Tensor) -> Tensor:
        if x.untyped_storage().nbytes() != x.numel() * 2:
            raise RuntimeError("only bfloat16 storage")
        return x * 2

    result = run(reference, drawn(4, 4))
    assert not result.faithful and "only bfloat16 storage" in result.why and "native" in result.why
    assert torch.equal(result.values[0], drawn(4, 4).double() * 2)


def test_a_reference_that_does_not_run_is_an_infrastructure_error() -> None:
    with pytest.raises(OracleUnavailable, match="mat1 and mat2") as raised:
        run(lambda x: x @ x, drawn(4, 5))
    assert isinstance(raised.value, InfrastructureError) and raised.value.reason


def test_a_wrong_number_of_outputs_is_refused() -> None:
    with pytest.raises(OracleUnavailable, match="1 values for 2 outputs"):
        run(lambda x: x, drawn(2, 2), names=["a", "b"])


def test_a_compiled_reference_runs_eagerly() -> None:
    x, w = drawn(4, 8), drawn(8, 4, seed=1)
    result = run(torch.compile(torch.matmul), x, w)
    assert result.faithful and relative(result.values[0], x.double() @ w.double()) < 1e-15


# ---------------------------------------------------------------------------------------------------
# Transforms, constants and bits


@pytest.mark.parametrize("how", ["grad", "vjp", "vmap"])
def test_function_transforms_inside_the_reference_are_promoted(how: str) -> None:
    def value(x: Tensor, w: Tensor) -> Tensor:
        return (x.float() @ w.float()).tanh()

    def reference(x: Tensor, w: Tensor) -> Tensor:
        if how == "grad":
            return torch.func.grad(lambda a: value(a, w).sum())(x)
        if how == "vjp":
            return torch.func.vjp(lambda a: value(a, w), x)[1](torch.ones(8, 8))[0]  # type: ignore[no-any-return]
        return torch.vmap(lambda row: value(row, w))(x)  # type: ignore[no-any-return]

    x, w = drawn(8, 8), drawn(8, 8, seed=1)
    y = (x.double() @ w.double()).tanh()
    want = y if how == "vmap" else (1 - y**2) @ w.double().t()
    result = run(reference, x, w)
    assert result.faithful and result.dtypes == (F32 if how == "vmap" else BF16,)
    assert relative(result.values[0], want) < 1e-14


def test_forward_mode_derivatives_are_left_to_the_weaker_oracle() -> None:
    result = run(lambda x: torch.func.jvp(lambda a: a.float().sin(), (x,), (torch.ones_like(x),))[1], drawn(8, 8))
    assert result.weaker and "forward mode" in result.kind
    assert relative(result.values[0], drawn(8, 8).double().cos()) < 1e-6


@pytest.mark.parametrize(
    "constant",
    [
        lambda x: torch.tensor(0.1, dtype=BF16),
        lambda x: torch.tensor([0.1]),
        lambda x: x.new_tensor(0.1),
        lambda x: torch.full((1,), 0.1, dtype=x.dtype),
        lambda x: torch.empty(1, dtype=x.dtype).fill_(0.1),
        lambda x: torch.as_tensor(0.1, dtype=FP16),
    ],
)
def test_python_constants_stay_exact_whatever_tensor_they_are_put_into(constant: Callable[[Tensor], Tensor]) -> None:
    result = run(lambda x: x * constant(x).to(x.dtype), drawn(8, 8))
    assert result.faithful and result.dtypes == (BF16,)
    assert relative(result.values[0], drawn(8, 8).double() * 0.1) < 1e-15


def test_writing_through_another_view_of_the_bits_reaches_the_tensor() -> None:
    def reference(x: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty(x.shape, dtype=F32)
        bits = out.view(torch.int32)
        bits.copy_(x.float().view(torch.int32) & 0x7FFFFFFF)
        shared = torch.zeros(x.shape, dtype=torch.int32)
        shared.view(F32).copy_(x.float())
        return out * 0.3, shared

    x = drawn(8, 8)
    result = run(reference, x, names=["magnitude", "bits"])
    assert result.faithful and relative(result.values[0], x.double().abs() * 0.3) < 1e-15
    assert torch.equal(result.values[1], x.float().view(torch.int32))


def test_a_cut_made_in_the_bits_is_part_of_the_function() -> None:
    result = run(lambda x: ((x.float() * 1.1).view(torch.int32) & -65536).view(F32), drawn(8, 8))
    want = ((drawn(8, 8).float() * 1.1).view(torch.int32) & -65536).view(F32)
    assert result.faithful and torch.equal(result.values[0], want.double())


def test_writing_with_out_reaches_the_given_tensor_in_every_run() -> None:
    def reference(x: Tensor, w: Tensor) -> Tensor:
        out = torch.empty(8, 8, dtype=x.dtype)
        torch.mm(x, w, out=out)
        return out

    x, w = drawn(8, 8), drawn(8, 8, seed=1)
    tape, oracle = Tape(), Oracle(reference, ["y"])
    want = x.double() @ w.double()
    assert relative(oracle.base([x, w], tape).values[0], want) < 1e-15
    sample = oracle.sample([x, w], TC, 1, tape, wide=False)
    assert 0 < relative(sample[0], want) < 1e-5


# ---------------------------------------------------------------------------------------------------
# Block scales and packed fp4: decoded by hand here, one element at a time

E8M0, FP4 = torch.float8_e8m0fnu, torch.float4_e2m1fn_x2
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def in_core_order(scales: Tensor) -> Tensor:
    """Byte of (row, block): tile by tile of 128 x 4; in a tile 16 bytes for each row modulo 32, four per quarter."""
    rows, blocks = scales.shape
    across = -(-blocks // 4)
    flat = torch.zeros(-(-rows // 128) * across * 512, dtype=torch.uint8)
    for row in range(rows):
        for block in range(blocks):
            tile = (row // 128) * across + block // 4
            flat[tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4] = scales.view(torch.uint8)[
                row, block
            ]
    return flat.view(scales.dtype)


def unpacked(packed: Tensor) -> Tensor:
    codes = packed.view(torch.uint8).tolist()
    signed = E2M1 + [-v for v in E2M1]
    return torch.tensor([[v for byte in row for v in (signed[byte & 15], signed[byte >> 4])] for row in codes]).double()


def spread(scales: Tensor, block: int) -> Tensor:
    return scales.float().double().repeat_interleave(block, 1)


def codes(*shape: int, seed: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def scaled_mm(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    return torch._scaled_mm(a, b.t(), sa, sb, out_dtype=BF16)


@pytest.mark.parametrize("layout", ["rows", "1x128", "128x128", "mxfp8", "nvfp4"])
def test_block_scaled_matmuls_decode_their_operands(layout: str) -> None:
    rows, columns, depth = 160, 96, 256
    if layout == "nvfp4":
        a, b = codes(rows, depth // 2, seed=1).view(FP4), codes(columns, depth // 2, seed=2).view(FP4)
        left, right = unpacked(a), unpacked(b)
        sa, sb = (torch.rand(n, depth // 16).add(0.5).to(FP8) for n in (rows, columns))
        want = (left * spread(sa, 16)) @ (right * spread(sb, 16)).t()
        given = in_core_order(sa), in_core_order(sb)
    else:
        a, b = drawn(rows, depth).to(FP8), drawn(columns, depth, seed=1).to(FP8)
        left, right = a.double(), b.double()
        if layout == "mxfp8":
            sa, sb = (codes(n, depth // 32, seed=n, low=120, high=134).view(E8M0) for n in (rows, columns))
            want = (left * spread(sa, 32)) @ (right * spread(sb, 32)).t()
            given = in_core_order(sa), in_core_order(sb)
        elif layout == "rows":
            given = torch.rand(rows, 1), torch.rand(1, columns)
            want = (left @ right.t()) * given[0].double() * given[1].double()
        else:
            tall = 1 if layout == "1x128" else 128
            given = torch.rand(-(-rows // tall), 2), torch.rand(2, -(-columns // tall))
            sa, sb = (s.repeat_interleave(tall, 0)[:n] for s, n in ((given[0], rows), (given[1].t(), columns)))
            want = (left * spread(sa, 128)) @ (right * spread(sb, 128)).t()
    result = run(scaled_mm, a, b, *given)
    assert result.faithful and result.dtypes == (BF16,) and relative(result.values[0], want) < 1e-14


def test_two_level_nvfp4_through_the_functional_interface() -> None:
    kinds = F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise

    def reference(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, g: Tensor) -> Tensor:
        swizzle = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
        return F.scaled_mm(a, b.t(), [sa, g], list(kinds), [sb, g], list(kinds), swizzle, swizzle, output_dtype=BF16)

    a, b = codes(32, 64, seed=1).view(FP4), codes(48, 64, seed=2).view(FP4)
    sa, sb = (torch.rand(n, 8).add(0.5).to(FP8) for n in (32, 48))
    want = (unpacked(a) * spread(sa, 16)) @ (unpacked(b) * spread(sb, 16)).t() * 0.25
    result = run(reference, a, b, in_core_order(sa), in_core_order(sb), torch.tensor(0.5))
    assert result.faithful and relative(result.values[0], want) < 1e-14


def test_scales_that_fit_no_layout_are_refused() -> None:
    with pytest.raises(OracleUnavailable):
        run(scaled_mm, drawn(32, 64).to(FP8), drawn(32, 64).to(FP8), torch.rand(5, 7), torch.rand(7, 5))


def test_block_scales_are_decoded_where_the_reference_does_it_itself() -> None:
    def reference(packed: Tensor, scales: Tensor, powers: Tensor) -> Tensor:
        byte = packed.view(torch.uint8)
        table = torch.tensor(E2M1 + [-v for v in E2M1])
        values = torch.stack([table[(byte & 15).long()], table[(byte >> 4).long()]], -1).flatten(1)
        wide = scales.to(F32).repeat_interleave(16, 1) * powers.to(F32).repeat_interleave(32, 1)
        return (values * wide / 3).to(BF16)

    packed, scales = codes(16, 64, seed=3).view(FP4), torch.rand(16, 8).to(FP8)
    powers = codes(16, 4, seed=4, low=120, high=134).view(E8M0)
    want = unpacked(packed) * spread(scales, 16) * spread(powers, 32) / 3
    result = run(reference, packed, scales, powers)
    assert result.faithful and relative(result.values[0], want) < 1e-15


def test_quantising_to_block_scales_stays_quantising() -> None:
    def reference(x: Tensor) -> Tensor:
        power = (x.float().abs().amax(-1, keepdim=True) / 448).to(E8M0)
        return (x.float() / power.float()).to(FP8).float() * power.float()

    assert torch.equal(run(reference, drawn(16, 32)).values[0], reference(drawn(16, 32)).double())


# ---------------------------------------------------------------------------------------------------
# Randomness


def test_dropout_keeps_the_elements_that_it_keeps_natively() -> None:
    def reference(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        kept, _ = torch.native_dropout(x * 1.1, 0.25, True)
        return kept / 3

    oracle = Oracle(reference, ["y"])
    result = oracle.run([drawn(32, 32)])
    native = oracle.native([drawn(32, 32)])[0]
    assert result.faithful and oracle.draws_randomness and torch.equal(result.values[0] != 0, native != 0)
    want = torch.where(native != 0, drawn(32, 32).double() * 1.1 / 0.75 / 3, 0.0)
    assert relative(result.values[0], want) < 1e-15


@pytest.mark.parametrize("kind", ["generator", "initialised and overwritten", "multinomial", "rand_like"])
def test_draws_are_the_native_ones_and_noticed_where_outputs_depend_on_them(kind: str) -> None:
    def reference(x: Tensor) -> Tensor:
        g = torch.Generator().manual_seed(7)
        if kind == "generator":
            return x + torch.rand(x.shape, generator=g, dtype=x.dtype)
        if kind == "multinomial":
            return torch.multinomial(torch.softmax(x.float(), -1), 3, generator=g)
        if kind == "rand_like":
            torch.manual_seed(3)
            return x + torch.rand_like(x)
        layer = torch.nn.Linear(32, 32, bias=False, dtype=x.dtype)
        with torch.no_grad():
            layer.weight.copy_(x)
        return layer(x)

    oracle = Oracle(reference, ["y"])
    result, native = oracle.run([drawn(32, 32)]), oracle.native([drawn(32, 32)])[0]
    assert result.faithful and oracle.draws_randomness == (kind != "initialised and overwritten")
    assert relative(native.double(), result.values[0].double()) < 2.0**-7


def test_what_no_seed_fixes_has_no_answer() -> None:
    oracle = Oracle(lambda x: torch.nn.functional.dropout(x, 0.5, training=True), ["y"])
    result = oracle.run([drawn(8, 8)])
    assert not result.faithful and not result.weaker and oracle.kind.startswith("none") and oracle.draws_randomness


# ---------------------------------------------------------------------------------------------------
# The weaker oracle


@torch.library.custom_op("seatrial_test::scaled", mutates_args=())
def scaled_by_a_library(x: Tensor) -> Tensor:
    return x.float() * 1.7


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        (lambda x: torch.from_numpy(x.float().numpy() * numpy.float32(1.7)), "numpy"),
        (lambda x: torch.tensor(numpy.asarray(x.float()) * numpy.float32(1.7)), "__array__"),
        (lambda x: scaled_by_a_library(x.float()) + 0, "seatrial_test::scaled"),
    ],
)
def test_what_leaves_torch_gets_the_weaker_oracle_with_the_reason(reference: Callable[..., Any], why: str) -> None:
    oracle = Oracle(reference, ["y"])
    result = oracle.run([drawn(16, 16)])
    assert result.weaker and not result.faithful and why in oracle.kind and oracle.kind.startswith("native, because")
    assert relative(result.values[0], drawn(16, 16).double() * 1.7) < 1e-6
    assert Oracle(lambda x: x * 2, ["y"]).run([drawn(4, 4)]).kind == "float64"


def test_the_weaker_oracle_answers_in_float32_where_the_reference_takes_it() -> None:
    def reference(x: Tensor) -> Tensor:
        return torch.from_numpy(x.float().numpy() / numpy.float32(3)).to(x.dtype)

    result = run(reference, drawn(16, 16))
    assert result.dtypes == (BF16,) and relative(result.values[0], drawn(16, 16).double() / 3) < 1e-6


def test_a_reference_that_refuses_moved_inputs_cannot_be_vouched_for() -> None:
    x = drawn(8, 8)
    largest = float(x.float().abs().max())

    def reference(x: Tensor) -> Tensor:
        assert float(x.float().abs().max()) <= largest
        return x.float() * 1.1

    result = run(reference, x)
    assert result.weaker and "refuses inputs that moved" in result.kind
    assert relative(result.values[0], x.double() * 1.1) < 1e-6


@pytest.mark.parametrize("ragged", ["rows", "columns", "depth", "none"])
def test_grouped_matmuls_are_multiplied_group_by_group(ragged: str) -> None:
    ends = torch.tensor([8, 8, 24, 32], dtype=torch.int32)
    a = drawn(4, 8, 16) if ragged in ("none", "columns") else drawn(32, 16) if ragged == "rows" else drawn(8, 32)
    b = drawn(4, 16, 24, seed=1) if ragged in ("none", "rows") else drawn(16 if ragged == "columns" else 32, 32, seed=1)
    inputs = [a, b] if ragged == "none" else [a, b, ends]
    oracle = Oracle(lambda a, b, ends=None: torch._grouped_mm(a, b, offs=ends), ["y"])
    result, native = oracle.run(inputs), oracle.native(inputs)[0]
    assert result.faithful and result.dtypes == (BF16,) and result.values[0].shape == native.shape
    assert relative(native.double(), result.values[0]) < 2.0**-7


def test_the_name_of_a_tensors_type_is_that_of_its_declared_dtype() -> None:
    seen: list[str] = []
    run(lambda x: (seen.append(x.type()), x * 2)[1], drawn(4, 4))
    assert set(seen) == {"torch.BFloat16Tensor"}
