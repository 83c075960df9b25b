"""What the rest of seatrial may ask of a device. Parent and child use the same object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Device(Protocol):
    """One device. Creating it touches no driver; the first other call may.

    The judged stream is the one that was current when `prepare` was called; work that a kernel leaves on
    any other stream is not part of its result.
    """

    name: str  # "cpu", "cuda:0": what torch.device() understands

    def available(self) -> str | None:
        """None when it can be used, otherwise the reason why not, as half a sentence."""

    def facts(self) -> dict[str, str]:
        """What it is, for the report: model, memory, driver."""

    def prepare(self) -> None:
        """Makes the device current and ready, and remembers its current stream as the judged one."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy of a dense tensor there (the tensor itself when it is there already)."""

    def snapshot(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Dense copies of `tensors` on the device, as the judged stream sees them now.

        Returns when that stream has reached this point; other streams are not waited for.
        """

    def synchronise(self) -> float:
        """Waits for all work on the device, on every stream; the seconds that took."""

    def free_memory(self) -> int:
        """Bytes that can be allocated there now."""

    def settings(self) -> dict[str, str]:
        """Settings of this process that a kernel may not change: current device, stream, generator."""
