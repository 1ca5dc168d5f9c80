"""Exported folders: what is in them, what the check refuses, and that the script in them needs nothing else."""

import ast
import json
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
from conftest import REPOSITORY
from popart_contract.standin.facts import ABOUT_OPERATORS, operator, registered_version
from popart_contract.standin.module import installed

from poptransformer import Session, UserError
from poptransformer.backends.popart import operators, runner
from poptransformer.backends.popart.check import check_folder, check_model
from poptransformer.backends.popart.writer import ProgramWriter
from poptransformer.export import main
from poptransformer.planning.shapes import find_shape

GPT2, LLAMA = (REPOSITORY / "tests" / "golden" / name for name in ("gpt2", "llama"))
IDS = [5, 17, 99, 3]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A program in two replicas, and what was printed for it."""
    folder = tmp_path_factory.mktemp("ipu") / "program"
    arguments = ["--model", str(LLAMA), "--out", str(folder), "--num-replicas", "2", "--precision", "fp32"]
    assert main([*arguments, "--max-length", "40", "--prompt-length", "16", "--max-new-tokens", "8"]) == 0
    return folder


@pytest.fixture
def copied(exported, tmp_path):
    """A copy to damage."""
    return shutil.copytree(exported, tmp_path / "copy")


def test_a_folder_has_all_that_a_host_needs(exported, capsys):
    assert {path.name for path in exported.iterdir()} == {"model.onnx", "weights.bin", "options.json", "run_popart.py"}
    assert main(["--check", str(exported)]) == 0
    told = capsys.readouterr().out
    assert "generate_16_16_greedy" in told and "for 2 IPUs: ok" in told
    options = json.loads((exported / "options.json").read_text())
    assert options["device"] == {"kind": "ipu", "num_ipus": 2, "ipu_version": "ipu2"}
    assert options["session_options"]["replicatedGraphCount"] == 2 and options["anchors"] == ["tokens", "logprobs", "num_new"]
    model = onnx.load(exported / "model.onnx", load_external_data=False)
    places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in model.graph.initializer]
    assert all(place["location"] == "weights.bin" for place in places)
    assert sum(int(place["length"]) for place in places) == options["weights"]["weights.bin"]


def test_the_script_generates_what_a_session_does(exported, tmp_path):
    """On the stand-in, from another working directory, in a process that has not this package."""
    with Session(LLAMA, backend="reference", max_length=40) as session:
        expected = session.generate(IDS, max_new_tokens=8)[0].token_ids
    on_path = REPOSITORY / "tests" / "popart_contract" / "on_path"
    done = subprocess.run(
        [sys.executable, str(exported / "run_popart.py"), "--ids", ",".join(map(str, IDS)), "--max-new", "8"],
        env={"PYTHONPATH": f"{on_path}:{REPOSITORY / 'tests'}", "PATH": ""}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"tokens: {expected}\n" in done.stdout


@pytest.mark.parametrize("prefill", ["whole", "stepwise"])
def test_prompts_of_every_length(tmp_path, prefill):
    """Both ways to take a prompt, in the script's own words."""
    arguments = ["--model", str(GPT2), "--out", str(tmp_path / "out"), "--precision", "fp32", "--option", f"prefill={prefill}"]
    assert main([*arguments, "--max-length", "40", "--prompt-length", "16", "--option", "check_memory=false"]) == 0
    with Session(GPT2, backend="reference", max_length=40) as session, installed():
        program = runner.Session(str(tmp_path / "out"))
        for length in (1, 4, 17):
            ids = [int(i) for i in np.random.default_rng(length).integers(0, 200, length)]
            feeds, first = runner.greedy_feeds(program.options, ids, 6)
            assert program.read_tokens(feeds, program.run(feeds), first) == session.generate(ids, max_new_tokens=6)[0].token_ids
        with pytest.raises(runner.PopartError, match="the program takes prompts of 1 to 17 tokens, given are 18"):
            runner.greedy_feeds(program.options, list(range(18)), 6)


def test_the_runner_is_written_for_the_sdks_python():
    """3.8, and nothing but its standard library, NumPy and popart."""
    tree = ast.parse(open(runner.__file__).read(), feature_version=(3, 8))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        assert not isinstance(node, ast.ImportFrom)
    assert found - {"numpy", "popart"} <= set(sys.stdlib_module_names)


# ---- what is refused


