"""Roles, recipes and sizes: what may be changed, what a change keeps, and what it is meant to bring about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seatrial.errors import ProblemError
from seatrial.formats import load_problem
from seatrial.inputs.changes import zipf
from seatrial.inputs.domain import are_free_ids, is_structured, keep_domain
from seatrial.inputs.recipes import Recipe, recipes
from seatrial.inputs.roles import Role, roles
from seatrial.inputs.sizes import elements, find_relations, other_sizes, sizes_beyond
from seatrial.model import InputRule, Problem, TensorSpec, Value, Workload

SAMPLES = Path(__file__).parent / "samples" / "sol_execbench"
VOCAB = 100


def declared(seed: int) -> dict[str, Value]:
    """One input of every kind that a recipe might be tempted to touch."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    return {
        "x": randn(40, 74).bfloat16(),
        "grad_output": randn(40, 74),
        "weight": randn(74, 74),
        "norm_weight": torch.ones(74),
        "token_ids": torch.randint(0, VOCAB, (40, 8), generator=g),
        "cu_seqlens": torch.arange(0, 41, 8),
        "kv_cache": randn(4, 16).to(torch.float8_e4m3fn),
        "probs": torch.softmax(randn(40, 16), -1),
        "gate": torch.sigmoid(randn(40, 16)),
        "decay": -torch.rand(40, 16, generator=g),
        "attn_mask": torch.where(randn(8, 8) > 0, 0.0, float("-inf")),
        "keep": randn(40) > 0,
        "rstd": randn(40).abs() + 0.1,
        "cos": torch.cos(randn(40, 8)),
        "w_scale": torch.rand(40, generator=g) + 0.5,
        "running": torch.rand(4, 32, generator=g).cumsum(-1),
        "eps": 1e-6,
        "softcap": 50.0,
        "alpha": 2.0,
        "count": 3,
        "causal": True,
    }


MASKING = {"half-masked", "few-kept", "padded", "left-padded", "one-row-masked"}
UNTOUCHED: dict[str, set[str]] = {  # input -> the recipes that are made for it
    "weight": set(),
    "cu_seqlens": set(),
    "attn_mask": MASKING | {"graded-bias"},
    "keep": MASKING,
    "rstd": set(),
    "cos": set(),
    "w_scale": {"uneven-scales"},
    "running": set(),
    "count": {"small-ints", "larger-ints"},
    "causal": {"flipped-flags"},
}


def problem_of(draw: Callable[[int], Mapping[str, Value]], **more: Any) -> Problem:
    sample = draw(0)
    specs = tuple(
        TensorSpec(n, tuple(map(str, v.shape)), str(v.dtype).removeprefix("torch."))
        if isinstance(v, Tensor)
        else TensorSpec(n, None, {bool: "bool", int: "int64", float: "float32"}[type(v)])
        for n, v in sample.items()
    )
    settings: dict[str, Any] = {
        "workloads": (Workload("w", {}, {n: InputRule("random") for n in sample}),),
        "sizes": lambda axes: dict(axes),
        "outputs": (TensorSpec("y", ("4",), "float32"),),
        "draw": lambda workload, seed, device: dict(draw(seed)),
    }
    return Problem(
        name="p",
        format="test",
        inputs=specs,
        reference=lambda *a: a[0],
        description="norm backward",
        **{**settings, **more},
    )


PROBLEM = problem_of(declared)
RANGES = {"token_ids": VOCAB}
ALL = {recipe.name: recipe for recipe in recipes(PROBLEM, RANGES)}


def tensor(values: Mapping[str, Value], name: str) -> Tensor:
    value = values[name]
    assert isinstance(value, Tensor)
    return value


def applied(name: str, seed: int = 3) -> dict[str, Value]:
    return ALL[name].apply(declared(1), seed)


# ---------------------------------------------------------------------------------------------------
# Roles


