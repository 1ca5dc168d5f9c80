"""python -m poptransformer.plan: tables, JSON, pictures, and what is refused."""

import json
import re
import shlex
import subprocess
import sys
import time

import pytest
from conftest import REPOSITORY

from poptransformer.plan import main


@pytest.fixture
def plan(capsys):
    """A function that runs the command line and gives what it prints; an error fails the test."""

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        assert status == 0, printed.err
        return printed.out

    return run


@pytest.fixture
def refusal(capsys):
    """A function that runs the command line and gives its error, one line without a traceback."""

    def run(*arguments):
        assert main([str(argument) for argument in arguments]) == 1
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.startswith("error: ")
        return printed.err.removeprefix("error: ").strip()

    return run


def as_json(plan, *arguments):
    return json.loads(plan(*arguments, "--json"))


XL_ON_BOW = ("--model", "gpt2-xl", "--device", "bow", "--precision", "fp16")


def test_gpt2_xl_on_bow(plan):
    lines = plan(*XL_ON_BOW).splitlines()
    assert lines[0] == "gpt2-xl: 48 layers, 1,557.6 M weights; fp16, KV cache float16; 1 row of up to 1024 tokens"
    assert "devices: 8 x bow (8 stages)" in lines
    assert sum(line.startswith(tuple("01234567")) for line in lines) == 8
    assert any(line.startswith("read per token: 3.11 GB of weights, 315 MB of KV cache") for line in lines)
    assert any("Not counted: program code" in line for line in lines)


