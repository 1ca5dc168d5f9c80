"""Chat templates: jinja2 programs that come with a checkpoint and write a conversation as one text.

They are rendered as transformers does it, in jinja2's sandbox: a template reaches nothing but what it is given. The sandbox
bounds ``range`` and nothing else, so a template made to loop for ever, or to fill the memory, does.
"""

import datetime
import functools
import json
import reprlib

from poptransformer.checkpoint.json_file import is_present, read_json
from poptransformer.errors import UserError

FILE = "chat_template.jinja"
JSON_FILES = ("tokenizer_config.json", "chat_template.json")
HOW_TO_GIVE = (
    f"put chat_template into its tokenizer_config.json or a file {FILE} beside it, or give generate the text in the form "
    "that the model was trained on"
)


def read_chat_template(folder):
    """Return (template, where it is from) of a checkpoint's folder; (None, None) if it has none. See `choose`."""
    path = folder / FILE
    if is_present(path):
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from error
    for name in JSON_FILES:
        template = read_json(folder / name, is_optional=True).get("chat_template")
        if template:
            return template, str(folder / name)
    return None, None


def choose(template, where):
    """Return the text of a template that is given as text, as a list of named ones or as a dict of them: "default" then.

    Raises: UserError if it is none of those, or has no default.
    """
    if isinstance(template, list) and all(isinstance(item, dict) for item in template):
        template = {item.get("name"): item.get("template") for item in template}
    if isinstance(template, dict):
        names = ", ".join(map(str, template))
        template = template.get("default")
        if template is None:
            raise UserError(f"{where}: chat_template has no template named default, only {names}; name one default")
    if not isinstance(template, str):
        raise UserError(f"{where}: chat_template is {reprlib.repr(template)}; text, or a list of named templates, is wanted")
    return template


class Refusal(UserError):
    """What a template says about a conversation that it does not take."""


@functools.lru_cache(maxsize=16)
def compile_template(source, where):
    """Return a template to call `render` with.

    Raises: UserError if it is not one.
    """
    import jinja2

    try:
        return _environment().from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        at = f", line {error.lineno}" if getattr(error, "lineno", None) else ""
        raise UserError(f"{where}: chat_template cannot be read{at}: {error}") from error


def render(template, where, messages, names):
    """Return the text of a conversation and of the beginning of its answer.

    Args:
      template: from `compile_template`.
      messages: list of {"role": text, "content": text}.
      names: what the template knows the tokenizer's tokens by: bos_token, eos_token, ...
    Raises: Refusal if the template calls raise_exception; UserError if it breaks down.
    """
    try:
        return template.render(names, messages=messages, tools=None, documents=None, add_generation_prompt=True)
    except Refusal:
        raise
    except Exception as error:  # a template is a program, and raises what any program may
        raise UserError(f"{where}: chat_template fails: {type(error).__name__}: {error}") from error


@functools.cache
def _environment():
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks the assistant's text for training; here it is just a block."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    class Namespace(jinja2.utils.Namespace):
        """Takes no names with an underscore in front, which lead to Python's own."""

        def __init__(*args, **kwargs):  # no named self: a template may call its attribute that
            names = dict(*args[1:], **kwargs)
            for name in names:
                _check_name(name)
            jinja2.utils.Namespace.__init__(args[0], names)

        def __setitem__(self, name, value):
            _check_name(name)
            super().__setitem__(name, value)

    def _check_name(name):
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace takes no name like {name!r}")

    def raise_exception(message):
        raise Refusal(str(message))

    def strftime_now(form):
        return datetime.datetime.now().strftime(form)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "namespace": Namespace,
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
    }
    return environment
