"""What a child notes around a call, beside the outputs.

All of it is seen from inside a process that the candidate shares, so absence proves nothing; it names an
honest author's mistakes and the plain cheats. Nothing here decides whether a fact is a fault.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from seatrial.devices import Device
from seatrial.workers import precision

# Functions that measure, compare, draw or look: what a candidate would replace to look better than it is.
WATCHED = (
    "torch.cuda.Event",
    "torch.cuda.Event.elapsed_time",
    "torch.cuda.Event.record",
    "torch.cuda.Event.synchronize",
    "torch.cuda.Stream",
    "torch.cuda.Stream.synchronize",
    "torch.cuda.synchronize",
    "torch.cuda.current_stream",
    "torch.cuda.default_stream",
    "torch.cuda.stream",
    "torch.cuda.is_available",
    "torch.cuda.CUDAGraph.replay",
    "time.time",
    "time.perf_counter",
    "time.perf_counter_ns",
    "time.monotonic",
    "time.process_time",
    "torch.allclose",
    "torch.isclose",
    "torch.equal",
    "torch.eq",
    "torch.testing.assert_close",
    "torch.Tensor.__eq__",
    "torch.Tensor.__ne__",
    "torch.Tensor.clone",
    "torch.Tensor.copy_",
    "torch.Tensor.to",
    "torch.Tensor.cpu",
    "torch.Tensor.data_ptr",
    "torch.Tensor.untyped_storage",
    "torch.manual_seed",
    "torch.randn",
    "torch.rand",
    "torch.randint",
    "torch.empty",
    "torch.zeros",
    "torch.full",
    "torch.empty_strided",
    "torch.matmul",
    "torch.nn.functional.linear",
    "torch.nn.functional.scaled_dot_product_attention",
    "triton.testing.do_bench",
    "builtins.open",
    "builtins.print",
    "builtins.compile",
    "builtins.exec",
    "builtins.isinstance",
    "builtins.type",
    "builtins.__import__",
    "gc.collect",
    "sys.exit",
    "os._exit",
    "threading.Thread.start",
    "inspect.getsource",
    "importlib.import_module",
)

_MISSING = object()
_disable_dynamo: Callable[..., Any] = torch._compile._disable_dynamo


def _resolve(dotted: str) -> Any:
    """The object itself, without running descriptors or importing anything."""
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:cut]))
        if found is not None:
            for part in parts[cut:]:
                found = _member(found, part)
            return found
    return _MISSING


def _member(owner: Any, name: str) -> Any:
    if isinstance(owner, type):
        return next((vars(c)[name] for c in owner.__mro__ if name in vars(c)), _MISSING)
    return getattr(owner, name, _MISSING)


class Originals:
    """The watched functions as they were before the candidate was imported."""

    def __init__(self) -> None:
        self._was = {name: _resolve(name) for name in WATCHED}

    def patched(self) -> list[str]:
        """Names that mean something else now. One that was not loaded yet is remembered at first sight."""
        changed = []
        for name, was in self._was.items():
            now = _resolve(name)
            if was is _MISSING:
                self._was[name] = now
            elif now is not was and not _is_dynamos_own(now, was):
                changed.append(name)
        return changed


def _is_dynamos_own(now: Any, was: Any) -> bool:
    """Importing torch._dynamo wraps `torch.manual_seed`; the wrapper is known by its code object."""
    wrapper = _disable_dynamo(lambda: None)
    return getattr(now, "__wrapped__", None) is was and getattr(now, "__code__", None) is getattr(
        wrapper, "__code__", _MISSING
    )


# Variables called _TORCH… are notes of torch.compile to itself.
_SETTINGS: dict[str, Callable[[], object]] = {
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "autocast": lambda: (torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")),
    "number of threads": torch.get_num_threads,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "deterministic algorithms only warn": torch.is_deterministic_algorithms_warn_only_enabled,
    "cudnn enabled": lambda: torch.backends.cudnn.enabled,
    "cudnn benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn deterministic": lambda: torch.backends.cudnn.deterministic,
    "flash attention": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math attention": torch.backends.cuda.math_sdp_enabled,
    "anomaly mode": torch.is_anomaly_enabled,
    "denormals flushed": lambda: torch.full((1,), 1e-39, device="cpu", dtype=torch.float32).mul(1).item() == 0.0,
    "garbage collector": gc.isenabled,
    "recursion limit": sys.getrecursionlimit,
    "working directory": os.getcwd,
    "environment": lambda: ", ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if not k.startswith("_TORCH")),
}


def flags(device: Device) -> dict[str, str]:
    """Settings of the process and of torch that outlive a call, in words."""
    ours = {name: _read(setting) for name, setting in _SETTINGS.items()}
    return ours | precision.read() | {k: v for k, v in device.settings().items() if "generator" not in k}


def _read(setting: Callable[[], object]) -> str:
    try:
        return str(setting())
    except (RuntimeError, AttributeError, OSError) as error:
        return f"unreadable ({str(error)[:80]})"


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What differs, one sentence each; a precision that is at least what it was is no change worth telling."""
    told = []
    for name, was in before.items():
        now = after.get(name, "gone")
        if now != was and (name not in precision.SETTINGS or precision.is_lowered(was, now)):
            told.append(_environment_change(was, now) if name == "environment" else f"{name}: {was} -> {now}")
    return told


def _environment_change(was: str, now: str) -> str:
    names = {pair.partition("=")[0] for pair in set(was.split(", ")) ^ set(now.split(", "))}
    return f"environment: {', '.join(sorted(names))}"


def generators(device: Device) -> list[str]:
    """The states of torch's random generators, for comparison."""
    state = torch.get_rng_state().numpy().tobytes()
    return [str(hash(state)), *(v for k, v in device.settings().items() if "generator" in k)]


def live_threads() -> dict[int, str]:
    """Python threads by identity. Pools of torch and OpenMP are native and do not show here."""
    return {id(t): t.name for t in threading.enumerate() if t.is_alive()}


def native_threads() -> int:
    """All threads of the process, pools included; 0 where /proc does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0
