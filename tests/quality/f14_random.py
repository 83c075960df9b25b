"""F14: random numbers, sampling, and results that depend on what else is in the batch."""

from __future__ import annotations

from typing import Any

import torch
from tests.quality.case import BF16, F32, VALUES, Kernel, Pair, generator, normal, unseeded
from torch import Tensor

# P01: the order of a sum depends on the number of rows


def row_sums(x: Tensor) -> Tensor:
    return x.float().sum(-1).to(BF16)


def many_rows(seed: int) -> dict[str, Any]:
    return {"x": normal(generator(seed), 300, 256)}


def by_batch(x: Tensor) -> Tensor:
    block = 128 if len(x) < 256 else 32
    return torch.stack([part.sum(-1) for part in x.float().split(block, 1)]).sum(0).to(BF16)


# P02: dropout

KEEP = 0.75


def given_mask(x: Tensor, mask: Tensor) -> Tensor:
    return (x.float() * mask / KEEP).to(BF16)


def mask_of(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=generator(seed)) < KEEP


def seeded_dropout(x: Tensor, seed: int) -> Tensor:
    return (x.float() * mask_of(seed, (64, 64)) / KEEP).to(BF16)


def own_dropout(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x.float(), 1 - KEEP).to(BF16)


def x_and_mask(seed: int) -> dict[str, Any]:
    g = generator(seed)
    return {"x": normal(g, 64, 64), "mask": torch.rand(64, 64, generator=g) < KEEP}


def x_and_seed(seed: int) -> dict[str, Any]:
    return {"x": normal(generator(seed), 64, 64), "seed": 0}


def x_and_any_seed(seed: int) -> dict[str, Any]:
    return {"x": normal(generator(seed), 64, 64), "seed": seed % 1000 + 1}


def x_alone(seed: int) -> dict[str, Any]:
    return {"x": normal(generator(seed), 64, 64)}


def mask_kernel(*, given: bool) -> Kernel:
    return lambda x, mask: given_mask(x, mask if given else mask_of(0, (64, 64)))


def seed_kernel(*, given: bool) -> Kernel:
    return lambda x, seed: seeded_dropout(x, seed if given else 0)


def drawing_kernel(*, fresh: bool) -> Kernel:
    def kernel(x: Tensor) -> Tensor:
        g = unseeded() if fresh else generator(0)
        return (x.float() * (torch.rand(x.shape, generator=g) < KEEP) / KEEP).to(BF16)

    return kernel


# P03: a sampler that runs off the end of the vocabulary


def sample(probabilities: Tensor, uniform: Tensor) -> Tensor:
    total = probabilities.cumsum(-1)
    return torch.searchsorted(total, uniform[:, None], right=True)[:, 0].clamp(max=probabilities.shape[1] - 1)


def dense_probabilities(seed: int) -> dict[str, Any]:
    g = generator(seed)
    p = torch.softmax(normal(g, 64, 32, dtype=F32), -1)
    return {"probabilities": p, "uniform": torch.rand(64, generator=g)}


def sampler(*, clamped: bool) -> Kernel:
    def kernel(probabilities: Tensor, uniform: Tensor) -> Tensor:
        token = (probabilities.cumsum(-1) <= uniform[:, None]).sum(-1)
        return token.clamp(max=probabilities.shape[1] - 1) if clamped else token

    return kernel


PAIRS = (
    Pair(
        "P01",
        "a row's result depends on the number of rows",
        row_sums,
        many_rows,
        by_batch,
        None,
        note="a property, no fault: another order, the same precision",
    ),
    Pair(
        "P02",
        "own mask of a constant seed for the given one",
        given_mask,
        x_and_mask,
        mask_kernel(given=True),
        mask_kernel(given=False),
    ),
    Pair(
        "P02/seed",
        "constant seed for the given one",
        seeded_dropout,
        x_and_any_seed,
        seed_kernel(given=True),
        seed_kernel(given=False),
    ),
    Pair(
        "P02/one-seed",
        "constant seed for the given one, which the benchmark never changes",
        seeded_dropout,
        x_and_seed,
        seed_kernel(given=True),
        seed_kernel(given=False),
        note="the seed is always 0",
    ),
    Pair(
        "P02/own",
        "the reference draws its own mask, the kernel the same one at each call",
        own_dropout,
        x_alone,
        drawing_kernel(fresh=True),
        drawing_kernel(fresh=False),
        VALUES,
        note="no element can be compared",
        lenient=True,
    ),
    Pair(
        "P03",
        "sampler without a clamp returns a token beyond the vocabulary",
        sample,
        dense_probabilities,
        sampler(clamped=True),
        sampler(clamped=False),
        note="a uniform variate near one, or probabilities that sum to less, are rare",
    ),
)
