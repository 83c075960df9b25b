"""Token streams for the training trial: real English text, Zipf ids, uniform ids.

The three differ in one thing that matters to a kernel: how often one id comes back within a step. Real
text repeats its commonest token in every second place; Zipf ids repeat as text does but carry no
structure; uniform ids hardly repeat at all, which is why a fault in how repeats are summed stays hidden
under them. The text is Python's own reference manual (`pydoc_data.topics`), which ships with every
Python, so nothing is downloaded.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache

import torch
from torch import Tensor

DATA = ("text", "zipf", "uniform")
UNKNOWN = "<unknown>"
_WORD = re.compile(r"\w+|[^\w\s]|\s")


def words_of(text: str) -> list[str]:
    """Words, single punctuation marks and single white-space characters, in order; nothing is dropped."""
    return _WORD.findall(text)


def vocabulary_of(words: list[str], size: int) -> list[str]:
    """The `size` - 1 most frequent words, commonest first (ties in order of first appearance), then UNKNOWN."""
    return [word for word, _ in Counter(words).most_common(size - 1)] + [UNKNOWN]


def encode(words: list[str], vocabulary: list[str]) -> Tensor:
    """int64 ids, one per word; a word outside the vocabulary gets the id of UNKNOWN."""
    ids = {word: i for i, word in enumerate(vocabulary)}
    unknown = ids[UNKNOWN]
    return torch.tensor([ids.get(word, unknown) for word in words], dtype=torch.int64)


@lru_cache(maxsize=1)
def _manual() -> list[str]:
    from pydoc_data.topics import topics  # 700 kB of text: only loaded when a trial runs

    return words_of("\n".join(topics[name] for name in sorted(topics)))


@lru_cache(maxsize=4)
def _text(vocabulary: int) -> Tensor:
    return encode(_manual(), vocabulary_of(_manual(), vocabulary))


def stream(data: str, *, vocabulary: int, seed: int) -> Tensor:
    """int64 ids in [0, vocabulary), as many as the text has tokens, for `data` in DATA.

    The text is the same for every seed; Zipf (exponent 1) and uniform ids are drawn from `seed`.
    """
    text = _text(vocabulary)
    draw = torch.Generator().manual_seed(seed)
    if data == "text":
        return text
    if data == "zipf":
        weights = 1.0 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
        return torch.multinomial(weights, len(text), replacement=True, generator=draw)
    if data == "uniform":
        return torch.randint(0, vocabulary, (len(text),), generator=draw)
    raise ValueError(f"data is {data!r}; known are {', '.join(DATA)}")


def batches(tokens: Tensor, *, batch: int, length: int, steps: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """`steps` pairs (ids, next ids), each int64 (batch, length), cut from `tokens` at places drawn from `seed`."""
    draw = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length)
    places = torch.randint(0, len(tokens) - length - 1, (steps, batch, 1), generator=draw)
    return [(tokens[p + offsets], tokens[p + offsets + 1]) for p in places]


def most_repeats(ids: Tensor) -> int:
    """How often the commonest id occurs in one step's `ids`."""
    return int(torch.bincount(ids.reshape(-1)).max())
