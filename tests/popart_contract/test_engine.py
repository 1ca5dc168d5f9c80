"""What else the real engine does through the stand-in: sampling, pipelines, packed weights, caches, reports, devices, and real
programs that are broken in one place.
"""

import contextlib
import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
from conftest import REPOSITORY
from onnx import helper
from popart_contract.standin.binding import NAMESPACE
from popart_contract.standin.errors import Refusal
from popart_contract.standin.module import installed
from session_cases import CASES, DICT, MIXED, generate_rows, ids
from tolerance import assert_close

from poptransformer import Session, export
from poptransformer.errors import UnsupportedError, UserError

ON_PATH = REPOSITORY / "tests" / "popart_contract" / "on_path"
PROMPTS = [case["prompt"] for case in CASES[1:3]]
GREEDY = [case["greedy"][:6] for case in CASES[1:3]]


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A fresh host, in a working directory of the test's own."""
    monkeypatch.chdir(tmp_path)
    with installed() as made:
        yield made


@contextlib.contextmanager
def on_popart(model, popart=None, **more):
    """A Session on the stand-in."""
    with Session(model, backend="popart", max_length=40, popart=popart, **{"batch_size": 2} | more) as session:
        yield session


def greedy(session, prompts=PROMPTS):
    return ids(session.generate(prompts, max_new_tokens=6, ignore_eos=True))


def test_sampling_draws_what_the_other_backends_draw(tiny):
    """Rows of unequal settings in one batch; the random numbers are the same bits."""
    rows = [row | {"prompt": row["prompt"][:17]} for row in MIXED]
    with Session(tiny, backend="reference", batch_size=3, max_length=40) as session:
        expected = generate_rows(session, rows)
    with on_popart(tiny, batch_size=3) as session:
        assert generate_rows(session, rows) == expected


def test_the_loop_ends_when_all_rows_have(tiny, machine):
    """The second row ends with its stop id after the first has its number of tokens."""
    stops = [[], [GREEDY[1][3]]]
    settings = {"max_new_tokens": [2, 9], "stop_token_ids": stops, "ignore_eos": True}
    with on_popart(tiny) as session:
        found = ids(session.generate(PROMPTS, **settings))
        with Session(tiny, backend="reference", batch_size=2, max_length=40) as other:
            assert found == ids(other.generate(PROMPTS, **settings))
    steps = GREEDY[1].index(GREEDY[1][3]) + 1
    assert machine.loop_steps[-1] == (_main_loop(machine), steps) and steps > 2


def _main_loop(machine):
    graph = machine.sessions[-1]._program.graph
    return next(node.place for node in graph.nodes if node.kind == "Loop")


@pytest.mark.parametrize("stages", [[2, 1], [1, 1, 1]])
def test_pipelines(tiny, stages):
    """As many batches as stages in one run."""
    options = {"enable_pipeline": True, "batch_per_step": len(stages)}
    prompts = [case["prompt"][:9] for case in CASES[1:3]] * 3
    with on_popart(tiny, batch_size=1) as session:
        expected = greedy(session, prompts)
    with on_popart(tiny, options, layers_per_device=stages, batch_size=1) as session:
        assert greedy(session, prompts) == expected


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_packed_weights(tiny, machine, precision, replicas):
    """They stay packed in the model, and are no constants that PopART would unpack while it compiles."""
    like = {"precision": precision, "num_replicas": replicas, "max_length": 40}  # ranks pack their own parts
    with Session(tiny, backend="reference", **like) as session:
        expected = session.logits(PROMPTS[0])
    with on_popart(tiny, precision=precision, num_replicas=replicas, batch_size=1) as session:
        found = session.logits(PROMPTS[0])
    # Products of float16 with float32 sums beside products of float32; logits have a deviation of 1.9. Worst seen: 0.016.
    assert_close(found, expected, rtol=0, atol=0.04)
    view = machine.sessions[-1]._program.view
    packed = [tensor for tensor in view.initializers.values() if tensor.data_type == onnx.TensorProto.UINT8]
    assert len(packed) >= 3 * 4 and not view.options.constantWeights


