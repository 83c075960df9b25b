"""The training trial: streams, adapters, the rule of judgement, and the origin case with its honest twins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from seatrial.model import InputRule, Problem, TensorSpec, Trial, Value, Workload
from seatrial.trials.adapters import ADAPTERS
from seatrial.trials.decoder import Decoder, Sizes
from seatrial.trials.judge import Twins, judge, leaves
from seatrial.trials.kernels import (
    ONE_IN,
    Axis,
    Kernel,
    KernelFailed,
    in_another_order,
    output_slots,
    reference_kernel,
    with_another_last_bit,
)
from seatrial.trials.loop import Run
from seatrial.trials.matrix import HonestRuns, Settings, find_adapter, fitted_sizes, run_matrix
from seatrial.trials.text import UNKNOWN, batches, encode, most_repeats, stream, vocabulary_of, words_of

# ---------------------------------------------------------------------------------------------------
# Problems, as small as they come


def problem(
    name: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    reference: Callable[..., Any],
    *,
    values: dict[str, float] | None = None,
    **constants: int,
) -> Problem:
    rules = {key: InputRule("scalar", value) for key, value in (values or {}).items()}
    return Problem(
        name=name,
        format="plain",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        workloads=(Workload("0", {"B": 2, "T": 16}, rules),),
        reference=reference,
        draw=lambda workload, seed, device: {},
        sizes=lambda axes: {**constants, **axes},
        var_axes=("B", "T"),
    )


def per_token(dy: Tensor, ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = table[ids.flatten()].float()
    inverse = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
    normed, upstream = rows * inverse, dy.reshape(-1, table.shape[1]).float() * weight.float()
    return ((upstream - normed * (upstream * normed).mean(-1, keepdim=True)) * inverse).bfloat16()


def summed_in_float32(dy: Tensor, ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> Tensor:
    total = torch.zeros(table.shape, dtype=torch.float32)
    return total.index_add_(0, ids.flatten(), per_token(dy, ids, table, weight, eps).float()).bfloat16()


def summed_in_bfloat16(dy: Tensor, ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> Tensor:
    return running_sum(ids.flatten(), per_token(dy, ids, table, weight, eps), torch.zeros_like(table))


def summed_backwards(dy: Tensor, ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> Tensor:
    gradient = per_token(dy, ids, table, weight, eps).flip(0)
    total = torch.zeros(table.shape, dtype=torch.float32)
    return total.index_add_(0, ids.flatten().flip(0), gradient.float()).bfloat16()


def running_sum(ids: Tensor, gradient: Tensor, total: Tensor) -> Tensor:
    """`for i: total[ids[i]] += gradient[i]`, in the dtype of `total`: first occurrences together, then second, …"""
    order = ids.argsort(stable=True)
    ranked = ids[order]
    occurrence = torch.arange(len(ids)) - torch.searchsorted(ranked, ranked)
    for turn in torch.split(occurrence.argsort(stable=True), occurrence.bincount().tolist()):
        total[ranked[turn]] = total[ranked[turn]] + gradient[order[turn]]
    return total


def embedding_backward(**names: str) -> Problem:
    def called(usual: str) -> str:
        return names.get(usual, usual)

    return problem(
        "embedding_rmsnorm_backward",
        [
            TensorSpec(called("grad_output"), ("B", "T", "H"), "bfloat16"),
            TensorSpec(called("token_ids"), ("B", "T"), "int64"),
            TensorSpec(called("embedding_weight"), ("V", "H"), "bfloat16"),
            TensorSpec(called("norm_weight"), ("H",), "bfloat16"),
            TensorSpec("eps", None, "float32"),
        ],
        [TensorSpec("grad_embedding", ("V", "H"), "bfloat16")],
        summed_in_float32,
        values={"eps": 1e-6},
        H=32,
        V=256,
    )


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def norm_forward() -> Problem:
    return problem(
        "rmsnorm",
        [
            TensorSpec("hidden_states", ("B", "T", "H"), "bfloat16"),
            TensorSpec("weight", ("H",), "bfloat16"),
            TensorSpec("variance_epsilon", None, "float32"),
        ],
        [TensorSpec("output", ("B", "T", "H"), "bfloat16")],
        norm,
        values={"variance_epsilon": 1e-5},
        H=32,
    )


def add_norm_forward() -> Problem:
    rows = ("B", "H")
    return problem(
        "fused_add_rmsnorm",
        [
            TensorSpec("hidden_states", rows, "bfloat16"),
            TensorSpec("residual", rows, "bfloat16"),
            TensorSpec("weight", ("H",), "bfloat16"),
        ],
        [TensorSpec("residual_out", rows, "bfloat16"), TensorSpec("output", rows, "bfloat16")],
        lambda x, residual, weight: {"output": norm(x + residual, weight, 1e-6), "residual_out": x + residual},
        H=32,
    )


def softmax_forward() -> Problem:
    shape = ("B", "heads", "T", "S")
    return problem(
        "softmax_with_soft_cap",
        [TensorSpec("scores", shape, "float32"), TensorSpec("softcap", None, "float32")],
        [TensorSpec("probabilities", shape, "float32")],
        lambda scores, cap: (cap * torch.tanh(scores / cap)).softmax(-1),
        values={"softcap": 20.0},
        heads=2,
        S=64,
    )


def logit_cap() -> Problem:
    return problem(
        "logit_softcap",
        [TensorSpec("logits", ("B", "V"), "float32")],
        [TensorSpec("capped", ("B", "V"), "float32")],
        lambda logits: 30.0 * torch.tanh(logits / 30.0),
        V=256,
    )


def matmul() -> Problem:
    return problem(
        "matmul",
        [TensorSpec("a", ("B", "H"), "float32"), TensorSpec("b", ("H", "H"), "float32")],
        [TensorSpec("c", ("B", "H"), "float32")],
        torch.matmul,
        H=32,
    )


PROBLEMS = {
    "embedding backward": embedding_backward,
    "norm forward": norm_forward,
    "add and norm forward": add_norm_forward,
    "softmax forward": softmax_forward,
}
SMALL = Settings(steps=12, batch=128, sizes=Sizes(vocabulary=256, width=32, layers=1, heads=2, length=64))
TEXT_SGD = replace(SMALL, data=("text",), optimizers=("sgd",))


def kernel(function: Callable[..., Any]) -> Kernel:
    def call(inputs: Sequence[Value]) -> tuple[Tensor, ...]:
        out = function(*inputs)
        return out if isinstance(out, tuple) else (out,)

    return call


def trial_of(candidate: Kernel, of: Problem | None = None, **options: Any) -> Trial:
    trial, why = run_matrix(of or embedding_backward(), candidate, **{"settings": TEXT_SGD, **options})
    assert trial is not None, why
    return trial


def verdicts(trial: Trial) -> dict[tuple[str, str], str]:
    return {(cell.data, cell.optimizer): cell.verdict for cell in trial.cells}


@pytest.fixture(scope="module")
def honest() -> HonestRuns:
    return HonestRuns()


# ---------------------------------------------------------------------------------------------------
# Token streams


def test_words_keep_every_character_of_the_text() -> None:
    text = "def f(x):\n    return x_1 + 2.5  # naïve\n"
    assert "".join(words_of(text)) == text
    assert words_of("a_1 +=") == ["a_1", " ", "+", "="]


def test_the_vocabulary_is_ranked_by_frequency_and_ends_with_unknown() -> None:
    words = words_of("b a a c c c")
    assert vocabulary_of(words, 4) == [" ", "c", "a", UNKNOWN]
    assert encode(["c", "b"], vocabulary_of(words, 4)).tolist() == [1, 3]


@pytest.mark.parametrize("data", ["text", "zipf", "uniform"])
def test_streams_are_seeded_and_inside_the_vocabulary(data: str) -> None:
    tokens = stream(data, vocabulary=256, seed=3)
    assert torch.equal(tokens, stream(data, vocabulary=256, seed=3))
    assert int(tokens.min()) >= 0 and int(tokens.max()) < 256
    assert (data == "text") == torch.equal(tokens, stream(data, vocabulary=256, seed=4))


def test_text_repeats_its_commonest_token_where_uniform_ids_hide_repeats() -> None:
    repeats = {}
    for data in ("text", "zipf", "uniform"):
        ((ids, targets),) = batches(stream(data, vocabulary=2048, seed=0), batch=32, length=64, steps=1, seed=0)
        assert torch.equal(ids[:, 1:], targets[:, :-1])
        repeats[data] = most_repeats(ids)
    assert repeats["text"] > 2 * repeats["zipf"] > 20 * repeats["uniform"]


# ---------------------------------------------------------------------------------------------------
# Kernels


def test_the_reordered_control_sums_the_same_in_another_order() -> None:
    reference = kernel(lambda x, row: (x.sum(0) + row, x))
    control = in_another_order(reference, [Axis({0: 0}, {1: 0}), Axis({0: 1, 1: 0}, {0: 0, 1: 1})], seed=1)
    x, row = torch.randn(100, 8), torch.randn(8)
    (total, same), (other, back) = reference([x, row]), control([x, row])
    assert torch.equal(same, back) and not torch.equal(total, other)
    torch.testing.assert_close(total, other)


def test_the_last_bit_control_moves_a_few_values_by_one_and_no_zero() -> None:
    values = torch.cat([torch.randn(100_000), torch.zeros(10)]).bfloat16()
    (moved,) = with_another_last_bit(kernel(lambda x: x), seed=0)([values])
    steps = moved.view(torch.int16).int() - values.view(torch.int16).int()
    assert set(steps.tolist()) == {-1, 0, 1}
    assert 0.8 / ONE_IN < (steps != 0).float().mean() < 1.2 / ONE_IN
    assert abs(steps.float().mean()) < 0.1 / ONE_IN * 3
    assert not moved[-10:].any()


def test_output_slots_follow_the_inputs() -> None:
    inputs: list[Value] = [torch.zeros(3, 32).bfloat16(), torch.ones(3, 32).bfloat16(), torch.ones(32).bfloat16()]
    slots = output_slots(add_norm_forward(), inputs)
    assert [(slot.name, slot.shape, slot.dtype) for slot in slots] == [
        ("residual_out", (3, 32), "bfloat16"),
        ("output", (3, 32), "bfloat16"),
    ]


def test_the_spelled_out_running_sum_is_the_loop() -> None:
    ids, gradient = torch.randint(0, 5, (200,)), torch.randn(200, 3).bfloat16()
    total = torch.zeros(5, 3).bfloat16()
    for i, row in zip(ids.tolist(), gradient, strict=True):
        total[i] += row
    assert torch.equal(total, running_sum(ids, gradient, torch.zeros(5, 3).bfloat16()))


# ---------------------------------------------------------------------------------------------------
# Adapters


@pytest.mark.parametrize("name", ADAPTERS)
def test_each_adapter_takes_its_own_problem(name: str) -> None:
    found = find_adapter(PROBLEMS[name]())
    assert not isinstance(found, str) and name == found[0].NAME


def test_an_operation_without_an_adapter_is_not_applicable() -> None:
    trial, why = run_matrix(matmul(), reference_kernel(matmul()))
    assert trial is None and "no training adapter" in why


@pytest.mark.parametrize(
    "names", [("dy", "indices", "table"), ("grad_hidden_states", "input_ids", "embed_tokens_weight")]
)
def test_the_embedding_adapter_knows_its_inputs_by_other_names(names: tuple[str, str, str]) -> None:
    renamed = dict(zip(("grad_output", "token_ids", "embedding_weight"), names, strict=True))
    match = ADAPTERS["embedding backward"].matches(embedding_backward(**renamed))
    assert match is not None
    assert dict(match.inputs) == {"gradient": 0, "ids": 1, "table": 2, "weight": 3}
    assert dict(match.constants) == {4: 1e-6} and dict(match.sizes) == {"width": 32, "vocabulary": 256}


def test_a_plain_embedding_gradient_with_flat_tokens_fits() -> None:
    flat = problem(
        "embedding_backward",
        [TensorSpec("dy", ("T", "H"), "float32"), TensorSpec("idx", ("T",), "int32")],
        [TensorSpec("dw", ("V", "H"), "float32")],
        lambda dy, idx: torch.zeros(256, 32).index_add_(0, idx, dy),
        H=32,
        V=256,
    )
    trial = trial_of(reference_kernel(flat), flat)
    assert [cell.verdict for cell in trial.cells] == ["agrees"]


def test_a_reference_that_is_no_gradient_of_a_known_forward_is_refused() -> None:
    doubled = replace(embedding_backward(), reference=lambda *inputs: 2 * summed_in_float32(*inputs))
    trial, why = run_matrix(doubled, reference_kernel(doubled))
    assert trial is None and "not the gradient" in why


def test_a_decoder_too_large_for_a_trial_is_not_applicable() -> None:
    trial, why = run_matrix(embedding_backward(), kernel(summed_in_float32), settings=replace(SMALL, largest=1000))
    assert trial is None and "parameters" in why


def test_sizes_the_problem_insists_on_override_the_settings() -> None:
    sizes, batch = fitted_sizes(Settings(batch=8), {"width": 36, "vocabulary": 100, "tokens": 96, "heads": 5})
    assert (sizes.width, sizes.vocabulary, sizes.length * batch) == (36, 100, 96)
    assert sizes.width % sizes.heads == 0


@pytest.mark.parametrize("make", [norm_forward, add_norm_forward, softmax_forward, logit_cap])
def test_forward_problems_train_as_a_layer(make: Callable[[], Problem]) -> None:
    forward = make()
    reference = reference_kernel(forward)

    def honest_kernel(inputs: Sequence[Value]) -> tuple[Tensor, ...]:
        return with_another_last_bit(reference, seed=99)(inputs)

    def not_scaled_down(inputs: Sequence[Value]) -> tuple[Tensor, ...]:
        return tuple(64 * out for out in reference(inputs))

    kept, settings = HonestRuns(), replace(TEXT_SGD, rates={"sgd": (0.2,)})
    assert trial_of(honest_kernel, forward, honest=kept, settings=settings).cells[0].verdict == "agrees"
    assert trial_of(not_scaled_down, forward, honest=kept, settings=settings).cells[0].verdict in (
        "drifts",
        "diverges",
    )


def test_with_the_reference_in_its_slot_the_decoder_is_the_plain_one() -> None:
    ids = torch.randint(0, 256, (2, 16))
    exact = replace(norm_forward(), inputs=tuple(replace(s, dtype="float32") for s in norm_forward().inputs))
    found = find_adapter(exact)
    assert not isinstance(found, str)
    adapter, match = found
    losses = []
    for slots in (None, adapter.fit(exact, match, reference_kernel(exact))):
        torch.manual_seed(0)
        model = Decoder(SMALL.sizes, slots)
        loss = model(ids, ids)
        loss.backward()
        losses.append((loss.item(), model.final.grad))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-4)
    torch.testing.assert_close(losses[0][1], losses[1][1], rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------------------------------------------
# The rule of judgement


def falling(offset: Callable[[int], float] = lambda t: 0.0, steps: int = 40) -> Run:
    losses = [3.0 + 4.0 * math.exp(-t / 8) + 0.05 * (-1) ** t + offset(t) for t in range(steps)]
    return Run(losses=losses, gradient_norms=[1.0] * steps)


def verdict_of(candidate: Run, *controls: Run) -> str:
    return judge([Twins(falling(), controls or (falling(),), candidate)]).verdict


def test_a_candidate_within_the_honest_spread_agrees() -> None:
    assert verdict_of(falling(lambda t: 0.002 * t), falling(lambda t: -0.001 * t)) == "agrees"


def test_a_candidate_outside_the_band_for_long_drifts() -> None:
    assert verdict_of(falling(lambda t: 0.01 * t), falling(lambda t: -0.001 * t)) == "drifts"


def test_one_spike_agrees() -> None:
    assert verdict_of(falling(lambda t: 0.5 if t == 5 else 0.0)) == "agrees"
    assert leaves([False, True, False, False, False, False, False, False]) is None
    assert leaves([False, True, False, False, True, False, False, False]) == 1
    assert leaves([False] * 5 + [True] * 9 + [False] * 300) is None
    assert leaves([False] * 5 + [True] * 10 + [False] * 300) == 5


@pytest.mark.parametrize("end", [math.nan, math.inf, 100.0])
def test_a_candidate_that_blows_up_diverges(end: float) -> None:
    lost = falling(steps=20)
    lost.losses.append(end)
    assert verdict_of(lost) == "diverges"


def test_an_honest_run_that_blows_up_leaves_the_cell_unverified() -> None:
    assert verdict_of(falling(), falling(lambda t: 100.0 if t == 39 else 0.0)) == "not verified"


def test_the_worst_seed_speaks() -> None:
    good = Twins(falling(), (falling(),), falling())
    bad = Twins(falling(), (falling(),), falling(lambda t: 1.0))
    assert judge([good, good]).verdict == "agrees"
    assert judge([good, bad]).verdict == "drifts"


# ---------------------------------------------------------------------------------------------------
# The origin case


def test_a_bfloat16_running_sum_leaves_the_band_on_text_with_sgd_and_is_masked_elsewhere(honest: HonestRuns) -> None:
    trial = trial_of(kernel(summed_in_bfloat16), settings=SMALL, honest=honest)
    found = verdicts(trial)
    assert found["text", "sgd"] in ("drifts", "diverges")
    assert found["uniform", "sgd"] == found["uniform", "adamw"] == found["text", "adamw"] == "masked"
    cells = {(cell.data, cell.optimizer): cell for cell in trial.cells}
    assert "contributions" in cells["uniform", "sgd"].reason and "AdamW" in cells["text", "adamw"].reason
    assert "is off by" in cells["text", "adamw"].reason and "nan" not in cells["text", "adamw"].reason
    assert (cells["text", "sgd"].most_repeats or 0) > 10 * (cells["uniform", "sgd"].most_repeats or 0)
    assert {curve.run for curve in cells["text", "sgd"].curves} == {"reference", "control", "candidate"}


def test_its_honest_twin_agrees_everywhere(honest: HonestRuns) -> None:
    found = verdicts(trial_of(kernel(summed_backwards), settings=SMALL, honest=honest))
    assert set(found.values()) == {"agrees"} and len(found) == 6


def test_cells_that_agree_are_masked_when_a_fault_is_proven(honest: HonestRuns) -> None:
    trial = trial_of(kernel(summed_backwards), settings=SMALL, honest=honest, fault_proven=True)
    assert set(verdicts(trial).values()) == {"masked"}
    assert all(cell.reason for cell in trial.cells)


@pytest.mark.parametrize("seed", range(6))
def test_an_honest_kernel_is_never_flagged(seed: int) -> None:
    trial = trial_of(in_another_order(kernel(summed_backwards), [Axis({0: 0, 1: 0})], seed=seed), seed=seed)
    assert [cell.verdict for cell in trial.cells] == ["agrees"]


def test_a_candidate_that_fails_is_not_verified_and_not_called_again(honest: HonestRuns) -> None:
    calls = 0

    def failing(inputs: Sequence[Value]) -> tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        raise KernelFailed("timed out after 60 s")

    trial = trial_of(failing, settings=SMALL, honest=honest)
    assert set(verdicts(trial).values()) == {"not verified"} and calls == 1
    assert all("timed out after 60 s" in cell.reason for cell in trial.cells)


def test_outputs_of_another_shape_are_not_verified(honest: HonestRuns) -> None:
    trial = trial_of(kernel(lambda *inputs: summed_in_float32(*inputs)[:1]), honest=honest)
    assert trial.cells[0].verdict == "not verified" and "(256, 32)" in trial.cells[0].reason


def test_a_gradient_of_nan_diverges(honest: HonestRuns) -> None:
    trial = trial_of(kernel(lambda *inputs: summed_in_float32(*inputs) * math.nan), honest=honest)
    assert trial.cells[0].verdict == "diverges" and "not finite" in trial.cells[0].reason


def test_honest_runs_are_made_once_and_progress_is_told() -> None:
    kept, told, settings = HonestRuns(), [], replace(TEXT_SGD, steps=5)
    for _ in range(2):
        trial_of(kernel(summed_in_float32), settings=settings, honest=kept, progress=lambda *p: told.append(p))
    assert told.count(("text × sgd: reference", 5, 5)) == 1
    assert told.count(("text × sgd: candidate", 5, 5)) == 2


def test_the_caller_keeps_its_threads_and_its_random_numbers() -> None:
    torch.set_num_threads(2)
    state = torch.random.get_rng_state()
    trial_of(kernel(summed_in_float32), settings=replace(TEXT_SGD, steps=3))
    assert torch.get_num_threads() == 2
    assert torch.equal(state, torch.random.get_rng_state())
