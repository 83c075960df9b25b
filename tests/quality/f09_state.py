"""F9 and F10: what is kept from call to call, and what is done to the caller's things."""

from __future__ import annotations

from typing import Any

import torch
from tests.quality.case import BF16, Kernel, Pair, generator, normal
from torch import Tensor

OWN = ("replayed-result",)
KEPT: dict[Any, Any] = {}


def linear(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return (x.float() @ (w.float() * scale[:, None]).T).to(x.dtype)


def drawn(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"x": normal(g, 16, 64), "w": normal(g, 24, 64), "scale": torch.rand(24, generator=g) + 0.5}


def keeping(key: Any, x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    if KEPT.get("key") != key:
        KEPT.update(key=key, weight=(w.float() * scale[:, None]).T.contiguous())
    return (x.float() @ KEPT["weight"]).to(x.dtype)


def whole(*tensors: Tensor) -> Any:
    return tuple(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)


def by_content(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return keeping(whole(w, scale), x, w, scale)


def by_fingerprint(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return keeping((w.shape, whole(w[0, :8], w[-1, -8:], scale[:2])), x, w, scale)


def by_identity(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    if KEPT.get("last") is not w or KEPT.get("version") != w._version:
        KEPT.update(last=w, version=w._version, weight=(w.float() * scale[:, None]).T.contiguous())
    return (x.float() @ KEPT["weight"]).to(x.dtype)


def by_address(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return keeping((w.data_ptr(), scale.data_ptr()), x, w, scale)


def quantised_once(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return keeping("the weight", x, w, scale)


# J03: a captured graph reads where its first inputs lay


def captured(*, moved: bool) -> Kernel:
    def kernel(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        if x.shape not in KEPT:
            KEPT[x.shape] = (x, w, scale)
        places = KEPT[x.shape]
        if moved:
            KEPT[x.shape] = places = (x, w, scale)
        return linear(*places)

    return kernel


# K01: autotuning runs an accumulating kernel three times


def added(x: Tensor, total: Tensor) -> Tensor:
    return total + x.float().sum(0)


def running(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"x": normal(g, 32, 48), "total": torch.randn(48, generator=g)}


def tuned(*, clears: bool) -> Kernel:
    def kernel(x: Tensor, total: Tensor) -> Tensor:
        out = total.clone()
        for _ in range(1 if KEPT.get("tuned") else 3):
            if clears:
                out = total.clone()
            out += x.float().sum(0)
        KEPT["tuned"] = True
        return out

    return kernel


# K02: the upstream gradient is used as scratch


def scaled_gradient(grad_output: Tensor, x: Tensor) -> Tensor:
    return grad_output * torch.cos(x)


def gradients(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"grad_output": torch.randn(16, 40, generator=g), "x": torch.randn(16, 40, generator=g)}


def over_the_gradient(grad_output: Tensor, x: Tensor) -> Tensor:
    return grad_output.mul_(torch.cos(x)).clone()


def beside_the_gradient(grad_output: Tensor, x: Tensor) -> Tensor:
    return grad_output.mul(torch.cos(x)).clone()


# K03: results are views of one buffer


def one_buffer(*, copied: bool) -> Kernel:
    def kernel(x: Tensor, total: Tensor) -> Tensor:
        out = KEPT.setdefault(total.shape, torch.empty_like(total))
        out.copy_(added(x, total))
        return out.clone() if copied else out.detach()

    return kernel


# K04: global numerics


def with_flag(*, exact: bool) -> Kernel:
    def kernel(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        from torch.backends.cuda import matmul  # here: a module held by a closure cannot travel to another process

        matmul.allow_fp16_reduced_precision_reduction = not exact
        matmul.allow_fp16_accumulation = not exact
        return linear(x, w, scale)

    return kernel


# K05: inputs zeroed so that both sides agree


def zeroing(x: Tensor, total: Tensor) -> Tensor:
    out = added(x, total)
    x.zero_()
    return out


# I01: a group without tokens leaves its row as it was


def grouped(x: Tensor, group: Tensor) -> Tensor:
    return torch.zeros(8, x.shape[1]).index_add_(0, group, x.float())


def balanced(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"x": normal(g, 64, 24, dtype=BF16), "group": torch.randperm(64, generator=g) % 8}


def groups_that_have_tokens(*, all_of_them: bool) -> Kernel:
    def kernel(x: Tensor, group: Tensor) -> Tensor:
        out = torch.empty(8, x.shape[1])
        for e in range(8):
            mine = x[group == e]
            if all_of_them or len(mine):
                out[e] = mine.float().sum(0)
        return out

    return kernel


PAIRS = (
    Pair("I01", "a group without tokens is left unwritten", grouped, balanced, groups_that_have_tokens(all_of_them=True), groups_that_have_tokens(all_of_them=False), ("stale-output", "fitted-inputs", "wrong-values")),
    Pair("J01", "weights kept behind a light fingerprint", linear, drawn, by_content, by_fingerprint, OWN),
    Pair("J02", "weights kept while object and version stay", linear, drawn, by_content, by_identity, OWN),
    Pair("J02/address", "weights kept by address", linear, drawn, by_content, by_address, OWN),
    Pair("J03", "a graph that reads where its first inputs lay", linear, drawn, captured(moved=True), captured(moved=False), OWN),
    Pair("J04", "weights quantised once", linear, drawn, by_content, quantised_once, (*OWN, "wrong-values", "fitted-inputs")),
    Pair("K01", "the first call accumulates three times", added, running, tuned(clears=True), tuned(clears=False), ("wrong-values", *OWN)),
    Pair("K02", "the upstream gradient is overwritten", scaled_gradient, gradients, beside_the_gradient, over_the_gradient, ("mutated-input",)),
    Pair("K03", "results share one buffer", added, running, one_buffer(copied=True), one_buffer(copied=False), OWN),
    Pair("K04", "global numerics are lowered", linear, drawn, with_flag(exact=True), with_flag(exact=False), ("tampered-process",)),
    Pair("K05", "an input is zeroed", added, running, added, zeroing, ("mutated-input",)),
)  # fmt: skip
