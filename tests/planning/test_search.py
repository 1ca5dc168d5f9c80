"""The smallest number of devices, and the ways to use it."""

import pytest
from plan_cases import MB, footprint, gpu

from poptransformer.errors import UserError
from poptransformer.planning.devices import find_device
from poptransformer.planning.footprint import Footprint, Part
from poptransformer.planning.search import check_replicas, place, ways_to_fit


def ranked(num_replicas):
    """A model of 4 layers that ranks share evenly."""
    whole = footprint()

    def share(part):
        return Part(
            {name: num_bytes // num_replicas for name, num_bytes in part.weights.items()},
            part.reads,
            {name: num_bytes // num_replicas for name, num_bytes in part.caches.items()},
            part.activation_bytes,
        )

    return Footprint(share(whole.first), tuple(map(share, whole.layers)), share(whole.last), num_replicas)


def shape(plan):
    return plan.num_replicas, len(plan.stages)


def test_one_device_where_that_is_enough():
    plan, ways = place(ranked, 8, gpu(600))
    assert shape(plan) == (1, 1) and [shape(way) for way in ways] == [(1, 1)]


def test_all_ways_on_as_few_as_can_be():
    plan, ways = place(ranked, 8, gpu(200))  # four layers of 110, embedding and head on three is too much
    assert [shape(way) for way in ways] == [(1, 4), (2, 2), (4, 1)] and shape(plan) == (1, 4)


def test_ranks_where_a_layer_is_too_much_for_a_device():
    plan, ways = place(ranked, 8, gpu(100))
    assert min(way.num_replicas for way in ways) >= 2 and plan.fits
    assert {way.num_taken for way in ways} == {plan.num_taken}


def test_no_more_ranks_than_there_is_to_cut():
    assert ways_to_fit(ranked, 1, gpu(100)) == []
    with pytest.raises(UserError, match="no number of devices is enough; take a lower precision, or a smaller max_length"):
        place(ranked, 1, gpu(100))


def test_what_was_asked_for_is_kept():
    plan, ways = place(ranked, 8, gpu(200), num_replicas=2)
    assert shape(plan) == (2, 2) and ways == []
    plan, _ = place(ranked, 8, gpu(600), num_devices=3)
    assert shape(plan) == (1, 3)
    plan, _ = place(ranked, 8, gpu(600), num_devices=6, num_replicas=3)
    assert shape(plan) == (3, 2)
    plan, _ = place(ranked, 8, gpu(600), layers_per_device=[0, 1, 3])
    assert plan.layers_per_device == [0, 1, 3]


@pytest.mark.parametrize(
    "asked", [{"num_devices": 1}, {"num_devices": 2}, {"layers_per_device": [2, 2]}, {"num_replicas": 2, "num_devices": 2}]
)
def test_what_does_not_fit_is_refused_with_the_smallest_number_that_does(asked):
    message = (
        "does not fit gpu, which has 200 MB: .*; the smallest number that fits is 4 x gpu: num_replicas=1 with 4 stages, or "
        "num_replicas=2 with 2 stages, or num_replicas=4 with 1 stage"
    )
    with pytest.raises(UserError, match=message):
        place(ranked, 8, gpu(200), **asked)


def test_too_few_ranks_at_any_number_of_stages():
    with pytest.raises(UserError, match=r"device 0 \(embedding, layers 0-3, head\) needs 557 MB: .* the smallest number"):
        place(ranked, 8, gpu(100), num_replicas=1)


def test_numbers_that_contradict_each_other():
    with pytest.raises(UserError, match="devices=3 is not a multiple of num_replicas=2"):
        place(ranked, 8, gpu(600), num_devices=3, num_replicas=2)
    with pytest.raises(UserError, match="devices=3, but 2 stages of 1 replica make 2"):
        place(ranked, 8, gpu(600), num_devices=3, layers_per_device=[2, 2])


def test_too_many_replicas():
    with pytest.raises(UserError, match="num_replicas=9 is more than the 8 heads or features .*; set at most 8"):
        place(ranked, 8, gpu(600), num_replicas=9)


def test_replicas_of_ipus():
    check_replicas(4, 8, find_device("bow"))
    check_replicas(3, 8, gpu(600))
    with pytest.raises(UserError, match="num_replicas=6: IPUs come in powers of two, .*; set 4 or 8"):
        check_replicas(6, 8, find_device("bow"))


def test_ipus_are_filled_in_powers_of_two():
    ways = ways_to_fit(lambda ranks: footprint(20, layer_mb=100 // ranks, num_replicas=ranks), 8, find_device("bow"))
    assert {way.num_taken for way in ways} == {4} and ways[0].total_bytes > 2 * 900 * MB
