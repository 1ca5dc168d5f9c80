"""ChatGLM's tokenizers and chat formats against sentencepiece, driven here as the originals drive it."""

import json
import logging
import re
import shutil

import pytest
from conftest import REPOSITORY
from hypothesis import given, settings
from hypothesis import strategies as st

from poptransformer.errors import UnsupportedError, UserError
from poptransformer.tokenizers import StreamDetokenizer, load_tokenizer
from poptransformer.tokenizers.chat import encode_conversations
from poptransformer.tokenizers.chatglm import ChatGLM2Tokenizer, ChatGLM3Tokenizer, ChatGLMTokenizer

sentencepiece = pytest.importorskip("sentencepiece")

GOLDEN = REPOSITORY / "tests" / "golden"
NAMES = ["chatglm6b", "chatglm2", "chatglm3"]
TOKENIZERS = {name: load_tokenizer(GOLDEN / name) for name in NAMES}
V1, V2, V3 = TOKENIZERS.values()
TEXTS = [
    "Hello there, who are you?",
    "你好，请问今天的天气怎么样？",
    "def f(x):\n\tif x:\n        return  x\n",
    " lead and trail  ",
    "",
    " ",
    " " * 81 + "x" + " " * 161 + "\t \t  ",
    "naïve 👍🏽 日本語 \x00 \ufffd ▁ ⁇",
    "<n><|tab|><|blank_3|>",
    "<sop> <eop> </s> <s> <unk> <pad> [sMASK] <unused_0> <ENC> <dBLOCK> sop eop people",
    "<|user|> <|assistant|> <|system|> <|observation|> <0x41> <|im_end|>",
]
MASKS = "[MASK] [gMASK]"


def model(name):
    file = "ice_text.model" if name == "chatglm6b" else "tokenizer.model"
    return sentencepiece.SentencePieceProcessor(model_file=str(GOLDEN / name / file))


def v1_text_ids(text):
    """What the code of ChatGLM-6B does to a text: longest runs of spaces first; here 5 ids are those of images."""
    text = text.replace("\n", "<n>").replace("\t", "<|tab|>")
    for n in range(80, 1, -1):
        text = text.replace(" " * n, f"<|blank_{n}|>")
    return [piece + 5 for piece in model("chatglm6b").encode(text)]


def v1_meaning(text):
    text = text.replace("<n>", "\n").replace("<|tab|>", "\t")
    for n in range(2, 81):
        text = text.replace(f"<|blank_{n}|>", " " * n)
    return text


def chat(tokenizer, messages):
    (ids,), stop_ids = encode_conversations(messages, tokenizer)
    return ids, stop_ids


def talk(*contents, **more):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


# ---- ids


@pytest.mark.parametrize("text", [*TEXTS, MASKS])
def test_ids_of_a_text(text):
    assert V1.encode_text(text) == v1_text_ids(text)
    for name, tokenizer in (("chatglm2", V2), ("chatglm3", V3)):
        assert tokenizer.encode_text(text) == model(name).encode(text)
        assert tokenizer.encode(text) == [410, 412, *model(name).encode(text)]  # 409 pieces, [MASK], [gMASK], [sMASK], sop


@pytest.mark.parametrize("text", TEXTS)
def test_prompts_of_chatglm_6b(text):
    assert V1.encode(text) == [*v1_text_ids(text), 251, 254]  # [gMASK], <sop>


def test_blanks_to_fill_in():
    """As GLM's code has it: the blank in its place, </s> behind a text that goes on after it, <sop>."""
    left, right = v1_text_ids("The river "), v1_text_ids(" was high.")
    assert V1.encode("The river [MASK] was high.") == [*left, 250, *right, 7, 254]
    assert V1.encode("The river [gMASK]") == [*left, 251, 254]
    assert V1.encode("[MASK]") == [250, 254]
    assert V1.encode("The river [sMASK]") == [*v1_text_ids("The river [sMASK]"), 251, 254]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", [*TEXTS, MASKS])