@pytest.mark.parametrize(
    ("name", "dtype", "role"),
    [
        ("x", "bfloat16", Role.ACTIVATION),
        ("hidden_states", "bfloat16", Role.ACTIVATION),
        ("residual", "float32", Role.ACTIVATION),
        ("logits", "float32", Role.ACTIVATION),
        ("q_weight", "bfloat16", Role.WEIGHT),
        ("gate_proj", "bfloat16", Role.WEIGHT),
        ("bias", "float32", Role.WEIGHT),
        ("packed", "float4_e2m1", Role.WEIGHT),
        ("q_norm_weight", "bfloat16", Role.NORM_WEIGHT),
        ("input_layernorm_weight", "float32", Role.NORM_WEIGHT),
        ("rmsnorm_weight", "float32", Role.NORM_WEIGHT),
        ("norm1_bias", "float32", Role.NORM_WEIGHT),
        ("grad_output", "bfloat16", Role.GRADIENT),
        ("grad_hidden_states", "bfloat16", Role.GRADIENT),
        ("dout", "float32", Role.GRADIENT),
        ("dy", "float32", Role.GRADIENT),
        ("token_ids", "int64", Role.TOKEN_IDS),
        ("input_ids", "int32", Role.TOKEN_IDS),
        ("labels", "int64", Role.TOKEN_IDS),
        ("kv_indptr", "int32", Role.INDICES),
        ("cu_seqlens", "int32", Role.INDICES),
        ("block_table", "int32", Role.INDICES),
        ("topk_ids", "int64", Role.INDICES),
        ("expert_ids", "int64", Role.INDICES),
        ("mystery", "int32", Role.INDICES),
        ("position_ids", "int64", Role.POSITION),
        ("freqs_cos", "bfloat16", Role.POSITION),
        ("attention_mask", "float32", Role.MASK),
        ("keep", "bool", Role.MASK),
        ("attn_mask", "int64", Role.MASK),
        ("rstd", "float32", Role.STATISTICS),
        ("running_var", "float32", Role.STATISTICS),
        ("lse", "float32", Role.STATISTICS),
        ("w_scale", "float32", Role.SCALE),
        ("x_scales", "float8_e4m3fn", Role.SCALE),
        ("ssm_state", "float32", Role.STATE),
        ("k_cache", "bfloat16", Role.STATE),
        ("exp_avg", "float32", Role.STATE),
    ],
)
def test_names_and_types_say_the_role(name: str, dtype: str, role: Role) -> None:
    problem = Problem(
        "p", "test", (TensorSpec(name, ("4", "4"), dtype),), (), (), lambda: 0, lambda *a: {}, lambda axes: {}
    )
    assert roles(problem)[name] is role


def test_a_traced_index_is_an_id_unless_its_name_says_it_addresses_something() -> None:
    problem = problem_of(lambda seed: {"mystery": torch.zeros(4).long(), "page_index": torch.zeros(4).long()})
    assert roles(problem)["mystery"] is Role.INDICES
    assert roles(problem, {"mystery": 9, "page_index": 9}) == {"mystery": Role.TOKEN_IDS, "page_index": Role.INDICES}


def test_gamma_is_a_norm_weight_only_in_a_problem_that_normalises() -> None:
    plain = problem_of(lambda seed: {"gamma": torch.ones(8)})
    assert roles(plain)["gamma"] is Role.NORM_WEIGHT
    assert roles(replace(plain, description="retention"))["gamma"] is Role.ACTIVATION


# ---------------------------------------------------------------------------------------------------
# What every recipe keeps


def test_the_promised_recipes_are_offered_and_the_declared_draw_is_first() -> None:
    assert next(iter(ALL)) == "declared"
    promised = """uniform zipf one-id half-one-id common-sign scaled-up scaled-up-32 tiny shifted outlier-channels heavy-tail
        heterogeneous one-sentinel nonunit-norm zero-rows tied absolute larger-eps smaller-eps smaller-cap"""
    assert set(promised.split()) <= set(ALL)
    assert len(ALL) == len(recipes(PROBLEM, RANGES)), "names are unique"


@pytest.mark.parametrize("recipe", ALL.values(), ids=list(ALL))
def test_a_recipe_keeps_form_domain_and_what_it_may_not_touch(recipe: Recipe) -> None:
    before, copy = declared(1), declared(1)
    after = recipe.apply(before, 5)
    assert list(after) == list(before) and recipe.words
    for name, value in after.items():
        assert_same(before[name], copy[name], f"{recipe.name} wrote into {name}")
        if not isinstance(value, Tensor):
            assert type(value) is type(before[name])
            if recipe.name not in UNTOUCHED.get(name, {recipe.name}):
                assert value == before[name]
            continue
        original = tensor(before, name)
        assert value.shape == original.shape and value.dtype == original.dtype and value.is_contiguous()
        if name != "attn_mask":
            assert bool(value.double().isfinite().all()), f"{recipe.name} made {name} overflow"
        if recipe.name not in UNTOUCHED.get(name, {recipe.name}):
            assert_same(value, original, f"{recipe.name} touched {name}")
    ids, probs, gate = (tensor(after, n) for n in ("token_ids", "probs", "gate"))
    assert int(ids.min()) >= 0 and int(ids.max()) < VOCAB
    assert bool((probs >= 0).all())
    assert torch.allclose(probs.sum(-1)[probs.sum(-1) > 0], torch.ones(()), atol=1e-3)
    assert float(gate.min()) >= 0 and float(gate.max()) <= 1
    assert float(tensor(after, "decay").max()) <= 0


def assert_same(one: Value, other: Value, words: str) -> None:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        assert torch.equal(one.double(), other.double()), words
    else:
        assert one == other, words


