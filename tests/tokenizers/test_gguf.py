"""Tokenizers out of GGUF files, against the tokenizers they come from and against byte-pair merging in plain Python."""

import json
import pathlib
import re
import unicodedata

import pytest
from gguf_cases import write
from plain_bpe import PATTERNS, TEXTS, PlainBPE

from poptransformer.errors import UnsupportedError, UserError
from poptransformer.tokenizers import StreamDetokenizer, load_tokenizer
from poptransformer.tokenizers.gguf import CUTS

POCKET = pathlib.Path(__file__).parents[2] / "examples" / "gpt2" / "gpt2-pocket"


@pytest.fixture(scope="module")
def pocket():
    """Metadata of the tokenizer of gpt2-pocket."""
    fields = json.loads((POCKET / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = fields["model"]["vocab"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in fields["model"]["merges"]]
    special = {token["content"] for token in fields["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    assert list(map(vocabulary.get, tokens)) == list(range(len(tokens)))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }


def load(tmp_path, metadata, architecture="llama"):
    return load_tokenizer(write(tmp_path / "model.gguf", architecture, metadata))


# ---- byte-level BPE


def test_equals_the_tokenizer_it_was_made_from(tmp_path, pocket):
    ours, wanted = load(tmp_path, pocket), load_tokenizer(POCKET)
    assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == (0, 0, wanted.vocab_size)
    assert ours.is_special(0) and not ours.is_special(1)
    lines = (POCKET / "valid.txt").read_text(encoding="utf-8")[:20000].splitlines(keepends=True)
    for text in (*TEXTS, *lines):
        ids = ours.encode(text)
        assert ids == wanted.encode(text), text
        assert ours.decode(ids) == wanted.decode(ids) and ours.decode(ids, False) == text
        stream = StreamDetokenizer(ours)
        assert "".join(stream.push([token_id]) for token_id in ids) + stream.flush() == ours.decode(ids)


@pytest.mark.parametrize("name", PATTERNS)
def test_every_way_to_cut(tmp_path, pocket, name):
    metadata = pocket | {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": False}
    # A token that no merges lead to, which two of them take all the same, and one of the user's own.
    tokens = [*metadata["tokenizer.ggml.tokens"], "unmergeable", "<tool>"]
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1, 4]
    ours, wanted = load(tmp_path, metadata), PlainBPE(metadata, name)
    seen = set()
    for text in (*TEXTS, "unmergeable", "<tool>12<tool >", "a<tool>"):
        ids = ours.encode(text)
        assert ids == wanted.encode(text), text
        text = unicodedata.normalize("NFC", text) if name == "qwen2" else text
        assert ours.decode(ids, skip_special_tokens=False) == text
        seen.update(ids)
    assert len(tokens) - 1 in seen and not ours.is_special(len(tokens) - 1)
    assert (len(tokens) - 2 in seen) == (name in ("llama-bpe", "tekken"))


def test_names_that_mean_the_same():
    groups = [
        ("gpt-2", "phi-2", "olmo"),
        ("smollm", "starcoder", "refact", "minerva-7b"),
        ("llama-bpe", "llama3", "llama-v3", "falcon3"),
        ("qwen2", "deepseek-r1-qwen"),
    ]
    for first, *others in groups:
        assert all(CUTS[other] == CUTS[first] for other in others)
    assert set(CUTS) == set(PATTERNS) | {name for group in groups for name in group}


@pytest.mark.parametrize(
    ("keys", "around"),
    [
        ({"pre": "gpt-2"}, (0, 0)),
        ({"pre": "llama-bpe"}, (1, 0)),
        ({"pre": "tekken"}, (1, 0)),
        ({"pre": "llama-bpe", "add_bos_token": False}, (0, 0)),
        ({"pre": "qwen2", "add_bos_token": True}, (1, 0)),
        ({"pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}, (1, 1)),
        ({"pre": "gpt-2", "add_eos_token": True}, (0, 1)),
    ],
)
def test_tokens_around_a_text(tmp_path, pocket, keys, around):
    named = {"tokenizer.ggml.bos_token_id": 7, "tokenizer.ggml.eos_token_id": 9}
    tokenizer = load(tmp_path, pocket | named | {f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    for text in ("", "Once"):
        inner = load_tokenizer(POCKET).encode(text)
        assert tokenizer.encode(text) == [7] * around[0] + inner + [9] * around[1]


def test_what_is_missing_but_can_be_guessed(tmp_path, pocket, caplog):
    bare = {key: pocket[f"tokenizer.ggml.{key}"] for key in ("model", "tokens", "merges")}
    bare = {f"tokenizer.ggml.{key}": value for key, value in bare.items()}
    for architecture, name in (("gpt2", "gpt-2"), ("qwen3", "qwen2"), ("llama", "default")):
        tokenizer = load(tmp_path, bare, architecture)
        text = "it's 1234 <|endoftext|>"
        plain = bare | {"tokenizer.ggml.token_type": [1] * tokenizer.vocab_size}
        assert tokenizer.encode(text) == PlainBPE(plain, name).encode(text)
        assert f"does not say how texts are cut up (tokenizer.ggml.pre); taking '{name}'" in caplog.text
        assert tokenizer.bos_token_id is None and tokenizer.eos_token_id is None


def test_chat_template(tmp_path, pocket):
    assert load(tmp_path, pocket).chat_template is None
    assert load(tmp_path, pocket | {"tokenizer.chat_template": "{{ messages }}"}).chat_template == "{{ messages }}"


def test_tokens_with_one_text(tmp_path, pocket, caplog):
    metadata = pocket | {"tokenizer.ggml.tokens": [*pocket["tokenizer.ggml.tokens"][:-1], "Ġthe"]}
    metadata["tokenizer.ggml.merges"] = pocket["tokenizer.ggml.merges"][:1000]
    tokenizer = load(tmp_path, metadata)
    assert "1 tokens have the text of another, 'Ġthe' for one; the first of each counts" in caplog.text
    assert tokenizer.encode(" the") == [pocket["tokenizer.ggml.tokens"].index("Ġthe")]


# ---- SentencePiece


@pytest.fixture(scope="module")
def piece_model(tmp_path_factory):
    """A SentencePiece BPE model with byte fallback, as Llama's, learnt from a page of text."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs sentencepiece: pip install -r requirements.txt")
    path = tmp_path_factory.mktemp("piece") / "model"
    lines = (POCKET / "valid.txt").read_text(encoding="utf-8")[:60000].splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines + list(TEXTS)), model_prefix=str(path), vocab_size=1000, model_type="bpe",
        byte_fallback=True, character_coverage=0.995, normalization_rule_name="identity", remove_extra_whitespaces=False,
        split_digits=True, allow_whitespace_only_pieces=True, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=f"{path}.model")


@pytest.fixture(scope="module")
def pieces(piece_model):
    """Its metadata."""
    model, count = piece_model, piece_model.get_piece_size()
    kinds = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(count)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": [model.get_score(i) for i in range(count)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }


def test_equals_sentencepiece(tmp_path, pieces, piece_model):
    """Texts without control tokens, which SentencePiece takes for text."""
    tokenizer = load(tmp_path, pieces)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    lines = (POCKET / "valid.txt").read_text(encoding="utf-8")[60000:80000].splitlines()
    # A text of a null character is none for SentencePiece's own normaliser.
    for text in (*(text.replace("\x00", "") for text in TEXTS), *lines, "<0x41>", "▁a ▁", " a", "  a"):
        ids = tokenizer.encode(text)
        assert ids[:1] == [1] and ids[1:] == piece_model.encode(text), text
        assert tokenizer.decode(ids) == piece_model.decode(ids[1:]), text
        stream = StreamDetokenizer(tokenizer)
        assert "".join(stream.push([token_id]) for token_id in ids) + stream.flush() == tokenizer.decode(ids)
    assert tokenizer.byte_value(tokenizer.encode("🙃")[-1]) == "🙃".encode()[-1]


def test_control_tokens_and_the_users_own(tmp_path, pieces, piece_model):
    """Found whole in texts; what follows one begins anew, with a space before it."""
    tokens = [*pieces["tokenizer.ggml.tokens"], "<user>", "  "]
    metadata = pieces | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [*pieces["tokenizer.ggml.scores"], 0.0, 0.0],
        "tokenizer.ggml.token_type": [*pieces["tokenizer.ggml.token_type"], 4, 4],
    }
    tokenizer, last = load(tmp_path, metadata), len(tokens) - 1
    once, girl = piece_model.encode("Once"), piece_model.encode("girl")
    assert tokenizer.encode("Once</s>girl<user>Once") == [1, *once, 2, *girl, last - 1, *once]
    assert tokenizer.encode("Once  girl") == [1, *once, last, *girl]
    assert tokenizer.encode("<unk>") == [1, 0]  # as llama.cpp and transformers have it
    assert tokenizer.is_special(0) and tokenizer.is_special(2) and not tokenizer.is_special(last)
    assert tokenizer.decode([1, *once, 2, last - 1]) == "Once<user>"


def test_no_space_in_front(tmp_path, pieces, piece_model):
    tokenizer = load(tmp_path, pieces | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    ids = tokenizer.encode(" Once")
    assert ids == piece_model.encode("Once") and tokenizer.decode(ids) == " Once"
    assert tokenizer.encode("Once") != ids and tokenizer.decode(tokenizer.encode("Once")) == "Once"


# ---- what is refused


def test_no_tokenizer(tmp_path, caplog):
    assert load(tmp_path, {}) is None and load(tmp_path, {"tokenizer.ggml.model": "none"}) is None
    assert "has no tokenizer; prompts must be token ids" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model='t5' is not supported; gpt2 and llama are"),
        (
            {"pre": "qwen"},
            "tokenizer.ggml.pre='qwen' is not supported; did you mean 'qwen2'?; there are default, gpt-2, phi-2,",
        ),
    ],
)
def test_unsupported(tmp_path, pocket, changes, message):
    with pytest.raises(UnsupportedError, match=re.escape(f"{tmp_path}/model.gguf: {message}")):
        load(tmp_path, pocket | {f"tokenizer.ggml.{key}": value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "metadata lacks tokenizer.ggml.tokens"),
        ({"merges": None}, "metadata lacks tokenizer.ggml.merges"),
        ({"model": "llama"}, "metadata lacks tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [0.5]}, "tokenizer.ggml.scores has 1 entries for 4096 tokens"),
        ({"token_type": [1, 3]}, "tokenizer.ggml.token_type has 2 entries for 4096 tokens"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is an array of int; str is wanted"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges has 'ab'; two tokens that make a third are wanted"),
        ({"merges": ["Ġ nothing"]}, "tokenizer.ggml.merges has 'Ġ nothing'; two tokens"),
        ({"bos_token_id": 4096}, "tokenizer.ggml.bos_token_id=4096 is no token; there are 4096"),
        ({"eos_token_id": None, "add_eos_token": True}, "add_eos_token is true, but there is no eos_token_id"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1; true or false is wanted"),
        ({"chat_template": 3}, "tokenizer.chat_template is 3; text is wanted"),
    ],
)
def test_what_makes_no_tokenizer(tmp_path, pocket, changes, message):
    named = {f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}": value for key, value in changes.items()}
    metadata = {key: value for key, value in (pocket | named).items() if value is not None}
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        load(tmp_path, metadata)
    assert str(caught.value).startswith(f"{tmp_path}/model.gguf: ")
