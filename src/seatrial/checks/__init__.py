"""The table of checks, in the order they run: cheap and likely to reject first, the training trial last."""

from __future__ import annotations

from seatrial.checks import (
    assumed_layout,
    broken_contract,
    crashing_call,
    does_not_load,
    fitted_inputs,
    fitted_sizes,
    mutated_input,
    narrow_accumulator,
    out_of_bounds,
    replayed_result,
    stale_output,
    tampered_process,
    training_divergence,
    wrong_values,
)
from seatrial.checks.base import Check

_does_not_load: Check = does_not_load
_crashing_call: Check = crashing_call
_broken_contract: Check = broken_contract
_wrong_values: Check = wrong_values
_narrow_accumulator: Check = narrow_accumulator
_fitted_inputs: Check = fitted_inputs
_fitted_sizes: Check = fitted_sizes
_replayed_result: Check = replayed_result
_stale_output: Check = stale_output
_mutated_input: Check = mutated_input
_assumed_layout: Check = assumed_layout
_tampered_process: Check = tampered_process
_out_of_bounds: Check = out_of_bounds
_training_divergence: Check = training_divergence

CHECKS: dict[str, Check] = {
    c.NAME: c
    for c in (
        _does_not_load,
        _crashing_call,
        _broken_contract,
        _wrong_values,
        _narrow_accumulator,
        _fitted_inputs,
        _fitted_sizes,
        _replayed_result,
        _stale_output,
        _mutated_input,
        _assumed_layout,
        _tampered_process,
        _out_of_bounds,
        _training_divergence,
    )
}