@pytest.mark.parametrize("recipe", ALL.values(), ids=list(ALL))
def test_a_recipe_is_a_function_of_its_seed_and_only_declared_changes_nothing(recipe: Recipe) -> None:
    first, again = recipe.apply(declared(1), 5), recipe.apply(declared(1), 5)
    for name in first:
        assert_same(first[name], again[name], f"{recipe.name} is not deterministic in {name}")
    changed = [n for n, v in declared(1).items() if not same(v, first[n])]
    assert bool(changed) == (recipe.name != "declared")


def same(one: Value, other: Value) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one.double(), other.double())
    return bool(one == other)


# ---------------------------------------------------------------------------------------------------
# What each recipe is for


def test_id_recipes_concentrate_as_they_say() -> None:
    def share(name: str) -> float:
        ids = tensor(applied(name), "token_ids")
        return float(ids.reshape(-1).bincount(minlength=VOCAB).max()) / ids.numel()

    assert share("one-id") == 1.0
    assert 0.4 < share("half-one-id") < 0.65 and 0.4 < share("hot-id") < 0.65
    assert share("uniform") < 0.05 < share("zipf") < 0.4


def test_zipf_falls_with_the_rank_and_the_seed_chooses_the_ids() -> None:
    def draw(seed: int) -> dict[str, Value]:
        return {"token_ids": torch.randint(0, 50, (20_000,), generator=torch.Generator().manual_seed(seed))}

    zipf = {r.name: r for r in recipes(problem_of(draw), {"token_ids": 50})}["zipf"]
    counts = [tensor(zipf.apply(draw(0), seed), "token_ids").bincount(minlength=50) for seed in (1, 2)]
    ranked = counts[0].sort(descending=True).values.double()
    assert float(ranked[0] / ranked[1]) == pytest.approx(2**1.1, rel=0.1)
    assert int(counts[0].argmax()) != int(counts[1].argmax())


def test_padding_ids_stay_where_they_are() -> None:
    ids = torch.randint(0, 50, (200,), generator=torch.Generator().manual_seed(0))
    ids[::10] = -100
    one = {r.name: r for r in recipes(problem_of(lambda s: {"labels": ids}), {"labels": 50})}["one-id"]
    changed = tensor(one.apply({"labels": ids}, 1), "labels")
    assert bool((changed[::10] == -100).all()) and len(set(changed.tolist())) == 2


@pytest.mark.parametrize(
    "ids",
    [
        torch.arange(64).repeat_interleave(2),
        torch.randperm(128),
        torch.stack([torch.randperm(16)[:8] for _ in range(64)]),
    ],
    ids=["sorted", "permutation", "top-k without repeats"],
)
def test_indices_with_structure_get_no_id_recipe_and_free_ones_do(ids: Tensor) -> None:
    bound = int(ids.max()) + 1
    free = torch.randint(0, bound, ids.shape, generator=torch.Generator().manual_seed(0))
    assert not are_free_ids(ids, bound) and are_free_ids(free, bound)
    assert "one-id" not in {r.name for r in recipes(problem_of(lambda s: {"ids": ids}), {"ids": bound})}
    assert "one-id" in {r.name for r in recipes(problem_of(lambda s: {"ids": free}), {"ids": bound})}


def test_a_bound_that_is_a_var_axis_follows_it() -> None:
    problem = Problem(
        name="p",
        format="test",
        inputs=(TensorSpec("idx", ("n",), "int64"), TensorSpec("x", ("rows", "4"), "float32")),
        outputs=(),
        workloads=(Workload("w", {"n": 64, "rows": 32}, {}),),
        reference=lambda *a: a[0],
        draw=lambda w, seed, device: small,
        sizes=lambda axes: dict(axes),
        var_axes=("n", "rows"),
    )
    small: dict[str, Value] = {"idx": torch.randint(0, 4, (64,)), "x": torch.randn(4, 4)}
    uniform = {r.name: r for r in recipes(problem, {"idx": 32})}["uniform"]
    assert int(tensor(uniform.apply(small, 0), "idx").max()) < 4


def test_scalings_are_exact_powers() -> None:
    x = tensor(declared(1), "x")
    assert torch.equal(tensor(applied("scaled-up"), "x"), x * 8)
    assert torch.equal(tensor(applied("scaled-up-32"), "x"), x * 32)
    assert torch.equal(tensor(applied("tiny"), "x"), x * 2.0**-10)


def test_common_sign_goes_to_gradients_when_there_are_any() -> None:
    after = applied("common-sign")
    assert float(tensor(after, "grad_output").mean()) == pytest.approx(0.5, abs=0.1)
    assert torch.equal(tensor(after, "x"), tensor(declared(1), "x"))
    without = {"x": torch.randn(40, 8)}
    plain = {r.name: r for r in recipes(problem_of(lambda s: without))}["common-sign"]
    assert float((tensor(plain.apply(without, 0), "x") - without["x"]).mean()) == pytest.approx(0.5, abs=0.1)


