"""Operands of a scaled matmul, decoded to float64: fp8 and packed fp4 values times the scales of their blocks.

Layouts are those of `torch._scaled_mm` and `torch.nn.functional.scaled_mm`: one scale per tensor, per row
(1 x K), per 1 x 128 or 128 x 128 block in float32; per 1 x 32 block in e8m0 (MXFP8, MXFP4); per 1 x 16 block in
e4m3 (NVFP4), with a scale per tensor on top where two are given. Scales of 16 and 32 blocks come in the order
in which Blackwell's tensor cores read them: tiles of 128 rows x 4 blocks, a tile as 32 x (4 x 4) (the
"1D block scaling factors layout" of the cuBLAS documentation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from seatrial.numerics.dtypes import E8M0, FP4

WIDE = torch.float64
_TILE_ROWS, _TILE_BLOCKS = 128, 4
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_RECIPES = ("tensor", "row", (1, 16), (1, 32), (1, 128), (128, 128))  # torch.nn.functional.ScalingType, in order


def decode_fp4(packed: Tensor) -> Tensor:
    """Packed e2m1 of shape (..., K/2) as float64 of shape (..., K); the low half of a byte comes first."""
    codes = packed.view(torch.uint8).long()
    values = torch.tensor([*_FP4_VALUES, *(-v for v in _FP4_VALUES)], dtype=WIDE, device=packed.device)
    return torch.stack([values[codes & 15], values[codes >> 4]], -1).flatten(-2)


def rows_of(operand: Tensor) -> Tensor:
    """A matmul operand of shape (rows, K) as float64 values; packed fp4 has K/2 columns."""
    if operand.dtype != FP4:
        return operand
    # the last axis must be the packed one, whatever strides a transposed operand came with
    return decode_fp4(operand.view(torch.uint8).contiguous().view(FP4))


def scaled_rows(
    values: Tensor,
    scale: Tensor,
    declared: torch.dtype,
    *,
    packed: bool,
    recipe: int | None = None,
    swizzled: bool | None = None,
) -> Tensor:
    """`values` (rows, K), decoded, times their scales.

    `scale` is float64 and `declared` the dtype it came in; `recipe` is a torch ScalingType, deduced from dtype and
    shape when None. Raises NotImplementedError for a layout that is none of those in the module docstring.
    """
    rows, columns = values.shape
    block = _block(scale, declared, rows, columns, packed=packed) if recipe is None else _RECIPES[recipe]
    if block == "tensor":
        return values * scale.reshape(())
    if block == "row":
        return values * scale.reshape(rows, 1)
    assert isinstance(block, tuple)
    tall, wide = block
    down, across = -(-rows // tall), -(-columns // wide)
    laid_out = _laid_out(scale, down, across, swizzled=swizzled, may_be_swizzled=wide < _TILE_ROWS)
    spread = laid_out.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return values * spread


def _block(scale: Tensor, declared: torch.dtype, rows: int, columns: int, *, packed: bool) -> str | tuple[int, int]:
    if scale.numel() == 1:
        return "tensor"
    if declared == E8M0:
        return (1, 32)
    if declared == torch.float8_e4m3fn and packed:
        return (1, 16)
    across, shape = -(-columns // 128), tuple(scale.shape)
    if shape == (rows, 1):
        return "row"
    if shape == (rows, across):
        return (1, 128)
    if shape == (-(-rows // 128), across):
        return (128, 128)
    raise NotImplementedError(f"a scaled matmul with {declared} scales of shape {shape} for {rows} x {columns} values")


def _laid_out(scale: Tensor, down: int, across: int, *, swizzled: bool | None, may_be_swizzled: bool) -> Tensor:
    """The scales as (down, across), whether they came like that, transposed, or in the order of the tensor cores."""
    tiles_down, tiles_across = -(-down // _TILE_ROWS), -(-across // _TILE_BLOCKS)
    padded = tiles_down * _TILE_ROWS * tiles_across * _TILE_BLOCKS
    if may_be_swizzled and swizzled is not False and scale.numel() == padded:
        tiles = scale.reshape(tiles_down, tiles_across, 32, 4, 4).permute(0, 3, 2, 1, 4)
        return tiles.reshape(tiles_down * _TILE_ROWS, tiles_across * _TILE_BLOCKS)[:down, :across]
    if tuple(scale.shape) == (down, across) or (scale.dim() == 1 and scale.numel() == down * across):
        return scale.reshape(down, across)
    if tuple(scale.shape) == (across, down):
        return scale.t()
    raise NotImplementedError(
        f"block scales of shape {tuple(scale.shape)} ({math.prod(scale.shape)} of them) for {down} x {across} blocks"
    )


def only_known_swizzles(swizzles: Sequence[int]) -> bool | None:
    """What a list of torch SwizzleType says: swizzled, not swizzled, or None when it says nothing."""
    if not swizzles:
        return None
    if swizzles[0] not in (0, 1):
        raise NotImplementedError(f"scales in swizzle {swizzles[0]}")
    return swizzles[0] == 1
