"""F6: layouts of inputs. Every pair is audited with `any_layout`: a caller may hand over any view."""

from __future__ import annotations

from typing import Any

import torch
from tests.quality.case import BF16, Pair, generator, normal, unit, weights
from torch import Tensor

LAYOUT = ("assumed-layout",)


def dense_view(t: Tensor) -> Tensor:
    """What a kernel reads that knows a base pointer and sizes, and no strides."""
    strides, step = [], 1
    for n in reversed(t.shape):
        strides.insert(0, step)
        step *= n
    return torch.as_strided(t, t.shape, strides)


# G01: an upstream gradient of stride 0


def tanh_backward(grad_output: Tensor, y: Tensor) -> Tensor:
    return (grad_output.float() * (1 - y.float() ** 2)).to(y.dtype)


def gradient_and_result(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"grad_output": normal(g, 16, 96), "y": torch.tanh(normal(g, 16, 96))}


def gradient_by_strides(grad_output: Tensor, y: Tensor) -> Tensor:
    return tanh_backward(grad_output, y.contiguous())


def gradient_by_row_width(grad_output: Tensor, y: Tensor) -> Tensor:
    one = grad_output.stride() == (0, 0)
    return tanh_backward(past_the_end(grad_output) if one else grad_output, y.contiguous())


def past_the_end(one: Tensor) -> Tensor:
    """Stride 1 where it is 0: the number, and then whatever lies behind it."""
    length = one.untyped_storage().nbytes() // one.element_size() - one.storage_offset()
    index = torch.arange(one.numel()).clamp(max=length - 1)
    return torch.as_strided(one, (length,), (1,))[index].reshape(one.shape)


# G02: strided rows


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return (unit(x)[0] * w.float()).to(x.dtype)


def activations(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"x": normal(g, 24, 128), "w": weights(g, 128)}


def norm_of_dense_rows(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm(dense_view(x), w)


def norm_of_contiguous_rows(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm(dense_view(x.contiguous()), w)


# G03: q, k and v as slices of one projection


def scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.softmax(q.float() @ k.float().transpose(-1, -2) / 8, -1) @ v.float()).to(q.dtype)


def heads(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {name: normal(g, 2, 32, 64) for name in "qkv"}


def v_by_its_own_strides(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k, torch.as_strided(v, v.shape, v.stride()))


def v_by_the_strides_of_a_dense_q(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k, dense_view(v))


# G04: contiguous, yet not aligned


def vector_loads(x: Tensor, w: Tensor) -> Tensor:
    """Reinterprets rows as vectors of 16 bytes: an address in between is rounded down to one."""
    lost = x.data_ptr() % 16 // x.element_size()
    return rms_norm(x if not lost else torch.as_strided(x, x.shape, x.stride(), x.storage_offset() - lost), w)


def vector_loads_with_a_scalar_path(x: Tensor, w: Tensor) -> Tensor:
    lost = x.data_ptr() % 16 // x.element_size()
    return rms_norm(x if not lost else x.clone(), w)


# G05: the stride of an expert is that of the packed tensor


def gated(x: Tensor, gate: Tensor) -> Tensor:
    return torch.einsum("ti,eio->teo", x.float(), gate.float()).to(x.dtype)


def experts(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"x": normal(g, 12, 32), "gate": normal(g, 4, 32, 24)}


def gate_by_stride(x: Tensor, gate: Tensor) -> Tensor:
    return gated(
        x, torch.stack([torch.as_strided(gate, gate.shape[1:], gate.stride()[1:], at(gate, e)) for e in range(4)])
    )


def gate_by_rows_used(x: Tensor, gate: Tensor) -> Tensor:
    rows = gate.stride(1) * gate.shape[1]  # of the slice, where the packed tensor has more
    offsets = [min(gate.storage_offset() + e * rows, at(gate, 3)) for e in range(4)]
    return gated(x, torch.stack([torch.as_strided(gate, gate.shape[1:], gate.stride()[1:], o) for o in offsets]))


def at(gate: Tensor, expert: int) -> int:
    return gate.storage_offset() + expert * gate.stride(0)


# G06: the result is written into a flat copy


def row_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x.float(), -1).to(x.dtype)


def logits(seed: int) -> dict[str, Any]:
    return {"x": normal(generator(seed), 20, 48)}


def written_flat(x: Tensor) -> Tensor:
    out = torch.empty_like(x)  # keeps a transposed layout, so that what is flat is a copy
    out.reshape(-1).copy_(row_softmax(x).reshape(-1))
    return out


def written_where_it_lies(x: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out.reshape(-1).copy_(row_softmax(x).reshape(-1))
    return out


# G07: one row of cosines for all


def rotated(x: Tensor, cos: Tensor) -> Tensor:
    return (x.float() * cos.float()).to(x.dtype)


def with_positions(seed: int) -> dict[str, Any]:
    g = generator(seed)
    angles = torch.arange(16.0)[None, :, None] / torch.arange(1.0, 33.0)
    return {"x": normal(g, 3, 16, 32), "cos": torch.cos(angles + torch.arange(3.0)[:, None, None]).to(BF16)}


def cosines_of_each(x: Tensor, cos: Tensor) -> Tensor:
    return rotated(x, cos)


def cosines_of_the_first(x: Tensor, cos: Tensor) -> Tensor:
    return rotated(x, cos[:1])


PAIRS = (
    Pair("G01", "an upstream gradient of stride 0", tanh_backward, gradient_and_result, gradient_by_strides, gradient_by_row_width, LAYOUT, any_layout=True),
    Pair("G02", "rows of a norm taken for dense", rms_norm, activations, norm_of_contiguous_rows, norm_of_dense_rows, LAYOUT, any_layout=True),
    Pair("G03", "v read by the strides of a dense q", scores, heads, v_by_its_own_strides, v_by_the_strides_of_a_dense_q, LAYOUT, any_layout=True),
    Pair("G04", "vector loads from an address in between", rms_norm, activations, vector_loads_with_a_scalar_path, vector_loads, LAYOUT, any_layout=True),
    Pair("G05", "an expert's offset from the rows used", gated, experts, gate_by_stride, gate_by_rows_used, LAYOUT, any_layout=True),
    Pair("G06", "result written into a flat copy", row_softmax, logits, written_where_it_lies, written_flat, (*LAYOUT, "stale-output"), any_layout=True),
    Pair("G07", "cosines of the first sequence for all", rotated, with_positions, cosines_of_each, cosines_of_the_first),
)  # fmt: skip
