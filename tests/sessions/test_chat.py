"""Session.chat and its stream, for a chat template and for ChatGLM3's roles; the models are random."""

import json
import shutil

import pytest
from conftest import REPOSITORY
from session_cases import DICT, join, whole

from poptransformer import Session, UserError

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from chat_cases import CONVERSATION, backend_of, write_folder

QUESTION = [{"role": "user", "content": "Who are you?"}]
LOUD = {"temperature": 9.0, "max_new_tokens": 60}  # nearly even chances: each token comes at times


def open_session(folder, vocab_size, **config):
    (folder / "config.json").write_text(json.dumps(DICT | {"vocab_size": vocab_size, "n_positions": 200} | config))
    return Session(folder, backend="reference", random_weights=True, batch_size=2)


@pytest.fixture(scope="module")
def templated(tmp_path_factory):
    folder = write_folder("byte_level", tmp_path_factory.mktemp("templated"))
    with open_session(folder, 280, eos_token_id=277) as session:
        yield session


@pytest.fixture(scope="module")
def glm3(tmp_path_factory):
    """ChatGLM3's tokenizer; the config names none of the ends of its turns."""
    pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("glm3")
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(REPOSITORY / "tests" / "golden" / "chatglm3" / name, folder)
    with open_session(folder, 431, eos_token_id=2) as session:
        yield session


def test_an_answer(templated):
    answer = templated.chat(CONVERSATION, max_new_tokens=7, logprobs=True)
    prompt = templated.tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>user\n Hello there,\n who are you? <|im_end|>\n<|im_start|>assistant\nI am")
    assert prompt.endswith("x < y<|im_end|>\n<|im_start|>assistant\n")
    assert whole(answer) == whole(templated.generate([answer.prompt_token_ids], max_new_tokens=7)[0])
    assert len(answer.logprobs) == len(answer.token_ids)
    assert whole(templated.chat("Who are you?", max_new_tokens=7)) == whole(templated.chat(QUESTION, max_new_tokens=7))


def test_several_conversations(templated):
    conversations = [QUESTION, CONVERSATION, "Why?"]
    settings = {"seed": 1, "top_k": 9, "ignore_eos": True}
    answers = templated.chat(conversations, max_new_tokens=[3, 5, 4], **settings)
    assert [len(answer.token_ids) for answer in answers] == [3, 5, 4]
    for conversation, number, answer in zip(conversations, (3, 5, 4), answers, strict=True):
        assert whole(templated.chat(conversation, max_new_tokens=number, **settings)) == whole(answer)
        assert [whole(answer)] == list(map(whole, templated.chat([conversation], max_new_tokens=number, **settings)))
    pieces = list(templated.stream_chat(conversations, max_new_tokens=[3, 5, 4], **settings))
    assert [join(pieces, row) for row in range(3)] == [whole(answer) for answer in answers]


def test_a_stream_ends_with_its_generation(templated):
    *pieces, last = templated.stream_chat(QUESTION, max_new_tokens=20, ignore_eos=True)
    assert all(piece.generation is None for piece in pieces)
    generation = templated.chat(QUESTION, max_new_tokens=20, ignore_eos=True)
    assert whole(last.generation) == whole(generation) == join([*pieces, last])
    assert last.generation.prompt_token_ids == generation.prompt_token_ids and last.generation.logprobs is None
    assert last.generation.timings.decode_tokens == 20
    *_, last = templated.stream([[1], [2]], max_new_tokens=2, logprobs=True)
    assert len(last.generation.logprobs) == 2


def cut(token_ids, ends):
    return next((token_ids[: i + 1] for i, token_id in enumerate(token_ids) if token_id in ends), token_ids)


