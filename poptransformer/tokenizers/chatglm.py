"""Tokenizers and chat formats of ChatGLM-6B, ChatGLM2 and ChatGLM3, over sentencepiece.

Their checkpoints come with Python code to tokenize with, which is never run; its semantics are these. GLM-4 in its Hugging
Face form has a tokenizer.json and needs none of this.

Two things that the originals do to answers are left out, as an answer is the text of its tokens: white space around it is
kept, and ChatGLM-6B's exchange of "[[训练时间]]" for a year and of ASCII punctuation beside Chinese for Chinese is not made.
Answers that come back as messages of a conversation are stripped, as there.
"""

import json
import logging
import numbers
import re
import reprlib

from poptransformer.checkpoint.json_file import is_present, read_json
from poptransformer.errors import UnsupportedError, UserError
from poptransformer.tokenizers.chat import ChatFormat, text_problems
from poptransformer.tokenizers.library import errors_as

logger = logging.getLogger(__name__)

CLASS, GLM4_CLASS = "ChatGLMTokenizer", "ChatGLM4Tokenizer"
V1_FILE, V2_FILE = "ice_text.model", "tokenizer.model"
MASKS = ("[MASK]", "[gMASK]", "[sMASK]")
V1_SPECIAL = (*MASKS, "<unused_0>", "<sop>", "<eop>", "<ENC>", "<dBLOCK>")
V2_SPECIAL = (*MASKS, "sop", "eop")
ROLES = ("system", "user", "assistant", "observation")
MAX_BLANKS = 80  # spaces in a row that are one token of ChatGLM-6B
FIRST_NUM_IMAGE_TOKENS = 20000  # of ChatGLM-6B's first release, whose files do not say so


def is_chatglm(folder):
    """Say whether a checkpoint's folder names these tokenizers, or is of their family and names none."""
    if is_present(folder / V1_FILE):
        return True
    name = read_json(folder / "tokenizer_config.json", is_optional=True).get("tokenizer_class")
    if name is None and is_present(folder / V2_FILE):
        return read_json(folder / "config.json", is_optional=True).get("model_type") == "chatglm"
    return name in (CLASS, GLM4_CLASS)


def load_chatglm(folder):
    """Load the tokenizer of a folder that `is_chatglm`.

    Raises: UserError if its file is missing or is no sentencepiece model, or its settings cannot be used.
    """
    config = read_json(folder / "tokenizer_config.json", is_optional=True)
    if config.get("tokenizer_class") == GLM4_CLASS:
        raise UnsupportedError(
            f"{folder}: GLM-4's {V2_FILE} has no reader; take the model in the form that has a tokenizer.json, glm-4-9b-chat-hf"
        )
    if is_present(folder / V1_FILE):
        return ChatGLMTokenizer(folder / V1_FILE, **_v1_settings(config, folder / "tokenizer_config.json"))
    if is_present(folder / V2_FILE):
        kind = ChatGLM3Tokenizer if _has_roles(folder, config) else ChatGLM2Tokenizer
        return kind(folder / V2_FILE)
    raise UserError(
        f"{folder}: its tokenizer_config.json names {CLASS}, whose file is missing: put {V1_FILE} (ChatGLM-6B) or {V2_FILE} "
        "(ChatGLM2, ChatGLM3) there"
    )


def _v1_settings(config, path):
    settings = {
        "num_image_tokens": config.get("num_image_tokens", FIRST_NUM_IMAGE_TOKENS),
        "do_lower_case": config.get("do_lower_case", False),
        "remove_space": config.get("remove_space", False),
    }
    count = settings["num_image_tokens"]
    problems = [f"{name} is {value!r}; true or false is wanted" for name, value in list(settings.items())[1:]
                if not isinstance(value, bool)]  # fmt: skip
    if not isinstance(count, numbers.Integral) or isinstance(count, bool) or not 0 <= count < 1 << 31:
        problems.insert(0, f"num_image_tokens is {reprlib.repr(count)}; a whole number from 0 is wanted")
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return settings


def _has_roles(folder, config):
    """Say whether a tokenizer is ChatGLM3's, which has the file of ChatGLM2's and four more tokens, by all that may tell."""
    told = json.dumps([config, read_json(folder / "special_tokens_map.json", is_optional=True)])
    if "<|user|>" in told:
        return True
    names = (config.get("name_or_path"), read_json(folder / "config.json", is_optional=True).get("_name_or_path"))
    for name in names:
        if found := re.search(r"chatglm-?([23])", str(name), re.IGNORECASE):
            return found[1] == "3"
    if is_present(folder / "tokenization_chatglm.py"):
        return b"<|user|>" in _read(folder / "tokenization_chatglm.py")
    logger.warning(
        "%s: nothing tells ChatGLM2 from ChatGLM3, taken for ChatGLM2; for the other, say so in tokenizer_config.json: "
        '"name_or_path": "chatglm3-6b"',
        folder,
    )
    return False


