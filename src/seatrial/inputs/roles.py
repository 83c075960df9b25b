"""What each input of a problem means, from its declaration and from how the reference uses it.

A role decides which recipes may touch an input (recipes.py). When in doubt the answer is the role that
fewest recipes touch: an input that is changed wrongly would blame an honest kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

from seatrial.model import Problem, TensorSpec


class Role(StrEnum):
    """The part an input plays in the computation."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    NORM_WEIGHT = "norm weight"  # or the bias of a norm
    GRADIENT = "gradient"
    TOKEN_IDS = "token ids"  # each value picks one row, any value in range is legal, any may repeat
    INDICES = "indices"  # anything else that addresses: offsets, permutations, page tables, top-k
    MASK = "mask"
    SCALE = "scale"  # of a quantised tensor
    POSITION = "position"  # position ids, rotary sines and cosines
    STATISTICS = "statistics"  # saved means and variances, logsumexp
    STATE = "state"  # carried from step to step: caches, recurrent states, optimizer moments
    SCALAR = "scalar"


CARRIES_SIGNAL = (Role.ACTIVATION, Role.GRADIENT, Role.STATE)  # what float recipes act on first

_FLOAT_WORDS: tuple[tuple[Role, str], ...] = (
    (Role.MASK, r"mask|causal_bias|alibi"),
    (Role.POSITION, r"cos|sin|rope|rotary|freqs?|pos(ition)?s?|timesteps?"),
    (Role.STATISTICS, r"r?std|var|variance|mean|lse|logsumexp|log_sum_exp|inv_?rms|rrms|max_logits?"),
    (Role.GRADIENT, r"d?grads?|gradients?|d_?out(put)?s?|dy|dz|dlogits|dloss"),
    (Role.SCALE, r"scales?|zero_points?|amax|absmax|qscale|sf|dequant"),
    (Role.STATE, r"state|states|cache|caches|kv|momentum|exp_avg(_sq)?|hidden_state0|ssm|moment[12]?|h0|c0"),
    (
        Role.NORM_WEIGHT,
        r"(layer_?|rms_?|group_?|batch_?|[a-z]*_?)norm\d*_(weights?|bias|scale|gamma|beta|w|b)|ln_[wb]",
    ),
    (Role.WEIGHT, r"weights?|w|w\d|kernel|proj|projs|bias|biases|embedding|table|filter|lora_[ab]|matrix|codebook"),
)
_TOKEN_WORDS = r"ids?|tokens?|labels?|targets?|inputs?_ids|idx|index|indices|categor(y|ies)|class(es)?|words?"
_ADDRESS_WORDS = (
    r"indptr|cu_?seq_?lens?|offsets?|seq_?lens?|lengths?|lens?|starts?|ends?|perm(utation)?|order|sorted|top_?k|"
    r"page|pages|block_tables?|slots?|slot_mapping|experts?|routing|segments?|batch_idx|counts?|splits?|strides?|"
    r"parents?|tree|rank|num"
)


def roles(problem: Problem, index_ranges: Mapping[str, int] | None = None) -> dict[str, Role]:
    """Every input's name to its role.

    `index_ranges` maps inputs that the reference uses as an index, as found by tracing it, to their
    legal exclusive upper bound.
    """
    ranges = index_ranges or {}
    normalises = "norm" in f"{problem.name} {problem.op_type} {problem.description} {problem.reference_source}".lower()
    return {spec.name: _role(spec, traced_index=spec.name in ranges, normalises=normalises) for spec in problem.inputs}


def _role(spec: TensorSpec, *, traced_index: bool, normalises: bool) -> Role:
    if spec.shape is None:
        return Role.SCALAR
    if spec.dtype == "bool":
        return Role.MASK
    if spec.dtype.startswith(("int", "uint")):
        return _integer_role(spec, traced_index=traced_index)
    return _float_role(spec, normalises=normalises)


def _integer_role(spec: TensorSpec, *, traced_index: bool) -> Role:
    if _has_word(spec.name, r"mask"):
        return Role.MASK
    if not traced_index and spec.dtype == "int8" and _has_word(spec.name, r"weights?|w|q?weights?|quantized"):
        return Role.WEIGHT
    if _has_word(spec.name, r"positions?|pos"):
        return Role.POSITION
    if traced_index and _has_word(spec.name, r"experts?"):
        return (
            Role.TOKEN_IDS
        )  # where each token goes, and any token may go anywhere; a top-k without repeats is seen later
    if _has_word(spec.name, _ADDRESS_WORDS):
        return Role.INDICES
    if traced_index or _has_word(spec.name, _TOKEN_WORDS):
        return Role.TOKEN_IDS
    return Role.INDICES


def _float_role(spec: TensorSpec, *, normalises: bool) -> Role:
    if spec.dtype.startswith("float4"):
        return Role.WEIGHT
    if _has_word(spec.name, "hidden_states?") and not _has_word(spec.name, "grad|d"):
        return Role.ACTIVATION  # a transformer's word for it; nothing is carried over
    for role, words in _FLOAT_WORDS:
        if _has_word(spec.name, words):
            return role
    described = spec.description.lower()
    if re.search(r"\bgradient (of|with respect to|w\.?r\.?t)", described):
        return Role.GRADIENT
    if len(spec.shape or ()) == 1 and normalises and _has_word(spec.name, r"gamma|beta"):
        return Role.NORM_WEIGHT
    if len(spec.shape or ()) == 1 and re.search(r"\bnorm(ali[sz]ation)?\b.*\b(weight|gain|bias)", described):
        return Role.NORM_WEIGHT
    return Role.ACTIVATION


def _has_word(name: str, words: str) -> bool:
    """True when one of `words` stands in the name between underscores, digits at the end apart."""
    return re.search(rf"(?:^|_)(?:{words})\d*(?:_|$)", name.lower()) is not None
