"""The cut into stages: against all cuts there are, and what it looks like for real models."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poptransformer.errors import UserError
from poptransformer.planning.balance import balance


def loads(layer_bytes, first_bytes, last_bytes, cut):
    """Bytes of each stage."""
    ends = [0, *itertools.accumulate(cut)]
    stages = [sum(layer_bytes[begin:end]) for begin, end in itertools.pairwise(ends)]
    stages[0] += first_bytes
    stages[-1] += last_bytes
    return stages


sizes = st.integers(0, 50)


@given(st.lists(sizes, max_size=7), sizes, sizes, st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_no_cut_has_a_smaller_largest_stage_or_is_more_even(layer_bytes, first_bytes, last_bytes, num_stages):
    def cost(cut):
        stages = loads(layer_bytes, first_bytes, last_bytes, cut)
        return max(stages), sum(load**2 for load in stages)

    cut = balance(layer_bytes, first_bytes, last_bytes, num_stages)
    cuts = itertools.product(range(len(layer_bytes) + 1), repeat=num_stages)
    every = [other for other in cuts if sum(other) == len(layer_bytes)]
    assert tuple(cut) in every
    assert cost(cut) == min(map(cost, every))


def test_even_layers_are_spread_evenly():
    assert balance([5] * 12, 0, 0, 4) == [3, 3, 3, 3]


def test_the_first_stage_has_no_layers_where_the_embedding_is_large():
    assert balance([1] * 20, 8, 0, 4) == [0, 6, 7, 7]


def test_a_tied_embedding_weighs_on_both_ends():
    assert balance([10] * 12, 20, 20, 4) == [2, 4, 4, 2]


def test_more_stages_than_layers_leaves_some_empty():
    cut = balance([7, 7], 0, 0, 5)
    assert sum(cut) == 2
    assert max(cut) == 1


def test_eighty_layers_over_sixty_four_stages_are_quick():
    cut = balance([10**9] * 80, 10**9, 10**9, 64)
    assert sum(cut) == 80
    assert max(loads([10**9] * 80, 10**9, 10**9, cut)) == 2 * 10**9


@pytest.mark.parametrize("num_stages", [0, -1, 2.0, True, "2"])
def test_a_number_of_stages_that_is_none_is_refused(num_stages):
    with pytest.raises(UserError, match="num_stages=.*give a whole number of stages, 1 or more"):
        balance([1], 0, 0, num_stages)
