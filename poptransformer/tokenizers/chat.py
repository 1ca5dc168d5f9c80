"""Conversations to token ids: what a message is, and what each kind of tokenizer makes of a list of them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence

from poptransformer.errors import UserError, near_miss
from poptransformer.tokenizers import chat_template
from poptransformer.tokenizers.library import errors_as
from poptransformer.tokenizers.verbatim import Verbatim

WANTED = 'a list of {"role": ..., "content": ...}'
MAX_PROBLEMS = 8  # that a message lists


class ChatFormat:
    """How conversations are written for one model.

    Attributes:
      roles: who may speak.
      keys: entries that a message may have beside role and content.
      stop_ids: tokens that end an answer, beside those of the model's config.
    """

    roles = ("system", "user", "assistant")
    keys = ()
    stop_ids = ()

    def encode(self, messages) -> list[int]:
        """Return the ids of a conversation that `check_messages` has let through, and of the beginning of its answer."""
        raise NotImplementedError

    def problems(self, messages):
        """Yield what else keeps a conversation from being written."""
        return ()


class TemplateFormat(ChatFormat):
    """The chat template that came with a Hugging Face tokenizer.

    Control tokens are the tokenizer's special ones, in every message; in messages that are not the assistant's also other
    added tokens in brackets that the template names, such as <tool_call>. In messages they are encoded as plain text.

    Args:
      backend: a tokenizers.Tokenizer, or a tokenizer in Python behind the same methods.
      template: its chat_template; see `chat_template.choose`.
      where: what messages call the place it came from.
      names: what the template knows tokens by: bos_token, eos_token, ...
      eos_token_id: of the tokenizer, or None.
    """

    def __init__(self, backend, template, where, names, eos_token_id=None):
        source = chat_template.choose(template, where)
        self._backend, self._where, self._names = backend, where, names
        self._template = chat_template.compile_template(source, where)
        self.stop_ids = () if eos_token_id is None else (eos_token_id,)
        added = backend.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special and token.content)
        named = {token.content for token in added if token.content[:1] in ("<", "[") and token.content in source}
        self._control = self._special | named
        self._verbatim = Verbatim(backend, self._control)
        self._taken = "".join((source, *self._control, *map(str, names.values())))

    def encode(self, messages):
        stand_ins = self._verbatim.stand_ins("".join((self._taken, *(message["content"] for message in messages))))
        marked = [
            {
                "role": message["role"],
                "content": stand_ins.mark(
                    message["content"], self._special if message["role"] == "assistant" else self._control
                ),
            }
            for message in messages
        ]
        try:
            text = chat_template.render(self._template, self._where, marked, self._names)
        except chat_template.Refusal as refusal:
            raise UserError(f"the model's chat template refuses it: {refusal}") from None
        with errors_as(f"{self._where}: the tokenizer cannot encode this conversation"):
            return self._verbatim.encode(text, stand_ins)


def encode_conversations(messages, tokenizer) -> tuple[list[list[int]], tuple[int, ...]]:
    """Turn conversations into token ids.

    Args:
      messages: as in `conversations`.
      tokenizer: with a `chat_format`; None if the checkpoint has none.
    Returns: (a list of ids for each conversation, ids that end an answer).
    Raises: UserError naming everything that keeps any of them from being written.
    """
    several = conversations(messages)
    if tokenizer is None:
        raise UserError("chat needs a tokenizer and the checkpoint has none; put its tokenizer.json or tokenizer.model there")
    chat_format = tokenizer.chat_format
    encoded, problems = [], []
    for number, conversation in enumerate(several):
        where = f"conversation {number}: " if len(several) > 1 else ""
        found = check_messages(conversation, chat_format)
        try:
            encoded.append([] if found else chat_format.encode([dict(message) for message in conversation]))
        except UserError as error:
            found = [str(error)]
        problems += [where + problem for problem in found]
    if problems:
        more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise UserError("; ".join(problems[:MAX_PROBLEMS]) + more)
    return encoded, tuple(chat_format.stop_ids)


def is_one(messages) -> bool:
    """Whether this is one conversation (text, or a list of messages) rather than a list of conversations."""
    return isinstance(messages, str) or (_is_list(messages) and len(messages) > 0 and isinstance(messages[0], Mapping))


def conversations(messages) -> list:
    """Return a list of lists of messages.

    Args:
      messages: one conversation or a list of them; each a list of messages, or text, which is one message of a user.
    Raises: UserError if it is no such list.
    """
    several = [messages] if is_one(messages) else messages
    if not _is_list(several) or len(several) == 0:
        what = "no messages" if _is_list(several) or messages is None else f"{reprlib.repr(messages)} is no conversation"
        raise UserError(f"{what}; give {WANTED}, the text of one question, or a list of those")
    return [[{"role": "user", "content": item}] if isinstance(item, str) else item for item in several]


def check_messages(messages, chat_format: ChatFormat) -> list[str]:
    """Return what is wrong with a conversation: all problems with single messages, or else those with their order."""
    if not _is_list(messages):
        return [f"{reprlib.repr(messages)} is no conversation; {WANTED} is wanted"]
    if not messages:
        return [f"no messages; {WANTED} is wanted"]
    problems = [
        f"message {number}: {problem}"
        for number, message in enumerate(messages)
        for problem in _message_problems(message, chat_format)
    ]
    if not problems and messages[-1]["role"] == "assistant":
        problems = ["the last message is the assistant's, whose turn it would be; end with a message to answer"]
    return problems or list(chat_format.problems(messages))


def _message_problems(message, chat_format):
    if not isinstance(message, Mapping):
        yield f"{reprlib.repr(message)} is no message; {{'role': ..., 'content': ...}} is wanted"
        return
    keys = ("role", "content", *chat_format.keys)
    for key in message:
        if key not in keys:
            yield f"unknown key {key!r}{near_miss(key, keys)}; keys: {', '.join(keys)}"
    role, content = message.get("role"), message.get("content")
    if "role" not in message:
        yield f"it has no role; roles: {', '.join(chat_format.roles)}"
    elif role not in chat_format.roles:
        yield f"unknown role {reprlib.repr(role)}{near_miss(role, chat_format.roles)}; roles: {', '.join(chat_format.roles)}"
    if "content" not in message:
        yield "it has no content; text is wanted"
    elif not isinstance(content, str):
        yield f"content is {reprlib.repr(content)}; text is wanted"
    else:
        yield from text_problems("content", content)


def text_problems(name, text):
    """Yield that a text is no Unicode, if so."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        yield f"{name} is not valid Unicode text: character {error.start} (from 0) stands for no character"


def _is_list(value):
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))
