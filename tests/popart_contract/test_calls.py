"""What the stand-in refuses beside models: calls in the wrong order, wrong arrays, and names that PopART does not have."""

import dataclasses
import os

import numpy as np
import pytest
from popart_contract.protos import FLOAT, INT32, Given, body, device, loop, model, node, run, trip_constants, value
from popart_contract.standin.binding import NAMESPACE, NotModelled
from popart_contract.standin.errors import CALL_RULES, Refusal
from popart_contract.standin.facts import API
from popart_contract.standin.machine import MACHINE

pytestmark = pytest.mark.usefixtures("machine")

X = np.ones((2, 3), np.float32)
ADD = Given(model([node("Add", "x w", "y")], weights={"w": np.ones(3, np.float32)}))
TWICE = {"enableReplicatedGraphs": True, "replicatedGraphCount": 2}
PROFILE = {"autoReport.all": "true", "autoReport.directory": "profiles"}
CALLS = {}


def case(function):
    """A function named after a rule, which takes whether to break it."""
    CALLS[function.__name__] = function
    return function


def steps(session, inputs, outputs=None, order=("prepareDevice", "weightsFromHost")):
    """The calls of a run, one after the other."""
    for call in order:
        getattr(session, call)()
    session.run(NAMESPACE["PyStepIO"](inputs, session.initAnchorArrays() if outputs is None else outputs))


@case
def fact_d_every_anchor_has_an_array(broken):
    dtype = np.float64 if broken else np.float32
    steps(ADD.session(), {"x": X}, {"y": np.zeros((2, 3), dtype)})


@case
def fact_d_every_input_is_fed(broken):
    steps(ADD.session(), {"x": X} | ({"X": X} if broken else {}))


@case
def fact_d_executables_are_for_hardware(broken):
    kind = "Cpu" if broken else "Offline"
    dataclasses.replace(ADD, device=(kind, 1)).session().compileAndExport("model.popef")
    assert os.path.isfile("model.popef")


@case
def fact_d_inputs_have_every_batch_and_replica(broken):
    fed = X if broken else np.stack([X] * 6)
    run(dataclasses.replace(ADD, options=TWICE, device=("Ipu", 2), batches=3).session(), x=fed)


@case
def fact_d_reports_are_found(broken):
    """The value of the option does not count for PopART, but Poplar writes nothing for "false"."""
    options = {"engineOptions": PROFILE | ({"autoReport.all": "false"} if broken else {})}
    dataclasses.replace(ADD, options=options).session("generate").prepareDevice()
    assert os.path.isfile("session_cache/generate/profile.pop")


@case
def fact_d_sessions_are_prepared_first(broken):
    calls = ["prepareDevice", "weightsFromHost"]
    steps(ADD.session(), {"x": X}, order=reversed(calls) if broken else calls)


@case
def fact_f_device_options_are_known(broken):
    manager = NAMESPACE["DeviceManager"]()
    manager.createOfflineIPUDevice(opts={"numIPUs": 2, "tilesPerIpu" if broken else "tilesPerIPU": 1472})


@case
def fact_f_offline_devices_only_compile(broken):
    steps(dataclasses.replace(ADD, device=("Offline" if broken else "Ipu", 1)).session(), {"x": X})


@case
def fact_h_model_is_bytes_or_a_path(broken):
    with open("model.onnx", "wb") as file:
        file.write(ADD.proto.SerializeToString())
    Given("other.onnx" if broken else "model.onnx").session()


@case
def fact_h_protos_fit_protobuf(broken):
    MACHINE.proto_limit = ADD.proto.ByteSize() - broken
    ADD.session()


@case
def fact_h_setup_gives_static_shapes(broken):
    Given(model([node("Add", "x z", "y")], [value("x", FLOAT, (2, 3)), value("z", FLOAT, (2 if broken else 3,))])).session()


@case
def fact_i_constant_weights_stay(broken):
    session = dataclasses.replace(ADD, options={"constantWeights": broken}).session()
    if broken:
        session.writeWeights(None)
    else:  # the stand-in then says that it cannot do it
        pytest.raises(NotModelled, session.writeWeights, None)


@case
def fact_i_fed_arrays_are_contiguous(broken):
    run(ADD.session(), x=np.asfortranarray(X) if broken else X)


@case
def fact_i_fed_arrays_have_the_type(broken):
    """INT64 is taken for INT32, float64 not for FLOAT."""
    made = model([node("Add", "i i", "y")], [value("i", INT32, (2,))])
    run(Given(made).session(), i=np.array([1, 2], np.int16 if broken else np.int64))


@case
def strict_weights_are_sent_before_a_run(broken):
    steps(ADD.session(), {"x": X}, order=("prepareDevice",) if broken else ("prepareDevice", "weightsFromHost"))


def test_every_rule_about_calls_has_a_case():
    assert set(CALLS) == set(CALL_RULES)


@pytest.mark.parametrize("rule", CALLS)
def test_call(rule):
    with pytest.raises(Refusal) as caught:
        CALLS[rule](True)
    assert caught.value.rules == [rule], caught.value
    CALLS[rule](False)


# ---- the API


def test_popart_comes_before_onnx():
    import popart

    assert popart.SessionOptions().cachePath == "session_cache"
    import onnx

    assert onnx.ModelProto is type(ADD.proto), "onnx is loaded once"


def test_popart_does_not_come_after_onnx():
    import onnx  # noqa: F401

    with pytest.raises(ImportError, match="before onnx"):
        import popart  # noqa: F401