def test_the_same_as_json(plan):
    values = as_json(plan, *XL_ON_BOW)
    assert values["num_devices"] == 8 and sum(values["layers_per_device"]) == 48
    assert [layer for stage in values["stages"] for layer in stage["layers"]] == list(range(48))
    table = 50257 * 1600 * 2  # tied: on the first and the last IPU
    assert sum(stage["weight_bytes"] for stage in values["stages"]) == 2 * 1_557_611_200 + table
    assert sum(stage["cache_bytes"] for stage in values["stages"]) == 48 * 2 * 1600 * 1024 * 2 + 50257  # and tokens seen
    for stage in values["stages"]:
        parts = stage["weight_bytes"] + stage["cache_bytes"] + stage["activation_bytes"]
        assert stage["total_bytes"] == parts <= values["device"]["memory_bytes"] == 900_000_000
        assert stage["total_bytes_per_tile"] == -(-parts // 1472) < 624 * 1024
    positions = 1024 * 1600 * 2
    reads = values["read_bytes_per_token"]
    assert reads["weights"] == 2 * 1_557_611_200 - positions
    at_best = values["ms_per_token_at_best"]
    assert at_best["empty_cache"] == pytest.approx(reads["weights"] / 65.4e12 * 1e3)
    assert at_best["full_cache"] == pytest.approx((reads["weights"] + reads["full_cache"]) / 65.4e12 * 1e3)
    assert {way["num_replicas"] for way in values["ways"]} == {1, 2, 4, 8}


def test_chatglm_on_bow_needs_ranks_as_its_embedding_is_more_than_an_ipu(refusal):
    error = refusal("--model", "chatglm-6b", "--device", "bow", "--precision", "fp16", "--num-replicas", 1)
    assert "weights 12.3 GB" in error and "the smallest number that fits is 16 x bow: num_replicas=16 with 1 stage" in error


def test_llama_on_a_gpu(plan):
    values = as_json(plan, "--model", "Llama-2-7B", "--device", "h200", "--precision", "bf16")
    assert (values["num_devices"], values["layers_per_device"]) == (1, [32])
    assert values["stages"][0]["weight_bytes"] == 2 * 6_738_415_616 and values["stages"][0]["total_bytes_per_tile"] is None
    reads = 2 * (6_738_415_616 - 32000 * 4096)
    assert values["ms_per_token_at_best"]["empty_cache"] == pytest.approx(reads / 4.8e12 * 1e3)
    assert as_json(plan, "--model", "llama-2-70b", "--device", "a100-80", "--precision", "bf16")["num_devices"] == 2


def test_stages_and_ranks_as_they_are_asked_for(plan):
    asked = ("--model", "gpt2-xl", "--device", "h100", "--num-replicas", 2, "--layers-per-device", "0,20,28")
    values = as_json(plan, *asked)
    assert (values["num_devices"], values["num_replicas"], values["layers_per_device"]) == (6, 2, [0, 20, 28])
    text = plan(*asked)
    assert "devices: 6 x h100 (3 stages, each cut over 2 ranks: the table shows what one of them holds)" in text
    assert as_json(plan, "--model", "gpt2", "--device", "l4", "--devices", 3)["layers_per_device"] == [2, 7, 3]
    idle = plan("--model", "gpt2", "--device", "bow", "--layers-per-device", "[4, 4, 4]")
    assert "4 x bow (3 stages, 1 of the IPUs idle, as they come in powers of two)" in idle


def test_this_machine(plan):
    text = plan("--model", "smollm2-135m", "--device", "cpu", "--precision", "int8", "--bandwidth-gb-per-s", 40)
    assert "devices: 1 on this machine" in text and "ms/token by the memory's bandwidth" in text
    without = plan("--model", "smollm2-135m", "--device", "cpu", "--memory-gb", 1)
    assert "cpu: this machine, 1.00 GB, bandwidth not known" in without and "ms/token" not in without


def test_settings_change_the_bytes(plan):
    def stage(*more):
        return as_json(plan, "--model", "gpt2", "--device", "l4", "--precision", "fp16", *more)["stages"][0]

    whole = stage()
    assert stage("--kv-cache", "fp32")["cache_bytes"] > 1.9 * whole["cache_bytes"]
    assert stage("--max-length", 512)["cache_bytes"] < 0.51 * whole["cache_bytes"]
    assert stage("--batch-size", 4)["cache_bytes"] == 4 * whole["cache_bytes"]
    assert stage("--prefill-length", 64)["activation_bytes"] < 0.2 * whole["activation_bytes"]
    groups = [as_json(plan, "--model", "gpt2", "--device", "l4", "--precision", "int4", "--group-size", n) for n in (32, 128)]
    assert groups[0]["stages"][0]["weight_bytes"] > groups[1]["stages"][0]["weight_bytes"]
    assert [values["model"]["group_size"] for values in groups] == [32, 128]


def test_rwkv_has_a_state_instead_of_a_cache(plan):
    text = plan("--model", "rwkv-4-7b", "--device", "rtx4090", "--precision", "fp16", "--batch-size", 2)
    assert "recurrent state float32; 2 rows of up to 1024 tokens" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h20"], "device='h20' is not known; did you mean 'h200'?; there are cpu, mk2, bow, c600, b200, h200"),
        (
            ["--device", "bow", "--memory-gb", "0.5", "--devices", "1"],
            "does not fit bow, which has 500 MB: device 0 (embedding,",
        ),
        (["--device", "l4", "--layers-per-device", "2,7"], "layers_per_device=[2, 7] adds up to 9; the model has 12 layers"),
        (["--device", "l4", "--layers-per-device", "many"], "layers_per_device='many': wanted auto, or layer counts such as"),
        (["--device", "l4", "--num-replicas", "13"], "num_replicas=13 is more than the 12 heads or features"),
        (["--device", "l4", "--num-replicas", "0"], "num_replicas=0: wanted a whole number of at least 1"),
        (["--device", "bow", "--num-replicas", "3"], "num_replicas=3: IPUs come in powers of two"),
        (["--device", "l4", "--devices", "3", "--num-replicas", "2"], "devices=3 is not a multiple of num_replicas=2"),
        (["--device", "l4", "--devices", "13"], "devices=13 makes 13 stages, but the model has 12 layers"),
        (["--device", "l4", "--prefill-length", "-1"], "prefill_length=-1: wanted a whole number of at least 1"),
        (["--device", "l4", "--max-length", "4096"], "max_length=4096 is more than the model's 1024 positions"),
        (["--device", "l4", "--precision", "fp12"], "precision='fp12' is not supported"),
        (["--device", "cpu", "--memory-gb", "0.3"], "take a lower precision, or a smaller max_length or batch_size"),
        (["--device", "l4", "--memory-gb", "0.01"], "no number of devices is enough; take a lower precision"),
        (["--device", "l4", "--picture", "plan.pdf"], "picture='plan.pdf': pictures end in .png or .svg"),
    ],
)
def test_what_is_refused(refusal, arguments, message):
    assert message in refusal("--model", "gpt2", *arguments)


def test_the_smallest_number_that_fits_is_named(refusal):
    error = refusal(*XL_ON_BOW, "--devices", 4)
    assert "the smallest number that fits is 8 x bow: num_replicas=1 with 8 stages, or num_replicas=2 with 4 stages" in error