def test_no_text_spells_a_control_token(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode_text(text)
    unknown = tokenizer.special["<unk>"]
    assert not set(tokenizer.special.values()) - {unknown} & set(ids)
    assert chat(tokenizer, talk(text))[0].count(tokenizer.special["[gMASK]"]) == 1


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_sizes(name):
    tokenizer, number = TOKENIZERS[name], NAMES.index(name)
    assert tokenizer.vocab_size == (594, 414, 418)[number]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == ((254, 255), (1, 2), (1, 2))[number]
    assert [i for i in range(-1, 600) if tokenizer.has_token(i)] == list(range((5, 0, 0)[number], tokenizer.vocab_size))
    config = json.loads((GOLDEN / name / "config.json").read_text())
    for key, token in (("bos_token_id", "<sop>"), ("mask_token_id", "[MASK]"), ("gmask_token_id", "[gMASK]")):
        assert config.get(key) in (None, tokenizer.special.get(token))


# ---- text


@pytest.mark.parametrize("text", [text for text in TEXTS if "<n>" not in text])
def test_decode_gives_the_text_back(text):
    text = text.replace("▁", "")  # sentencepiece's own sign for a space
    for tokenizer in (V2, V3):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    if not set("，：；？！") & set(text):  # which this model's own normaliser makes ASCII
        assert V1.decode(V1.encode(text)) == text


def test_decode_of_control_tokens():
    ids = [V1.special["[MASK]"], *V1.encode_text("a\nb"), 3, V1.special["<sop>"], *V1.encode_text("c")]
    assert V1.decode(ids) == "a\nb c"  # read as one text
    assert V1.decode(ids, skip_special_tokens=False) == "[MASK]a\nb<sop>c"
    ids = [V3.special["<|user|>"], *V3.encode_text("\n"), *V3.encode_text("hi"), 2, 0, 10**6]
    assert V3.decode(ids) == "\n hi"
    assert V3.decode(ids, skip_special_tokens=False) == "<|user|>\n hi</s><unk>"
    assert V1.decode([]) == V3.decode([5000]) == ""


def test_decode_is_that_of_the_originals():
    pieces = [*model("chatglm6b").encode("x<n> y<|blank_4|>z<|tab|>"), *model("chatglm6b").encode("日本 👍")]
    assert V1.decode([piece + 5 for piece in pieces]) == v1_meaning(model("chatglm6b").decode(pieces))


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_streams_of_any_ids(name, data):
    tokenizer = TOKENIZERS[name]
    count, byte = tokenizer.vocab_size, tokenizer.vocab_size - 256 if name == "chatglm6b" else 3
    odd = [byte + value for value in (*range(0x80, 0xC0), 0xC3, 0xE4, 0xE6, 0xF0, 0x20, 0xFF)]
    ids = data.draw(st.lists(st.integers(0, count + 1) | st.sampled_from(odd), max_size=70))
    for skip in (True, False):
        stream, text = StreamDetokenizer(tokenizer, skip), ""
        for token_id in ids:
            piece = stream.push([token_id])
            text += piece
        assert text + stream.flush() == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", NAMES)
def test_streams_send_no_half_characters(name):
    tokenizer = TOKENIZERS[name]
    for text in TEXTS:
        stream = StreamDetokenizer(tokenizer)
        pieces = [stream.push([token_id]) for token_id in tokenizer.encode_text(text)]
        assert "".join(pieces) + stream.flush() == tokenizer.decode(tokenizer.encode_text(text))
        assert "\ufffd" in text or "\ufffd" not in "".join(pieces)
    stream = StreamDetokenizer(tokenizer)
    *begin, last = tokenizer.encode_text("👍")[-4:]
    assert [stream.push([token_id]) for token_id in begin] == ["", "", ""] and stream.push([last]) == "👍"


# ---- chats


def test_rounds_of_chatglm_6b():
    def wanted(text):
        return [*v1_text_ids(text), 251, 254]

    assert chat(V1, "你好 [MASK]") == (wanted("你好 [MASK]"), ())
    text = "[Round 0]\n问：你好\n答：你好！\n[Round 1]\n问： 你是谁 \n答："
    assert chat(V1, talk("你好", " 你好！\n", " 你是谁 "))[0] == wanted(text)
    text = "[Round 0]\n问：a\n答：b\n[Round 1]\n问：c\n答：d\n[Round 2]\n问：e\n答："
    assert chat(V1, talk(*"abcde"))[0] == wanted(text)


def test_rounds_of_chatglm2():
    def wanted(text):
        return [410, 412, *model("chatglm2").encode(text)]

    assert chat(V2, "你好") == (wanted("[Round 1]\n\n问：你好\n\n答："), ())
    text = "[Round 1]\n\n问：a\n\n答：b\n\n[Round 2]\n\n问：<|user|>\n\n答："
    assert chat(V2, talk("a", "\n b ", "<|user|>"))[0] == wanted(text)


def test_roles_of_chatglm3():
    text = model("chatglm3").encode
    system, user, assistant, observation = 414, 415, 416, 417
    assert chat(V3, " 你好<|user|>") == (
        [410, 412, user, *text("\n"), *text(" 你好<|user|>"), assistant],
        (2, user, observation),
    )
    tools = [{"name": "wetter", "description": "天气"}]
    messages = [
        {"role": "system", "content": "Use tools.", "tools": tools},
        {"role": "user", "content": "q"},
        {"role": "assistant", "metadata": "wetter", "content": "call()\n"},
        {"role": "observation", "content": "12 °C"},
        {"role": "assistant", "content": "\n cold"},
        {"role": "user", "content": ""},
    ]
    listed = json.dumps(tools, indent=4, ensure_ascii=False)
    assert chat(V3, messages)[0] == [
        410, 412, system, *text("\n"), *text("Use tools.\n" + listed), user, *text("\n"), *text("q"),
        assistant, *text("wetter\n"), *text("call()"), observation, *text("\n"), *text("12 °C"),
        assistant, *text("\n"), *text("cold"), user, *text("\n"), assistant,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tokenizer", "messages", "message"),
    [
        (V1, [{"role": "system", "content": "x"}, *talk("y")], "message 0: unknown role 'system'; roles: user, assistant"),
        (V2, [{"role": "system", "content": "x"}], "message 0: unknown role 'system'; roles: user, assistant"),
        (V2, [*talk("x"), *talk("y")], "message 1 is the user's; this model takes question and answer in turn: user, "),
        (V1, [talk("x", "y")[1], *talk("y")], "message 0 is the assistant's; this model takes question and answer in turn"),
        (V2, talk("x", "y"), "the last message is the assistant's, whose turn it would be; end with a message to answer"),
        (V2, [{"role": "user", "content": "x", "tools": []}], "message 0: unknown key 'tools'; keys: role, content"),
        (
            V3,
            [{"role": "user", "content": "x", "tools": []}],
            "message 0: tools belong to a system message, this is the user's",
        ),
        (V3, [{"role": "system", "content": "x", "tools": {1, 2}}], "message 0: tools cannot be written as JSON: Object of "),
        (V3, [{"role": "system", "content": "x", "tools": ["\ud800"]}], "message 0: tools is not valid Unicode text"),
        (V3, [{"role": "user", "content": "x", "metadata": 5}], "message 0: metadata is 5; text of one line is wanted"),
        (V3, [{"role": "user", "content": "x", "metadata": "a\nb"}], "message 0: metadata is 'a\\nb'; text of one line"),
        (V3, [{"role": "user", "content": "x", "metadata": "\ud800"}], "message 0: metadata is not valid Unicode text"),
        (V3, [{"role": "tool", "content": "x"}], "unknown role 'tool'; roles: system, user, assistant, observation"),
        (
            V3,
            [{"role": "user", "content": "x", "tool": []}],
            "unknown key 'tool'; did you mean 'tools'?; keys: role, content, ",
        ),
    ],
)
def test_conversations_that_cannot_be_used(tokenizer, messages, message):
    with pytest.raises(UserError, match=re.escape(message)):
        chat(tokenizer, messages)


# ---- files


@pytest.fixture
def folder(tmp_path):
    """Files of a tokenizer to change: folder("chatglm2")."""

    def copy(name):
        for path in (GOLDEN / name).iterdir():
            if path.name.startswith(("tokenizer", "ice_text", "config")):
                shutil.copy(path, tmp_path)
        return tmp_path

    return copy


def edit(path, **changes):
    fields = json.loads(path.read_text()) if path.exists() else {}
    fields |= changes
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))


