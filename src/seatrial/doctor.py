"""What this machine can and cannot verify, and why: the text of `seatrial doctor`."""

from __future__ import annotations

import importlib.util
import platform
import shutil

import seatrial


def examine() -> list[str]:
    """One line per fact; each line that takes something away says what and why."""
    import torch

    from seatrial.devices.cpu import CpuDevice
    from seatrial.devices.cuda import CudaDevice
    from seatrial.workers.process import ForkServer

    lines = [
        f"seatrial {seatrial.__version__}, python {platform.python_version()}, torch {torch.__version__}",
        f"system: {platform.system()} {platform.release()} {platform.machine()}",
        "",
    ]
    for name, device in (("cpu", CpuDevice()), ("cuda", CudaDevice(0))):
        reason = device.available()
        if reason:
            lines.append(f"no   {name}: {reason}")
            continue
        facts = ", ".join(f"{k} {v}" for k, v in device.facts().items())
        lines.append(f"yes  {name}: {facts}")
    lines += _tools()
    lines += ["", "A candidate's process is confined by:"]
    with ForkServer() as server:
        lines += [f"     {layer}: {words}" for layer, words in server.isolation().items()]
    return lines


def _tools() -> list[str]:
    triton = importlib.util.find_spec("triton") is not None
    return [
        "yes  Python and PyTorch kernels",
        f"{'yes' if triton else 'no '}  Triton kernels: {'installed, on CUDA' if triton else 'triton is not installed'}",
        "no   C++ and CUDA sources: not built yet",
        f"{'yes' if shutil.which('compute-sanitizer') else 'no '}  compute-sanitizer on the PATH (not used yet)",
    ]
