"""Seeds: the same for ever, and different wherever they should be."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipebench.seeds import Purpose, seed_of, seeds_of


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, Purpose.WEIGHTS, 0), 2871514730620370382),
        ((0, Purpose.DATA, 0), 7776734705470436316),
        ((0, Purpose.DROPOUT, 0, 0, 0), 2110663037044504242),
        ((0, Purpose.DROPOUT, 1, 2, 3), 3236604010731237567),
        ((0, Purpose.DROPOUT, 3, 2, 1), 7211456424106202974),
        ((0, Purpose.TEACHER), 3944978716420687324),
        ((7, Purpose.DROPOUT, 1, 2, 3), 7914879166896125131),
        ((2**31 - 1, Purpose.WEIGHTS, 17), 1111159957353672987),
    ],
)
def test_results_recorded_yesterday_can_be_repeated(arguments: tuple[int, ...], expected: int) -> None:
    seed, purpose, *parts = arguments
    assert seed_of(seed, Purpose(purpose), *parts) == expected


def test_no_two_draws_of_a_run_or_of_neighbouring_runs_share_a_seed() -> None:
    seeds = [seed_of(seed, Purpose.DROPOUT, *parts) for seed in range(3) for parts in product(range(12), repeat=3)]
    seeds += [seed_of(seed, Purpose.DATA, step) for seed, step in product(range(3), range(500))]
    seeds += [seed_of(seed, Purpose.WEIGHTS, layer) for seed, layer in product(range(3), range(500))]
    seeds += [seed_of(seed, Purpose.TEACHER) for seed in range(3)]
    assert len(set(seeds)) == len(seeds)


@given(st.integers(0, 2**31 - 1), st.sampled_from(list(Purpose)), st.lists(st.integers(0, 2**31), max_size=3))
def test_torch_generators_take_every_seed(seed: int, purpose: Purpose, parts: list[int]) -> None:
    assert 0 <= seed_of(seed, purpose, *parts) < 2**63


def test_seeds_that_share_all_but_the_last_part_are_the_same_mixed_together() -> None:
    assert seeds_of(7, Purpose.DROPOUT, (3, 5), range(4)) == [seed_of(7, Purpose.DROPOUT, 3, 5, i) for i in range(4)]