class _Tokenizer:
    """What the three have in common; the interface is that of hugging_face.Tokenizer.

    Attributes:
      special: text of a control token -> its id.
      bos_token_id, eos_token_id, vocab_size, clean_up: as in hugging_face.Tokenizer.
    """

    clean_up = ()
    _first_id = 0  # id of the model's first piece

    def __init__(self, path):
        self._path = path
        self._model = self._load(_read(path))
        self._num_pieces = self._model.GetPieceSize()

    def _load(self, data):
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor()
        with errors_as(f"{self._path}: not a tokenizer that sentencepiece can read"):
            model.LoadFromSerializedProto(data)
        return model

    def _set_special(self, special):
        own = {
            "unk": self._model.unk_id(),
            "bos": self._model.bos_id(),
            "eos": self._model.eos_id(),
            "pad": self._model.pad_id(),
        }
        own = {self._model.IdToPiece(piece): piece + self._first_id for piece in own.values() if piece >= 0}
        self.special = own | special
        self._special_texts = {token_id: text for text, token_id in self.special.items()}

    def encode(self, text):
        """Return the ids of a prompt, with the control tokens that the model wants around it."""
        raise NotImplementedError

    def encode_text(self, text):
        """Return the ids of a text and nothing else; what spells a control token in it is text."""
        if not isinstance(text, str):
            raise UserError(f"a prompt is a string, not {type(text).__name__}")
        for problem in text_problems("prompt", text):
            raise UserError(problem)
        with errors_as(f"{self._path}: the tokenizer cannot encode this prompt"):
            return [piece + self._first_id for piece in self._model.EncodeAsIds(text)]

    def decode(self, ids, skip_special_tokens=True):
        """Return the text of token ids; ids outside the vocabulary have none."""
        text = self.decode_raw(ids, skip_special_tokens)
        for written, meant in self.clean_up:
            text = text.replace(written, meant)
        return text

    def decode_raw(self, ids, skip_special_tokens=True):
        """Return the text of token ids without clean-up; what a stream puts together from."""
        runs, texts = [[]], []
        for token_id in filter(self.has_token, map(int, ids)):
            if token_id not in self._special_texts:
                runs[-1].append(token_id - self._first_id)
            elif not skip_special_tokens:
                texts.append(self._special_texts[token_id])
                runs.append([])
        decoded = [self._model.DecodeIds(run) if run else "" for run in runs]
        return decoded[0] + "".join(special + text for special, text in zip(texts, decoded[1:], strict=True))

    def is_special(self, token_id):
        """Say whether decode skips this id."""
        return token_id in self._special_texts

    def has_token(self, token_id):
        """Say whether the id stands for a token with text."""
        return self._first_id <= token_id < self._first_id + self._num_pieces or token_id in self._special_texts

    def byte_value(self, token_id):
        """Return None: sentencepiece decodes each character of a run of bytes by itself, so nothing waits for the run's end."""
        return None


