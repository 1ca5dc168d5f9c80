"""Configs of the examples: hydra files and command-line overrides to a Session and its settings.

An example's script is then

    run_example("gpt2")

and one that does something of its own with the model

    @main(config_dir="gpt2", config_name="sharding")
    def run(config: Config):
        with config.open_session() as session:
            ...
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pathlib
import re
import sys

from poptransformer.errors import UserError, near_miss
from poptransformer.generation.prompts import is_single

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclasses.dataclass
class Inputs:
    """What goes in."""

    prompts: list  # strings, or lists of token ids; one prompt alone counts as a list of one
    chat: str | list | None  # Session.chat's `messages`; prompts do not count where it is set


@dataclasses.dataclass
class SessionConfig:
    """Where and how graphs run; arguments of Session under the same names."""

    backend: str
    platform: str
    devices: int | None
    custom_ops: str | bool
    execution_cache_dir: str | None
    distributed: str | dict | None


@dataclasses.dataclass
class ModelConfig:
    """Which model, and how it generates; arguments of Session and fields of GenerationSettings."""

    hf_model_name: str  # Session's `model`
    random_weights: bool
    max_length: int | None  # tokens, prompt and new ones together
    layers_per_device: str | list | None
    max_new_tokens: int | None
    temperature: float | None
    topk: int  # GenerationSettings' `top_k`
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    ignore_eos: bool
    stop: list
    stop_token_ids: list


@dataclasses.dataclass
class GlobalArgs:
    """Sizes and precision; arguments of Session under the same names."""

    num_replicas: int
    batch_size: int
    precision: str | None
    group_size: int | None
    kv_cache: str | None


@dataclasses.dataclass
class Config:
    """A whole config; one field for each group of keys."""

    inputs: Inputs
    session: SessionConfig
    model: ModelConfig
    global_args: GlobalArgs
    log_level: str

    def open_session(self):
        """Open the Session that the config describes."""
        from poptransformer.sessions import Session

        model = dataclasses.asdict(self.model)
        own = {name: model[name] for name in ("random_weights", "max_length", "layers_per_device")}
        return Session(
            model["hf_model_name"],
            **own,
            **dataclasses.asdict(self.session),
            **dataclasses.asdict(self.global_args),
        )

    def generation_settings(self) -> dict:
        """Keyword arguments for Session.generate and Session.stream."""
        model = dataclasses.asdict(self.model)
        names = (
            "max_new_tokens", "temperature", "top_p", "min_p", "repetition_penalty", "seed", "ignore_eos", "stop",
            "stop_token_ids",
        )  # fmt: skip
        return {name: model[name] for name in names} | {"top_k": model["topk"]}


GROUPS = {"inputs": Inputs, "session": SessionConfig, "model": ModelConfig, "global_args": GlobalArgs}


def main(config_dir: str, config_name: str):
    """Decorator that runs a function of a Config from the command line, with hydra.

    A UserError ends the program with one line on standard error and exit status 1.

    Args:
      config_dir: folder under configs/.
      config_name: file there without .yaml; `--config-name` chooses another.
    """

    def decorate(function):
        @functools.wraps(function)
        def run():
            import hydra
            from omegaconf import OmegaConf
            from omegaconf.errors import OmegaConfBaseException

            OmegaConf.register_new_resolver("repository", lambda path: str(REPOSITORY / path), replace=True)
            settle_once = [
                f"hydra.searchpath=[file://{REPOSITORY / 'configs'}]",
                "hydra.run.dir=.",
                "hydra.output_subdir=null",
                "hydra.sweep.dir=.",
                "hydra.sweep.subdir=.",
                "hydra/job_logging=none",
                "hydra/hydra_logging=none",
            ]

            @hydra.main(version_base="1.3", config_path=str(REPOSITORY / "configs" / config_dir), config_name=config_name)
            def with_config(dictionary):
                with _one_line_errors():
                    try:
                        plain = OmegaConf.to_container(dictionary, resolve=True, throw_on_missing=False)
                    except OmegaConfBaseException as error:  # ${...} that leads nowhere
                        raise UserError(f"config: {error}") from error
                    config = from_dictionary(plain)
                    set_up_logging(config.log_level)
                    function(config)

            with _one_line_errors():
                check_overrides(sys.argv[1:])
            settled = [override for override in settle_once if not _is_given(override, sys.argv)]
            sys.argv[1:] = _overrides_last(sys.argv[1:] + settled)
            with_config()

        return run

    return decorate


def run_example(config_dir: str) -> None:
    """Generate what the command line and a family's config ask for, and print it with the figures: see report.show.

    Args:
      config_dir: folder under configs/; its sharding.yaml counts unless `--config-name` chooses another.
    """
    from poptransformer.report import show

    @main(config_dir=config_dir, config_name="sharding")
    def run(config: Config):
        with config.open_session() as session:
            show(session, config)

    run()


def check_overrides(arguments: list[str]) -> None:
    """Refuse overrides of keys that no config has, with the near miss; the other arguments are hydra's."""
    unknown = []
    for argument in arguments:
        key, is_override, _ = argument.partition("=")
        if argument.startswith("-") or not is_override or key.startswith(("hydra", "~", "+hydra")):
            continue
        unknown += _unknown_key(key.lstrip("+"))
    if unknown:
        raise UserError("; ".join(unknown))


