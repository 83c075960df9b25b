"""Residual add and RMSNorm, tile by tile, with a tile height tuned for seven token counts."""

import triton
import triton.language as tl

ROWS_PER_TILE = {64: 1, 128: 1, 256: 2, 512: 2, 1024: 4, 2048: 8, 4096: 8}


@triton.jit
def add_rmsnorm(x, residual, weight, out, residual_out, eps, tokens, hidden, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < tokens) & (column < hidden)
    at = row * hidden + column
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(residual_out.dtype.element_ty)
    tl.store(residual_out + at, rounded, mask=inside)

    wide = rounded.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / hidden + eps)
    w = tl.load(weight + column, mask=column < hidden, other=0.0).to(tl.float32)
    tl.store(out + at, (wide * rstd[:, None] * w).to(out.dtype.element_ty), mask=inside)


def run(x, residual, norm_weight, eps, out, residual_out):
    tokens, hidden = x.shape
    tuned_for = max((count for count in ROWS_PER_TILE if count <= tokens), default=min(ROWS_PER_TILE))
    height = ROWS_PER_TILE[tuned_for]
    tiles = triton.cdiv(tokens, height)
    x, residual, norm_weight = x.contiguous(), residual.contiguous(), norm_weight.contiguous()
    block = triton.next_power_of_2(hidden)
    if tokens:
        add_rmsnorm[(tiles,)](
            x, residual, norm_weight, out, residual_out, eps, tokens, hidden, ROWS=height, BLOCK=block
        )