def test_damaged_folders(copied, capsys):
    with open(copied / "weights.bin", "ab") as file:
        file.write(b"x")
    assert main(["--check", str(copied)]) == 1
    size = (copied / "weights.bin").stat().st_size
    assert f"weights.bin has {size} bytes, wanted {size - 1}: was it copied whole?" in capsys.readouterr().err
    (copied / "weights.bin").unlink()
    with pytest.raises(UserError, match="there is no weights.bin"):
        check_folder(copied)
    (copied / "model.onnx").write_bytes(b"no model")
    with pytest.raises(UserError, match="model.onnx: this is no ONNX model"):
        check_folder(copied)
    (copied / "model.onnx").unlink()
    with pytest.raises(UserError, match="there is no model.onnx"):
        check_folder(copied)
    (copied / "options.json").write_text("{")
    with pytest.raises(UserError, match="options.json: this is no JSON"):
        check_folder(copied)
    (copied / "options.json").write_text('{"name": "x"}')
    with pytest.raises(UserError, match="options.json: lacks model, weights, device"):
        check_folder(copied)
    with pytest.raises(UserError, match="options.json: cannot be read"):
        check_folder(copied / "nowhere")


def opset(model, options):
    model.opset_import[0].version = 11


def ir_version(model, options):
    model.ir_version = 10


def unknown_operator(model, options):
    model.graph.node.add(op_type="Mish", name="mish", input=["token"], output=["mish"])


def unknown_attribute(model, options):
    node = _first(model, "MatMul")
    node.attribute.add(name="transB", type=onnx.AttributeProto.INT, i=1)


def wrong_ipu(model, options):
    next(attribute for attribute in _first(model, "MatMul").attribute if attribute.name == "__ipu_number").i = 1


def no_ipu(model, options):
    node = _first(model, "MatMul")
    del node.attribute[:]


def dynamic_shape(model, options):
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "B"


def reserved_name(model, options):
    model.graph.output[0].name = "Step___tokens"


def computed_int64(model, options):
    node = _first(model, "Loop")
    model.graph.node.add(op_type="Add", name="sum", input=[node.input[0], node.input[0]], output=["sum"])


def large_bool(model, options):
    _first(model, "Constant").attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(np.ones(3, bool)))


def typed_field(model, options):
    _first(model, "Constant").attribute[0].t.CopyFrom(onnx.helper.make_tensor("", onnx.TensorProto.INT32, [2], [1, 2]))


def body_initializer(model, options):
    _first(model, "Loop").attribute[0].g.initializer.add().CopyFrom(onnx.numpy_helper.from_array(np.zeros(2, np.float32)))


def missing_carried_value(model, options):
    del _first(model, "Loop").attribute[0].g.output[-1]


def one_replicas_weight(model, options):
    name = next(entry.key for entry in model.metadata_props if "comm_group_type" in entry.key).partition("/")[2]
    next(tensor for tensor in model.graph.initializer if tensor.name == name).dims[0] = 1


def empty_input(model, options):
    _first(model, "MatMul").input.append("")


def lost_anchor(model, options):
    options["anchors"] = ["words"]


def other_input(model, options):
    options["inputs"]["token"]["shape"] = [7]


BREAKS = {
    opset: "opsets .*, wanted ai.onnx 10 and ai.graphcore 1", ir_version: "IR version 10, wanted 4",
    unknown_operator: "mish: ai.onnx.Mish is not an operator that programs use",
    unknown_attribute: "attribute transB of type INT, wanted none of that name",
    wrong_ipu: r"__ipu_number \[1\], wanted one of 0 .. 0", no_ipu: r"__ipu_number \[\], wanted one of 0 .. 0",
    dynamic_shape: "its shape is not static", reserved_name: "Step___ is reserved by PopART",
    computed_int64: "sum: int64 constant.* is computed with", large_bool: "3 bool elements",
    typed_field: "0 bytes of raw_data, wanted 8", body_initializer: "its body has initializers",
    missing_carried_value: "wanted as many inputs, and one output less",
    one_replicas_weight: r"a part for each of 2 replicas wants a leading dimension of 2, has \[1",
    empty_input: "an empty input name",
    lost_anchor: r"the model has no output \['words'\]", other_input: "inputs of the model .* are not those of options.json",
}  # fmt: skip


