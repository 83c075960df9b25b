"""Roles of inputs found by running the reference, without any annotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from seatrial.numerics.oracle import Oracle
from seatrial.numerics.trace import Reduction, Trace, flatten_outputs, linear_slots, trace
from simulated_kernels import BF16, EMBEDDING, F32


def ids(*shape: int, below: int = 5) -> Tensor:
    return torch.randint(0, below, shape)


def traced(reference: Callable[..., Any], **inputs: Any) -> Trace:
    return trace(reference, list(inputs.values()), list(inputs))


def test_the_main_example() -> None:
    seen = trace(EMBEDDING.reference, EMBEDDING.inputs(), EMBEDDING.input_names)
    assert seen.index_ranges == {"token_ids": 64}
    assert seen.levers == {"token_ids": (0,)}
    assert seen.levers_on(0) == ("token_ids",) and seen.levers_on(1) == ()
    assert seen.structural == frozenset() and seen.masks == frozenset() and seen.notes == ()
    fed_by = ("embed_weight", "grad_output", "norm_weight", "token_ids")
    assert Reduction("index_add", 384, F32, fed_by, scatter=True, outputs=(0,)) in seen.reductions
    (into_norm,) = (r for r in seen.reductions_into(1) if r.op == "sum")
    assert (into_norm.length, into_norm.dtype, into_norm.scatter) == (384, F32, False)


ACCUMULATING: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "index_add_": (lambda i, x: torch.zeros(5, 3).index_add_(0, i, x), {"i": ids(8), "x": torch.randn(8, 3)}),
    "through a view": (
        lambda i, x: (out := torch.zeros(5, 3), out.view(5, 3).index_add_(0, i, x))[0],
        {"i": ids(8), "x": torch.randn(8, 3)},
    ),
    "scatter_add": (lambda i, x: torch.zeros(5).scatter_add(0, i, x), {"i": ids(8), "x": torch.randn(8)}),
    "scatter_reduce": (
        lambda i, x: torch.zeros(5).scatter_reduce(0, i, x, "sum"),
        {"i": ids(8), "x": torch.randn(8)},
    ),
    "index_put_": (
        lambda i, x: torch.zeros(5, 3).index_put_((i,), x, accumulate=True),
        {"i": ids(8), "x": torch.randn(8, 3)},
    ),
    "one-hot product": (lambda i, x: F.one_hot(i, 5).float().T @ x, {"i": ids(8), "x": torch.randn(8, 3)}),
    "reshaped and widened": (
        lambda i, x: torch.zeros(5, 3).index_add_(0, i.reshape(-1).long(), x),
        {"i": ids(2, 4).to(torch.int32), "x": torch.randn(8, 3)},
    ),
}


@pytest.mark.parametrize("how", ACCUMULATING)
def test_an_index_of_an_accumulating_scatter_is_a_lever(how: str) -> None:
    reference, inputs = ACCUMULATING[how]
    seen = traced(reference, **inputs)
    assert seen.index_ranges == {"i": 5}
    assert seen.levers == {"i": (0,)}
    assert any(r.outputs for r in seen.reductions)


GATHERING: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "embedding": (lambda i, w: F.embedding(i, w), {"i": ids(8), "w": torch.randn(5, 3)}),
    "index": (lambda i, w: w[:, i], {"i": ids(8), "w": torch.randn(3, 5)}),
    "index_select": (lambda i, w: w.index_select(1, i), {"i": ids(8), "w": torch.randn(3, 5)}),
    "gather": (lambda i, w: w.gather(1, i), {"i": ids(3, 2), "w": torch.randn(3, 5)}),
    "overwriting scatter": (
        lambda i, x: torch.zeros(5, 3).index_put((i,), x),
        {"i": torch.randperm(5), "x": torch.randn(5, 3)},
    ),
    "class labels": (lambda i, x: F.cross_entropy(x, i), {"i": ids(8), "x": torch.randn(8, 5)}),
    "range checked": (
        lambda i, w: w[i] if int(i.max()) < 5 else w,
        {"i": ids(8), "w": torch.randn(5, 3)},
    ),
}


@pytest.mark.parametrize("how", GATHERING)
def test_an_index_that_adds_nothing_up_is_no_lever(how: str) -> None:
    reference, inputs = GATHERING[how]
    seen = traced(reference, **inputs)
    assert seen.index_ranges == {"i": 5}
    assert seen.levers == {}
    assert "i" not in seen.structural


def test_after_arithmetic_only_the_values_seen_are_known_to_be_legal() -> None:
    seen = traced(lambda i, w: w.reshape(-1)[i * 3 + 1], i=torch.tensor([0, 2, 1]), w=torch.randn(5, 3))
    assert seen.index_ranges == {"i": 3}


def test_an_index_made_of_values_is_not_an_index_input() -> None:
    seen = traced(lambda x, w: w[x.argmax(-1)], x=torch.randn(4, 5), w=torch.randn(5, 3))
    assert seen.index_ranges == {}


def test_positions_and_lengths_are_left_alone() -> None:
    def reference(x: Tensor, positions: Tensor, lengths: Tensor, offsets: Tensor) -> Tensor:
        parts = torch.split(x, lengths.tolist())
        rotated = x * positions.float()[:, None].cos()
        return torch.add(rotated[int(offsets[1]) :], parts[0].sum())

    seen = traced(
        reference,
        x=torch.randn(6, 2),
        positions=torch.arange(6),
        lengths=torch.tensor([4, 2]),
        offsets=torch.tensor([0, 2, 6]),
    )
    assert seen.structural == {"positions", "lengths", "offsets"}
    assert seen.index_ranges == {}


def test_masks_are_told_apart() -> None:
    seen = traced(
        lambda x, keep, kind: torch.where(kind[:, None] == 1, x.masked_fill(keep[:, None], 0.0), x),
        x=torch.randn(6, 2),
        keep=torch.rand(6) > 0.5,
        kind=ids(6),
    )
    assert seen.masks == {"keep", "kind"} and seen.structural == frozenset()


def test_a_reference_that_calls_autograd_is_followed() -> None:
    @torch.no_grad()
    def reference(grad: Tensor, i: Tensor, weight: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            leaf = weight.detach().requires_grad_(True)
            (gradient,) = torch.autograd.grad(F.embedding(i, leaf), leaf, grad)
        return {"loss": grad.sum(), "gradient": gradient}

    inputs = [torch.randn(8, 3), ids(8), torch.randn(5, 3)]
    seen = trace(reference, inputs, ["grad", "i", "weight"], output_names=["gradient", "loss"])
    assert seen.levers == {"i": (0,)}
    assert [r.op for r in seen.reductions_into(1)] == ["sum"]


LENGTHS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "sum": (lambda x: x.sum(-1), 12),
    "mm": (lambda x: x @ x.T, 12),
    "mean": (lambda x: x.mean(), 48),
    "_softmax": (lambda x: x.softmax(0), 4),
    "convolution": (lambda x: F.conv1d(x[None], torch.ones(2, 4, 3)), 12),
    "native_layer_norm": (lambda x: F.layer_norm(x, (12,)), 12),
}


@pytest.mark.parametrize("op", LENGTHS)
def test_reduction_lengths(op: str) -> None:
    reference, length = LENGTHS[op]
    (found,) = (r for r in traced(reference, x=torch.randn(4, 12)).reductions if r.op == op)
    assert (found.length, found.fed_by, found.outputs) == (length, ("x",), (0,))


def test_the_inputs_stay_as_they_were() -> None:
    x = torch.ones(3)
    traced(lambda x: x.mul_(2), x=x)
    assert torch.equal(x, torch.ones(3))


def test_an_operation_that_is_not_known_leaves_a_note() -> None:
    @torch.library.custom_op("seatrial_tests::shift", mutates_args=())
    def shift(x: Tensor) -> Tensor:
        return x + 1

    seen = traced(lambda x: shift(x).sum(), x=torch.randn(3))
    assert any("seatrial_tests::shift" in note for note in seen.notes)


def test_outputs_are_put_in_the_declared_order() -> None:
    assert flatten_outputs({"b": 1, "a": 2}, ["a", "b"]) == [2, 1]
    assert flatten_outputs((1, 2)) == [1, 2]
    assert flatten_outputs(1) == [1]


LINEAR: dict[str, tuple[Callable[..., Any], dict[int, tuple[int, ...]]]] = {
    "product": (lambda x, y: x @ y.T, {0: (0,), 1: (0,)}),
    "affine": (lambda x, y: x + 1, {}),
    "square": (lambda x, y: x * x + y, {}),
    "rounded": (lambda x, y: x.round(), {}),
    "magnitude": (lambda x, y: x.abs() * y, {1: (0,)}),
    "two outputs": (lambda x, y: (x.sum(), x * y.exp()), {0: (0, 1)}),
    "cast to bfloat16 and back": (lambda x, y: x.to(BF16).float() * 3, {0: (0,)}),
}


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("how", LINEAR)
def test_linear_slots(how: str, dtype: torch.dtype) -> None:
    reference, expected = LINEAR[how]
    names = ["p", "q"] if how == "two outputs" else ["p"]
    oracle = Oracle(lambda x, y: reference(x.float(), y.float()), names)
    assert linear_slots(oracle, [torch.randn(3, 4).to(dtype), torch.randn(3, 4).to(dtype)]) == expected
