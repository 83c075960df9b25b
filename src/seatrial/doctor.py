"""What this machine can and cannot verify, and why: the text of `seatrial doctor`."""

from __future__ import annotations

import importlib.util
import os
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
    lines += ["", "What this machine cannot verify:"]
    lines += [
        f"     {what}" for what in not_verifiable(has_cuda=not CudaDevice(0).available(), cores=os.cpu_count() or 1)
    ]
    lines += ["", "A candidate's process is confined by:"]
    with ForkServer() as server:
        lines += [f"     {layer}: {words}" for layer, words in server.isolation().items()]
    return lines


def not_verifiable(*, has_cuda: bool, cores: int) -> list[str]:
    """What no audit on this machine can say, one line each with the reason."""
    missing = [
        "C++ and CUDA sources: they are not built yet",
        "races inside a kernel that do not show in its results: no sanitizer is run yet",
    ]
    if cores < 2:
        missing.append("races between threads of a CPU kernel: one core runs them one after the other")
    if has_cuda:
        return [*missing, "other kinds of GPU than the one above: tile sizes, precision and memory differ"]
    return [
        "Triton and other GPU kernels: there is no CUDA device; their verdict here is inconclusive",
        "streams: work that a kernel leaves on another stream, or a missing synchronisation",
        "races between blocks, and atomics whose order changes from run to run",
        "the precision of a GPU's units: tensor cores, TF32, fp8 accumulators, approximate functions",
        "GPU memory: writes beyond a buffer on the device, what a GPU's allocator leaves in it",
        *missing,
    ]


def _tools() -> list[str]:
    triton = importlib.util.find_spec("triton") is not None
    return [
        "yes  Python and PyTorch kernels",
        f"{'yes' if triton else 'no '}  Triton kernels: {'installed, on CUDA' if triton else 'triton is not installed'}",
        "no   C++ and CUDA sources: not built yet",
        f"{'yes' if shutil.which('compute-sanitizer') else 'no '}  compute-sanitizer on the PATH (not used yet)",
    ]
