"""The one training loop.

It sees a model, a list of batches and the name of an optimizer. Which kernel sits in the model it does
not know, so the reference, the controls and the candidate are trained by the very same lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from seatrial.trials.text import most_repeats

OPTIMIZERS = ("sgd", "adamw")
BLOWN_UP = 2.0  # a loss this many times the starting loss ends the run: it will not come back


@dataclass
class Run:
    """What one training run showed, step by step. `watched` is the parameter the kernel acts on.

    losses            mean cross entropy in nats
    gradient_norms    L2 norm over all parameters
    watched_norms     L2 norm of the watched parameter's gradient
    row_gradients     the same of one row of it: the row of the step's commonest id (empty when it has no rows)
    row_updates       L2 norm of the change the optimizer made to that row
    row_errors        relative L2 error of that row's gradient against the reference on the same inputs
                      (filled in by the matrix, for a candidate)
    repeats           how often that id occurred in the step
    """

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    watched_norms: list[float] = field(default_factory=list)
    row_gradients: list[float] = field(default_factory=list)
    row_updates: list[float] = field(default_factory=list)
    row_errors: list[float] = field(default_factory=list)
    repeats: list[int] = field(default_factory=list)
    failed: str = ""  # the kernel's own words when it could not be called

    @property
    def finite(self) -> bool:
        """True when no loss and no gradient norm is NaN or infinite."""
        return all(map(math.isfinite, self.losses + self.gradient_norms))

    @property
    def blew_up(self) -> bool:
        """The loss is not finite, or rose to BLOWN_UP times where it started."""
        return bool(self.losses) and not self.losses[-1] <= BLOWN_UP * self.losses[0]


def make_optimizer(name: str, parameters: Sequence[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """SGD with momentum 0.9, or AdamW with PyTorch's defaults."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=rate)
    raise ValueError(f"optimizer is {name!r}; known are {', '.join(OPTIMIZERS)}")


def train(
    model: nn.Module,
    watched: nn.Parameter,
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    optimizer: str,
    rate: float,
    warm_up: int = 0,
    by_row: bool = False,
    each_step: Callable[[int], None] = lambda step: None,
) -> Run:
    """Train `model` on `batches`, one step each; stop early once the loss is lost for good.

    `rate` is reached linearly over `warm_up` steps; `by_row` says that row i of `watched` belongs to token id i. Exceptions of the kernel pass through.
    """
    run = Run()
    parameters = list(model.parameters())
    steps = make_optimizer(optimizer, parameters, rate)
    for step, (ids, targets) in enumerate(batches):
        for group in steps.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / (warm_up + 1))
        loss = model(ids, targets)
        run.losses.append(loss.item())
        if run.blew_up:
            break
        steps.zero_grad()
        loss.backward()
        run.gradient_norms.append(_norm([p.grad for p in parameters if p.grad is not None]))
        assert watched.grad is not None, "the watched parameter took no part in the loss"
        run.watched_norms.append(watched.grad.norm().item())
        run.repeats.append(most_repeats(ids))
        row = int(ids.flatten().mode().values)
        before = watched[row].detach().clone() if by_row else watched.detach()
        steps.step()
        if by_row:
            run.row_gradients.append(watched.grad[row].norm().item())
            run.row_updates.append((watched[row].detach() - before).norm().item())
        each_step(step)
    return run


def _norm(gradients: list[Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(gradients))