def test_heterogeneous_leaves_the_first_half_as_it_was() -> None:
    before, after = tensor(declared(1), "grad_output"), tensor(applied("heterogeneous"), "grad_output")
    assert torch.equal(after[:20], before[:20]) and torch.equal(after[20:], before[20:] * 8)


def test_outlier_channels_are_every_37th() -> None:
    ratio = tensor(applied("outlier-channels"), "grad_output") / tensor(declared(1), "grad_output")
    hot = (ratio.mean(0) > 10).nonzero().flatten()
    assert hot.numel() == 2 and int(hot[1] - hot[0]) == 37 and torch.allclose(ratio[:, hot], torch.tensor(50.0))


def test_shifted_rows_have_means_of_several_sigma() -> None:
    means = tensor(applied("shifted"), "grad_output").mean(-1)
    assert float(means.abs().min()) > 3 and float(means.abs().max()) < 9
    assert bool((means > 0).any()) and bool((means < 0).any())


def test_one_sentinel_is_one_element_at_256_sigma() -> None:
    before, after = tensor(declared(1), "grad_output"), tensor(applied("one-sentinel"), "grad_output")
    assert int((before != after).sum()) == 1
    assert float(after.max()) == pytest.approx(256, rel=0.05)
    assert int(after.argmax()) != int(tensor(applied("one-sentinel", 4), "grad_output").argmax())


def test_zero_rows_ties_signs_and_tails() -> None:
    zero = (tensor(applied("zero-rows"), "x") == 0).all(-1)
    assert int(zero.sum()) == 13
    assert len(set(tensor(applied("tied"), "grad_output").flatten().tolist())) < 25
    assert float(tensor(applied("absolute"), "grad_output").min()) >= 0
    heavy = tensor(applied("heavy-tail"), "grad_output")
    assert float(heavy.abs().max() / heavy.abs().median()) > 20


def test_norm_weights_leave_one_and_hold_zero_and_minus_one() -> None:
    weight = tensor(applied("nonunit-norm"), "norm_weight")
    assert bool((weight == 0).any()) and bool((weight == -1).any()) and 0.7 < float(weight.std()) < 1.3


def test_scalars_change_by_their_name() -> None:
    assert applied("larger-eps")["eps"] == pytest.approx(1e-3) and applied("smaller-eps")["eps"] == pytest.approx(1e-9)
    assert applied("smaller-cap")["softcap"] == 50 / 16
    other = applied("smaller-scalars")
    assert (other["alpha"], other["eps"], other["softcap"], other["count"]) == (1.5, 1e-6, 50.0, 3)


def test_narrow_floats_saturate_instead_of_overflowing() -> None:
    cache = tensor(applied("outlier-channels"), "kv_cache").float()
    assert float(cache.abs().max()) > 30 and bool(cache.isfinite().all())
    assert (
        float(keep_domain(torch.tensor([1e9, 1.0]), torch.tensor([-1.0, 1.0]).to(torch.float8_e4m3fn)).float().max())
        == 448
    )


def test_a_problem_without_changeable_inputs_has_only_the_declared_draw() -> None:
    assert [r.name for r in recipes(problem_of(lambda s: {"cu_seqlens": torch.arange(4)}))] == ["declared"]


def test_a_sample_that_cannot_be_drawn_leaves_the_recipes_that_need_none() -> None:
    def refuse(workload: Workload, seed: int, device: str) -> dict[str, Value]:
        raise ProblemError("not here")

    unseen = {r.name for r in recipes(replace(PROBLEM, draw=refuse), RANGES)}
    assert {"hot-id", "scaled-up-32", "nonunit-norm", "sentinel-per-row", "zipf"} <= unseen <= set(ALL)


def test_blob_ids_stay_as_they_are() -> None:
    def draw(seed: int) -> dict[str, Value]:
        return {"token_ids": torch.randint(0, 9, (64,))}

    rules = {"token_ids": InputRule("safetensors", path="p", tensor_key="k")}
    assert len(recipes(problem_of(draw, workloads=(Workload("w", {}, rules),)), {"token_ids": 9})) == 1


@pytest.mark.parametrize(
    ("structured", "free"),
    [
        (torch.ones(16), torch.ones(16).index_fill(0, torch.tensor([3]), 1.5)),
        (torch.tensor([0.0, 1, 1, 0, 1]), torch.tensor([0.0, 1, 1, 0, 0.9])),
        (torch.tensor([0.0, float("-inf")]).repeat(8), torch.tensor([0.5, float("-inf"), 0.1]).repeat(8)),
        (torch.linspace(0.1, 0.9, 16), torch.linspace(0.1, 0.9, 16).flip(0).roll(3)),
    ],
    ids=["constant", "whole numbers", "mask", "monotone"],
)
def test_structure_is_told_from_values(structured: Tensor, free: Tensor) -> None:
    assert is_structured(structured) and not is_structured(free)


