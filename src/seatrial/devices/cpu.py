"""The CPU as a device: memory is memory, and there is one stream."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


class CpuDevice:
    """The CPU; always available. Calls return when their work is done."""

    name = "cpu"

    def available(self) -> str | None:
        return None

    def facts(self) -> dict[str, str]:
        return {
            "device": "cpu",
            "model": _model_name(),
            "threads": str(torch.get_num_threads()),
            "torch": torch.__version__,
        }

    def prepare(self) -> None:
        """Nothing to make ready."""

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def snapshot(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(t.clone(memory_format=torch.contiguous_format) for t in tensors)

    def synchronise(self) -> float:
        return 0.0

    def free_memory(self) -> int:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return sys.maxsize  # a kernel that does not tell: the allocation itself will say

    def settings(self) -> dict[str, str]:
        return {}


def _model_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
