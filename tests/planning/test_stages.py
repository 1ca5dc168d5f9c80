"""Plans of made-up footprints: bytes by hand, what fits, what is refused and how."""

import pytest
from plan_cases import MB, footprint, gpu

from poptransformer.errors import UserError
from poptransformer.planning.devices import Device, find_device
from poptransformer.planning.stages import fewest_stages, next_power_of_two, plan_stages


def test_bytes_of_each_stage():
    plan = plan_stages(footprint(), [1, 3], device=gpu(1000))
    first, last = plan.stages
    assert (first.weight_bytes, first.cache_bytes, first.activation_bytes) == (150 * MB, 10 * MB, 5 * MB)
    assert (last.weight_bytes, last.cache_bytes, last.activation_bytes) == (360 * MB, 30 * MB, 7 * MB)
    assert (first.read_bytes, last.read_bytes) == (100 * MB, 360 * MB)
    assert first.total_bytes == 165 * MB and plan.fullest is last and plan.total_bytes == 562 * MB
    assert [stage.holds for stage in plan.stages] == ["embedding, layer 0", "layers 1-3, head"]
    assert (plan.num_devices, plan.num_taken, plan.layers_per_device) == (2, 2, [1, 3])


def test_auto_balances_with_both_ends():
    assert plan_stages(footprint(12), "auto", 4, device=gpu(1000)).layers_per_device == [3, 3, 3, 3]
    assert plan_stages(footprint(4, layer_mb=20), "auto", 2, device=gpu(1000)).layers_per_device == [2, 2]
    assert plan_stages(footprint(), "auto", device=gpu(1000)).layers_per_device == [4]
    assert plan_stages(footprint(), None, device=gpu(1000)).layers_per_device == [4]


def test_a_tied_embedding_is_on_both_ends_and_read_at_the_last():
    one, two = (plan_stages(footprint(is_tied=True), "auto", count, device=gpu(1000)) for count in (1, 2))
    assert one.stages[0].weight_bytes == 450 * MB and [stage.weight_bytes for stage in two.stages] == [250 * MB] * 2
    assert one.read_bytes_per_token == two.read_bytes_per_token == 450 * MB
    assert [stage.read_bytes for stage in two.stages] == [200 * MB, 250 * MB]


def test_a_stage_without_layers():
    plan = plan_stages(footprint(), [0, 0, 4, 0], device=gpu(1000))
    assert [stage.holds for stage in plan.stages] == ["embedding", "nothing", "layers 0-3", "head"]
    assert plan.stages[1].total_bytes == 0


def test_time_is_what_one_rank_reads_on_all_stages():
    plan = plan_stages(footprint(), [2, 2], device=gpu(1000, bandwidth=46))
    assert plan.ms_per_token(False) == pytest.approx(10) and plan.ms_per_token(True) == pytest.approx(500 / 46)
    ranks = plan_stages(footprint(num_replicas=4), None, device=gpu(1000, bandwidth=46))
    assert ranks.ms_per_token(False) == pytest.approx(10) and ranks.num_devices == 4
    shared = Device("cpu", "cpu", 10**10, 46, is_shared=True)
    assert plan_stages(footprint(num_replicas=4), None, device=shared).ms_per_token(False) == pytest.approx(40)
    assert plan_stages(footprint(), None, device=gpu(1000, bandwidth=None)).ms_per_token(True) is None


def test_a_plan_that_fits_passes():
    plan = plan_stages(footprint(), [2, 2], device=gpu(297))
    assert plan.fits
    plan.check()


def test_one_that_does_not_is_refused_with_the_numbers_and_the_smallest_that_does():
    plan = plan_stages(footprint(), [2, 2], device=gpu(280))
    assert not plan.fits
    message = (
        "does not fit gpu, which has 280 MB: device 1 (layers 2-3, head) needs 287 MB: weights 260 MB, KV cache 20.0 MB, "
        "activations 7.00 MB; the smallest number that fits is 3 x gpu: layers_per_device: auto over 3 stages"
    )
    with pytest.raises(UserError) as refusal:
        plan.check()
    assert str(refusal.value) == message


