"""Text of users that spells control tokens, encoded as the text it is, inside the text that a template makes.

A template weaves messages into text, and nothing in that text tells which ``<|im_end|>`` is the template's. So what
messages spell is marked before the template runs, written in stand-in characters afterwards, and read by a copy of the
tokenizer that turns stand-ins back into themselves once it has looked for control tokens. All else about that copy is
as it was: the ids are those of the whole text, read in one piece.
"""

import functools
import json
import re

from poptransformer.errors import UserError

# Private-use characters, of which a free block is taken: two marks and a stand-in for each character of a control token.
FIRST_STAND_IN, LAST_STAND_IN = 0xF0000, 0xFFFFD


class Verbatim:
    """Marks control tokens in messages, and encodes what a template makes of them.

    Args:
      backend: a tokenizers.Tokenizer.
      tokens: texts of control tokens.
    """

    def __init__(self, backend, tokens):
        self._backend = backend
        self._tokens = frozenset(tokens)
        self._alphabet = sorted(set("".join(self._tokens)))
        # Nearly always it is the first block, so one copy is enough.
        self._copy_for = functools.lru_cache(maxsize=1)(self._copy)

    def stand_ins(self, text):
        """Return StandIns of which none occurs in a text."""
        return StandIns(_free_block(len(self._alphabet) + 2, text), self._alphabet)

    def encode(self, text, stand_ins):
        """Return the ids of a template's text, in which StandIns has marked what is only text."""
        text = stand_ins.hide(text)
        if stand_ins.all.isdisjoint(text):
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        copy, ids = self._copy_for(stand_ins)
        return [ids.get(token_id, token_id) for token_id in copy.encode(text, add_special_tokens=False).ids]

    def _copy(self, stand_ins):
        """Return the tokenizer that finds control tokens first and reads stand-ins later, and its ids that are others here."""
        import tokenizers

        if not hasattr(self._backend, "to_str"):
            raise UserError(
                "a message spells a control token, which a tokenizer in Python cannot take for plain text; leave it out, or "
                "put a tokenizer.json into the checkpoint's folder"
            )
        fields = json.loads(self._backend.to_str())
        own = [fields["normalizer"]] if fields.get("normalizer") else []
        replace = [{"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in stand_ins.meanings.items()]
        fields["normalizer"] = {"type": "Sequence", "normalizers": replace + own}
        added = [token["content"] for token in fields["added_tokens"]]
        for token in fields["added_tokens"]:
            if token["content"] in self._tokens:
                token["normalized"] = False  # or it would be looked for after the normaliser
        _take_out(fields["model"], self._tokens, stand_ins.begin)
        copy = tokenizers.Tokenizer.from_str(json.dumps(fields))
        return copy, {copy.token_to_id(token): self._backend.token_to_id(token) for token in added}


class StandIns:
    """Characters that stand for others while control tokens are looked for.

    Attributes:
      begin, end: marks around text that is only text.
      meanings: each of the characters with the text it stands for, nothing for the marks.
      all: the characters.
    """

    def __init__(self, first, alphabet):
        """Take the first of a block of code points that are free, and the characters that need one."""
        self._first = first
        self.begin, self.end = chr(first), chr(first + 1)
        self._table = {ord(character): chr(first + 2 + i) for i, character in enumerate(alphabet)}
        self.meanings = {self.begin: "", self.end: ""} | {new: chr(code) for code, new in self._table.items()}
        self.all = frozenset(self.meanings)
        self._marked = re.compile(f"{self.begin}([^{self.begin}{self.end}]*){self.end}")

    def __eq__(self, other):
        return self._first == other._first

    def __hash__(self):
        return self._first

    def mark(self, text, tokens):
        """Put marks around each part of a text that is one of the tokens, or that its neighbours could make one of."""
        pattern, prefixes, suffixes, longest = _patterns(frozenset(tokens))
        is_marked = bytearray(len(text))
        for match in pattern.finditer(text):
            is_marked[match.start() : match.end()] = b"\1" * len(match[0])
        for n in range(1, min(len(text) + 1, longest)):
            # White space alone is left for templates to trim.
            if text[:n] in suffixes and not text[:n].isspace():
                is_marked[:n] = b"\1" * n
            if text[-n:] in prefixes and not text[-n:].isspace():
                is_marked[-n:] = b"\1" * n
        parts, done = [], 0
        for match in re.finditer(b"\1+", is_marked):
            begin, end = match.span()
            parts += text[done:begin], self.begin, text[begin:end], self.end
            done = end
        return "".join(parts) + text[done:]

    def hide(self, text):
        """Write stand-ins for what is between marks. A mark that a template has left alone stays, and parts its neighbours."""
        return self._marked.sub(lambda match: match[1].translate(self._table), text)


def _take_out(model, tokens, impossible):
    """Rename control tokens in a model's own vocabulary, so that it does not make them of plain text; not the unknown one."""
    tokens = tokens - {model.get("unk_token")}
    if model["type"] == "Unigram":
        unknown = model.get("unk_id")
        model["vocab"] = [
            [impossible + piece if piece in tokens and i != unknown else piece, score]
            for i, (piece, score) in enumerate(model["vocab"])
        ]
        return
    model["vocab"] = {impossible + word if word in tokens else word: i for word, i in model["vocab"].items()}
    if model["type"] == "BPE":
        pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if tokens.isdisjoint((*pair, "".join(pair)))]


def _free_block(size, text):
    """Return the first of so many code points in a row that do not occur in a text."""
    first = FIRST_STAND_IN
    for code in sorted({ord(character) for character in text if FIRST_STAND_IN <= ord(character) <= LAST_STAND_IN}):
        if code - first >= size:
            break
        first = code + 1
    if LAST_STAND_IN - first + 1 < size:
        raise UserError("the messages use up the characters U+F0000 to U+FFFFD, some of which are needed; leave some out")
    return first


@functools.lru_cache(maxsize=16)
def _patterns(tokens):
    """Return (pattern of whole tokens, all true beginnings of tokens, all true ends, length of the longest)."""
    pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")
    prefixes = frozenset(token[:n] for token in tokens for n in range(1, len(token)))
    suffixes = frozenset(token[n:] for token in tokens for n in range(1, len(token)))
    return pattern, prefixes, suffixes, max(map(len, tokens), default=0)