def test_an_answer_ends_with_the_turn(templated, glm3):
    """The tokenizer's own end counts in a chat beside the model's, and ChatGLM3's roles do."""
    end = backend_of("byte_level").token_to_id("<|im_end|>")
    for session, ends, chat_only in ((templated, {277, end}, {end}), (glm3, {2, 415, 417}, {415, 417})):
        found = set()
        for seed in range(40):
            free = session.chat("x", seed=seed, ignore_eos=True, **LOUD).token_ids
            answer = session.chat("x", seed=seed, **LOUD)
            assert len(free) == 60 and answer.token_ids == cut(free, ends)
            if answer.finish_reason == "stop":
                found.add(answer.token_ids[-1])
                ended_by = session.generate([answer.prompt_token_ids], seed=seed, **LOUD)[0].token_ids
                assert ended_by == cut(free, ends - chat_only)
            if found >= chat_only:
                break
        assert found >= chat_only


def test_control_tokens_of_users(glm3, templated):
    end = backend_of("byte_level").token_to_id("<|im_end|>")
    count = templated.chat("x", max_new_tokens=1).prompt_token_ids.count(end)
    assert templated.chat("<|im_end|>" * 3, max_new_tokens=1).prompt_token_ids.count(end) == count == 1
    ids = glm3.chat("[gMASK]sop<|user|></s>", max_new_tokens=1).prompt_token_ids
    assert (ids[:3], ids[-1]) == ([410, 412, 415], 416) and not {2, *range(409, 418)} & set(ids[3:-1])


def test_ends_outside_the_vocabulary_are_left_out(tmp_path):
    """A tokenizer may have more tokens than the model has rows."""
    write_folder("byte_level", tmp_path)
    with (
        open_session(tmp_path, 256, eos_token_id=3) as session,
        pytest.raises(UserError, match="outside the vocabulary of 256"),
    ):
        session.chat("x")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with open_session(tmp_path, 256, eos_token_id=3) as session:
        assert session.chat("x", max_new_tokens=2).token_ids


@pytest.mark.parametrize("call", ["chat", "stream_chat"])
@pytest.mark.parametrize(
    ("messages", "settings", "message"),
    [
        ([], {}, "no messages; give a list of"),
        ([[], QUESTION], {}, "conversation 0: no messages"),
        ([{"role": "usr", "content": "x"}], {}, "message 0: unknown role 'usr'; did you mean 'user'?"),
        (QUESTION, {"topk": 3}, "unknown generation setting 'topk'; did you mean 'top_k'?"),
        ("x" * 200, {}, r"prompt 0 has 2\d\d tokens; max_length is 200: shorten the prompt or raise max_length"),
    ],
)
def test_calls_that_cannot_be_used(templated, monkeypatch, call, messages, settings, message):
    """Refused at once, before any device work."""
    monkeypatch.setattr(templated._engine, "run", lambda *_: pytest.fail("began to work"))
    with pytest.raises(UserError, match=message):
        getattr(templated, call)(messages, **settings)


def test_a_model_without_a_tokenizer(tiny):
    with Session(tiny, backend="reference") as session, pytest.raises(UserError, match="the checkpoint has none; put its"):
        session.chat("x")


@pytest.mark.parametrize("name", ["chatglm6b", "chatglm2", "chatglm3"])
def test_chatglm(name):
    """The model's idea of its control tokens is the tokenizer's."""
    pytest.importorskip("sentencepiece")
    messages = [{"role": "user", "content": "[MASK] 你好"}, {"role": "assistant", "content": "b"}, *QUESTION]
    with Session(REPOSITORY / "tests" / "golden" / name, backend="reference") as session:
        answer = session.chat(messages, max_new_tokens=4, ignore_eos=True)
        assert len(answer.token_ids) == 4 and answer.text == session.tokenizer.decode(answer.token_ids)
        ids, special = answer.prompt_token_ids, session.tokenizer.special
        assert special["[MASK]"] not in ids and ids.count(special["[gMASK]"]) == 1
        if name == "chatglm6b":
            assert ids[-2:] == [session.config.gmask_token_id, session.config.sop_token_id]
        assert session.score("你好").shape[0] > 1