@pytest.mark.parametrize("name", ["gpt2-large", "llama-3.2-1b", "mistral-7b", "qwen2-0.5b", "chatglm3-6b", "rwkv-4-1.5b"])
def test_every_family_has_a_plan(plan, name):
    values = as_json(plan, "--model", name, "--device", "bow", "--precision", "fp16", "--max-length", 256)
    assert sum(values["layers_per_device"]) == values["model"]["num_layers"]
    assert values["num_devices"] in (2, 4, 8, 16, 32) and all(stage["share_of_memory"] <= 1 for stage in values["stages"])


def test_a_plan_for_seven_billion_weights_takes_less_than_two_seconds():
    """As a process of its own, and without loading the compiler."""
    program = (
        "import sys, time; from poptransformer.plan import main; "
        "main('--model llama-2-7b --device h200 --precision fp16'.split()); "
        "assert 'jax' not in sys.modules; print(time.process_time())"
    )
    begin = time.process_time()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "devices: 1 x h200" in done.stdout and time.process_time() - begin < 2
    assert float(done.stdout.split()[-1]) < 2  # of the processor: 0.4 seen


def test_as_a_module():
    command = [sys.executable, "-m", "poptransformer.plan", "--model", "gpt2", "--device", "abacus"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (
        done.returncode == 1
        and done.stderr.startswith("error: device='abacus' is not known")
        and "Traceback" not in done.stderr
    )


def test_a_reader_that_stops_reading():
    command = f"{shlex.quote(sys.executable)} -m poptransformer.plan --model gpt2 --device l4 --json | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


# ---- pictures


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_pictures(plan, tmp_path, ranks):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -r requirements-dev.txt")
    svg, png = tmp_path / "plan.svg", tmp_path / "plan.PNG"
    for path in (svg, png):
        plan("--model", "gpt2-medium", "--device", "bow", "--num-replicas", ranks, "--picture", path)
    assert png.read_bytes().startswith(b"\x89PNG\r\n") and png.stat().st_size > 10_000
    assert "<svg" in svg.read_text(encoding="utf-8")


def test_a_picture_says_what_is_where(tmp_path):
    figure = pytest.importorskip("matplotlib.figure", reason="needs matplotlib: pip install -r requirements-dev.txt")
    from poptransformer.planning.devices import find_device
    from poptransformer.planning.models import find_sizes
    from poptransformer.planning.picture import draw
    from poptransformer.planning.stages import plan_stages

    sizes, device = find_sizes("gpt2", "fp16"), find_device("bow")
    drawn = figure.Figure()
    draw(drawn, plan_stages(sizes.footprint(device, 2), [0, 5, 7], device=device), sizes)
    words = [text.get_text() for text in drawn.axes[0].texts]
    assert words.count("stage 0: embedding") == words.count("stage 1: layers 0-4") == 2
    assert words.count("stage 2: layers 5-11, head") == 2 and "rank 1" in words
    assert drawn.get_suptitle() == "gpt2, fp16: 8 x bow, 2 ranks"


def test_a_picture_without_matplotlib(refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = refusal("--model", "gpt2", "--device", "bow", "--picture", "plan.png")
    assert error == "drawing a picture needs the package matplotlib: pip install 'matplotlib>=3.9,<4'"


def test_a_picture_that_cannot_be_written(refusal, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -r requirements-dev.txt")
    gpt2 = ("--model", "gpt2", "--device", "bow")
    assert "there is no folder" in refusal(*gpt2, "--picture", tmp_path / "absent" / "plan.png")
    (tmp_path / "plan.png").mkdir()
    assert "cannot be written (Is a directory)" in refusal(*gpt2, "--picture", tmp_path / "plan.png")


# ---- docs/planning.md


def test_the_page_shows_what_is_printed(plan, refusal):
    page = (REPOSITORY / "docs" / "planning.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```\n\$ python -m poptransformer.plan (.*)\n((?:.*\n)*?)```$", page, re.MULTILINE)
    assert len(examples) == 4
    for command, shown in examples:
        arguments = shlex.split(command)
        printed = f"error: {refusal(*arguments)}\n" if shown.startswith("error: ") else plan(*arguments)
        assert printed == shown, command


def test_the_page_has_python_that_runs(capsys):
    page = (REPOSITORY / "docs" / "planning.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(code, "planning.md", "exec"), {})
    assert "embedding, 0-19" in capsys.readouterr().out