class ChatGLMTokenizer(_Tokenizer):
    """ChatGLM-6B: a piece's id is its number in ice_text.model plus num_image_tokens, as ids of images came first once.

    Line breaks, tabs and runs of up to 80 spaces are tokens; a text that spells one, such as ``<n>``, means it too.

    Args:
      path: ice_text.model.
      num_image_tokens: ids in front of the pieces; they have no text.
      do_lower_case, remove_space: whether text is put into lower case, and runs of white space into one space, first.
    """

    def __init__(self, path, num_image_tokens=0, do_lower_case=False, remove_space=False):
        super().__init__(path)
        self._first_id = num_image_tokens
        self._do_lower_case, self._remove_space = do_lower_case, remove_space
        self._set_special({token: self._model.PieceToId(token) + num_image_tokens for token in V1_SPECIAL})
        self.bos_token_id, self.eos_token_id = self.special["<sop>"], self.special["<eop>"]
        self.vocab_size = num_image_tokens + self._num_pieces
        blanks = ((f"<|blank_{n}|>", " " * n) for n in range(2, MAX_BLANKS + 1))
        self.clean_up = (("<n>", "\n"), ("<|tab|>", "\t"), *blanks)
        self.chat_format = _Rounds(self, first=0, gap="\n", is_single_bare=True)

    def _load(self, data):
        model = super()._load(data)
        complete = _with_control_tokens(data, model, self._path)
        return model if complete is data else super()._load(complete)

    def encode(self, text):
        """Return the ids of a prompt: text, [gMASK], <sop>.

        In a prompt, [MASK] and [gMASK] mean the tokens: a text with a blank to fill in. It gets no further [gMASK], and
        </s> behind it unless it ends with its blank. A message of a chat never means them.
        """
        blanks = ("[MASK]", "[gMASK]")
        if not isinstance(text, str) or not any(blank in text for blank in blanks):
            return [*self.encode_text(text), self.special["[gMASK]"], self.bos_token_id]
        ids = []
        for part in re.split(r"(\[g?MASK\])", text):
            ids += [self.special[part]] if part in blanks else self.encode_text(part) if part else []
        if ids[-1] not in (self.special[blank] for blank in blanks):
            ids += [self.special["</s>"]] if "</s>" in self.special else []
        return [*ids, self.bos_token_id]

    def encode_text(self, text):
        if not isinstance(text, str):
            return super().encode_text(text)
        if self._remove_space:
            text = " ".join(text.split())
        if self._do_lower_case:
            text = text.lower()
        text = text.replace("\n", "<n>").replace("\t", "<|tab|>")
        text = re.sub(f" {{2,{MAX_BLANKS}}}", lambda blanks: f"<|blank_{len(blanks[0])}|>", text)
        return super().encode_text(text)

    def encode_prompt(self, text):
        """Return the ids of a chat's text as a prompt; nothing in it means a control token."""
        return [*self.encode_text(text), self.special["[gMASK]"], self.bos_token_id]


class ChatGLM2Tokenizer(_Tokenizer):
    """ChatGLM2: the pieces of tokenizer.model, then the control tokens, which no text spells.

    Args:
      path: tokenizer.model.
    """

    control_tokens = V2_SPECIAL

    def __init__(self, path):
        super().__init__(path)
        self._set_special({token: self._num_pieces + i for i, token in enumerate(self.control_tokens)})
        self.bos_token_id, self.eos_token_id = (
            token_id if token_id >= 0 else None for token_id in (self._model.bos_id(), self._model.eos_id())
        )
        self.vocab_size = self._num_pieces + len(self.control_tokens)
        self.chat_format = _Rounds(self, first=1, gap="\n\n", is_single_bare=False)

    def encode(self, text):
        """Return the ids of a prompt: [gMASK], sop, text."""
        return [self.special["[gMASK]"], self.special["sop"], *self.encode_text(text)]

    encode_prompt = encode


class ChatGLM3Tokenizer(ChatGLM2Tokenizer):
    """ChatGLM3: as ChatGLM2, with a control token for each role."""

    control_tokens = (*V2_SPECIAL, *(f"<|{role}|>" for role in ROLES))

    def __init__(self, path):
        super().__init__(path)
        self.chat_format = _Roles(self)


class _Rounds(ChatFormat):
    """ChatGLM-6B and ChatGLM2: rounds of question and answer, counted, in one text.

    Args:
      tokenizer: with `encode_prompt`.
      first: number of the first round.
      gap: between the lines of a round.
      is_single_bare: whether a question without a past is the whole text.
    """

    roles = ("user", "assistant")

    def __init__(self, tokenizer, first, gap, is_single_bare):
        self._tokenizer, self._first, self._gap, self._is_single_bare = tokenizer, first, gap, is_single_bare

    def problems(self, messages):
        for number, message in enumerate(messages):
            if message["role"] != self.roles[number % 2]:
                yield (
                    f"message {number} is the {message['role']}'s; this model takes question and answer in turn: user, "
                    "assistant, ..., user"
                )
                return

    def encode(self, messages):
        if len(messages) == 1 and self._is_single_bare:
            return self._tokenizer.encode_prompt(messages[0]["content"])
        text, gap = "", self._gap
        for number, message in enumerate(messages):
            if number % 2 == 0:
                text += f"[Round {self._first + number // 2}]{gap}问：{message['content']}{gap}答："
            else:
                text += message["content"].strip() + gap
        return self._tokenizer.encode_prompt(text)


