"""Memory between two guard bands: what lies before and behind a tensor is not the kernel's to read or to write.

The tensor that a kernel gets has a storage of its own size, at offset 0, as any other; the bands lie around that storage and
are found by address alone. Filled with all bits set they read as NaN in every float format that has one and as -1
in integers, so that a read beyond the ends shows in the values; filled with another byte they show that a result depends
on them at all; and a byte that is no longer what it was shows a write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from seatrial.workers.wire import Buffer

BAND = 1 << 16  # bytes on each side: some tiles, and a multiple of every alignment that an allocator gives


@dataclass(frozen=True)
class Guarded:
    """`base` is never shown to the candidate. `byte` fills the bands.

    A view of a larger tensor has a storage that begins before it and ends behind it: `lead` and `tail` bytes of its
    `nbytes`, which are no more the kernel's than the bands are.
    """

    base: Tensor
    nbytes: int
    byte: int
    lead: int = 0
    tail: int = 0

    @classmethod
    def make(cls, nbytes: int, device: str, byte: int, *, lead: int = 0, tail: int = 0) -> Guarded:
        """So many bytes, contents undefined, between two bands. Raises what the allocator raises."""
        made = cls(torch.empty(nbytes + 2 * BAND, dtype=torch.uint8, device=device), nbytes, byte, lead, tail)
        for band in made.bands():
            band.fill_(byte)
        return made

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> Tensor:
        """A tensor on a storage that begins and ends where the bands do; offset and strides count elements."""
        made = torch.empty(0, dtype=dtype, device=self.base.device)
        if self.nbytes == 0:
            return made.set_(made.untyped_storage(), 0, tuple(shape), tuple(strides))
        return made.set_(self._inside().untyped_storage(), offset, tuple(shape), tuple(strides))

    def _inside(self) -> Tensor:
        if self.base.device.type == "cpu":
            return torch.frombuffer(
                memoryview(cast(Buffer, self.base.numpy()))[BAND : BAND + self.nbytes], dtype=torch.uint8
            )
        return torch.as_tensor(_Lent(self.base[BAND : BAND + self.nbytes]), device=self.base.device)

    def bands(self) -> tuple[Tensor, Tensor]:
        """The bytes before and behind what the kernel may touch."""
        return self.base[: BAND + self.lead], self.base[BAND + self.nbytes - self.tail :]

    def content(self) -> Tensor:
        """The bytes between the bands, by our own address."""
        return self.base[BAND : BAND + self.nbytes]

    def broken(self) -> str:
        """ "before", "behind" or "around" where a band was written to; empty when both are whole."""
        hurt = [(int(band.min()), int(band.max())) != (self.byte, self.byte) for band in self.bands()]
        return {(True, False): "before", (False, True): "behind", (True, True): "around"}.get((hurt[0], hurt[1]), "")


class _Lent:
    """Device memory in the protocol by which libraries lend it; keeps the block alive for as long as it is lent."""

    def __init__(self, block: Tensor) -> None:
        self._block = block
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (block.numel(),),
            "typestr": "|u1",
            "data": (block.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
