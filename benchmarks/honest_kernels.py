"""Audits kernels that are known to be honest: none may be rejected.

    python benchmarks/honest_kernels.py --device cpu                    # references compiled by Inductor
    python benchmarks/honest_kernels.py --device cuda --jobs 8          # and Liger-Kernel, cuBLAS, attention back ends

Every line is one kernel on one problem, forward or backward. The references are plain PyTorch with the roundings that
the kernel's own documentation promises; gradients are what autograd makes of them. On a GPU the kernels are those of
Liger-Kernel (pip install liger-kernel), of torch.compile, of cuBLAS and cuDNN through torch, and the attention back
ends of scaled_dot_product_attention: forward beside attention written out in fp32, forward and backward beside torch's
own. Kernels with a fault that was found and understood stand among them as controls of the list itself: an embedding
gradient that adds in bf16 by atomics, and a group norm that takes its variance as E[x²] − E[x]², which cancels where the
mean is large; they must be rejected. Exits 1 when a verdict is wrong; prints what could not be verified.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]
Maker = Callable[[int], dict[str, Any]]
BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Item:
    """One kernel beside the reference that says what it must compute.

    `wrt` names the inputs whose gradients the backward form of the problem asks for; empty: forward only.
    """

    name: str
    reference: Function
    inputs: Maker
    kernel: Function
    wrt: tuple[str, ...] = ()
    cuda: bool = True
    faulty: tuple[str, ...] = ()  # "forward", "backward": known to be; the head of this file says why
    backward: bool = False

    @property
    def wrong(self) -> bool:
        """True when this audit must end in a rejection."""
        return ("backward" if self.backward else "forward") in self.faulty


def backward_of(function: Function, names: Sequence[str], wrt: Sequence[str]) -> Function:
    """The gradients of `function` as a function of (upstream gradients…, inputs…), in the order of `wrt`."""

    def gradients(*values: Any) -> tuple[Tensor, ...]:
        count = len(values) - len(names)
        upstream, given = values[:count], dict(zip(names, values[count:], strict=True))
        leaves = {
            n: v.detach().clone().requires_grad_(n in wrt) if isinstance(v, Tensor) else v for n, v in given.items()
        }
        with torch.enable_grad():
            out = function(*leaves.values())
            outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
            return torch.autograd.grad(outs, [leaves[n] for n in wrt], [g.clone() for g in upstream])

    return gradients


def on_copies(kernel: Function) -> Function:
    """A kernel that may write into its inputs by design, called the way autograd calls it: on values of its own."""

    def call(*values: Any) -> Any:
        return kernel(*(v.clone() if isinstance(v, Tensor) else v for v in values))

    return call


def compiled(function: Function) -> Function:
    """What Inductor makes of the reference; compiled at the first call, in the process that makes it."""
    made: list[Function] = []

    def call(*values: Any) -> Any:
        if not made:
            made.append(torch.compile(function))
        return made[0](*values)

    return call


# ---------------------------------------------------------------------------------------------------
# Inputs


def normal(seed: int, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """bf16 activations; names that end in `_f` stay fp32."""
    g = torch.Generator().manual_seed(seed)
    drawn = {n: torch.randn(s, generator=g) for n, s in shapes.items()}
    return {n.removesuffix("_f"): v if n.endswith("_f") else v.to(BF16) for n, v in drawn.items()}


def with_weight(seed: int) -> dict[str, Any]:
    return {**normal(seed, x=(96, 1024)), "weight": 1 + 0.1 * normal(seed + 1, w=(1024,))["w"]}


def with_weight_and_bias(seed: int) -> dict[str, Any]:
    return {**with_weight(seed), "bias": normal(seed + 2, b=(1024,))["b"]}


def two(seed: int) -> dict[str, Any]:
    return normal(seed, a=(96, 1024), b=(96, 1024))


def one(seed: int) -> dict[str, Any]:
    return normal(seed, x=(96, 1024))


def logits_and_labels(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {**normal(seed, logits_f=(128, 2000)), "labels": torch.randint(0, 2000, (128,), generator=g)}


def two_distributions(seed: int) -> dict[str, Any]:
    drawn = normal(seed, p_f=(64, 1000), q_f=(64, 1000))
    return {"log_q": drawn["q"].log_softmax(-1), "p": drawn["p"].softmax(-1)}


def two_log_distributions(seed: int) -> dict[str, Any]:
    drawn = normal(seed, p_f=(64, 1000), q_f=(64, 1000))
    return {"log_q": drawn["q"].log_softmax(-1), "log_p": drawn["p"].log_softmax(-1)}


def rotary(seed: int) -> dict[str, Any]:
    angle = torch.arange(64)[:, None] * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    both = torch.cat([angle, angle], -1)[None]
    return {**normal(seed, q=(2, 8, 64, 64), k=(2, 2, 64, 64)), "cos": both.cos(), "sin": both.sin()}


def attention_inputs(seed: int) -> dict[str, Any]:
    return normal(seed, q=(2, 4, 256, 64), k=(2, 4, 256, 64), v=(2, 4, 256, 64))


def matrices(seed: int) -> dict[str, Any]:
    return normal(seed, a=(256, 2048), b=(2048, 192))


def matrices_fp32(seed: int) -> dict[str, Any]:
    return normal(seed, a_f=(256, 2048), b_f=(2048, 192))


def image(seed: int) -> dict[str, Any]:
    return {**normal(seed, x=(4, 32, 24, 24), w=(48, 32, 3, 3))}


def grouped(seed: int) -> dict[str, Any]:
    return {**normal(seed, x_f=(8, 32, 64)), "weight": torch.ones(32), "bias": torch.zeros(32)}


def tokens_and_table(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {**normal(seed, table=(500, 128)), "ids": torch.randint(0, 500, (512,), generator=g)}


def tokens_and_wide_table(seed: int) -> dict[str, Any]:
    drawn = tokens_and_table(seed)
    return {**drawn, "table": drawn["table"].float()}


def head(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    drawn = normal(seed, x_f=(128, 256), w_f=(1000, 256))
    return {"x": drawn["x"], "weight": drawn["w"] / 16, "labels": torch.randint(0, 1000, (128,), generator=g)}


# ---------------------------------------------------------------------------------------------------
# References


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, 1e-6)


def add_rms_norm(a: Tensor, b: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = a + b
    return rms_norm(total, weight), total


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def geglu(a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(a, approximate="tanh") * b


def relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.t(), labels)


def kl_divergence(log_q: Tensor, p: Tensor) -> Tensor:
    return F.kl_div(log_q, p, reduction="batchmean")


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    return 0.5 * (p - q).abs().sum(-1).mean()


def js_divergence(log_q: Tensor, log_p: Tensor) -> Tensor:
    q, p = log_q.exp(), log_p.exp()
    middle = (0.5 * (p + q)).log()
    return 0.5 * (p * (log_p - middle) + q * (log_q - middle)).sum(-1).mean()


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return weight * torch.tanh(alpha * x) + bias


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 8, weight, bias, 1e-6)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    c, s = cos[:, None], sin[:, None]
    return rotated(q.float(), c, s).to(q.dtype), rotated(k.float(), c, s).to(k.dtype)


def embedding(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(later, float("-inf")).softmax(-1) @ v.float()).to(q.dtype)


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def fused_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def convolution(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1)


def row_sum(x: Tensor) -> Tensor:
    return x.float().sum(-1)


def sparsemax(x: Tensor) -> Tensor:
    ordered = x.sort(-1, descending=True).values
    counts = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    partial = ordered.cumsum(-1) - 1
    support = (counts * ordered > partial).sum(-1, keepdim=True)
    return (x - partial.gather(-1, support - 1) / support).clamp(min=0)


# ---------------------------------------------------------------------------------------------------
# Kernels of Liger-Kernel


def liger(function: str, *more: Any, first: bool = False) -> Function:
    """The autograd function of this name, with further arguments after the problem's inputs."""

    def kernel(*values: Tensor) -> Any:
        import liger_kernel.ops as ops  # type: ignore[import-not-found]  # only where it is installed

        out = getattr(ops, function).apply(*values, *more)
        return out[0] if first else out

    return kernel


