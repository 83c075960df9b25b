"""The table of adapters, most specific first."""

from __future__ import annotations

from seatrial.trials.adapters import add_norm_forward, embedding_backward, norm_forward, softmax_forward
from seatrial.trials.adapters.base import Adapter, Match, Refused

__all__ = ["ADAPTERS", "Adapter", "Match", "Refused"]

ADAPTERS: dict[str, Adapter] = {
    embedding_backward.NAME: embedding_backward,
    add_norm_forward.NAME: add_norm_forward,
    norm_forward.NAME: norm_forward,
    softmax_forward.NAME: softmax_forward,
}
