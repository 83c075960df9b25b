"""NVIDIA GPUs: the only file that speaks CUDA.

The functions it needs are taken from torch when the device object is made. In a child that is before the
candidate is imported, so a candidate that replaces `torch.cuda.synchronize` deceives only itself.
"""

# ruff: noqa: TID251  (this is the one file that the ban on torch.cuda points to)
from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor


class CudaDevice:
    """One NVIDIA GPU by its index. Creating the object touches no driver."""

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self._index = index
        self._synchronise = torch.cuda.synchronize
        self._on_stream = torch.cuda.stream
        self._current_stream = torch.cuda.current_stream
        self._wait_for_stream = torch.cuda.Stream.synchronize
        self._judged: torch.cuda.Stream | None = None

    def available(self) -> str | None:
        if torch.version.cuda is None:
            return "this build of torch has no CUDA"
        if not torch.cuda.is_available():
            return "no CUDA device answers"
        if (count := torch.cuda.device_count()) <= self._index:
            return f"only {count} CUDA device{'s are' if count > 1 else ' is'} there"
        return None

    def facts(self) -> dict[str, str]:
        card = torch.cuda.get_device_properties(self._index)
        return {
            "device": self.name,
            "model": card.name,
            "capability": f"{card.major}.{card.minor}",
            "memory": f"{card.total_memory / 2**30:.0f} GiB",
            "multiprocessors": str(card.multi_processor_count),
            "cuda": str(torch.version.cuda),
            "torch": torch.__version__,
        }

    def prepare(self) -> None:
        torch.cuda.set_device(self._index)
        self._judged = self._current_stream(self._index)
        self._synchronise(self._index)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.name)

    def snapshot(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if self._judged is None:
            self.prepare()
        assert self._judged is not None
        with self._on_stream(self._judged):
            copies = tuple(t.clone(memory_format=torch.contiguous_format) for t in tensors)
        self._wait_for_stream(self._judged)
        return copies

    def synchronise(self) -> float:
        started = perf_counter()
        self._synchronise(self._index)
        return perf_counter() - started

    def free_memory(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._index)[0])

    def settings(self) -> dict[str, str]:
        return {
            "current CUDA device": str(torch.cuda.current_device()),
            "current CUDA stream": str(self._current_stream(self._index).cuda_stream),
            "CUDA generator": str(hash(bytes(torch.cuda.get_rng_state(self._index).tolist()))),
        }
