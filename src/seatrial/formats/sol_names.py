"""Which of SOL-ExecBench's rules makes a random float input, from its name, shape and description.

The first rule that applies wins. Only the choice is here; sol_inputs.py draws.
"""

from __future__ import annotations

import re
from enum import Enum, auto


class Rule(Enum):
    """What a name says about the values of a float tensor."""

    ONES = auto()
    ZEROS = auto()
    CAUSAL_MASK = auto()
    BINARY_MASK = auto()
    COSINE = auto()
    SINE = auto()
    POSITIVE = auto()
    CUMULATED_DECAY = auto()
    LOG_DECAY = auto()
    DECAY = auto()
    GATE = auto()
    PROBABILITIES = auto()
    WEIGHT_MATRIX = auto()


NAMED_FLOATS = ("float64", "float32", "float16", "bfloat16")  # narrower floats are drawn by type alone

_NORM_WEIGHT = re.compile(r".*norm\d*_weight")
_NORM_BIAS = re.compile(r".*norm\d*_bias")
_WEIGHT_MATRIX = re.compile(r"(?:weight|.*_(?:weights?|projs?|proj_weights?|weight_matrix))\d*")
_POSITIVE = re.compile(r"(?:rstd|std|variance|var|.*_(?:rstd|std|var))\d*|.*_variance")
_CAUSAL_NAMES = ("attention_mask", "causal_mask")
_BINARY_NAMES = ("x_mask", "text_mask", "aspect_ratio_mask", "drop_mask", "attention_mask")
_BINARY_WORDS = ("binary", "{0, 1}", "0 or 1", "1.0 for valid", "0.0 for masked")
_SOFTMAXED = ("attn_weights", "attention_weights", "routing_weights")
_EXACT = {
    "cos": Rule.COSINE,
    "cos_cached": Rule.COSINE,
    "rope_cos": Rule.COSINE,
    "sin": Rule.SINE,
    "sin_cached": Rule.SINE,
    "rope_sin": Rule.SINE,
    "A_cumsum": Rule.CUMULATED_DECAY,
    "A_log": Rule.LOG_DECAY,
    "A": Rule.DECAY,
    "g": Rule.GATE,
}


def rule(name: str, shape: tuple[int, ...], description: str = "") -> Rule | None:
    """The rule for a float tensor of one of NAMED_FLOATS; None when it is drawn by type alone."""
    words = description.lower()
    if _NORM_WEIGHT.fullmatch(name):
        return Rule.ONES
    if _NORM_BIAS.fullmatch(name):
        return Rule.ZEROS
    if _is_causal_mask(name, shape, words):
        return Rule.CAUSAL_MASK
    if name in _BINARY_NAMES or (name.endswith("_mask") and any(word in words for word in _BINARY_WORDS)):
        return Rule.BINARY_MASK
    if _POSITIVE.fullmatch(name):
        return Rule.POSITIVE
    if name in _EXACT:
        return _EXACT[name]
    if name in _SOFTMAXED or ("softmax" in words and "output" in words):
        return Rule.PROBABILITIES
    return Rule.WEIGHT_MATRIX if len(shape) >= 2 and _WEIGHT_MATRIX.fullmatch(name) else None


def pinned(name: str, dtype: str) -> str | None:
    """ "ones" or "zeros" when the rules give this tensor one constant value, else None."""
    if dtype not in NAMED_FLOATS:
        return None
    constants = {Rule.ONES: "ones", Rule.ZEROS: "zeros"}
    chosen = rule(name, ())
    return None if chosen is None else constants.get(chosen)


def _is_causal_mask(name: str, shape: tuple[int, ...], words: str) -> bool:
    if len(shape) < 2 or shape[-1] != shape[-2]:
        return False
    return name in _CAUSAL_NAMES or ("attention mask" in words and "causal" in words)