class _Roles(ChatFormat):
    """ChatGLM3: the role's token, a line with metadata (an assistant's tool), the content; each encoded by itself.

    A system message may list tools, any JSON value, which follow its content.
    """

    roles = ROLES
    keys = ("metadata", "tools")

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.stop_ids = (tokenizer.eos_token_id, tokenizer.special["<|user|>"], tokenizer.special["<|observation|>"])

    def problems(self, messages):
        for number, message in enumerate(messages):
            metadata = message.get("metadata", "")
            if not isinstance(metadata, str) or "\n" in metadata:
                yield f"message {number}: metadata is {reprlib.repr(metadata)}; text of one line is wanted"
            else:
                yield from (f"message {number}: {problem}" for problem in text_problems("metadata", metadata))
            if "tools" in message and message["role"] != "system":
                yield f"message {number}: tools belong to a system message, this is the {message['role']}'s"
            elif "tools" in message:
                try:
                    yield from (f"message {number}: {problem}" for problem in text_problems("tools", _tools_text(message)))
                except (TypeError, ValueError, RecursionError) as error:
                    yield f"message {number}: tools cannot be written as JSON: {error}"

    def encode(self, messages):
        encode_text, special = self._tokenizer.encode_text, self._tokenizer.special
        ids = [special["[gMASK]"], special["sop"]]
        for message in messages:
            content = message["content"].strip() if message["role"] == "assistant" else message["content"]
            content += _tools_text(message)
            ids += special[f"<|{message['role']}|>"], *encode_text(f"{message.get('metadata', '')}\n"), *encode_text(content)
        return [*ids, special["<|assistant|>"]]


def _tools_text(message):
    return "\n" + json.dumps(message["tools"], indent=4, ensure_ascii=False) if "tools" in message else ""


def _read(path):
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


# ---- ice_text.model as ChatGLM-6B's code completes it
#
# A sentencepiece model is a ModelProto in protobuf's wire format. Field 1 of it, any number of times, is a piece: field 1
# its text, 2 its score, 3 its type. A later value of a field that can be there once counts more than an earlier one, and
# two messages one after the other are one message; so bytes can be added without a library that knows the format.

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
_BYTE_FALLBACK = b"\x12\x03\x98\x02\x01"  # trainer_spec (2) { byte_fallback (35): true }


def _with_control_tokens(data, model, path):
    """Return ice_text.model's bytes, in which the control tokens are tokens of their own and no text spells them.

    The first release's file ends before them, and its code adds them, the tokens of white space and the bytes. Where they
    are there, but as pieces that text can spell, their type is changed.

    Args:
      data: the file's bytes, given back as they are if nothing is to be done.
      model: sentencepiece's reading of them.
      path: what messages call it.
    """
    known = {token: model.PieceToId(token) for token in V1_SPECIAL}
    there = {token for token, piece in known.items() if piece != model.unk_id()}
    if not there:
        blanks = ("<|tab|>", *(f"<|blank_{n}|>" for n in range(2, MAX_BLANKS + 1)))
        pieces = [(token, _CONTROL) for token in V1_SPECIAL] + [(token, _USER_DEFINED) for token in blanks]
        pieces += [(f"<0x{value:02X}>", _BYTE) for value in range(256)]
        return data + b"".join(_field(1, _piece(text, kind)) for text, kind in pieces) + _BYTE_FALLBACK
    if lacking := [token for token in V1_SPECIAL if token not in there]:
        raise UserError(f"{path}: the model has no piece for {', '.join(lacking)}; is it ChatGLM-6B's?")
    if all(model.IsControl(known[token]) for token in there):
        return data
    return _retyped(data, {token.encode() for token in V1_SPECIAL})


def _piece(text, kind):
    return _field(1, text.encode()) + b"\x15\x00\x00\x00\x00" + b"\x18" + bytes([kind])


def _field(number, content):
    """A field with a length and content."""
    length = b""
    rest = len(content)
    while rest >= 0x80:
        length += bytes([rest & 0x7F | 0x80])
        rest >>= 7
    return bytes([number << 3 | 2]) + length + bytes([rest]) + content


def _retyped(data, tokens):
    """Return a model, one that sentencepiece has read, whose pieces with these texts are control tokens."""
    parts, at = [], 0
    while at < len(data):
        begin = at
        tag, at = _varint(data, at)
        kind = tag & 7
        length, at = _varint(data, at) if kind in (0, 2) else ({1: 8, 5: 4}[kind], at)
        end = at + (length if kind != 0 else 0)
        content = data[at:end]
        if tag == 0x0A and content[:1] == b"\x0a" and content[2 : 2 + content[1]] in tokens:
            parts.append(_field(1, content + b"\x18" + bytes([_CONTROL])))
        else:
            parts.append(data[begin:end])
        at = end
    return b"".join(parts)


def _varint(data, at):
    """Return (number, where it ends)."""
    value = shift = 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1