def test_the_engine_cache_is_keyed_by_the_weights(tmp_path):
    """Two models that differ in their weights alone, in one cache: PopART's own key would take them for the same."""

    def run(seed):
        options = {"execution_cache_name": "models"}
        with on_popart(DICT, options, random_weights=True, execution_cache_dir=str(tmp_path), batch_size=1) as session:
            for layer in session.model.parameters():
                layer.load = _drawn(layer, seed)
            return session.logits([1, 2, 3])

    first, second, again = run(1), run(2), run(1)
    assert not np.allclose(first, second)
    assert_close(again, first)
    folders = [len(files) for _, _, files in os.walk(tmp_path / "popart" / "models") if files]
    assert sorted(folders) == [1, 1]


def _drawn(parameter, seed):
    return lambda rank=0: np.random.default_rng(seed).standard_normal(parameter.shape).astype(parameter.dtype)


def test_profiles_go_where_popvision_looks(tiny):
    with on_popart(tiny, {"profile_name": "first"}, batch_size=1) as session:
        session.logits([1, 2, 3])
    found = [os.path.join(folder, name) for folder, _, names in os.walk("profiles") for name in names]
    assert any(path.startswith("profiles/first/") and path.endswith("profile.pop") for path in found), found


def test_large_weights_are_external(tiny, machine, monkeypatch):
    """With limits of a few bytes: a proto beyond protobuf's is refused, so the weights go into a file of their own."""
    from poptransformer.backends.popart import folder

    machine.proto_limit = 200_000
    with on_popart(tiny) as session, pytest.raises(UserError, match="fact_h_protos_fit_protobuf"):
        greedy(session)
    monkeypatch.setattr(folder, "INSIDE_UP_TO", 10_000)
    with on_popart(tiny, num_replicas=2) as session:
        assert greedy(session) == GREEDY


def test_devices(tiny, machine):
    for device in ("cpu", "ipu_model"):
        with on_popart(tiny, {"device": device}) as session:
            assert greedy(session) == GREEDY and device in session.device_info.name
    with on_popart(tiny, {"device": "offline"}, num_replicas=4, layers_per_device=[1, 1, 1]) as session:
        with pytest.raises(UserError, match="offline"):
            greedy(session)
    assert machine.sessions[-1]._program.view.num_ipus == 16, "a power of two for each replica"
    with (
        pytest.raises(UnsupportedError, match="ipu_model has no replicas"),
        on_popart(tiny, {"device": "ipu_model"}, num_replicas=2),
    ):
        pass
    machine.num_ipus = 2
    with on_popart(tiny, num_replicas=4) as session, pytest.raises(UserError, match="no 4 IPUs are free"):
        greedy(session)
    assert machine.attached == 0


@pytest.mark.parametrize(
    ("key", "option", "value"),
    [
        ("disable_outlining", "enableOutlining", False),
        ("unstable_softmax", "enableNonStableSoftmax", True),
        ("use_loop_candidate_creator", "useLoopCandidateCreator", True),
    ],
)
def test_options_reach_the_session(tiny, machine, key, option, value):
    with on_popart(tiny, {key: True}, batch_size=1) as session:
        session.logits([1, 2])
    assert getattr(machine.sessions[-1]._options, option) is value


def test_onnx_may_not_come_first(tiny):
    import onnx  # noqa: F401

    with pytest.raises(UserError, match="before onnx"):
        Session(tiny, backend="popart")


def test_popart_in_a_process_of_its_own(tiny, monkeypatch):
    """Where another Python has the SDK; onnx may then be here already."""
    import onnx  # noqa: F401

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ON_PATH, ON_PATH.parents[1]))))
    with on_popart(tiny, {"python": sys.executable}, num_replicas=2) as session:
        assert greedy(session) == GREEDY and "3.4.0" in session.device_info.name
    with on_popart(tiny, {"python": sys.executable}, num_replicas=32) as session:
        with pytest.raises(UserError, match="no 32 IPUs are free"):
            greedy(session)