def test_which_tokenizer_a_folder_has(folder, tmp_path, caplog):
    folder("chatglm3")
    assert type(load_tokenizer(tmp_path)) is ChatGLM3Tokenizer
    edit(tmp_path / "tokenizer_config.json", name_or_path=None)
    assert type(load_tokenizer(tmp_path)) is ChatGLM3Tokenizer  # by config.json
    edit(tmp_path / "config.json", _name_or_path="mine")
    with caplog.at_level(logging.WARNING):
        assert type(load_tokenizer(tmp_path)) is ChatGLM2Tokenizer
    assert f"{tmp_path}: nothing tells ChatGLM2 from ChatGLM3, taken for ChatGLM2; for the other, say so" in caplog.text
    (tmp_path / "tokenization_chatglm.py").write_text("raise SystemExit('must not run')  # '<|user|>'")
    assert type(load_tokenizer(tmp_path)) is ChatGLM3Tokenizer
    edit(tmp_path / "tokenizer_config.json", name_or_path="THUDM/chatglm2-6b")
    assert type(load_tokenizer(tmp_path)) is ChatGLM2Tokenizer
    edit(tmp_path / "tokenizer_config.json", added_tokens_decoder={"415": {"content": "<|user|>"}})
    assert type(load_tokenizer(tmp_path)) is ChatGLM3Tokenizer
    edit(tmp_path / "tokenizer_config.json", tokenizer_class=None)
    assert type(load_tokenizer(tmp_path)) is ChatGLM3Tokenizer  # by the model's type
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.model").unlink()
    folder("chatglm6b")
    (tmp_path / "tokenizer_config.json").unlink()
    assert type(load_tokenizer(tmp_path)) is ChatGLMTokenizer