# ---------------------------------------------------------------------------------------------------
# Sizes


def sized(listed: list[dict[str, int]], *, resizable: bool = True) -> Problem:
    axes = tuple(listed[0])
    return Problem(
        name="p",
        format="test",
        inputs=(TensorSpec("x", axes, "float32"),),
        outputs=(TensorSpec("y", axes[:1], "float32"),),
        workloads=tuple(Workload(str(i), a, {"x": InputRule("random")}) for i, a in enumerate(listed)),
        reference=lambda x: x,
        draw=lambda w, seed, device: {},
        sizes=even_only,
        var_axes=axes,
        resizable=resizable,
    )


def even_only(axes: Mapping[str, int]) -> dict[str, int]:
    if axes.get("even", 0) % 2:
        raise ProblemError("odd")
    return dict(axes)


def test_sizes_are_new_distinct_below_the_ceiling_and_follow_the_seed() -> None:
    listed = [{"rows": n, "columns": m} for n, m in ((8, 64), (8, 128), (64, 64), (128, 256))]
    problem = sized(listed)
    found = other_sizes(problem, count=12, seed=1, ceiling_elements=20_000)
    sizes = [tuple(w.axes.values()) for w in found]
    assert len(set(sizes)) == len(found) == 12 and not {tuple(a.values()) for a in listed} & set(sizes)
    assert all(elements(problem, w.axes) <= 20_000 and w.inputs == problem.workloads[0].inputs for w in found)
    rows, columns = ({w.axes[axis] for w in found} for axis in ("rows", "columns"))
    assert {1, 9} <= rows and {1, 65} <= columns, "one, and one more than listed"
    assert other_sizes(problem, count=12, seed=1, ceiling_elements=20_000) == found
    assert other_sizes(problem, count=4, seed=1, ceiling_elements=20_000) == found[:4]


def test_a_larger_size_than_any_listed_is_among_the_first() -> None:
    found = other_sizes(sized([{"rows": n} for n in (32, 64, 128)]), count=6, seed=0, ceiling_elements=1 << 20)
    assert {33, 1, 129, 515} <= {w.axes["rows"] for w in found}


def test_every_axis_goes_beyond_its_list_alone_however_few_sizes_are_tried() -> None:
    problem = sized([{"rows": n, "columns": m} for n, m in ((8, 64), (64, 128), (500, 500))])
    for count in (0, 1, 3, 6):
        tried = other_sizes(problem, count=count, seed=1, ceiling_elements=1 << 21)
        every = (*tried, *sizes_beyond(problem, tried, ceiling_elements=1 << 21))
        assert any(w.axes["rows"] > 500 and w.axes["columns"] <= 500 for w in every), count
        assert any(w.axes["columns"] > 500 and w.axes["rows"] <= 500 for w in every), count
        assert len(every) <= count + 2
    added = sizes_beyond(problem, (), ceiling_elements=1 << 21)
    assert [tuple(w.axes.values()) for w in added] == [(501, 64), (8, 501)], "the smallest workload's other lengths"
    assert sizes_beyond(problem, added, ceiling_elements=1 << 21) == ()
    assert sizes_beyond(problem, (), ceiling_elements=100) == ()
    assert sizes_beyond(sized([{"rows": 8}], resizable=False), (), ceiling_elements=1 << 21) == ()
    assert [w.axes for w in sizes_beyond(sized([{"even": 8}]), (), ceiling_elements=1 << 21)] == [{"even": 16}]


def test_sizes_that_do_not_resolve_are_left_out() -> None:
    found = other_sizes(sized([{"even": 8}, {"even": 64}]), count=6, seed=0, ceiling_elements=1 << 20)
    assert found and all(w.axes["even"] % 2 == 0 for w in found)


def test_no_sizes_for_a_problem_that_cannot_be_resized_or_has_no_room() -> None:
    listed = [{"rows": 8}, {"rows": 64}]
    assert other_sizes(sized(listed, resizable=False), count=6, seed=0, ceiling_elements=1 << 20) == ()
    assert other_sizes(sized(listed), count=6, seed=0, ceiling_elements=0) == ()


@pytest.mark.parametrize(
    ("points", "kept"),
    [
        ([(1, 2), (4, 5), (9, 10)], True),
        ([(1, 2), (4, 8)], True),
        ([(2, 5), (4, 9), (7, 15)], True),
        ([(2, 5), (4, 9)], False),
        ([(1, 2), (4, 5), (9, 11)], False),
        ([(1, 2), (1, 3)], False),
        ([(1, 7), (4, 7), (9, 7)], False),
        ([(4, 4)], True),
        ([(4, 9)], False),
    ],
)
def test_relations_between_listed_sizes(points: list[tuple[int, int]], *, kept: bool) -> None:
    relations = find_relations(("batch", "indptr"), [{"batch": b, "indptr": i} for b, i in points])
    assert bool(relations) == kept
    found = other_sizes(
        sized([{"batch": b, "indptr": i} for b, i in points]), count=8, seed=0, ceiling_elements=1 << 20
    )
    assert found
    if kept:
        relation = relations["indptr"]
        assert all(w.axes["indptr"] == relation.length(w.axes["batch"]) for w in found)