@pytest.mark.parametrize("prefill", ["whole", "stepwise"])
def test_an_exported_folder_runs_by_itself(tiny, machine, prefill):
    """On a host with the SDK alone: nothing of this package is on the path there."""
    arguments = [
        "--model",
        str(tiny),
        "--out",
        "ipu",
        "--precision",
        "fp32",
        "--num-replicas",
        "2",
        "--layers-per-device",
        "2,1",
    ]
    arguments += ["--max-length", "40", "--prompt-length", "20", "--option", f"prefill={prefill}"]
    assert export.main(arguments) == 0 and export.main(["--check", "ipu"]) == 0
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ON_PATH, ON_PATH.parents[1])))}
    command = [sys.executable, "ipu/run_popart.py", "--ids", ",".join(map(str, PROMPTS[0])), "--max-new", "6"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr
    assert f"tokens: {GREEDY[0]}" in found.stdout
    assert sorted(os.listdir("ipu")) == ["model.onnx", "options.json", "run_popart.py", "weights.bin"]


# ---- real programs, broken in one place: the rules find it there too


def _each(graph):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from _each(attribute.g)


def _loop(proto):
    return next(node for node in proto.graph.node if node.op_type == "Loop")


def _drop_attribute(node, name):
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)


def _placed(node):
    return any(attribute.name == "__ipu_number" for attribute in node.attribute)


def fact_a_all_ops_have_an_ipu_or_none(proto):
    _drop_attribute([node for node in _each(_loop(proto).attribute[0].g) if _placed(node)][5], "__ipu_number")


def fact_a_ipu_numbers_are_in_range(proto):
    next(attribute for attribute in _loop(proto).attribute if attribute.name == "__ipu_number").i = 2


def fact_b_leading_dimension_is_the_group_count(proto):
    cut = next(entry.key.partition("/")[2] for entry in proto.metadata_props if entry.key.startswith("__comm_group_type"))
    weight = next(tensor for tensor in proto.graph.initializer if tensor.name == cut)
    weight.dims.insert(0, 1)


def fact_c_nodes_are_in_order(proto):
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes[::-1])


def fact_c_loop_outputs_follow_the_body(proto):
    del _loop(proto).attribute[[a.name for a in _loop(proto).attribute].index("body")].g.output[-1]


def fact_d_ipu_model_has_no_replicas(proto):
    return {"device": "IpuModel"}


def fact_h_ir_version_is_4(proto):
    proto.ir_version = 8


def fact_h_operators_have_a_class(proto):
    next(node for node in _each(proto.graph) if node.op_type == "Softmax").op_type = "SoftmaxV3"


def fact_i_operators_are_in_3_2(proto):
    gelu = next(node for node in _each(proto.graph) if node.op_type == "Gelu")
    gelu.op_type = "GeluErf"
    return {"sdk": "3.2.0"}


def fact_i_tensors_have_raw_data(proto):
    weight = next(tensor for tensor in proto.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT)
    weight.data_type = onnx.TensorProto.FLOAT16
    weight.ClearField("raw_data")
    weight.int32_data.extend([0] * int(np.prod(weight.dims)))


def strict_attributes_are_known(proto):
    node = next(node for node in _each(proto.graph) if node.op_type == "Transpose")
    node.attribute.append(helper.make_attribute("axes", [0, 1]))


BREAKS = [function for name, function in list(globals().items()) if name.startswith(("fact_", "strict_"))]


@pytest.fixture(scope="module")
def program(tiny):
    """A real program on two replicas of two IPUs, as bytes, with its session's options."""
    with installed() as machine, on_popart(tiny, num_replicas=2, layers_per_device=[2, 1]) as session:
        greedy(session)
        made = machine.sessions[-1]
        return made._program.view.proto.SerializeToString(), made.dataFlow, made._options


@pytest.mark.parametrize("damage", BREAKS, ids=lambda function: function.__name__)
def test_a_broken_program_is_refused(machine, program, damage):
    data, flow, options = program
    popart, proto = NAMESPACE["popart"], onnx.ModelProto.FromString(data)
    more = damage(proto) or {}
    machine.sdk = more.get("sdk", machine.sdk)
    manager = popart.DeviceManager()
    offline = manager.createOfflineIPUDevice({"numIPUs": 4})
    device = manager.createIpuModelDevice({"numIPUs": 4}) if more.get("device") else offline
    popart.InferenceSession(data, flow, offline, userOptions=options)
    with pytest.raises(Refusal) as caught:
        popart.InferenceSession(proto.SerializeToString(), flow, device, userOptions=options)
    assert damage.__name__ in caught.value.rules, caught.value