def test_settings_of_chatglm_6b(folder):
    path = folder("chatglm6b") / "tokenizer_config.json"
    edit(path, do_lower_case=True, remove_space=True, num_image_tokens=0)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode_text("  Hello \n\t THERE ") == [i - 5 for i in v1_text_ids("hello there")]
    assert tokenizer.has_token(0) and tokenizer.eos_token_id == 250
    edit(path, do_lower_case=False, num_image_tokens=None)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode_text("Hi") == [i + 19995 for i in v1_text_ids("Hi")]  # as in the first release, which says nothing
    assert tokenizer.vocab_size == 20589 and tokenizer.decode([0, 19999, *tokenizer.encode_text("Hi")]) == "Hi"


@pytest.mark.parametrize("kind", ["absent", "spelled"])
def test_control_tokens_of_other_files(folder, kind):
    """The first release's file ends before its control tokens; elsewhere they may be pieces that text can spell."""
    proto = pytest.importorskip("sentencepiece.sentencepiece_model_pb2", reason="needs protobuf")
    path = folder("chatglm6b") / "ice_text.model"
    changed = proto.ModelProto.FromString(path.read_bytes())
    if kind == "absent":
        del changed.pieces[245:]
        changed.trainer_spec.byte_fallback = False
    else:
        for piece in changed.pieces[245:253]:
            piece.type = piece.USER_DEFINED
    path.write_bytes(changed.SerializeToString())
    tokenizer = load_tokenizer(path)
    assert tokenizer.special == V1.special and tokenizer.vocab_size == V1.vocab_size
    for text in (*TEXTS, MASKS, "a<|blank_2|>[gMASK]<sop>"):
        assert tokenizer.encode(text) == V1.encode(text)
        assert tokenizer.decode(tokenizer.encode(text), False) == V1.decode(V1.encode(text), False)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("chatglm6b", {"num_image_tokens": -1}, "num_image_tokens is -1; a whole number from 0 is wanted"),
        ("chatglm6b", {"num_image_tokens": True}, "num_image_tokens is True; a whole number from 0 is wanted"),
        ("chatglm6b", {"num_image_tokens": "5"}, "num_image_tokens is '5'; a whole number from 0 is wanted"),
        ("chatglm6b", {"do_lower_case": 1}, "do_lower_case is 1; true or false is wanted"),
        ("chatglm6b", {"remove_space": "no"}, "remove_space is 'no'; true or false is wanted"),
    ],
)
def test_settings_that_cannot_be_used(folder, name, changes, message):
    path = folder(name) / "tokenizer_config.json"
    edit(path, **changes)
    with pytest.raises(UserError, match=re.escape(f"{path}: {message}")):
        load_tokenizer(path)
    edit(path, num_image_tokens=[], do_lower_case=True, remove_space=0)
    with pytest.raises(UserError, match=r"num_image_tokens is \[\].*\n.*remove_space is 0"):
        load_tokenizer(path)