def test_the_module_has_the_names_of_the_facts_alone():
    import popart

    assert {name for name in vars(popart) if not name.startswith("__")} == set(API)
    with pytest.raises(AttributeError):
        popart.Session  # noqa: B018


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        ("replicatedGraphCount", 2.0),
        ("enableOutlining", 1),
        ("virtualGraphMode", 1),
        ("engineOptions", {"a": 1}),
        ("cachePath", None),
    ],
)
def test_options_have_their_type(option, wrong):
    import popart

    options = popart.SessionOptions()
    with pytest.raises(TypeError, match=option):
        setattr(options, option, wrong)


def test_options_that_are_none_raise():
    import popart

    options = popart.SessionOptions()
    with pytest.raises(AttributeError, match="numReplicas"):
        options.numReplicas = 2
    with pytest.raises(AttributeError, match="numReplicas"):
        options.numReplicas  # noqa: B018
    with pytest.raises(NotModelled, match="batchSerializationSettings"):
        options.batchSerializationSettings  # noqa: B018


def test_options_that_came_after_3_2(machine):
    import popart

    options = popart.SessionOptions()
    options.stashAllTensorsInferencePipeline = True
    machine.sdk = "3.2.0"
    with pytest.raises(AttributeError, match="stashAll"):
        options.stashAllTensorsInferencePipeline = True


def test_dict_options_are_copies_that_write_items_back():
    import popart

    options = popart.SessionOptions()
    options.engineOptions["a"] = "1"
    options.engineOptions.update(b="2")
    assert options.engineOptions == {"a": "1"}
    with pytest.raises(TypeError, match="str -> str"):
        options.engineOptions["c"] = 3


def test_the_cache_can_be_set_from_outside(monkeypatch):
    import popart

    monkeypatch.setenv("POPART_CACHE_DIR", "elsewhere")
    options = popart.SessionOptions()
    assert options.enableEngineCaching and options.cachePath == "elsewhere"


def test_keywords_and_types_of_calls():
    import popart

    manager = popart.DeviceManager()
    with pytest.raises(TypeError, match="createIpuModelDevice"):
        manager.createIpuModelDevice()  # the dict is required
    with pytest.raises(TypeError, match="numIPUs"):
        manager.acquireAvailableDevice(numIPUs=2)
    with pytest.raises(TypeError, match="TensorInfo"):
        popart.TensorInfo(dtype="FLOAT", shape=[2])  # positional only
    with pytest.raises(TypeError, match="DataFlow"):
        popart.DataFlow(1, {"y": "ALL"})
    with pytest.raises(TypeError, match="relicatedStreamMode"):
        popart.InputSettings(replicatedStreamMode=popart.ReplicatedStreamMode.Broadcast)  # PopART's spelling is another
    with pytest.raises(TypeError, match="No constructor"):
        popart.DeviceInfo()
    with pytest.raises(NotModelled, match="getIr"):
        ADD.session().getIr()


def test_devices_are_taken_and_given_back(machine):
    import popart

    manager, always = popart.DeviceManager(), popart.DeviceConnectionType.Always
    machine.num_ipus = 4
    first = manager.acquireAvailableDevice(numIpus=4, connectionType=always)
    assert first.isAttached and manager.tryAcquireAvailableDevice(numIpus=1) is None
    with pytest.raises(popart.popart_exception, match="no device with 1 IPUs is free"):
        manager.acquireAvailableDevice()
    first.detach()
    assert manager.tryAcquireAvailableDevice(3) is None, "IPUs come in powers of two"
    with manager.acquireAvailableDevice(2) as second:
        assert second.isAttached and machine.attached == 2
    assert machine.attached == 0


def test_anchors_are_sorted_and_typed():
    import popart

    flow = popart.DataFlow(6, ["b", "a"], popart.AnchorReturnType("Final"))
    assert flow.anchors() == ["a", "b"] and flow.art("a").id() == popart.AnchorReturnTypeId.Final
    with pytest.raises(popart.popart_exception):
        popart.AnchorReturnType("Last")


# ---- caches


def test_the_cache_does_not_see_values():
    """FACTS (d): models that differ in values alone share a cache file, so the folder must be named after the values."""

    def run_with(weight, path):
        made = model([node("Add", "x w", "y")], weights={"w": np.full(3, weight, np.float32)})
        return Given(made, {"enableEngineCaching": True, "cachePath": path}).run(x=X)["y"][0, 0]

    assert run_with(1, "one") == 2 and run_with(5, "one") == 2, "the second run took the first one's constants"
    assert run_with(5, "two") == 6 and len(os.listdir("one")) == 1


def test_only_programs_for_ipus_are_cached():
    for kind in ("Cpu", "IpuModel"):
        Given(ADD.proto, {"enableEngineCaching": True, "cachePath": "cache"}, (kind, 1)).run(x=X)
    assert not os.path.exists("cache")


def test_an_executable_can_be_loaded():
    dataclasses.replace(ADD, device=("Offline", 1)).session().saveExecutable(".")
    other = Given(model([node("Add", "x w", "y")], weights={"w": np.zeros(3, np.float32)})).session()
    other.loadExecutable("executable.popef")
    steps(other, {"x": X}, order=("weightsFromHost",))


def test_devices_that_are_no_kind_of_ipu():
    assert device("Cpu").type.name == "Cpu"
    looped = Given(model([*trip_constants(), loop(body=body())]), device=("IpuModel", 1))
    assert looped.run(x=X)["y"][0, 0] == 8
