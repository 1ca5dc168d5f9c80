"""Configs: dicts to a Config, overrides to messages; no hydra but where a file is read."""

import copy
import re
import sys

import pytest

from poptransformer.config import _overrides_last, check_overrides, from_dictionary, main
from poptransformer.errors import UserError


@pytest.fixture
def dictionary():
    """configs/base.yaml as hydra gives it, with a model."""
    yaml = pytest.importorskip("omegaconf").OmegaConf
    from conftest import REPOSITORY

    plain = yaml.to_container(yaml.load(REPOSITORY / "configs" / "base.yaml"))
    plain["model"]["hf_model_name"] = "somewhere"
    return plain


def test_base_becomes_a_config(dictionary):
    config = from_dictionary(dictionary)
    assert config.inputs.prompts == ["Once upon a time"] and config.inputs.chat is None
    assert config.session.backend == "xla" and config.global_args.precision is None and config.log_level == "warning"
    settings = config.generation_settings()
    assert settings["top_k"] == 0 and settings["max_new_tokens"] == 64 and "topk" not in settings


def test_settings_are_those_of_generation(dictionary):
    from poptransformer.generation.settings import settings_per_row

    (row,) = settings_per_row(1, **from_dictionary(dictionary).generation_settings())
    assert row.temperature == 0 and row.max_new_tokens == 64


def test_session_keys_are_those_of_session(dictionary, tiny):
    dictionary["model"] |= {"hf_model_name": str(tiny), "max_length": 20}
    dictionary["session"]["backend"] = "reference"
    dictionary["global_args"] |= {"batch_size": 3, "kv_cache": "bf16"}
    with from_dictionary(dictionary).open_session() as session:
        assert (session.max_length, session.batch_size, session.precision.cache_dtype.name) == (20, 3, "bfloat16")


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("one text", ["one text"]),
        ([5, 6], [[5, 6]]),
        (["a", "b"], ["a", "b"]),
        ([[5], [6]], [[5], [6]]),
        ([], []),
        (None, None),
    ],
)
def test_one_prompt_alone_is_a_list_of_one(dictionary, given, prompts):
    dictionary["inputs"]["prompts"] = given
    assert from_dictionary(dictionary).inputs.prompts == prompts


@pytest.mark.parametrize(
    ("group", "key", "message"),
    [
        ("model", "topkk", "unknown config key 'model.topkk'; did you mean 'topk'?; keys of model: hf_model_name, "),
        ("session", "plattform", "unknown config key 'session.plattform'; did you mean 'platform'?"),
        ("global_args", "zzz", "unknown config key 'global_args.zzz'; keys of global_args: num_replicas, batch_size, "),
        ("inputs", "prompt", "unknown config key 'inputs.prompt'; did you mean 'prompts'?"),
    ],
)
def test_unknown_keys(dictionary, group, key, message):
    dictionary[group][key] = 5
    with pytest.raises(UserError, match=re.escape(message)):
        from_dictionary(dictionary)


def test_all_problems_in_one_message(dictionary):
    dictionary["model"]["topkk"] = 5
    dictionary["sesion"] = {}
    dictionary["log_level"] = "loud"
    del dictionary["global_args"]["precision"]
    dictionary["model"]["hf_model_name"] = "???"
    before = copy.deepcopy(dictionary)
    with pytest.raises(UserError) as error:
        from_dictionary(dictionary)
    for part in (
        "'model.topkk'; did you mean 'topk'?",
        "unknown config key 'sesion'; did you mean 'session'?; groups: inputs, session, model, global_args, popart, log_level",
        "log_level='loud': choose one of debug, info, warning, error",
        "config key 'global_args.precision' has no value; set global_args.precision=...",
        "config key 'model.hf_model_name' has no value; set model.hf_model_name=...",
    ):
        assert part in str(error.value)
    assert dictionary == before


@pytest.mark.parametrize("value", [5, "gpt2", [1], True])
def test_a_value_where_a_group_belongs(dictionary, value):
    dictionary["model"] = value
    with pytest.raises(UserError, match=re.escape(f"model={value!r}: model is a group of keys; set model.<key>=...")):
        from_dictionary(dictionary)


@pytest.mark.parametrize("value", [None, {}])
def test_an_empty_group(dictionary, value):
    dictionary["session"] = value
    with pytest.raises(UserError, match="config key 'session.backend' has no value"):
        from_dictionary(dictionary)