def from_dictionary(dictionary: dict) -> Config:
    """Make a Config of nested dicts.

    Raises: UserError naming every key that is unknown (with the near miss), missing or without a value.
    """
    problems, fields = [], {}
    for group, values in dictionary.items():
        keys = [f"{group}.{key}" for key in values] if group in GROUPS and isinstance(values, dict) else [group]
        problems += [problem for key in keys for problem in _unknown_key(key)]
    for group, kind in GROUPS.items():
        values = dictionary.get(group) or {}
        if not isinstance(values, dict):
            problems.append(f"{group}={values!r}: {group} is a group of keys; set {group}.<key>=...")
            continue
        lacking = [field.name for field in dataclasses.fields(kind) if values.get(field.name, "???") == "???"]
        problems += [f"config key '{group}.{name}' has no value; set {group}.{name}=..." for name in lacking]
        fields[group] = values
    if dictionary.get("log_level") not in LOG_LEVELS:
        problems.append(f"log_level={dictionary.get('log_level')!r}: choose one of {', '.join(LOG_LEVELS)}")
    if problems:
        raise UserError("; ".join(problems))
    made = {group: kind(**fields[group]) for group, kind in GROUPS.items()}
    if is_single(made["inputs"].prompts):
        made["inputs"].prompts = [made["inputs"].prompts]
    return Config(made["inputs"], made["session"], made["model"], made["global_args"], dictionary["log_level"])


def set_up_logging(level: str) -> None:
    """Send the project's log lines to standard error from a level on; other packages' from warnings on."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("poptransformer").setLevel(level.upper())


class _one_line_errors:
    """Turns a UserError into one line and exit status 1; Ctrl-C into status 130."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if kind is not None and issubclass(kind, UserError):
            sys.stderr.write("error: " + re.sub(r"\s*\n\s*", " ", str(error)) + "\n")
            sys.exit(1)
        if kind is BrokenPipeError:  # whoever read the output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        if kind is KeyboardInterrupt:
            sys.stderr.write("interrupted\n")
            sys.exit(130)


def _unknown_key(key):
    key = str(key)
    group, is_dotted, name = key.partition(".")
    tops = [*GROUPS, "log_level"]
    if group not in tops:
        return [f"unknown config key '{key}'{near_miss(group, tops)}; groups: {', '.join(tops)}"]
    if is_dotted and group in GROUPS:
        names = [field.name for field in dataclasses.fields(GROUPS[group])]
        if name.partition(".")[0] not in names:
            return [f"unknown config key '{key}'{near_miss(name, names)}; keys of {group}: {', '.join(names)}"]
    return []


def _overrides_last(arguments):
    """Hydra takes overrides from one place among its options only."""
    overrides = [text for text in arguments if not text.startswith("-") and ("=" in text or text.startswith("~"))]
    return [text for text in arguments if text not in overrides] + overrides


def _is_given(override, arguments):
    key = override.partition("=")[0]
    return any(argument.lstrip("+").partition("=")[0] == key for argument in arguments)