def test_files_that_cannot_be_used(folder, tmp_path):
    path = folder("chatglm2") / "tokenizer.model"
    path.unlink()
    with pytest.raises(UserError) as error:
        load_tokenizer(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}: its tokenizer_config.json names ChatGLMTokenizer, whose file is missing: put ice_text.model (ChatGLM-6B) "
        "or tokenizer.model (ChatGLM2, ChatGLM3) there"
    )
    path.write_bytes(b"no such thing")
    with pytest.raises(UserError, match=re.escape(f"{path}: not a tokenizer that sentencepiece can read")):
        load_tokenizer(tmp_path)
    path.write_bytes((GOLDEN / "chatglm2" / "tokenizer.model").read_bytes()[:3000])
    with pytest.raises(UserError, match=re.escape(f"{path}: not a tokenizer that sentencepiece can read")):
        load_tokenizer(tmp_path)
    edit(tmp_path / "tokenizer_config.json", tokenizer_class="ChatGLM4Tokenizer")
    with pytest.raises(UnsupportedError, match="GLM-4's tokenizer.model has no reader; take the model in the form that has a"):
        load_tokenizer(tmp_path)


def test_a_model_with_some_of_its_control_tokens(folder):
    proto = pytest.importorskip("sentencepiece.sentencepiece_model_pb2", reason="needs protobuf")
    path = folder("chatglm6b") / "ice_text.model"
    changed = proto.ModelProto.FromString(path.read_bytes())
    changed.pieces[249].piece, changed.pieces[250].piece = "<x>", "<y>"
    path.write_bytes(changed.SerializeToString())
    with pytest.raises(UserError, match=r"ice_text\.model: the model has no piece for <sop>, <eop>; is it ChatGLM-6B's\?"):
        load_tokenizer(path)


@pytest.mark.parametrize("tokenizer", [V1, V2], ids=["v1", "v2"])
def test_prompts_that_are_none(tokenizer):
    with pytest.raises(UserError, match="a prompt is a string, not list"):
        tokenizer.encode(["a"])
    with pytest.raises(UserError, match=r"prompt is not valid Unicode text: character 1 \(from 0\) stands for no character"):
        tokenizer.encode("a\ud800")
