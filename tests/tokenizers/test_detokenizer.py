"""Streams of pieces against decode of the whole, for byte-level, byte-fallback and other decoders."""

import functools
import pathlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poptransformer.tokenizers import StreamDetokenizer, Tokenizer, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")

POCKET = pathlib.Path(__file__).parents[2] / "examples" / "gpt2" / "gpt2-pocket"
TEXTS = ["naïve café", "日本語の文字", "👍🏽👩‍👩‍👧 done", "\ufffd literal", "  two  spaces ", "\n\n\tcode", "é", "a"]


def byte_chars():
    """Return the character that byte-level tokenizers write for each byte: printable ones stand for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return {byte: chr(byte) if byte in plain else chr(next(others)) for byte in range(256)}


def spell(data):
    table = byte_chars()
    return "".join(table[byte] for byte in data)


# Beside each single byte: tokens that begin, end or lie across characters.
ODD_BYTES = [b" the", b" \xf0\x9f", b"\x91\x8d", b"\xa0\xe4\xbd", b"\xe6\x97\xa5\xe6", b"\x9c\xac x", b"\xff\xff"]
ODD_BYTES += [b"\xef\xbf\xbd"]  # U+FFFD itself


@functools.cache
def byte_level():
    words = [spell(bytes([byte])) for byte in range(256)] + [spell(data) for data in ODD_BYTES]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend)


@functools.cache
def byte_fallback():
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁the", "a", "▁▁", "é", "\ufffd", "日本"]
    model = tokenizers.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    d = tokenizers.decoders
    backend.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


@functools.cache
def word_piece():
    words = ["hello", "do", "n't", ".", ",", "'", "##s", "s", "?", "'s", "[UNK]", "'re"]
    model = tokenizers.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    from poptransformer.tokenizers.hugging_face import CLEAN_UP

    return Tokenizer(backend, clean_up=CLEAN_UP)


@functools.cache
def word_suffix():
    words = ["a</w>", "b</w>", "c", "."]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], end_of_word_suffix="</w>")
    )
    backend.decoder = tokenizers.decoders.BPEDecoder("</w>")
    return Tokenizer(backend)


@functools.cache
def metaspace():
    words = ["▁", "▁the", "a", "▁▁", "b▁", "日"]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram([(word, -1.0) for word in words], unk_id=0))
    backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    return Tokenizer(backend)


MAKERS = {maker.__name__: maker for maker in (byte_level, byte_fallback, metaspace, word_piece, word_suffix)}


def stream(tokenizer, ids, sizes=(1,), skip_special_tokens=True):
    """Return the pieces for ids pushed in groups of the given sizes, over and over, and the flush."""
    detokenizer, pieces, at, turn = StreamDetokenizer(tokenizer, skip_special_tokens), [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("kind", MAKERS)
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_pieces_join_to_decode_for_any_ids(kind, data):
    tokenizer = MAKERS[kind]()
    count = tokenizer.vocab_size
    ids = st.integers(0, count)
    if count > 256:
        # Bytes of multi-byte characters and the odd tokens, more often than even chances would bring them.
        ids |= st.sampled_from([*range(0x80, 0xC0), 0xC3, 0xE4, 0xE6, 0xF0, *range(256, count + 1)])
    sequence = data.draw(st.lists(ids, max_size=60))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    for skip in (True, False):
        pieces = stream(tokenizer, sequence, sizes, skip)
        assert "".join(pieces) == tokenizer.decode(sequence, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=30), junk=st.binary(max_size=6), at=st.integers(0, 30))
def test_bytes_of_text_with_junk_in_it(kind, text, junk, at):
    data = text.encode()
    ids = list(data[:at] + junk + data[at:])  # in both vocabularies the first 256 ids are the bytes
    tokenizer = MAKERS[kind]()
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_no_half_characters_and_each_as_soon_as_it_is_whole(text):
    detokenizer, out = StreamDetokenizer(byte_level()), ""
    data = text.encode()
    for end in range(1, len(data) + 1):
        out += detokenizer.push([data[end - 1]])
        whole = data[:end].decode(errors="ignore")
        assert out == whole or "\ufffd" in text
    assert out + detokenizer.flush() == text


def test_byte_fallback_holds_a_run_until_it_is_certain():
    ids = [*"👍".encode(), *"é".encode()]
    detokenizer = StreamDetokenizer(byte_fallback())
    assert detokenizer.push(ids) == ""  # one wrong byte now, and decode gives six times U+FFFD
    assert detokenizer.push([258]) == "👍éa"
    detokenizer = StreamDetokenizer(byte_fallback())
    assert detokenizer.push(ids) == ""
    assert detokenizer.push([0xFF]) == "\ufffd" * 7 == byte_fallback().decode([*ids, 0xFF])
    assert detokenizer.push([0xC3]) == "\ufffd"
    assert detokenizer.push([0xA9, 258]) == "\ufffda"


def test_unfinished_bytes_come_out_at_the_flush():
    detokenizer = StreamDetokenizer(byte_level())
    assert detokenizer.push([*b"ok ", 0xF0, 0x9F]) == "ok "
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("unit", [[0xFF], [0xE4, 0xBD], [0xC3, 0xC3, 0xF0]])
def test_undecodable_bytes_are_not_held_for_ever(kind, unit):
    tokenizer, detokenizer, out = MAKERS[kind](), None, 0
    detokenizer, ids = StreamDetokenizer(tokenizer), []
    for _ in range(100):
        ids += unit
        out += len(detokenizer.push(unit))
        assert len(tokenizer.decode(ids)) - out <= 3


@pytest.mark.parametrize(
    ("kind", "ids"),
    [("byte_level", [token] * 1000) for token in (256 + 3, 0xFF, 0x20, 0x0A, 0x41)]
    + [("byte_fallback", [258] * 1000), ("byte_fallback", [0x41] * 40 + [0xFF] * 1000)],
)
def test_cost_does_not_grow_with_the_text(kind, ids):
    calls = []
    tokenizer = MAKERS[kind]()

    class Counting:
        has_token, is_special, byte_value = tokenizer.has_token, tokenizer.is_special, tokenizer.byte_value

        def decode(self, ids, skip_special_tokens=True):
            calls.append(len(ids))
            return tokenizer.decode(ids, skip_special_tokens)

    stream(Counting(), ids)
    assert max(calls) <= 64 and sum(calls) / len(ids) <= 40


def test_a_bare_decode_is_enough():
    class Bare:
        def decode(self, ids, skip_special_tokens=True):
            return bytes(ids).decode(errors="replace")

    data = list("日本語 and 👍".encode())
    assert "".join(stream(Bare(), data)) == "日本語 and 👍"


def test_a_decoder_that_drops_all_leading_spaces():
    class Dropping:
        def decode(self, ids, skip_special_tokens=True):
            return "".join(" \nab"[i] for i in ids).lstrip()

    for ids in ([0] * 100 + [2, 0, 3], [2] + [0] * 100 + [3] + [0, 1] * 50 + [2], [0, 1] * 5):
        assert "".join(stream(Dropping(), ids)) == Dropping().decode(ids)


def test_special_tokens_between_bytes_are_skipped_as_decode_skips_them():
    for tokenizer, special in ((byte_level(), 256 + len(ODD_BYTES)), (byte_fallback(), 263)):
        assert tokenizer.is_special(special)
        ids = [0xC3, special, 0xA9, 0x41, 10**6]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_long_text_of_the_pocket_model():
    tokenizer = load_tokenizer(POCKET)
    text = (POCKET / "valid.txt").read_text(encoding="utf-8")[:20000]
    ids = tokenizer.encode(text)
    start = time.perf_counter()
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == text
    assert (time.perf_counter() - start) / len(ids) < 1e-3  # seconds a token; 2e-5 on an idle machine
