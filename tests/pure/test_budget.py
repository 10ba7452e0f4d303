"""The cheapest layers to run again, against every set there is."""

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from pipebench.engine.budget import Candidate, cheapest

costs = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=8)


def seconds_of(candidates: list[Candidate], layers: tuple[int, ...]) -> float:
    return sum(candidate.seconds for candidate in candidates if candidate.layer in layers)


@given(costs, st.integers(0, 200))
def test_no_other_set_that_fits_is_cheaper(sizes: list[tuple[int, int]], to_let_go: int) -> None:
    candidates = [Candidate(layer, seconds, num_bytes) for layer, (seconds, num_bytes) in enumerate(sizes)]

    def fits(layers: tuple[int, ...]) -> bool:
        return sum(candidate.num_bytes for candidate in candidates if candidate.layer in layers) >= to_let_go

    found = cheapest(candidates, fits)
    layers = range(len(candidates))
    fitting = [s for s in chain(*(combinations(layers, n) for n in range(len(layers) + 1))) if fits(s)]
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert fits(found)
    assert seconds_of(candidates, found) == min(seconds_of(candidates, each) for each in fitting)


def test_no_more_sets_are_asked_about_than_there_are_steps() -> None:
    candidates = [Candidate(layer, 1 + layer % 7, 1000 + 37 * layer) for layer in range(200)]
    asked = 0

    def fits(layers: tuple[int, ...]) -> bool:
        nonlocal asked
        asked += 1
        return False

    assert cheapest(candidates, fits) is None
    assert asked <= 2050