def test_many_full_devices_are_counted():
    plan = plan_stages(footprint(8), [1] * 8, device=gpu(100))
    assert plan.problem().count("needs") == 4 and plan.problem().endswith("; and 4 more")


def test_where_a_layer_alone_is_too_much_ranks_are_needed():
    plan = plan_stages(footprint(num_replicas=2), None, device=gpu(110))
    with pytest.raises(UserError, match="on each of num_replicas=2 ranks; no number of stages is enough: raise num_replicas"):
        plan.check()


def test_stages_are_at_most_as_many_as_layers():
    assert fewest_stages(footprint(), gpu(180)).layers_per_device == [1, 1, 1, 1]
    assert fewest_stages(footprint(), gpu(170)) is None


def test_devices_of_one_machine_share_its_memory():
    machine = Device("cpu", "cpu", 560 * MB, is_shared=True)
    assert plan_stages(footprint(), None, device=machine).fits  # 557
    split = plan_stages(footprint(), [2, 2], device=machine)  # activations of both stages: 562
    with pytest.raises(UserError, match="does not fit: 562 MB are needed, and cpu has 560 MB for all devices; the smallest"):
        split.check()
    small = Device("cpu", "cpu", 500 * MB, is_shared=True)
    with pytest.raises(UserError, match="take a lower precision, or a smaller max_length or batch_size"):
        plan_stages(footprint(), None, device=small).check()


def test_ipus_come_in_powers_of_two():
    bow = find_device("bow")
    plan = fewest_stages(footprint(20, layer_mb=100), bow)  # 2317 MB: three would do
    assert len(plan.stages) == 4 and plan.num_taken == 4 and plan.fits
    three = plan_stages(footprint(20, layer_mb=100), [6, 7, 7], device=bow)
    assert three.fits and (three.num_devices, three.num_taken) == (3, 4)
    assert [next_power_of_two(n) for n in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]


def test_the_table():
    assert plan_stages(footprint(), [1, 3], device=gpu(400)).table().splitlines() == [
        "device  layers        weights  KV cache  activations   total  share",
        "0       embedding, 0   150 MB   10.0 MB      5.00 MB  165 MB   42 %",
        "1       1-3, head      360 MB   30.0 MB      7.00 MB  397 MB  100 %",
    ]


def test_the_table_of_ipus_has_tiles():
    head, row = plan_stages(footprint(num_replicas=2), None, device=find_device("mk2")).table().splitlines()
    assert head.split() == "stage layers weights KV cache activations total share per tile share".split()
    assert row.endswith("557 MB   62 %   370 KiB   60 %")


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1, 2], r"layers_per_device=\[1, 2\] adds up to 3; the model has 4 layers"),
        ([5, -1], "layers_per_device=.*: wanted auto, or a list of layer counts"),
        ([], "wanted auto, or a list of layer counts"),
        ("half", "layers_per_device='half': wanted auto, or a list of layer counts"),
        ([2.0, 2.0], "wanted auto, or a list of layer counts"),
    ],
)
def test_layer_counts_that_are_none_or_do_not_add_up(counts, message):
    with pytest.raises(UserError, match=message):
        plan_stages(footprint(), counts, device=gpu(1000))


def test_stages_that_contradict_the_layer_counts():
    with pytest.raises(UserError, match=r"layers_per_device=\[2, 2\] is for 2 stages, not for num_stages=3"):
        plan_stages(footprint(), [2, 2], 3, device=gpu(1000))
    with pytest.raises(UserError, match="num_stages=2 wants layers_per_device: auto, or a list of layer counts"):
        plan_stages(footprint(), None, 2, device=gpu(1000))
