"""Byte-level byte-pair encoding in plain Python, and texts to try it on."""

import re
import unicodedata

import pytest

TEXTS = (
    "",
    " ",
    "a",
    "Once upon a time, there was a little girl.",
    "  two spaces,   three,\ttab\t\tand\n\n\nlines \r\n end  ",
    "it's IT'S we'Ll they'd I'M can't''s 'sss",
    "0 12 123 1234 12345 3.14159 1,000,000 x2y33 ²³ Ⅷ ½ ٣٤٥ 四五",
    "def f(x):\n    return {'a': x**2, \"b\": [x, -x]}  # comment\n\n\n\tif x<=0 && y!=1: $z += `w` | ~v^2\n",
    "naïve café Ångström Straße ĲSSEL ﬁ ﬂ İstanbul ǅ",
    "e\u0301 a\u030a \u1100\u1161 \ufb01 \u2126",  # not in form C
    "日本語のテキスト、中文字符。한국어 ภาษาไทย हिन्दी العربية עברית",
    "🙂🙃👩‍👩‍👧‍👦🇩🇪 \u200b\u00a0\u2003\ufeff \x00\x01\x7f\u0085",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaa bbbbbb!!!???...---___ ((([[[{{{",
    "https://example.org/a_b?c=1&d=%20#e  user@host  C:\\dir\\file.txt  #!/bin/sh",
    "<|endoftext|>Once<|endoftext|> upon <|im_start|>user\nhi<|im_end|>\n",
    "\n", "\r\n", "'", "' s", "\u2028\u2029", " \n \n ", "a\n\n", "\u00a0a",
)  # fmt: skip


# The patterns as llama.cpp spells them, which cuts by one after the other.
PLAIN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
NEWER = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", PLAIN, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "gpt-2": [PLAIN],
    "smollm": [r"\p{N}", PLAIN],
    "llama-bpe": [NEWER.replace("NUMBER", r"\p{N}{1,3}")],
    "smaug-bpe": [NEWER.replace("NUMBER", r"\p{N}{1,3}")],
    "qwen2": [NEWER.replace("NUMBER", r"\p{N}")],
    "tekken": [
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}


class PlainBPE:
    """Cut, spell bytes as characters, merge the best pair until there is none.

    Args:
      metadata: of a GGUF file: tokenizer.ggml.tokens, .token_type and .merges.
      name: how texts are cut, a key of PATTERNS.
    """

    def __init__(self, metadata, name):
        regex = pytest.importorskip("regex", reason="needs regex, which comes with transformers")
        self.ids = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        types = metadata["tokenizer.ggml.token_type"]
        self.whole = [token for token, kind in zip(self.ids, types, strict=True) if kind in (3, 4)]
        self.patterns = [regex.compile(pattern) for pattern in PATTERNS[name]]
        self.form = "NFC" if name == "qwen2" else None
        self.takes_tokens = name in ("llama-bpe", "tekken")
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self.spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}

    def encode(self, text):
        if self.whole:
            pattern = "|".join(map(re.escape, sorted(self.whole, key=len, reverse=True)))
            parts = re.split(f"({pattern})", text)
        else:
            parts = [text]
        ids = []
        for i, part in enumerate(parts):
            ids += [self.ids[part]] if i % 2 else self._encode_plain(part)
        return ids

    def _encode_plain(self, text):
        pieces = [unicodedata.normalize(self.form, text) if self.form else text]
        for pattern in self.patterns:
            pieces = [new for piece in pieces for new in cut(pattern, piece)]
        return [token_id for piece in pieces for token_id in self._merge(piece)]

    def _merge(self, piece):
        symbols = [self.spelling[byte] for byte in piece.encode()]
        if self.takes_tokens and "".join(symbols) in self.ids:
            return [self.ids["".join(symbols)]]
        while True:
            pairs = [self.ranks.get(pair, len(self.ranks)) for pair in zip(symbols, symbols[1:], strict=False)]
            if not pairs or min(pairs) == len(self.ranks):
                return [self.ids[symbol] for symbol in symbols]
            at = pairs.index(min(pairs))
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]


def cut(pattern, text):
    """Matches and what lies between them."""
    pieces, end = [], 0
    for match in pattern.finditer(text):
        pieces += [text[end : match.start()], match[0]]
        end = match.end()
    return [piece for piece in (*pieces, text[end:]) if piece]