def test_sample_problems_have_recipes_and_sizes_that_the_reference_accepts() -> None:
    problem = load_problem(SAMPLES / "custom_ids")
    found = other_sizes(problem, count=3, seed=0, ceiling_elements=1 << 16)
    for workload in found:
        for recipe in recipes(problem, {"ids": 256}):
            inputs = recipe.apply(problem.draw(workload, 1, "cpu"), 2)
            assert tuple(problem.reference(*inputs.values()).shape) == (256, 8)
    assert len(found) == 3


def test_a_zipf_draw_over_a_huge_range_needs_no_memory_of_that_size() -> None:
    ids = zipf(torch.zeros(4096, dtype=torch.int64), 1 << 40, torch.Generator().manual_seed(0))
    assert int(ids.min()) >= 0 and int(ids.max()) > 1 << 30
    assert int(torch.unique(ids, return_counts=True)[1].max()) > 100


# ---------------------------------------------------------------------------------------------------
# Masks, positions, labels, scalars


def offered(
    draw: Callable[[int], Mapping[str, Value]], index_ranges: Mapping[str, int] | None = None, **more: Any
) -> dict[str, Recipe]:
    return {r.name: r for r in recipes(problem_of(draw, **more), index_ranges)}


def test_a_mask_that_masks_nothing_is_drawn_anew_and_keeps_something_in_every_row() -> None:
    whole: dict[str, Value] = {"x": torch.randn(6, 40), "mask": torch.ones(6, 40, dtype=torch.bool)}
    ways = offered(lambda s: whole)
    for name in sorted(MASKING - {"one-row-masked"}):
        mask = tensor(ways[name].apply(whole, 3), "mask")
        assert bool(mask.any(-1).all()) and not bool(mask.all()), name
    assert (
        bool((~tensor(ways["one-row-masked"].apply(whole, 3), "mask")).all(-1).any()) and ways["one-row-masked"].risky
    )
    padded = tensor(ways["padded"].apply(whole, 3), "mask").int()
    assert bool((padded.diff(dim=-1) <= 0).all()), "padding on the right is a prefix"


def test_an_additive_mask_of_zeros_gets_excluded_elements_and_a_causal_one_stays() -> None:
    zeros: dict[str, Value] = {"x": torch.randn(6, 8), "attn_mask": torch.zeros(6, 8)}
    changed = tensor(offered(lambda s: zeros)["half-masked"].apply(zeros, 1), "attn_mask")
    assert set(changed.unique().tolist()) == {0.0, -1e4}
    for causal in (torch.ones(8, 8).tril().bool(), torch.full((8, 8), float("-inf")).triu(1)):
        assert "half-masked" not in offered(lambda s, m=causal: {"x": torch.randn(6, 8), "attn_mask": m})  # type: ignore[misc]


def test_positions_leave_the_first_rows_of_a_table_and_stay_inside_it() -> None:
    first: dict[str, Value] = {"x": torch.randn(2, 16, 8), "position_ids": torch.arange(16).expand(2, 16).contiguous()}
    free = tensor(offered(lambda s: first)["long-positions"].apply(first, 1), "position_ids")
    assert int(free.max()) > 4095 and not bool((free[0] == free[1]).all())
    table = offered(lambda s: first, {"position_ids": 64})
    for name in ("long-positions", "late-positions"):
        bounded = tensor(table[name].apply(first, 1), "position_ids")
        assert 16 <= int(bounded.max()) < 64 and int(bounded.min()) >= 0, name
    late = tensor(table["late-positions"].apply(first, 1), "position_ids")
    assert bool((late.diff(dim=-1) == 1).all())


@pytest.mark.parametrize(
    ("words", "scalar"),
    [("F.cross_entropy(x, y, ignore_index=-7)", None), ("valid = labels != -7", None), ("def run(x, y, n):", -7)],
)
def test_labels_are_ignored_only_where_the_reference_names_an_ignored_label(words: str, scalar: int | None) -> None:
    def draw(seed: int) -> dict[str, Value]:
        labels = torch.randint(0, 9, (64,), generator=torch.Generator().manual_seed(seed))
        return {"labels": labels, **({} if scalar is None else {"ignore_index": scalar})}

    ways = offered(draw, {"labels": 9}, reference_source=words)
    most, one = (tensor(ways[n].apply(draw(1), 2), "labels") for n in ("most-ignored", "one-ignored"))
    assert 32 < int((most == -7).sum()) < 64 and int((one == -7).sum()) == 1
    assert "most-ignored" not in offered(lambda s: {"labels": tensor(draw(s), "labels")}, {"labels": 9})


