"""Layouts of inputs: which are tried, who is named, what is a limit and what a fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import seatrial
from seatrial.inputs.layouts import LAYOUTS, gaps_changed, laid_out
from seatrial.model import Finding, Outcome, Verdict
from seatrial.policy import STANDARD
from seatrial.workers.tensors import Layout, all_bytes

TENSORS = {
    "matrix": torch.randn(5, 7),
    "vector": torch.randn(9).bfloat16(),
    "batch": torch.randn(2, 3, 4, dtype=torch.float64),
    "ids": torch.randint(0, 9, (6,)),
    "fp8": torch.randn(4, 8).to(torch.float8_e4m3fn),
    "flags": torch.tensor([[True, False], [False, True]]),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("layout", [one for one in LAYOUTS if LAYOUTS[one].keeps_values])
def test_a_layout_keeps_every_value(layout: str, name: str) -> None:
    value = TENSORS[name]
    now = laid_out(LAYOUTS[layout], {name: value}, [name])[name]
    assert isinstance(now, Tensor)
    assert now.dtype is value.dtype and now.tolist() == value.tolist()
    moved = (now.stride(), now.storage_offset()) != (value.stride(), value.storage_offset())
    assert moved or (layout == "transposed" and value.dim() < 2)


def test_a_slice_lies_between_bytes_that_are_not_a_number() -> None:
    view = laid_out(LAYOUTS["window"], {"x": torch.ones(3, 4)}, ["x"])["x"]
    assert isinstance(view, Tensor)
    whole = all_bytes(view).view(torch.float32)
    assert int((whole == 1).sum()) == 12 and int(whole.isnan().sum()) == whole.numel() - 12
    sent = Layout.of(view).empty()
    assert sent.stride() == view.stride()
    other = view.as_strided(view.shape, view.stride()).clone()
    assert gaps_changed(view, view) == 0 and other.is_contiguous() is True


def test_an_expanded_gradient_is_one_number_and_never_nought() -> None:
    for first in (0.0, 2.5):
        gradient = torch.full((3, 4), 7.0)
        gradient[0, 0] = first
        now = laid_out(LAYOUTS["expanded"], {"dy": gradient}, ["dy"])["dy"]
        assert isinstance(now, Tensor)
        assert now.stride() == (0, 0) and now.unique().tolist() == [first or 1.0]
        assert Layout.of(now).empty().stride() == (0, 0)


# -- the check ----------------------------------------------------------------------------------------


def dense(t: Tensor) -> Tensor:
    """As a kernel sees it that knows a base pointer and sizes."""
    strides = [1]
    for n in reversed(t.shape[1:]):
        strides.insert(0, strides[0] * n)
    return torch.as_strided(t, t.shape, strides)


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def make(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(6, 40, generator=g), "w": torch.randn(40, generator=g)}


def any_strides(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def one_assumed(x: Tensor, w: Tensor) -> Tensor:
    return dense(x) * w


def guarded(x: Tensor, w: Tensor) -> Tensor:
    if not (x.is_contiguous() and w.is_contiguous()):
        raise ValueError("dense inputs only")
    return dense(x) * dense(w)


def made_dense(x: Tensor, w: Tensor) -> Tensor:
    return dense(x.contiguous()) * dense(w.contiguous())


def padded_stores(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    if not x.is_contiguous() and x.stride(-1) == 1:
        x.as_strided((1,), (1,), x.storage_offset() + x.shape[-1]).zero_()
    return y


def aligned_only(x: Tensor, w: Tensor) -> Tensor:
    return (x if x.data_ptr() % 16 == 0 else x + 1e-3) * w


def broken(x: Tensor, w: Tensor) -> Tensor:
    return dense(x) * w * 1.5


def audit(kernel: Any, *, any_layout: bool = False, reference: Any = scaled, inputs: Any = make) -> Finding:
    policy = replace(STANDARD, any_layout=any_layout)
    report = seatrial.check(
        kernel, reference=reference, inputs=inputs, policy=policy, device="cpu", only=["assumed-layout"], seed=5
    )
    expected = {Outcome.FAILED: Verdict.REJECTED, Outcome.LIMITED: Verdict.ACCEPTED_WITH_LIMITS}
    first = report.findings[0]
    assert report.verdict is expected.get(
        first.outcome, Verdict.INCONCLUSIVE if first.outcome is Outcome.NOT_APPLICABLE else Verdict.ACCEPTED
    )
    return report.findings[-1] if first.outcome is Outcome.HELD else first


@pytest.mark.parametrize("kernel", [any_strides, made_dense])
def test_honest_kernels_hold_even_where_every_layout_is_demanded(kernel: Any) -> None:
    found = audit(kernel, any_layout=True)
    assert found.outcome is Outcome.HELD and "transposed" in found.reason


def test_a_dense_index_is_a_limit_or_where_demanded_a_fault_and_its_input_is_named() -> None:
    limit, fault = audit(one_assumed), audit(one_assumed, any_layout=True)
    assert limit.outcome is Outcome.LIMITED and fault.outcome is Outcome.FAILED
    for found in (limit, fault):
        assert "wrong without an error when `x` is a slice of a larger tensor" in found.reason
        assert "`w`" not in found.reason.partition(":")[0]
        assert found.details["inputs"] == ["x"]


def test_a_guard_is_worth_a_note_or_where_demanded_a_limit() -> None:
    assert audit(guarded).outcome is Outcome.NOTED
    demanded = audit(guarded, any_layout=True)
    assert demanded.outcome is Outcome.LIMITED and "dense inputs only" in demanded.reason


def test_a_store_between_the_rows_is_found_though_every_value_is_right() -> None:
    found = audit(padded_stores, any_layout=True)
    assert found.outcome is Outcome.FAILED and "between the elements of `x` were overwritten" in found.reason


def test_an_address_off_its_alignment_is_found() -> None:
    found = audit(aligned_only, any_layout=True)
    assert found.outcome is Outcome.FAILED and "`x` is one element behind an aligned address" in found.reason


def test_a_kernel_that_is_wrong_anyhow_is_not_blamed_for_layouts() -> None:
    assert audit(broken, any_layout=True).outcome is Outcome.NOT_APPLICABLE


def backward(grad_output: Tensor, x: Tensor) -> Tensor:
    return grad_output * (1 - torch.tanh(x) ** 2)


def make_backward(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {"grad_output": torch.randn(6, 40, generator=g), "x": torch.randn(6, 40, generator=g)}


def backward_by_strides(grad_output: Tensor, x: Tensor) -> Tensor:
    return grad_output * (1 - torch.tanh(x) ** 2)


def backward_past_one_number(grad_output: Tensor, x: Tensor) -> Tensor:
    first = grad_output.storage_offset() + torch.arange(40) * (grad_output.stride(-1) or 1)
    reach = grad_output.untyped_storage().nbytes() // 4
    if grad_output.stride() == (0, 0):
        grad_output = torch.as_strided(grad_output, (reach,), (1,), 0)[first.clamp(max=reach - 1)].expand(6, 40)
    return grad_output * (1 - torch.tanh(x) ** 2)


def test_an_upstream_gradient_of_stride_nought_is_tried() -> None:
    found = audit(backward_past_one_number, any_layout=True, reference=backward, inputs=make_backward)
    assert found.outcome is Outcome.FAILED and "`grad_output` is expanded from one number" in found.reason
    honest = audit(backward_by_strides, any_layout=True, reference=backward, inputs=make_backward)
    assert honest.outcome is Outcome.HELD and "expanded" in honest.reason


def flattened(x: Tensor, w: Tensor) -> Tensor:
    return (x.view(-1) * w.repeat(6)).view(6, 40)


def test_a_layout_that_the_reference_refuses_is_not_tried() -> None:
    found = audit(one_assumed, any_layout=True, reference=flattened)
    assert found.outcome is Outcome.HELD and "slice" not in found.reason and "aligned" in found.reason


def softmax_backward(grad_output: Tensor, y: Tensor) -> Tensor:
    wide = grad_output.float() * y.float()
    return (wide - y.float() * wide.sum(-1, keepdim=True)).to(y.dtype)


def make_softmax_backward(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    y = torch.softmax(torch.randn(6, 40, generator=g), -1).bfloat16()
    return {"grad_output": torch.randn(6, 40, generator=g).bfloat16(), "y": y}


def rounded_in_between(grad_output: Tensor, y: Tensor) -> Tensor:
    mean = (grad_output.float() * y.float()).sum(-1, keepdim=True)
    if bool((grad_output == grad_output[0, 0]).all()):
        mean = mean * 1.01  # as rounding may leave it where all should cancel
    return (y.float() * (grad_output.float() - mean)).to(y.dtype)


def test_what_dense_constant_gradients_get_wrong_as_well_is_no_fault_of_a_layout() -> None:
    found = audit(rounded_in_between, any_layout=True, reference=softmax_backward, inputs=make_softmax_backward)
    assert found.outcome is Outcome.HELD and "expanded" in found.reason