@pytest.mark.parametrize("level", [None, 5, ["info"], "Info"])
def test_log_levels(dictionary, level):
    dictionary["log_level"] = level
    with pytest.raises(UserError, match=re.escape(f"log_level={level!r}: choose one of")):
        from_dictionary(dictionary)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.topkk=5"], "unknown config key 'model.topkk'; did you mean 'topk'?; keys of model: "),
        (["+model.topkk=5"], "'model.topkk'; did you mean 'topk'?"),
        (["++modle.topk=5"], "unknown config key 'modle.topk'; did you mean 'model'?; groups: "),
        (["modell.topk=5"], "unknown config key 'modell.topk'; did you mean 'model'?; groups: "),
        (["topk=5"], "unknown config key 'topk'"),
        (["log_levle=info"], "unknown config key 'log_levle'; did you mean 'log_level'?"),
        (["model.topkk=5", "session.x=1"], "'session.x'; keys of session"),
    ],
)
def test_overrides_of_unknown_keys(arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check_overrides(["log_level=info", *arguments])


def test_overrides_that_hydra_is_left_to_read():
    check_overrides(
        ["--config-name=sharding", "-m", "model.topk=5", "+inputs.prompts=[a=b]", "hydra.run.dir=x", "+hydra.verbose=true"]
        + ["~model.topk", "session", "model.stop=[a]", "global_args.batch_size=2", "log_level=info", "session={backend: xla}"]
    )


def test_overrides_go_last_in_their_order():
    assert _overrides_last(["a=1", "--config-name=x", "b=2", "-cn", "y", "~c", "--help"]) == [
        "--config-name=x", "-cn", "y", "--help", "a=1", "b=2", "~c",
    ]  # fmt: skip


def run_main(monkeypatch, capsys, arguments):
    """Run a program under @main; gives (exit status, the Config it got, standard error)."""
    got = []

    @main(config_dir="gpt2", config_name="sharding")
    def program(config):
        got.append(config)

    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    monkeypatch.setattr("poptransformer.config.set_up_logging", lambda level: None)
    hydra = pytest.importorskip("hydra")
    try:
        program()
        status = 0
    except SystemExit as end:
        status = end.code
    finally:
        hydra.core.global_hydra.GlobalHydra.instance().clear()
    return status, got[0] if got else None, capsys.readouterr().err


def test_main_reads_files_and_overrides(monkeypatch, capsys, pocket):
    arguments = ["model.topk=5", "--config-name=sharding", 'inputs.prompts=["The old man, he said: a=b", "x"]', "model.seed=-3"]
    status, config, _ = run_main(monkeypatch, capsys, arguments)
    assert status == 0 and config.model.topk == 5 and config.model.seed == -3
    assert config.inputs.prompts == ["The old man, he said: a=b", "x"]
    assert config.model.hf_model_name == str(pocket)


def test_unknown_key_in_a_file(monkeypatch, capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [/base, _self_]\nmodel:\n  hf_model_name: x\n  top_kk: 5\n")
    status, config, error = run_main(monkeypatch, capsys, [f"--config-dir={tmp_path}", "--config-name=mine"])
    assert status == 1 and config is None
    assert error == (
        "error: unknown config key 'model.top_kk'; did you mean 'topk'?; keys of model: hf_model_name, random_weights, "
        "max_length, layers_per_device, max_new_tokens, temperature, topk, top_p, min_p, repetition_penalty, seed, "
        "ignore_eos, stop, stop_token_ids\n"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("log_level=nonsense", "error: log_level='nonsense': choose one of debug, info, warning, error\n"),
        ("model.hf_model_name=${nothing}", "error: config: Interpolation key 'nothing' not found"),
        ("~model.topk", "error: config key 'model.topk' has no value; set model.topk=...\n"),
        ("session=5", "error: session=5: session is a group of keys; set session.<key>=...\n"),
        ("model.topkk=5", "error: unknown config key 'model.topkk'; did you mean 'topk'?; keys of model: "),
    ],
)
def test_errors_are_one_line(monkeypatch, capsys, override, message):
    status, config, error = run_main(monkeypatch, capsys, [override])
    assert status == 1 and config is None
    assert error.startswith(message) and error.count("\n") == 1


def test_errors_and_interrupts_of_the_program(monkeypatch, capsys):
    def program_that(raises):
        @main(config_dir="gpt2", config_name="sharding")
        def program(config):
            raise raises

        return program

    hydra = pytest.importorskip("hydra")
    monkeypatch.setattr("poptransformer.config.set_up_logging", lambda level: None)
    for error, status, text in (
        (UserError("first\n  second"), 1, "error: first second\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ):
        monkeypatch.setattr(sys, "argv", ["program"])
        with pytest.raises(SystemExit) as end:
            program_that(error)()
        hydra.core.global_hydra.GlobalHydra.instance().clear()
        assert end.value.code == status and capsys.readouterr().err == text
