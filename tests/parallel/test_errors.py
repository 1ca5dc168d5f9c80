"""What is refused when devices, ranks and stages do not fit together, before any weight is read; and the plan that says so."""

import logging

import jax
import pytest
from conftest import NUM_DEVICES
from parallel_cases import GOLDEN, open_session, shortest

from poptransformer import Session, UnsupportedError, UserError
from poptransformer.backends import make_engine
from poptransformer.backends.xla.devices import cpu_name
from poptransformer.planning import placement
from poptransformer.planning.devices import this_machine
from poptransformer.report import report

ODD_NUMBERS = [0, -2, 1.5, "2", True, [2]]


def refused(**options):
    """The message with which a Session of the golden GPT-2 (3 layers) is refused; nothing may be read before."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as caught:
        patch.setattr("poptransformer.backends.engine.Engine.load", lambda *_: pytest.fail("weights are being loaded"))
        open_session("gpt2", **options).compile()
    return str(caught.value)


@pytest.mark.parametrize("name", ["num_replicas", "devices"])
@pytest.mark.parametrize("number", ODD_NUMBERS)
def test_counts_that_are_none(name, number):
    assert refused(**{name: number}) == f"{name}={number!r}: wanted a whole number of at least 1"


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"num_replicas": NUM_DEVICES + 1}, NUM_DEVICES + 1),
        ({"num_replicas": 5, "layers_per_device": [1, 2]}, 10),
        ({"devices": 12, "num_replicas": 4, "layers_per_device": "auto"}, 12),
    ],
)
def test_more_devices_than_there_are(options, count):
    """How many there are, and on a CPU how to get more."""
    assert len(jax.devices("cpu")) == NUM_DEVICES  # and so JAX is up: the first Session may still ask for more
    assert refused(**options) == (
        f"{count} devices are wanted (num_replicas times the stages of layers_per_device); JAX sees {NUM_DEVICES} of platform "
        f"cpu here; JAX makes virtual CPU devices when it starts: open the Session that wants most of them first, or set the "
        f"environment variable JAX_NUM_CPU_DEVICES={count}"
    )


@pytest.mark.parametrize(("layers", "total"), [([1, 1], 2), ([3, 1], 4), ([0], 0), ((1, 1, 2), 4), ([0, 0, 0, 0], 0)])
def test_layers_that_do_not_add_up(layers, total):
    assert refused(layers_per_device=layers) == (f"layers_per_device={list(layers)} adds up to {total}; the model has 3 layers")


@pytest.mark.parametrize("layers", [[], [1.0, 2.0], [4, -1], [True, 2], ["1", "2"], 3, "even", {"0": 3}, [[1, 2]], [None, 3]])
def test_layers_that_are_no_counts(layers):
    assert refused(layers_per_device=layers) == f"layers_per_device={layers!r}: wanted auto, or a list of layer counts"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"devices": 3, "layers_per_device": [1, 2]},
            "devices=3, but 2 stages of 1 replica make 2; set devices=2, or leave it out",
        ),
        (
            {"devices": 2, "num_replicas": 2, "layers_per_device": [3, 0]},
            "devices=2, but 2 stages of 2 replicas make 4; set devices=4, or leave it out",
        ),
        ({"devices": 4, "num_replicas": 2}, "devices=4, but 1 stage of 2 replicas make 2; set devices=2, or leave it out"),
        ({"devices": 2}, "devices=2, but 1 stage of 1 replica make 1; set devices=1, or leave it out"),
        (
            {"devices": 5, "num_replicas": 2, "layers_per_device": "auto"},
            "devices=5 is not a multiple of num_replicas=2; set another number",
        ),
        (
            {"devices": 8, "num_replicas": 2, "layers_per_device": "auto"},
            "devices=8 makes 4 stages, but the model has 3 layers; set at most 6 devices, or list layers_per_device",
        ),
    ],
)
def test_devices_that_do_not_fit(options, message):
    assert refused(**options) == message


def test_backends_and_clusters():
    with pytest.raises(UnsupportedError, match="distributed goes with backend xla, not with 'reference'"):
        Session(GOLDEN / "gpt2", backend="reference", num_replicas=2, distributed="auto")
    assert make_engine("reference", world_size=3).world_size == 3


@pytest.mark.parametrize("family", ["chatglm2", "gemma", "rwkv"])
def test_no_number_of_ranks_is_refused(family):
    """Two key/value heads, one, none: any number does, also far more than there are heads."""
    case = shortest(family)
    with open_session(family, backend="reference", num_replicas=11) as session:
        assert session.generate([case["prompt"]], max_new_tokens=2)[0].token_ids == case["greedy"][:2]


# ---- the plan


def test_a_plan_that_does_not_fit_is_refused_before_loading(monkeypatch):
    """With the numbers: of GPUs each device's, of virtual devices the machine's."""
    monkeypatch.setattr(placement, "this_machine", lambda: this_machine(300_000))
    assert refused(num_replicas=2).startswith("does not fit: ")
    assert " are needed, and cpu has 300 kB for all devices; take a lower precision" in refused(layers_per_device=[1, 2])
    monkeypatch.setattr("poptransformer.backends.xla.engine.XlaEngine.memory_bytes", lambda self: 120_000)
    message = refused(layers_per_device=[1, 2], num_replicas=2)
    assert message.startswith(f"does not fit {cpu_name()}, which has 120 kB: device 0 (embedding, layer 0) needs "), message
    assert "KV cache 12.7 kB" in message and "; device 1 (layers 1-2, head) needs " in message
    assert " on each of num_replicas=2 ranks; " in message


def test_where_the_system_tells_nothing(monkeypatch, caplog):
    def unknown():
        raise UserError("the system does not say how much memory there is")

    monkeypatch.setattr(placement, "this_machine", unknown)
    with caplog.at_level(logging.INFO, "poptransformer"), open_session("gpt2", num_replicas=2, backend="reference") as session:
        assert session.plan is None
    assert "no plan is made: the system does not say how much memory there is" in caplog.text


def test_the_plan_in_log_and_report(caplog):
    """A line for each stage, with bytes as they are on the devices once all is loaded."""
    options = {"num_replicas": 2, "layers_per_device": [1, 2], "batch_size": 2}
    with caplog.at_level(logging.INFO, "poptransformer"), open_session("gpt2", **options) as session:
        assert "the plan:\nstage  layers" in caplog.text and "loaded the weights" not in caplog.text
        out = session.generate([[5]], max_new_tokens=2)
        text = report(session, out)
        table = text.split("\n\n")[1].splitlines()
        assert [line.split("  ")[0] for line in table] == ["stage", "0", "1"]
        assert " embedding, 0 " in table[1] and " 1-2, head " in table[2] and " weights  KV cache " in table[0]
        assert "MB read per token on each of 2 ranks\n" in text
        engine = session._engine
        for stage in session.plan.stages:
            devices = engine.groups[stage.index].devices
            arrays = [array for places in engine._parameters.values() for array in places.values()]
            for device in devices:
                held = [shard for array in arrays for shard in array.addressable_shards if shard.device == device]
                assert sum(shard.data.nbytes for shard in held) == stage.weight_bytes
                states = engine._states.values()
                held = [shard for array in states for shard in array.addressable_shards if shard.device == device]
                assert sum(shard.data.nbytes for shard in held) == stage.cache_bytes
    with open_session("gpt2", backend="reference") as session:
        assert session.plan is None
