"""The options of backend popart, where they go, and what is said where the SDK is missing."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY
from popart_contract.standin.module import installed

from poptransformer import Session, UnsupportedError, UserError
from poptransformer.backends.popart import selfcheck
from poptransformer.backends.popart.host import WorkerHost
from poptransformer.backends.popart.options import PopartOptions, count_ipus
from poptransformer.config import PopartConfig
from poptransformer.generation.program_wave import generate_name
from poptransformer.models.sampling import Sampling

GPT2 = REPOSITORY / "tests" / "golden" / "gpt2"
NO_SDK = "the Poplar SDK is not active in .*: get it from Graphcore .* `source <sdk>/popart-\\*/enable.sh`.*docs/ipu.md"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"devise": "ipu"}, "popart: unknown option 'devise'; did you mean 'device'?; options: device, ipu_version, "),
        ({"device": "gpu"}, "popart.device='gpu': choose one of ipu, ipu_model, cpu, offline"),
        ({"ipu_version": "ipu3"}, "popart.ipu_version='ipu3': choose one of ipu2, ipu21"),
        ({"prefill": "all"}, "popart.prefill='all': choose one of whole, stepwise"),
        ({"disable_outlining": 1}, "popart.disable_outlining=1: wanted true or false"),
        ({"execution_cache_name": "../x"}, "popart.execution_cache_name='../x': wanted the name of a folder"),
        ({"profile_name": ".."}, "popart.profile_name='..': wanted the name of a folder"),
        ({"batch_per_step": 0}, "popart.batch_per_step=0: wanted a whole number of at least 1"),
        ({"python": 3}, "popart.python=3: wanted the path of a Python interpreter"),
        (["ipu"], "popart=['ipu']: wanted a dict of options"),
    ],
)
def test_values_that_are_none(values, told):
    with pytest.raises(UserError) as caught:
        PopartOptions.of(values)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("values", "stages", "replicas", "told"),
    [
        ({}, 1, 3, "num_replicas=3: IPUs come in powers of two"),
        ({"device": "ipu_model"}, 1, 2, "num_replicas=2: popart.device=ipu_model has no replicas"),
        ({"device": "cpu"}, 2, 1, "popart.device=cpu is one device, not 2"),
        ({"enable_pipeline": True}, 1, 1, "popart.enable_pipeline: one stage is no pipeline"),
        (
            {"enable_pipeline": True, "batch_per_step": 2},
            3,
            1,
            "popart.batch_per_step=2: a pipeline of 3 stages needs at least 3",
        ),
    ],
)
def test_placements_that_cannot_be(values, stages, replicas, told):
    with pytest.raises(UserError) as caught:
        PopartOptions.of(values).check_placement(stages, replicas)
    assert told in str(caught.value)


def test_ipus_come_in_powers_of_two():
    assert [count_ipus(stages, 1) for stages in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 8]
    assert [count_ipus(stages, 4) for stages in (1, 3)] == [4, 16]


def test_the_configs_keys_are_the_options():
    assert list(PopartConfig.__dataclass_fields__) == list(PopartOptions.__dataclass_fields__)


def test_options_of_another_backend_are_refused():
    with pytest.raises(UserError, match="the options popart={device} go with backend popart, not with 'reference'"):
        Session(GPT2, backend="reference", popart={"device": "cpu"})


# ---- without the SDK


def test_one_clear_line_without_the_sdk():
    with pytest.raises(UserError, match=NO_SDK):
        Session(GPT2, backend="popart")


def test_an_example_without_the_sdk():
    done = subprocess.run(
        [sys.executable, "examples/gpt2/inference.py", "session.backend=popart"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: popart: the Poplar SDK is not active") and done.stderr.count("\n") == 1


def test_another_python_without_the_sdk():
    with pytest.raises(UserError, match=NO_SDK):
        WorkerHost(sys.executable)
    with pytest.raises(UserError, match="popart.python=/no/python: cannot be started: No such file"):
        WorkerHost("/no/python")
    with pytest.raises(UserError, match=r"popart.python=.*: the process of PopART has ended \(status 1\)"):
        WorkerHost("/bin/false")


def test_another_popart(tmp_path, monkeypatch):
    """The one on the package index is somebody else's."""
    (tmp_path / "popart.py").write_text("name = 'something else'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "popart", raising=False)
    with pytest.raises(UserError, match=r"the module popart at .*popart.py is not Graphcore's; "):
        Session(GPT2, backend="popart")
    sys.modules.pop("popart", None)


# ---- selfcheck


def test_selfcheck_without_the_sdk():
    lines = []
    assert selfcheck.main([], lines.append) == 1
    assert lines[0].startswith("poptransformer ") and lines[-1].startswith("FAILED popart: the Poplar SDK is not active")


def test_selfcheck_on_the_stand_in():
    lines = []
    with installed():
        assert selfcheck.main([], lines.append) == 0
    assert any(line.startswith("PopART 3.4.0") for line in lines)
    assert sum(line.startswith("ok ") for line in lines) == len(selfcheck.STEPS) and lines[-1].startswith("all steps passed")


def test_selfcheck_tells_what_fails(monkeypatch):
    """A wrong token, and a device that is not there."""
    lines = []
    name = "gpt2 fp32, greedy"
    monkeypatch.setattr(selfcheck, "STEPS", {name: selfcheck.STEPS[name], "two": selfcheck.STEPS["gpt2 fp32, 2 stages"]})
    draw = "poptransformer.backends.reference.engine.random_weight"
    monkeypatch.setattr(draw, lambda parameter, rank: np.ones(parameter.shape, parameter.dtype) * (len(parameter.name) % 7))
    with installed(num_ipus=1):
        assert selfcheck.main([], lines.append) == 1
    assert any(line.startswith(f"FAILED {name}") and "AssertionError" in line for line in lines)
    assert any(line.startswith("FAILED two") and "no 2 IPUs are free" in line for line in lines)
    assert lines[-1].startswith("2 of 2 steps failed on device ipu")


# ---- which programs there are


def rows(**settings):
    count = 2
    unset = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    return {name: np.resize(np.asarray(settings.get(name, number)), count) for name, number in unset.items()}


@pytest.mark.parametrize(
    ("settings", "name", "inputs"),
    [
        ({}, "greedy", ()),
        ({"top_k": 5, "top_p": 0.5}, "greedy", ()),  # without a temperature nothing is drawn
        ({"repetition_penalty": [1, 2]}, "greedy-r", ("repetition_penalty",)),
        ({"temperature": [0, 1]}, "all", ("temperature", "seed")),
        ({"temperature": 1, "top_k": [0, 5]}, "top8", ("temperature", "top_k", "seed")),
        ({"temperature": [0, 1], "top_k": [900, 1]}, "top1", ("temperature", "top_k", "seed")),
        (
            {"temperature": 1, "top_k": 8, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 2},
            "top8-p-m-r",
            ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty"),
        ),
    ],
)
def test_sampling_of_rows(settings, name, inputs):
    sampling = Sampling.of_rows(rows(**settings))
    assert sampling.name == name and sampling.inputs == inputs
    assert Sampling.parse(name) == sampling


@pytest.mark.parametrize("name", ["", "top", "top0", "best", "all-r-p", "greedy-p", "top5-p-p"])
def test_names_that_are_no_sampling(name):
    with pytest.raises(UserError, match="sampling "):
        Sampling.parse(name)


def test_names_of_programs():
    greedy = Sampling()
    assert generate_name(0, 1, 2048, greedy) == "generate_16_16_greedy"
    assert generate_name(100, 65, 2048, greedy) == "generate_128_128_greedy"
    assert generate_name(1000, 300, 600, Sampling(True, 8)) == "generate_600_512_top8"


def test_graphs_that_need_states_are_refused():
    with installed(), Session(GPT2, backend="popart", max_length=20) as session:
        with pytest.raises(UnsupportedError, match="graph 'decode': this backend keeps no caches between runs"):
            session.run("decode", {})
        with pytest.raises(UserError, match="no graph 'generate_16_16'; there are decode"):
            session.run("generate_16_16", {})
        with pytest.raises(UserError, match="sampling 'best'"):
            session.run("generate_16_16_best", {})
        session.compile([5, 17])
        assert list(session._engine.graphs) == ["generate_16_16_greedy"]


def test_logits_and_scores_come_from_programs_too():
    ids = [int(i) for i in np.random.default_rng(0).integers(0, 250, 23)]
    with installed(), Session(GPT2, backend="popart", max_length=40) as session, Session(GPT2, backend="reference") as other:
        np.testing.assert_allclose(session.logits(ids), other.logits(ids), rtol=1e-5, atol=3e-5)
        np.testing.assert_allclose(session.score(ids), other.score(ids), rtol=1e-5, atol=3e-5)


def test_streams_give_one_piece_a_row():
    with installed(), Session(GPT2, backend="popart", max_length=40, batch_size=2) as session:
        prompts = [[5, 17, 99], [3], [7, 7]]
        whole = session.generate(prompts, max_new_tokens=5, ignore_eos=True)
        pieces = list(session.stream(prompts, max_new_tokens=5, ignore_eos=True))
        assert [piece.token_ids for piece in pieces] == [out.token_ids for out in whole]
        assert [piece.finish_reason for piece in pieces] == ["length"] * 3


@pytest.mark.parametrize("settings", [{}, {"top_k": 4, "seed": 3, "repetition_penalty": 1.4}])
def test_prompts_in_the_loop(settings):
    """Rows of unequal prompts, one of which ends early by a stop id that its prompt has as well."""
    prompts = [[5, 17, 99, 3], [42], list(range(20, 37))]
    settings = {"max_new_tokens": 8, "ignore_eos": True} | settings
    with Session(GPT2, backend="reference", max_length=40, batch_size=3) as session:
        first = session.generate(prompts, **settings)[0].token_ids
        stops = {"stop_token_ids": [[17, first[2]], [], []]}
        expected = session.generate(prompts, **settings, **stops)
    options = {"prefill": "stepwise"}
    with installed(), Session(GPT2, backend="popart", max_length=40, batch_size=3, popart=options) as session:
        found = session.generate(prompts, **settings, **stops)
    assert [out.token_ids for out in found] == [out.token_ids for out in expected]
    assert found[0].token_ids[-1] == first[2] and len(found[0].token_ids) <= 3 and found[0].finish_reason == "stop"