def liger_embedding(table: Tensor, ids: Tensor) -> Any:
    from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction  # type: ignore[import-not-found]

    return LigerEmbeddingFunction.apply(table, ids)


def liger_total_variation(p: Tensor, q: Tensor) -> Any:
    from liger_kernel.ops import LigerTVDLossFunction

    return LigerTVDLossFunction.apply(p, q)


def sdpa(backend: str, *, causal: bool) -> Function:
    """scaled_dot_product_attention held to one back end."""

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel([getattr(SDPBackend, backend)]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return kernel


def probabilities(seed: int) -> dict[str, Any]:
    drawn = normal(seed, p_f=(64, 1000), q_f=(64, 1000))
    return {"p": drawn["p"].softmax(-1), "q": drawn["q"].softmax(-1)}


def with_alpha(seed: int) -> dict[str, Any]:
    drawn = normal(seed, x_f=(96, 1024))
    return {**drawn, "alpha": torch.tensor([0.5]), "weight": torch.ones(1024), "bias": torch.zeros(1024)}


def fp32_rows(seed: int) -> dict[str, Any]:
    return normal(seed, x_f=(96, 1000))


def added(seed: int) -> dict[str, Any]:
    return {**two(seed), "weight": with_weight(seed)["weight"]}


LIGER = (
    Item("liger rms_norm", rms_norm, with_weight, liger("LigerRMSNormFunction", 1e-6, 0.0, "llama", False), ("x", "weight")),
    Item("liger layer_norm", layer_norm, with_weight_and_bias, liger("LigerLayerNormFunction", 1e-6), ("x", "weight", "bias")),
    Item("liger fused_add_rms_norm", add_rms_norm, added, liger("LigerFusedAddRMSNormFunction", 1e-6), ("a", "b", "weight")),
    Item("liger swiglu", swiglu, two, liger("LigerSiLUMulFunction"), ("a", "b")),
    Item("liger geglu", geglu, two, liger("LigerGELUMulFunction"), ("a", "b")),
    Item("liger relu_squared", relu_squared, one, liger("LigerReLUSquaredFunction"), ("x",)),
    Item("liger softmax", softmax, one, liger("LigerSoftmaxFunction"), ("x",)),
    Item("liger sparsemax", sparsemax, fp32_rows, liger("LigerSparsemaxFunction", -1), ("x",)),
    Item("liger cross_entropy", cross_entropy, logits_and_labels, liger("LigerCrossEntropyFunction", None, first=True), ("logits",)),
    Item("liger fused_linear_cross_entropy", linear_cross_entropy, head, liger("LigerFusedLinearCrossEntropyFunction", first=True), ("x", "weight")),
    Item("liger kl_div", kl_divergence, two_distributions, liger("LigerKLDivLossFunction"), ("log_q",)),
    Item("liger jsd", js_divergence, two_log_distributions, liger("LigerJSDFunction"), ("log_q",)),
    Item("liger tvd", total_variation, probabilities, liger_total_variation, ("p",)),
    Item("liger dyt", dynamic_tanh, with_alpha, liger("LigerDyTFunction"), ("x", "alpha", "weight", "bias")),
    Item("liger group_norm", group_norm, grouped, liger("LigerGroupNormFunction", 32, 8, 1e-6), ("x", "weight", "bias"), faulty=("forward", "backward")),
    Item("liger rope", rope, rotary, liger("LigerRopeFunction"), ("q", "k")),
    Item("liger embedding", embedding, tokens_and_wide_table, liger_embedding, ("table",)),
    Item("liger embedding bf16", embedding, tokens_and_table, liger_embedding, ("table",), faulty=("backward",)),
)  # fmt: skip

COMPILED = tuple(
    Item(f"compiled {reference.__name__}", reference, inputs, compiled(reference), wrt, cuda=False)
    for reference, inputs, wrt in (
        (rms_norm, with_weight, ("x", "weight")),
        (layer_norm, with_weight_and_bias, ("x", "weight", "bias")),
        (add_rms_norm, added, ()),
        (swiglu, two, ("a", "b")),
        (geglu, two, ()),
        (softmax, one, ("x",)),
        (log_softmax, one, ()),
        (gelu, one, ("x",)),
        (cross_entropy, logits_and_labels, ("logits",)),
        (rope, rotary, ()),
        (attention, attention_inputs, ()),
        (row_sum, one, ()),
        (embedding, tokens_and_wide_table, ("table",)),
        (js_divergence, two_log_distributions, ()),
    )
)

REFERENCES = {  # by causal, and whether the reference is torch's own
    (False, False): attention,
    (True, False): causal_attention,
    (False, True): fused_attention,
    (True, True): fused_causal_attention,
}

LIBRARY = (
    Item("cublas matmul bf16", matmul, matrices, matmul, ("a", "b")),
    Item("cublas matmul fp32", matmul, matrices_fp32, matmul, ("a", "b")),
    Item("cudnn convolution bf16", convolution, image, convolution, ("x", "w")),
    Item("torch layer_norm", layer_norm, with_weight_and_bias, layer_norm, ("x", "weight", "bias")),
    *(
        Item(
            f"sdpa {backend.lower()}{' causal' if causal else ''}{' beside torch' if own else ''}",
            REFERENCES[causal, own],
            attention_inputs,
            sdpa(backend, causal=causal),
            ("q", "k", "v") if own else (),
        )
        for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
        for causal in (False, True)
        for own in (False, True)
    ),
)  # fmt: skip


def items(*, cuda: bool) -> Iterator[Item]:
    """Every audit: the forward of each kernel, then its backward."""
    for item in (*LIGER, *COMPILED, *LIBRARY) if cuda else COMPILED:
        yield replace(item, kernel=on_copies(item.kernel))
        if item.wrt:
            yield _backward(item)


def _backward(item: Item) -> Item:
    names = list(item.inputs(0))

    def inputs(seed: int) -> dict[str, Any]:
        drawn = item.inputs(seed)
        out = item.reference(*drawn.values())
        outs = out if isinstance(out, tuple) else (out,)
        g = torch.Generator().manual_seed(seed + 77)
        upstream = {f"grad_{i}": torch.randn(o.shape, generator=g).to(o.dtype) for i, o in enumerate(outs)}
        return {**upstream, **drawn}

    return Item(
        f"{item.name} backward",
        backward_of(item.reference, names, item.wrt),
        inputs,
        backward_of(item.kernel, names, item.wrt),
        cuda=item.cuda,
        faulty=item.faulty,
        backward=True,
    )


# ---------------------------------------------------------------------------------------------------


def main() -> int:
    """Audit each in a process of its own, several at a time; one line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--policy", default="quick")
    parser.add_argument("--only", default="", help="a part of the names to audit")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one audit")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    every = {item.name: item for item in items(cuda=arguments.device.startswith("cuda"))}
    if arguments.one:
        print(json.dumps(_audit(every[arguments.one], arguments.device, arguments.policy)))
        return 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        rows = list(pool.map(lambda name: _in_process(name, arguments), [n for n in every if arguments.only in n]))
    wrong = [r for r in rows if (r["verdict"] == "rejected") != every[r["name"]].wrong]
    counts = {v: sum(r["verdict"] == v for r in rows) for v in sorted({r["verdict"] for r in rows})}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"device": arguments.device, "policy": arguments.policy, "rows": rows}, indent=1)
        )
    print(f"{len(wrong)} wrong: {', '.join(r['name'] for r in wrong)}" if wrong else "none wrong")
    return 1 if wrong else 0


def _in_process(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    started = time.monotonic()
    words = [sys.executable, __file__, "--one", name, "--device", arguments.device, "--policy", arguments.policy]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=arguments.limit, check=False)
        last = done.stdout.strip().splitlines()[-1:] or ["{}"]
        row = json.loads(last[0]) if last[0].startswith("{") else {}
        row = row if "verdict" in row else {"verdict": "not run", "why": done.stderr.strip().splitlines()[-1:]}
    except subprocess.TimeoutExpired:
        row = {"verdict": "not run", "why": [f"not done after {arguments.limit:.0f} s"]}
    row = {"name": name, "seconds": round(time.monotonic() - started, 1), **row}
    print(f"{row['verdict']:21} {name:42} {row.get('grade', ''):4} {row['seconds']:6.1f} s", flush=True)
    for why in row.get("why", []):
        print(f"    {why[:240]}", flush=True)
    return row


def _audit(item: Item, device: str, policy: str) -> dict[str, Any]:
    import seatrial
    from seatrial.api import policy_named

    report = seatrial.check(
        item.kernel,
        reference=item.reference,
        inputs=item.inputs,
        device=device,
        policy=replace(policy_named(policy), trial=False),
    )
    shown = [f for f in report.findings if f.outcome.value in ("failed", "not-verified", "limited", "noted")]
    return {
        "verdict": report.verdict.value,
        "grade": report.grade,
        "why": [f"{f.check} [{f.outcome.value}, {f.where.inputs}]: {f.reason}" for f in shown[:4]],
        "environment": {k: report.environment[k] for k in ("torch", "device model") if k in report.environment},
    }


if __name__ == "__main__":
    sys.exit(main())