def test_confident_scores_favour_the_label_and_mistaken_ones_do_not() -> None:
    def draw(seed: int) -> dict[str, Value]:
        g = torch.Generator().manual_seed(seed)
        return {"logits": torch.randn(32, 9, generator=g), "labels": torch.randint(0, 9, (32,), generator=g)}

    ways = offered(draw, {"labels": 9})
    for name, share in (("confident", 1.0), ("mistaken", 0.0)):
        after = ways[name].apply(draw(1), 2)
        assert float((tensor(after, "logits").argmax(-1) == tensor(after, "labels")).float().mean()) == share


def test_scalars_take_other_values_be_they_numbers_or_tensors_of_one_element() -> None:
    def draw(seed: int) -> dict[str, Value]:
        return {"x": torch.randn(8, 8), "scale_by": torch.tensor(2.0), "window": 16, "renormalize": True, "gain": 4.0}

    ways = offered(draw)
    tripled = ways["larger-scalars"].apply(draw(1), 0)
    assert float(tensor(tripled, "scale_by")) == 6.0 and tripled["gain"] == 12.0 and tripled["window"] == 16
    assert ways["small-ints"].apply(draw(1), 0)["window"] == 1 and ways["small-ints"].risky
    assert ways["flipped-flags"].apply(draw(1), 0)["renormalize"] is False


def test_what_is_constant_in_the_declared_draw_varies_where_any_value_is_legal() -> None:
    flat: dict[str, Value] = {"x": torch.randn(9, 8), "grad_output": torch.ones(9, 8), "bias": torch.zeros(8)}
    ways = offered(lambda s: flat)
    assert tensor(ways["free-gradient"].apply(flat, 1), "grad_output").std() > 0.5
    assert tensor(ways["free-weight"].apply(flat, 1), "bias").std() > 0.2
    only = tensor(ways["one-row"].apply(flat, 1), "grad_output")
    assert int((only != 0).any(-1).sum()) == 1


def test_sentinels_reach_every_row_and_the_very_end() -> None:
    x: dict[str, Value] = {"x": torch.randn(50, 16)}
    ways = offered(lambda s: x)
    assert bool((tensor(ways["sentinel-per-row"].apply(x, 1), "x") > 100).sum(-1).eq(1).all())
    assert float(tensor(ways["sentinel-at-end"].apply(x, 1), "x")[-1, -1]) > 100


def test_targets_that_sum_to_one_may_sum_to_something_else() -> None:
    soft: dict[str, Value] = {"logits": torch.randn(6, 8), "target_probs": torch.softmax(torch.randn(6, 8), -1)}
    sums = tensor(offered(lambda s: soft)["unnormalised"].apply(soft, 1), "target_probs").sum(-1)
    assert float(sums[0]) == 0.0 and torch.allclose(sums[1:], torch.full((5,), 0.5))


def test_log_probabilities_stay_log_probabilities() -> None:
    logs: dict[str, Value] = {"log_q": torch.randn(6, 8).log_softmax(-1), "decay": -torch.rand(6, 8)}
    for name, recipe in offered(lambda s: logs).items():
        changed = recipe.apply(logs, 1)
        if not torch.equal(tensor(changed, "log_q"), tensor(logs, "log_q")):
            sums = tensor(changed, "log_q").double().exp().sum(-1)
            assert torch.allclose(sums, torch.ones(6, dtype=torch.float64), atol=1e-3), name


def test_what_the_declared_draw_holds_constant_varies_by_whatever_name() -> None:
    flat: dict[str, Value] = {
        "x": torch.randn(9, 8),
        "h0": torch.zeros(8),
        "temperature": torch.ones(8),
        "zeros": torch.zeros(8, dtype=torch.int8),
        "seq_lens": torch.full((8,), 64),
        "p": 0.0,
    }
    ways = offered(lambda s: flat)
    varied = ways["varied-constants"].apply(flat, 1)
    assert tensor(varied, "h0").std() > 0.3 and bool((tensor(varied, "temperature") > 0).all())
    assert int(tensor(varied, "zeros").max()) > 0 and tensor(varied, "zeros").dtype == torch.int8
    assert 1 <= int(tensor(varied, "seq_lens").min()) < int(tensor(varied, "seq_lens").max()) <= 64
    assert ways["larger-scalars"].apply(flat, 1)["p"] == 0.1