@pytest.mark.parametrize("damage", BREAKS, ids=lambda damage: damage.__name__)
def test_broken_models(exported, damage):
    model = onnx.load(exported / "model.onnx", load_external_data=False)
    options = json.loads((exported / "options.json").read_text())
    assert not list(check_model(model, options))
    damage(model, options)
    problems = "; ".join(check_model(model, options))
    with pytest.raises(UserError, match=BREAKS[damage]):
        raise UserError(problems)


def _first(model, kind):
    return next(node for node in model.graph.node if node.op_type == kind)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--backend", "xla"], "backend='xla': only programs for popart can be exported"),
        (["--precision", "bf16"], "backend popart has no bfloat16"),
        (["--num-replicas", "3"], "num_replicas=3: IPUs come in powers of two"),
        (["--option", "prefil=whole"], "popart: unknown option 'prefil'; did you mean 'prefill'?"),
        (["--option", "prefill"], "--option prefill: wanted KEY=VALUE"),
        (["--sampling", "top"], "sampling 'top': wanted greedy, all or topN"),
        (["--prompt-length", "40"], "prompt_length=40 leaves no room for a new token in max_length=40"),
        (["--max-new-tokens", "30"], "max_new_tokens=30 and prompt_length=20 are more than max_length=40 together"),
        (["--layers-per-device", "1,x"], "layers_per_device='1,x': wanted auto, or layer counts"),
        (["--out", "/dev/null/x"], "/dev/null/x: cannot be written"),
    ],
)
def test_arguments_that_cannot_be_used(tmp_path, capsys, more, told):
    assert main(["--model", str(GPT2), "--out", str(tmp_path / "out"), "--max-length", "40", *more]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and told in err and err.count("\n") == 1


def test_a_model_that_does_not_fit_is_refused_before_it_is_written(tmp_path):
    """GPT-2 XL has 3.1 GB in float16: with the prompt's pass apart more than one IPU, whatever the cache."""
    config = find_shape("gpt2-xl").config
    for options, told in (({}, "weights count twice"), ({"prefill": "stepwise"}, "popart.check_memory=false tries it")):
        with Session(config, backend=ProgramWriter(options), precision="fp16", max_length=64, random_weights=True) as session:
            with pytest.raises(UserError, match=r"does not fit mk2.*smallest number that fits") as caught:
                session.write_program("generate_16_16_greedy", tmp_path / "out")
            assert told in str(caught.value) and not (tmp_path / "out").exists()


def test_the_table_of_operators_is_popart_s():
    """Every operator is in the facts for the opset of programs, with these attributes and their types, and in SDK 3.2."""
    for domain, table in operators.TABLE.items():
        name = domain or "ai.onnx"
        for kind, attributes in table.items():
            assert kind not in ABOUT_OPERATORS["absent_in_3_2"][name]
            version = registered_version(name, kind, 10 if name == "ai.onnx" else 1)
            known = operator(name, kind, version)["attributes"]
            assert set(attributes) <= set(known), kind
            # The facts give no type where the creator reads an attribute by other means: Constant's value.
            told = {attribute: known[attribute]["type"] or attributes[attribute] for attribute in attributes}
            assert told == attributes, kind


@pytest.mark.parametrize(
    "arguments",
    [
        ["--precision", "fp16", "--layers-per-device", "1,1", "--num-replicas", "2", "--batch-size", "3"],
        ["--precision", "int4", "--group-size", "64", "--sampling", "top8-p-m-r"],
        ["--precision", "int8", "--option", "prefill=stepwise", "--sampling", "all-p"],
        [
            "--precision",
            "fp16",
            "--option",
            "enable_pipeline=true",
            "--option",
            "batch_per_step=2",
            "--layers-per-device",
            "1,1",
        ],
    ],
)
def test_what_is_exported_is_sound(tmp_path, capsys, arguments):
    """The export ends with the check, which has ONNX infer every type and shape strictly."""
    assert main(["--model", str(LLAMA), "--out", str(tmp_path / "out"), "--max-length", "30", *arguments]) == 0
    assert capsys.readouterr().out.rstrip().endswith(": ok")
    with installed():
        program = runner.Session(str(tmp_path / "out"))
        feeds, first = runner.greedy_feeds(program.options, IDS, 3)
        if program.options["name"].endswith("greedy"):
            assert len(program.read_tokens(feeds, program.run(feeds), first)) == 3
