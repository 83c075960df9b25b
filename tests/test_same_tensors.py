"""New values in the tensors of an earlier call: what a cache keyed by address, object or version gives away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import seatrial
from seatrial.model import Outcome, Verdict


def scaled_matmul(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return x @ (w * scale).T


def make(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"x": (16, 64), "w": (24, 64), "scale": (24, 1)}
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


CACHE: dict[Any, Tensor] = {}


def keyed(key: Any, x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    if key not in CACHE:
        CACHE.clear()
        CACHE[key] = (w * scale).T.contiguous()
    return x @ CACHE[key]


def by_address(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return keyed((w.data_ptr(), scale.data_ptr(), tuple(w.shape)), x, w, scale)


def by_object(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return keyed((id(w), id(scale)), x, w, scale)


def by_version(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return keyed((w.data_ptr(), w._version, scale.data_ptr(), scale._version), x, w, scale)


def by_first_elements(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return keyed((tuple(w[0, :8].tolist()), float(scale[0, 0]), tuple(w.shape)), x, w, scale)


def by_content(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return keyed((w.numpy().tobytes(), scale.numpy().tobytes()), x, w, scale)


PLANS: dict[Any, Any] = {}


def plans_by_address(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """Keeps what was decided for an address, as a captured graph does, and computes from what lies there now."""
    plan = PLANS.setdefault(w.data_ptr(), max(1, w.shape[1] // 4))
    return sum((a @ (b * scale).T for a, b in zip(x.split(plan, 1), w.split(plan, 1), strict=True)), torch.zeros(()))


@pytest.mark.parametrize("kernel", [by_address, by_object, by_version, by_first_elements])
def test_a_stale_cache_is_found_and_named(kernel: Any) -> None:
    report = seatrial.check(
        kernel, reference=scaled_matmul, inputs=make, policy="quick", device="cpu", only=["replayed-result"]
    )
    assert report.verdict is Verdict.REJECTED
    (found,) = [f for f in report.findings if f.outcome is Outcome.FAILED]
    assert found.cause == "in-place" and "an earlier call, and right in new tensors" in found.reason


@pytest.mark.parametrize("kernel", [by_content, plans_by_address])
def test_what_follows_the_values_is_right(kernel: Any) -> None:
    report = seatrial.check(
        kernel, reference=scaled_matmul, inputs=make, policy="quick", device="cpu", only=["replayed-result"]
    )
    assert report.verdict is Verdict.ACCEPTED, report.headline