def test_a_second_draw_of_the_constants_differs_and_each_varies_alone() -> None:
    flat: dict[str, Value] = {"x": torch.randn(9, 8), "a": torch.ones(8), "b": torch.zeros(8)}
    ways = offered(lambda s: flat)
    first, second = (
        ways[name].apply(flat, seed) for seed, name in ((1, "varied-constants"), (2, "varied-constants-again"))
    )
    assert all(not same(first[n], second[n]) and not same(second[n], flat[n]) for n in ("a", "b"))
    for alone, other in (("a", "b"), ("b", "a")):
        changed = ways[f"varied-{alone}"].apply(flat, 1)
        assert not same(changed[alone], flat[alone]) and same(changed[other], flat[other])
    assert all(r.repeats == (n in {"varied-constants-again", "varied-a", "varied-b"}) for n, r in ways.items())
    many: dict[str, Value] = {"x": torch.randn(9, 8), **{f"c{i}": torch.ones(8) for i in range(9)}}
    assert sum(name.startswith("varied-c") and name[8:].isdigit() for name in offered(lambda s: many)) == 4
    one: dict[str, Value] = {"x": torch.randn(9, 8), "a": torch.ones(8)}
    assert "varied-a" not in offered(lambda s: one), "it would be the second draw once more"


@pytest.mark.parametrize("shape", [(128, 300), (3, 40), (2, 16), (1, 16), (40, 3), (24,)])
def test_every_column_holds_one_of_few_large_elements_in_some_row(shape: tuple[int, ...]) -> None:
    given: dict[str, Value] = {"x": torch.randn(*shape), "residual": torch.randn(*shape)}
    changed = offered(lambda s: given)["covered-x"].apply(given, 1)
    large = tensor(changed, "x").reshape(-1, shape[-1]).abs() > 150
    assert bool(large.any(0).all()) and bool(large.any(1).all())
    assert int(large.sum(1).max()) <= -(-shape[-1] // large.shape[0])
    assert torch.equal(tensor(changed, "residual"), tensor(given, "residual") * 2.0**-10)


def test_an_epsilon_changes_where_the_signals_are_tiny() -> None:
    given: dict[str, Value] = {"x": torch.randn(9, 8), "eps": 1e-6}
    changed = offered(lambda s: given)["tiny-other-eps"].apply(given, 1)
    assert torch.equal(tensor(changed, "x"), tensor(given, "x") * 2.0**-10) and changed["eps"] == 16e-6
    assert "tiny-other-eps" not in offered(lambda s: {"x": torch.randn(9, 8)})


@pytest.mark.parametrize("low", [-1e4, float("-inf")])
@pytest.mark.parametrize("name", ["attn_bias", "attn_mask"])
def test_an_additive_mask_of_two_values_holds_small_numbers_too_unless_the_reference_compares_it(
    name: str, low: float
) -> None:
    random = torch.where(torch.randn(16, 16) > 0, 0.0, low)
    given: dict[str, Value] = {"x": torch.randn(16, 16), name: random}
    adds = f"def run(x, {name}):\n    return x + {name}\n"
    recipe = offered(lambda s: given, reference_source=adds)["graded-bias"]
    changed = tensor(recipe.apply(given, 1), name)
    assert set(changed.unique().tolist()) == {low, -3.0, -0.5, 0.0, 0.5} and recipe.risky
    for asks in (
        f"{name} == 0",
        f"{name} < -1",
        f"{name}.bool()",
        f"torch.isinf({name})",
        f"{name} >= 0",
        f"0 > {name}",
    ):
        compares = f"def run(x, {name}):\n    return torch.where({asks}, x, 0)\n"
        assert "graded-bias" not in offered(lambda s: given, reference_source=compares), asks
    keyword = f"def run(x, {name}):\n    return attention(x, x, x, attn_mask={name})\n"
    assert "graded-bias" in offered(lambda s: given, reference_source=keyword)
    causal: dict[str, Value] = {"x": torch.randn(16, 16), name: torch.full((16, 16), low).triu(1)}
    assert "graded-bias" not in offered(lambda s: causal, reference_source=adds), "what lies above it may be skipped"
    bias: dict[str, Value] = {"x": torch.randn(16, 16), name: torch.where(torch.randn(16, 16) > 0, 0.0, -1.0)}
    assert "graded-bias" not in offered(lambda s: bias, reference_source=adds)


def test_squares_that_would_cancel_lean_one_way_in_a_bfloat16_input_and_in_no_other() -> None:
    x = torch.randn(64, 96).bfloat16()
    given: dict[str, Value] = {"x": x, "y": torch.randn(64, 96)}
    ways = offered(lambda s: given)
    changed = tensor(ways["leaning-x"].apply(given, 1), "x").double()
    off = (changed.square().bfloat16().double() - changed.square()) / changed.square()
    assert bool((off > 0).all()) and float(off.mean()) > 2.0**-9
    assert abs(float(((x.double().square().bfloat16().double() / x.double().square()) - 1).mean())) < 2.0**-11
    assert float((changed / x.double() - 1).abs().max()) < 0.25
    assert "leaning-y" not in ways and "covered-y" in ways
