"""Where kernels run: one file per kind of device, chosen once by its name."""

from __future__ import annotations

import re

from seatrial.devices.base import Device
from seatrial.errors import UsageError

__all__ = ["Device", "pick"]


def pick(spec: str) -> Device:
    """The device called "cpu", "cuda", "cuda:N" or "auto" (CUDA where there is one, the CPU otherwise).

    Raises UsageError when the name is unknown or that device is not there.
    """
    from seatrial.devices.cpu import CpuDevice
    from seatrial.devices.cuda import CudaDevice

    if spec == "cpu":
        return CpuDevice()
    if spec == "auto":
        return CpuDevice() if CudaDevice(0).available() else CudaDevice(0)
    match = re.fullmatch(r"cuda(?::(\d{1,4}))?", spec)
    if match is None:
        raise UsageError(f"{spec!r} is no device; use auto, cpu, cuda or cuda:N")
    device = CudaDevice(int(match[1] or 0))
    if (reason := device.available()) is not None:
        raise UsageError(f"{spec} was asked for, but {reason}; use --device cpu to judge on the CPU")
    return device
