"""Cutting layers into stages and mini-batches into micro-batches."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.engine.partition import split_by_cost, split_uniformly


def stage_sums(costs: list[float], counts: list[int]) -> list[float]:
    ends = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    return [sum(costs[start:end]) for start, end in pairwise(ends)]


def all_splits(num_layers: int, num_stages: int) -> list[list[int]]:
    cuts = combinations(range(1, num_layers), num_stages - 1)
    return [[end - start for start, end in pairwise([0, *cut, num_layers])] for cut in cuts]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_no_contiguous_split_has_a_cheaper_longest_stage_or_then_more_even_others(
    whole_costs: list[int], data: st.DataObject
) -> None:
    costs = [float(cost) for cost in whole_costs]
    num_stages = data.draw(st.integers(1, len(costs)))

    def quality(counts: list[int]) -> tuple[float, float]:
        sums = stage_sums(costs, counts)
        return max(sums), sum(s * s for s in sums)

    found = split_by_cost(costs, num_stages)
    assert len(found) == num_stages
    assert sum(found) == len(costs)
    assert min(found) >= 1
    assert quality(found) == min(quality(counts) for counts in all_splits(len(costs), num_stages))


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=8), st.data())
def test_rounding_of_sums_does_not_cost_the_optimum(costs: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    best = min(max(stage_sums(costs, counts)) for counts in all_splits(len(costs), num_stages))
    assert max(stage_sums(costs, split_by_cost(costs, num_stages))) <= best * (1 + 1e-8)


@pytest.mark.parametrize(
    ("costs", "published"),
    [([1, 2, 3, 4, 5, 6], [4, 2]), ([0, 0], [1, 1])],  # torchgpipe, tests/test_balance.py
)
def test_the_longest_stage_is_no_longer_than_in_torchgpipes_test_vectors(
    costs: list[float], published: list[int]
) -> None:
    found = split_by_cost(costs, len(published))
    assert max(stage_sums(costs, found)) <= max(stage_sums(costs, published))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.data())
def test_the_longest_stage_keeps_the_bound_of_barany_and_grinberg(costs: list[float], data: st.DataObject) -> None:
    # Some split has sums that differ by at most 1 pairwise (arXiv:1308.2452), so its longest is below mean + 1.
    num_stages = data.draw(st.integers(1, len(costs)))
    assert max(stage_sums(costs, split_by_cost(costs, num_stages))) <= sum(costs) / num_stages + 1 + 1e-9


@pytest.mark.parametrize(
    ("costs", "num_stages", "counts"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([5, 1, 1, 1, 1, 1], 2, [1, 5]),
        ([1, 1, 1, 9], 3, [1, 2, 1]),
        ([3.0], 1, [1]),
        ([1, 1, 1, 1, 1, 10], 3, [2, 3, 1]),
    ],
)
def test_layers_of_these_costs_are_cut_so(costs: list[float], num_stages: int, counts: list[int]) -> None:
    found = split_by_cost(costs, num_stages)
    assert sorted(stage_sums(costs, found)) == sorted(stage_sums(costs, counts))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "counts"),
    [(18, 4, [5, 5, 4, 4]), (8, 8, [1] * 8), (7, 1, [7]), (7, 3, [3, 2, 2])],
)
def test_a_uniform_split_puts_the_longer_stages_first(num_layers: int, num_stages: int, counts: list[int]) -> None:
    assert split_uniformly(num_layers, num_stages) == counts


@pytest.mark.parametrize(
    ("num_samples", "num_micro_batches", "sizes"),
    [(11, 4, [3, 3, 3, 2]), (8, 8, [1] * 8), (32, 5, [7, 7, 6, 6, 6]), (5, 1, [5]), (12, 3, [4, 4, 4])],
)
def test_a_mini_batch_is_cut_so(num_samples: int, num_micro_batches: int, sizes: list[int]) -> None:
    assert micro_batch_sizes(num_samples, num_micro_batches) == sizes


@given(st.integers(1, 500), st.data())
def test_micro_batches_add_up_and_differ_by_at_most_one(num_samples: int, data: st.DataObject) -> None:
    num_micro_batches = data.draw(st.integers(1, num_samples))
    sizes = micro_batch_sizes(num_samples, num_micro_batches)
    assert len(sizes) == num_micro_batches
    assert sum(sizes) == num_samples
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
