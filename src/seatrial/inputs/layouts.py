"""The same values in other places: layouts that views and autograd give to tensors.

Sources: ROCm/TransformerEngine PR #623 (an upstream gradient of stride 0), unsloth PR #10617 (strided rows), flash-attention
#355 (q, k and v as views of one projection), Jim137/qkan #26 (contiguous, yet not aligned).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seatrial.model import Value
from seatrial.poison import ALL_BITS

if TYPE_CHECKING:
    from torch import Tensor

PADDING_BYTES = 64  # between rows: keeps what alignment a row had


@dataclass(frozen=True)
class LayoutChange:
    """`apply` gives the tensor elsewhere in memory, or None where it has no such layout."""

    name: str
    words: str  # completes "`x` is …"
    apply: Callable[[Tensor], Tensor | None]
    keeps_values: bool = True


def _window(tensor: Tensor) -> Tensor | None:
    """A slice of a larger tensor in every dimension; of one dimension, a column of a matrix."""
    if tensor.numel() == 0 or tensor.dim() == 0:
        return None
    if tensor.dim() == 1:
        return _within(tensor, (tensor.shape[0], 2))
    pad = max(1, PADDING_BYTES // tensor.element_size())
    return _within(tensor, (*(n + 1 for n in tensor.shape[:-1]), tensor.shape[-1] + pad))


def _transposed(tensor: Tensor) -> Tensor | None:
    """The last two dimensions the other way round in memory."""
    if tensor.dim() < 2 or min(tensor.shape[-2:]) < 2 or tensor.numel() == 0:
        return None
    turned = _unowned((*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2]), tensor).transpose(-1, -2)
    _bits(turned).copy_(_bits(tensor))
    return turned


def _offset(tensor: Tensor) -> Tensor | None:
    """One element behind an aligned address, contiguous all the same."""
    if tensor.numel() == 0 or tensor.dim() == 0:
        return None
    flat = _unowned((tensor.numel() + 1,), tensor)[1:].view(tensor.shape)
    _bits(flat).copy_(_bits(tensor))
    return flat


def _expanded(gradient: Tensor) -> Tensor | None:
    """One number for all, among memory that is not its own."""
    if gradient.numel() < 2 or not gradient.is_floating_point():
        return None
    first = gradient.reshape(-1)[:1]
    one = _unowned((3,), gradient)
    _bits(one[1:2]).copy_(_bits(first if bool(first.float() != 0) else (first.float() + 1).to(first.dtype)))
    return one[1:2].view((1,) * gradient.dim()).expand(gradient.shape)


# Of an upstream gradient, which `sum().backward()` hands on so; no other input may be made constant.
EXPANDED = LayoutChange("expanded", "expanded from one number (stride 0)", _expanded, keeps_values=False)
LAYOUTS = {
    layout.name: layout
    for layout in (
        EXPANDED,
        LayoutChange("window", "a slice of a larger tensor", _window),
        LayoutChange("offset", "one element behind an aligned address", _offset),
        LayoutChange("transposed", "a transposed view", _transposed),
    )
}


def laid_out(layout: LayoutChange, inputs: Mapping[str, Value], names: Collection[str]) -> dict[str, Value]:
    """The inputs with the tensors of these names in this layout, on the device where they are."""
    from torch import Tensor

    changed: dict[str, Value] = dict(inputs)
    for name in names:
        value = inputs[name]
        relaid = layout.apply(value) if isinstance(value, Tensor) else None
        changed[name] = value if relaid is None else relaid
    return changed


def gaps_changed(was: Tensor, now: Tensor) -> int:
    """Bytes that differ between the elements of two tensors of one layout: memory that is not theirs."""
    from seatrial.workers.tensors import Layout, same_bits, window

    owned = Layout.of(was).empty()
    window(owned).fill_(1)
    same_bits(owned).zero_()
    gaps = window(owned) == 1
    return int((window(was)[gaps] != window(now)[gaps]).sum())


def _within(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    view = _unowned(shape, tensor)
    view = view[:, 0] if tensor.dim() == 1 else view[tuple(slice(n) for n in tensor.shape)]
    _bits(view).copy_(_bits(tensor))
    return view


def _unowned(shape: tuple[int, ...], like: Tensor) -> Tensor:
    import torch

    from seatrial.workers.tensors import all_bytes

    made = torch.empty(shape, dtype=like.dtype, device=like.device)
    all_bytes(made).fill_(ALL_BITS)
    return made


def _bits(tensor: Tensor) -> Tensor:
    from seatrial.workers.tensors import same_bits

    return same_bits(tensor)
