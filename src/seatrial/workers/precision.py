"""Who lowers the precision of torch's matrix products, even if it is put back before the call returns.

The setters of torch are wrapped before the candidate is imported. What a write did is read back through the getters,
so every interface of torch to one setting counts alike. A write to the exact side, or back to what was there before
the import, is nobody's fault.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

SETTERS = (
    "_set_float32_matmul_precision",
    "_set_fp32_precision_setter",
    "_set_cublas_allow_tf32",
    "_set_cublas_allow_fp16_reduced_precision_reduction",
    "_set_cublas_allow_bf16_reduced_precision_reduction",
    "_set_cublas_allow_fp16_accumulation",
    "_set_cudnn_allow_tf32",
    "_set_onednn_allow_tf32",
    "_set_math_sdp_allow_fp16_bf16_reduction",
)

SETTINGS: dict[str, Callable[[], object]] = {
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "float32 matmul precision of CUDA": lambda: torch.backends.cuda.matmul.fp32_precision,
    "float32 precision of cuDNN convolutions": lambda: torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
    "float32 matmul precision of oneDNN": lambda: torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
    "cudnn TF32": torch._C._get_cudnn_allow_tf32,
    "bf16 reduced precision reduction": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "fp16 reduced precision reduction": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "fp16 accumulation": lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
    "reduced precision in attention by matrix products": torch._C._get_math_sdp_allow_fp16_bf16_reduction,
}

# From exact to coarse. "none" leaves the choice to a setting above it, and counts as that one's exact side.
_COARSENESS = {"highest": 0, "ieee": 0, "none": 0, "false": 0, "high": 1, "tf32": 1, "true": 1, "medium": 2, "bf16": 2}


def is_lowered(was: str, now: str) -> bool:
    """True when a precision setting allows less than it did. What torch refuses to read counts as unchanged."""
    before, after = _COARSENESS.get(was.lower()), _COARSENESS.get(now.lower())
    return before is not None and after is not None and after > before


def read() -> dict[str, str]:
    """Every precision setting in torch's own words; what torch refuses to read is "unreadable (…)"."""
    return {name: _word(setting) for name, setting in SETTINGS.items()}


def _word(setting: Callable[[], object]) -> str:
    try:
        return str(setting())
    except (RuntimeError, AttributeError) as error:
        # torch refuses to read a setting that was written through two of its interfaces
        return f"unreadable ({str(error)[:80]})"


class Watch:
    """Notes every write that lowers a setting below what it is now. One per process, before the candidate is loaded."""

    def __init__(self) -> None:
        self._base = read()
        self._lowered: dict[str, None] = {}
        wrapped = {name: self._noting(getattr(torch._C, name)) for name in SETTERS if hasattr(torch._C, name)}
        for name, function in wrapped.items():
            setattr(torch._C, name, function)
        self._rebind(wrapped)

    def lowered(self) -> list[str]:
        """The writes so far, one sentence each; asking forgets them."""
        told = list(self._lowered)
        self._lowered.clear()
        return told

    def _noting(self, setter: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(setter)
        def write(*values: Any) -> Any:
            result = setter(*values)
            for name, now in read().items():
                if is_lowered(self._base[name], now):
                    self._lowered[f"{name}: {self._base[name]} -> {now}"] = None
            return result

        return write

    @staticmethod
    def _rebind(wrapped: dict[str, Callable[..., Any]]) -> None:
        """torch.backends keeps references of its own to some setters."""
        for module in (torch.backends.cudnn, torch.backends.mkldnn):
            for descriptor in vars(type(module)).values():
                name = getattr(getattr(descriptor, "setter", None), "__name__", "")
                if name in wrapped:
                    descriptor.setter = wrapped[name]
