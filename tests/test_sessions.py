"""Session: batches, settings, stops, streams, threads, interrupts, and every error it gives."""

import concurrent.futures
import itertools
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import REPOSITORY
from tolerance import assert_close

from poptransformer import Session, UnsupportedError, UserError

GOLDEN = json.loads((REPOSITORY / "tests" / "golden" / "gpt2.json").read_text(encoding="utf-8"))
CASES = GOLDEN["gpt2-tiny"]["cases"]
PROMPT, GREEDY = CASES[1]["prompt"], CASES[1]["greedy"]
TEXT = "Once upon a time"
DICT = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 12, "n_head": 2, "n_layer": 2, "n_positions": 40, "eos_token_id": 49}


@pytest.fixture(scope="module")
def reference(tiny):
    with Session(tiny, backend="reference", batch_size=3) as session:
        yield session


@pytest.fixture(scope="module")
def xla(tiny):
    with Session(tiny, batch_size=3) as session:
        yield session


@pytest.fixture(scope="module")
def texts(pocket):
    """gpt2-pocket, two rows of at most 128 tokens: the one with a tokenizer."""
    with Session(pocket, batch_size=2, max_length=128) as session:
        yield session


@pytest.fixture(params=["reference", "xla"])
def session(request):
    return request.getfixturevalue(request.param)


def ids(generations):
    return [generation.token_ids for generation in generations]


def join(pieces, row=0):
    """(text, ids, finish reason) of a row's pieces."""
    mine = [piece for piece in pieces if piece.row == row]
    assert all(piece.finish_reason is None for piece in mine[:-1])
    text = None if any(piece.text is None for piece in mine) else "".join(piece.text for piece in mine)
    return text, [token_id for piece in mine for token_id in piece.token_ids], mine[-1].finish_reason


def whole(generation):
    return generation.text, generation.token_ids, generation.finish_reason


# ---- batches

MIXED = [
    {"prompt": [7], "seed": 1, "temperature": 0.0},
    {"prompt": PROMPT, "seed": 2, "temperature": 1.0, "top_k": 20},
    {"prompt": list(range(40)), "seed": -3, "temperature": 3.0},
    {"prompt": [250, 3], "seed": 2**70, "temperature": 0.7, "top_p": 0.6},
    {"prompt": list(range(100, 117)), "seed": 5, "temperature": 1.0, "min_p": 0.2, "repetition_penalty": 1.5},
    {"prompt": [9] * 16, "seed": 5, "temperature": 0.0, "repetition_penalty": 2.0},
    {"prompt": [9] * 17, "seed": 1, "temperature": 1.0, "max_new_tokens": 1},
]


def generate_rows(session, rows):
    columns = {"temperature": 0.0, "seed": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    columns["max_new_tokens"] = 15
    settings = {name: [row.get(name, default) for row in rows] for name, default in columns.items()}
    return ids(session.generate([row["prompt"] for row in rows], ignore_eos=True, **settings))


@pytest.fixture(scope="module")
def alone(tiny):
    """Each row of MIXED by itself, in a Session of one row."""
    with Session(tiny) as session:
        return [generate_rows(session, [row])[0] for row in MIXED]


def test_a_batch_equals_each_row_alone(xla, alone):
    """Any neighbours, any place in the batch, more rows than the batch has room for."""
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    assert list(map(len, alone)) == [15] * 6 + [1]
    generator = np.random.default_rng(0)
    for count in (1, 2, 3, 3, 3, 7, 7):
        order = generator.permutation(len(MIXED))[:count]
        assert generate_rows(xla, [MIXED[i] for i in order]) == [alone[i] for i in order], order


def test_a_batch_equals_each_row_alone_on_the_reference(reference, alone):
    assert generate_rows(reference, MIXED[:4]) == alone[:4]


def test_waves_keep_the_order(session):
    prompts = [[7], PROMPT, CASES[2]["prompt"], CASES[3]["prompt"]] * 2
    greedy = [CASES[i]["greedy"][:5] for i in (0, 1, 2, 3)] * 2
    outs = session.generate(prompts, max_new_tokens=5, ignore_eos=True)
    assert ids(outs) == greedy
    assert [out.prompt_token_ids for out in outs] == prompts
    timings = [id(out.timings) for out in outs]
    assert timings[0] == timings[2] != timings[3] == timings[5] != timings[6] == timings[7]


def test_rows_that_all_end_at_once(session):
    outs = session.generate([[7], PROMPT, [9]], max_new_tokens=1)
    assert [len(out.token_ids) for out in outs] == [1, 1, 1]
    outs = session.generate([[7], [7], [7]], stop_token_ids=CASES[0]["greedy"][0])
    assert [(out.token_ids, out.finish_reason) for out in outs] == [([CASES[0]["greedy"][0]], "stop")] * 3


# ---- prompts


@pytest.mark.parametrize(
    "prompt",
    [
        PROMPT,
        tuple(PROMPT),
        np.array(PROMPT),
        np.array(PROMPT, np.uint8),
        [PROMPT],
        np.array([PROMPT]),
        [np.int32(i) for i in PROMPT],
    ],
    ids=["list", "tuple", "array", "uint8", "list of one", "matrix", "numpy scalars"],
)
def test_prompts_of_ids(session, prompt):
    (out,) = session.generate(prompt, max_new_tokens=4, ignore_eos=True)
    assert out.token_ids == GREEDY[:4] and out.prompt_token_ids == PROMPT and out.text is None


def test_prompts_of_text_and_ids_together(texts):
    tokens = texts.tokenizer.encode(TEXT)
    outs = texts.generate([TEXT, tokens, tuple(tokens)], max_new_tokens=5)
    assert ids(outs) == [GOLDEN["gpt2-pocket"]["cases"][0]["greedy"][:5]] * 3
    assert [out.text for out in outs] == [", there was a little"] * 3


@pytest.mark.parametrize("empty", [[[]], np.zeros(0, np.int32), [()]])
def test_an_empty_prompt_begins_with_bos(session, empty):
    assert session.generate(empty, max_new_tokens=4)[0].prompt_token_ids == [255]
    assert ids(session.generate(empty, max_new_tokens=4)) == ids(session.generate([255], max_new_tokens=4))


def test_an_empty_text_begins_with_bos(texts):
    (out,) = texts.generate("", max_new_tokens=4)
    assert out.prompt_token_ids == [0] and len(out.token_ids) == 4


def test_an_empty_prompt_without_bos():
    with Session(DICT, random_weights=True, backend="reference") as session:
        with pytest.raises(
            UserError, match=re.escape("prompt 0: is empty, and the model has no token to begin with (bos_token_id)")
        ):
            session.generate([[]])


def test_a_checkpoint_without_tokenizer_refuses_text(reference):
    for call in (reference.generate, reference.stream, reference.logits, reference.score):
        with pytest.raises(UserError, match="prompt 0: is text, but the checkpoint has no tokenizer; give token ids"):
            call("Hello")
    with pytest.raises(UserError, match=re.escape("stop=('x',): the checkpoint has no tokenizer; use stop_token_ids")):
        reference.generate([1], stop="x")


# ---- sampling


def test_seeds(session):
    def draw(**settings):
        return ids(session.generate(PROMPT, max_new_tokens=20, temperature=1.5, ignore_eos=True, **settings))

    assert draw(seed=1) == draw(seed=1) == draw(seed=np.int32(1)) == draw(seed=[1])
    assert draw(seed=1) != draw(seed=2) != draw(seed=1 + 2**32)
    assert draw(seed=-1) == draw(seed=2**64 - 1)
    (first,) = session.generate(PROMPT, max_new_tokens=20, temperature=1.5)
    (second,) = session.generate(PROMPT, max_new_tokens=20, temperature=1.5)
    assert first.seed != second.seed
    (again,) = session.generate(PROMPT, max_new_tokens=20, temperature=1.5, seed=first.seed)
    assert again.token_ids == first.token_ids


def test_both_backends_draw_the_same(reference, xla):
    settings = {"max_new_tokens": 10, "temperature": 1.2, "top_k": 30, "top_p": 0.9, "seed": [1, 2, 3]}
    prompts = [PROMPT, [5], CASES[2]["prompt"]]
    assert ids(reference.generate(prompts, **settings)) == ids(xla.generate(prompts, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0},
        {"temperature": 0, "top_k": 50},
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1},
        {"temperature": 1e-300},
    ],
    ids=str,
)
def test_greedy_in_many_ways(session, settings):
    assert ids(session.generate(PROMPT, max_new_tokens=12, ignore_eos=True, seed=4, **settings)) == [GREEDY[:12]]


def test_top_k_above_the_vocabulary_is_all_of_it(session):
    settings = {"max_new_tokens": 12, "seed": 5, "temperature": 1.0}
    assert ids(session.generate(PROMPT, top_k=10**30, **settings)) == ids(session.generate(PROMPT, **settings))
    assert ids(session.generate(PROMPT, top_k=257, **settings)) == ids(session.generate(PROMPT, **settings))


def test_top_k_keeps_to_the_best(xla):
    for seed in range(5):
        (out,) = xla.generate(PROMPT, max_new_tokens=10, top_k=3, temperature=5.0, seed=seed, ignore_eos=True)
        logits = xla.logits(PROMPT + out.token_ids)[len(PROMPT) - 1 : -1]
        assert all(token in np.argsort(row)[-3:] for row, token in zip(logits, out.token_ids, strict=True))


def test_repetition_penalty(session):
    (plain,) = session.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    (new,) = session.generate(PROMPT, max_new_tokens=30, ignore_eos=True, repetition_penalty=1e30)
    assert len(set(plain.token_ids)) < 20
    assert len(set(new.token_ids)) == 30 and not set(new.token_ids) & set(PROMPT)
    (old,) = session.generate(PROMPT, max_new_tokens=30, ignore_eos=True, repetition_penalty=1e-30)
    assert set(old.token_ids) <= set(PROMPT)
    # Tokens of earlier calls don't count.
    assert ids(session.generate(PROMPT, max_new_tokens=30, ignore_eos=True, repetition_penalty=1e30)) == [new.token_ids]


# ---- ends


def test_stop_ids(session):
    first = GREEDY[5]
    end = GREEDY.index(first) + 1
    (out,) = session.generate(PROMPT, stop_token_ids=first, ignore_eos=True)
    assert (out.token_ids, out.finish_reason) == (GREEDY[:end], "stop")
    outs = session.generate([PROMPT] * 3, stop_token_ids=[[first], [], [GREEDY[0]]], max_new_tokens=10, ignore_eos=True)
    assert ids(outs) == [GREEDY[:end], GREEDY[:10], GREEDY[:1]]
    assert [out.finish_reason for out in outs] == ["stop", "length", "stop"]
    many = [i for i in range(257) if i not in GREEDY][:63]
    assert ids(session.generate(PROMPT, stop_token_ids=[*many, first], ignore_eos=True)) == [GREEDY[:end]]


def test_stop_strings(texts):
    (plain,) = texts.generate(TEXT, max_new_tokens=30)
    for stop in ("little girl", "girl named L", " named", "y who", ["zzz", "named Lily"], "l", ", there"):
        (out,) = texts.generate(TEXT, max_new_tokens=30, stop=stop)
        end = min(at for at in map(plain.text.find, [stop] if isinstance(stop, str) else stop) if at >= 0)
        assert (out.text, out.finish_reason) == (plain.text[:end], "stop"), stop
        assert out.token_ids == plain.token_ids[: len(out.token_ids)]
        assert join(texts.stream(TEXT, max_new_tokens=30, stop=stop)) == whole(out)
    outs = texts.generate([TEXT, TEXT, TEXT], max_new_tokens=30, stop=[[" girl"], [], ["lived", " who"]])
    assert [out.text for out in outs] == [plain.text.partition(" girl")[0], plain.text, plain.text.partition(" who")[0]]
    assert [out.finish_reason for out in outs] == ["stop", "length", "stop"]


def test_text_is_held_back_only_while_it_may_be_a_stop_string(texts):
    (plain,) = texts.generate(TEXT, max_new_tokens=12)
    stop = plain.text[-4:] + "never"
    pieces = list(texts.stream(TEXT, max_new_tokens=12, stop=stop))
    assert join(pieces) == whole(plain)
    sent = "".join(piece.text for piece in pieces[:-1])
    assert plain.text.startswith(sent) and not sent.endswith(plain.text[-4:])


def test_every_eos_of_both_files(tiny, tmp_path, caplog):
    folder = shutil.copytree(tiny, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [CASES[0]["greedy"][2], 256]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [GREEDY[1], 9999, -1], "bos_token_id": None}))
    with Session(folder, backend="reference", batch_size=2) as session:
        assert session.eos_token_ids == (CASES[0]["greedy"][2], 256, GREEDY[1])
        assert "eos_token_id: [9999, -1] are outside the vocabulary of 257 and are ignored" in caplog.text
        outs = session.generate([[7], PROMPT], max_new_tokens=10)
        assert [(out.token_ids, out.finish_reason) for out in outs] == [
            (CASES[0]["greedy"][:3], "stop"),
            (GREEDY[:2], "stop"),
        ]
        outs = session.generate([[7], PROMPT], max_new_tokens=10, ignore_eos=[True, False])
        assert ids(outs) == [CASES[0]["greedy"][:10], GREEDY[:2]]
        assert [out.finish_reason for out in outs] == ["length", "stop"]


def test_lengths(session):
    assert [len(session.generate(PROMPT, max_new_tokens=n, ignore_eos=True)[0].token_ids) for n in (1, 2, 37)] == [1, 2, 37]
    for length in (60, 59, 45):
        (out,) = session.generate(list(range(length)), ignore_eos=True)
        assert (len(out.token_ids), out.finish_reason) == (61 - length, "length")
    (out,) = session.generate(list(range(50)), ignore_eos=True, max_new_tokens=10**30)
    assert len(out.token_ids) == 11


def test_max_length_of_one_and_two(tiny):
    with Session(tiny, backend="reference", max_length=1) as session:
        assert session.logits([7]).shape == (1, 257)
        with pytest.raises(UserError, match="prompt 0: 1 tokens fill max_length=1, which leaves no room for a new one"):
            session.generate([7])
    with Session(tiny, max_length=2, batch_size=2) as session:
        assert ids(session.generate([[7], [3], [7]])) == [[CASES[0]["greedy"][0]], [int(session.logits([3])[0].argmax())]] + [
            [CASES[0]["greedy"][0]]
        ]
        assert session.score([7, 9]).shape == (1,)


# ---- logits, scores, log-probabilities


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_logprobs_are_those_of_the_model(session):
    outs = session.generate(
        [PROMPT, [5]],
        max_new_tokens=12,
        temperature=2.0,
        top_k=50,
        repetition_penalty=1.3,
        seed=3,
        ignore_eos=True,
        logprobs=True,
    )
    for out in outs:
        logits = session.logits(out.prompt_token_ids + out.token_ids)[len(out.prompt_token_ids) - 1 : -1]
        wanted = log_softmax(logits)[np.arange(12), out.token_ids]
        assert_close(np.float32(out.logprobs), wanted, rtol=1e-5, atol=2e-5)
    assert session.generate(PROMPT, max_new_tokens=2)[0].logprobs is None
    pieces = list(session.stream(PROMPT, max_new_tokens=12, ignore_eos=True, logprobs=True))
    (out,) = session.generate(PROMPT, max_new_tokens=12, ignore_eos=True, logprobs=True)
    assert [logprob for piece in pieces for logprob in piece.logprobs] == pytest.approx(out.logprobs, abs=2e-5)
    assert all(piece.logprobs is None for piece in session.stream(PROMPT, max_new_tokens=3))


def test_score_and_logits(session):
    logits, scores = session.logits(PROMPT), session.score(PROMPT)
    assert logits.shape == (11, 257) and logits.dtype == np.float32
    assert scores.shape == (10,) and scores.dtype == np.float32
    assert_close(scores, log_softmax(logits)[np.arange(10), PROMPT[1:]], rtol=1e-5, atol=1e-5)
    assert_close(session.logits(np.array(PROMPT)), logits)
    assert session.logits(list(range(61))).shape == (61, 257)  # a whole cache is fine: nothing is added
    assert session.score(range(61)).shape == (60,)
    with pytest.raises(UserError, match="score needs at least two tokens, the prompt has 1"):
        session.score([7])


def test_score_of_text(texts):
    tokens = texts.tokenizer.encode(TEXT)
    assert_close(texts.score(TEXT), texts.score(tokens))
    assert texts.logits(TEXT).shape == (len(tokens), 4096)


# ---- streams


def test_a_stream_gives_what_generate_gives(session):
    outs = session.generate([PROMPT, [7], CASES[2]["prompt"]], max_new_tokens=[30, 1, 8], seed=4, top_k=30)
    pieces = list(session.stream([PROMPT, [7], CASES[2]["prompt"]], max_new_tokens=[30, 1, 8], seed=4, top_k=30))
    for row, out in enumerate(outs):
        assert join(pieces, row) == whole(out)
    assert {piece.row for piece in pieces[:3]} == {0, 1, 2}  # side by side
    assert len(pieces[0].token_ids) == 1  # the first token at once


def test_a_stream_of_more_prompts_than_rows(session):
    prompts = [[7], PROMPT, [9], [256, 0, 255], [8]]
    outs = session.generate(prompts, max_new_tokens=5)
    pieces = list(session.stream(prompts, max_new_tokens=5))
    assert [join(pieces, row) for row in range(5)] == [whole(out) for out in outs]


@pytest.mark.parametrize("prompt", ["🙂🙃", "日本語の物語", "Ünïcödé ", "👩‍👩‍👧", "", " ", "\x00", "a\ud7ff"])
def test_streams_of_text_that_is_hard_to_cut(texts, prompt):
    for seed in range(3):
        settings = {"max_new_tokens": 40, "temperature": 3.0, "seed": seed, "ignore_eos": True}
        (out,) = texts.generate(prompt, **settings)
        pieces = list(texts.stream(prompt, **settings))
        assert join(pieces) == whole(out)
        assert out.text == texts.tokenizer.decode(out.token_ids)
    assert len(pieces) > 3


def test_text_that_is_no_unicode(texts):
    with pytest.raises(UserError, match="prompt 0: prompt is not valid Unicode"):
        texts.generate("\ud800")


def count_runs(session, monkeypatch):
    """A list that grows by the name of each graph the session runs."""
    names, run = [], session._engine._run_one

    def counted(name, inputs):
        names.append(name)
        return run(name, inputs)

    monkeypatch.setattr(session._engine, "_run_one", counted)
    return names


def test_closing_a_stream_stops_the_work(session, monkeypatch):
    names = count_runs(session, monkeypatch)
    stream = session.stream([PROMPT] * 9, ignore_eos=True)
    assert names == []  # nothing before the first piece
    next(stream)
    assert names == ["prefill_16", "decode"]
    stream.close()
    assert names == ["prefill_16", "decode"] and list(stream) == []
    assert ids(session.generate(PROMPT, max_new_tokens=9, ignore_eos=True)) == [GREEDY[:9]]
    for _ in session.stream(PROMPT, ignore_eos=True):
        break
    assert ids(session.generate(PROMPT, max_new_tokens=9, ignore_eos=True)) == [GREEDY[:9]]


def test_a_stream_checks_its_arguments_at_once(session):
    with pytest.raises(UserError, match="unknown generation setting 'topk'"):
        session.stream(PROMPT, topk=3)
    with pytest.raises(UserError, match="token id 257"):
        session.stream([257])


def test_streams_and_calls_in_between(session):
    """Whatever uses the Session between two pieces, a stream's tokens stay what they are."""
    settings = {"max_new_tokens": 25, "temperature": 1.0, "repetition_penalty": 1.2, "ignore_eos": True}
    prompts = {5: [PROMPT, [7]], 6: [CASES[2]["prompt"], [3], [4, 4]]}
    alone = {seed: ids(session.generate(some, seed=seed, **settings)) for seed, some in prompts.items()}
    streams = {seed: session.stream(some, seed=seed, **settings) for seed, some in prompts.items()}
    between = itertools.cycle(
        [
            lambda: session.generate([9] * 20, max_new_tokens=3),
            lambda: session.logits(PROMPT),
            lambda: None,
            lambda: session.score(PROMPT),
            lambda: next(session.stream([1, 2])),
        ]
    )
    pieces = {seed: [] for seed in streams}
    for first, second in itertools.zip_longest(streams[5], streams[6]):
        pieces[5] += [first] if first else []
        pieces[6] += [second] if second else []
        next(between)()
    for seed, some in prompts.items():
        assert [join(pieces[seed], row)[1] for row in range(len(some))] == alone[seed]


@pytest.mark.parametrize("use", ["logits", "score", "generate", "closed stream"])
def test_a_stream_notices_that_its_caches_are_gone(session, use):
    calls = {
        "logits": lambda: session.logits([8] * 30),
        "score": lambda: session.score([8] * 30),
        "generate": lambda: session.generate([[8] * 30] * 3, max_new_tokens=1),
        "closed stream": lambda: next(session.stream([8] * 30)),
    }
    stream = session.stream(PROMPT, max_new_tokens=20, ignore_eos=True)
    pieces = [next(stream), next(stream)]
    calls[use]()
    assert join(pieces + list(stream))[1] == GREEDY[:20]


# ---- threads


def test_several_threads_call_one_session(xla, alone):
    def call(i):
        if i % 2:
            return generate_rows(xla, [MIXED[i]])[0]
        row = {"ignore_eos": True, "max_new_tokens": 15} | MIXED[i]
        return join(xla.stream(row.pop("prompt"), **row))[1]

    with concurrent.futures.ThreadPoolExecutor(7) as pool:
        for _ in range(3):
            assert list(pool.map(call, range(len(MIXED)))) == alone


def test_two_sessions_of_two_precisions_in_two_threads(tiny):
    barrier = threading.Barrier(2, timeout=60)

    def work(precision):
        barrier.wait()
        with Session(tiny, precision=precision, batch_size=2 if precision == "bf16" else 1) as session:
            dtypes = {parameter.dtype.name for parameter in session.model.parameters()}
            barrier.wait()
            return dtypes, session.generate([PROMPT], max_new_tokens=8)[0].token_ids, session.logits(PROMPT)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        (exact, tokens, logits), (half, _, rounded) = pool.map(work, ["fp32", "bf16"])
    assert exact == {"float32"} and half == {"bfloat16"}
    assert tokens == GREEDY[:8]
    assert 0 < np.abs(logits - rounded).max() < 0.12 * logits.std()


# ---- interrupts


def interrupt_at(session, monkeypatch, number, is_after):
    """Raise KeyboardInterrupt in the session's run of this number, before the device works or after it has."""
    count, run = itertools.count(), session._engine._run_one

    def interrupted(name, inputs):
        is_now = next(count) == number
        if is_now and not is_after:
            raise KeyboardInterrupt
        outputs = run(name, inputs)
        if is_now:
            raise KeyboardInterrupt
        return outputs

    monkeypatch.setattr(session._engine, "_run_one", interrupted)


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_an_interrupt_leaves_the_session_usable(session, monkeypatch, number, is_after):
    other = session.stream([7], max_new_tokens=20, ignore_eos=True)
    first = next(other)
    with monkeypatch.context() as patch:
        interrupt_at(session, patch, number, is_after)
        with pytest.raises(KeyboardInterrupt):
            for _ in session.stream(PROMPT, ignore_eos=True):
                pass
    assert [*first.token_ids, *join(other)[1]] == CASES[0]["greedy"][:20]
    with monkeypatch.context() as patch:
        interrupt_at(session, patch, min(number, 1), is_after)
        with pytest.raises(KeyboardInterrupt):
            session.generate(PROMPT, ignore_eos=True)
    assert ids(session.generate([[7], PROMPT], max_new_tokens=20, ignore_eos=True)) == [CASES[0]["greedy"][:20], GREEDY[:20]]


def test_an_interrupt_when_the_device_has_taken_the_caches(xla, monkeypatch):
    """The program has overwritten the caches that it was given, and what it returned gets lost."""
    stream = xla.stream([7], max_new_tokens=20, ignore_eos=True)
    first, programs = next(stream), xla._engine._programs

    def interrupted(*args, program=programs["decode"]):
        program(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(programs, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            xla.generate(PROMPT)
    assert [*first.token_ids, *join(stream)[1]] == CASES[0]["greedy"][:20]
    assert ids(xla.generate(PROMPT, max_new_tokens=20, ignore_eos=True)) == [GREEDY[:20]]


def test_an_interrupt_while_loading_or_compiling(tiny, monkeypatch):
    with Session(tiny, backend="reference") as session:
        load, count = session._engine._load_one, itertools.count()

        def interrupted(*args):
            if next(count) in (3, 50):
                raise KeyboardInterrupt
            return load(*args)

        monkeypatch.setattr(session._engine, "_load_one", interrupted)
        compile_one, compiles = session._engine._compile_one, itertools.count()

        def compile_interrupted(*args):
            if next(compiles) == 1:
                raise KeyboardInterrupt
            return compile_one(*args)

        monkeypatch.setattr(session._engine, "_compile_one", compile_interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                session.generate(PROMPT)
        assert ids(session.generate(PROMPT, max_new_tokens=5)) == [GREEDY[:5]]


SIGNALLED = """
import sys
from poptransformer import Session

with Session(sys.argv[1], max_length=128) as session:
    text = "Once upon a time"
    wanted = session.generate(text, max_new_tokens=60)[0].token_ids
    kinds = {
        "stream": lambda: list(session.stream(text, ignore_eos=True)),
        "generate": lambda: session.generate(text, ignore_eos=True),
    }
    for kind, call in kinds.items():
        try:
            print("ready", flush=True)
            for _ in range(100000):
                call()
            sys.exit("no interrupt came")
        except KeyboardInterrupt:
            pass
        assert session.generate(text, max_new_tokens=60)[0].token_ids == wanted, kind
        print(kind, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_a_real_interrupt(pocket):
    command = [sys.executable, "-c", SIGNALLED, str(pocket)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(100, process.kill)
    timer.start()
    try:
        for kind, delay_s in (("stream", 0.31), ("generate", 0.23)):
            assert process.stdout.readline() == "ready\n"
            is_sent = threading.Event()

            def send(is_sent=is_sent, delay_s=delay_s):
                while not is_sent.wait(delay_s):
                    process.send_signal(signal.SIGINT)
                    delay_s = 10  # again, as Python drops an interrupt that comes while it collects garbage

            sender = threading.Thread(target=send)
            sender.start()
            line = process.stdout.readline()
            is_sent.set()
            sender.join()
            assert line == f"{kind}\n"
        assert process.wait(30) == 0
    finally:
        timer.cancel()
        process.kill()
        process.wait()


# ---- device, graphs, timings


def test_closing(tiny):
    session = Session(tiny, batch_size=2)
    stream = session.stream(PROMPT, ignore_eos=True)
    next(stream)
    session.close()
    session.close()
    for call in (
        lambda: next(stream),
        lambda: session.generate(PROMPT),
        lambda: list(session.stream(PROMPT)),
        lambda: session.logits(PROMPT),
        lambda: session.score(PROMPT),
        lambda: session.run("decode", {}),
        session.compile,
    ):
        with pytest.raises(UserError, match="this Session is closed"):
            call()


def test_closing_before_the_first_call(tiny):
    with Session(tiny, backend="reference") as session:
        pass
    with pytest.raises(UserError, match="this Session is closed"):
        session.generate([1])


def test_the_context_manager_closes_after_an_error(tiny):
    with pytest.raises(ZeroDivisionError), Session(tiny, backend="reference") as session:
        _ = 1 / 0
    with pytest.raises(UserError, match="this Session is closed"):
        session.generate([1])


def test_compile_does_the_work_ahead(tiny, monkeypatch):
    with Session(tiny, backend="reference") as session:
        assert session.timings_s["load"] == 0 and not session._engine.graphs
        session.compile([1, 20, 61])
        assert set(session._engine.graphs) == {"decode", "prefill_32", "prefill_61"}
        monkeypatch.setattr(session._engine, "compile", lambda *_: pytest.fail("compiled again"))
        session.generate([PROMPT * 2], max_new_tokens=2)
        session.compile()


def test_graphs_by_name(session):
    for name in ("decode", "prefill_16", "logits_3", "score_61", "generate_8"):
        assert session.graph(name).name == name
    for name in ("", "decode_3", "prefill", "prefill_", "prefill_x", "prefill_-3", "prefill_1.5", "nonsense_3", "_3"):
        with pytest.raises(UserError, match="no graph .*; there are decode, prefill_T, logits_T, score_T and generate_T"):
            session.graph(name)
    for name in ("prefill_0", "logits_62", "score_9999999999999999999"):
        with pytest.raises(UserError, match="the length must be in 1 .. max_length=61"):
            session.graph(name)


def decode_inputs(session, **rows):
    count = session.batch_size
    inputs = {
        "temperature": np.zeros(count, np.float32), "top_k": np.zeros(count, np.int32), "top_p": np.ones(count, np.float32),
        "min_p": np.zeros(count, np.float32), "repetition_penalty": np.ones(count, np.float32),
        "seed": np.zeros((count, 2), np.uint32), "stop_ids": np.full((count, 64), -1, np.int32),
    }  # fmt: skip
    return inputs | {name: np.array(value, np.int32) for name, value in rows.items()}


def test_graphs_run_by_hand_give_what_generate_gives(session):
    stream = session.stream([7], max_new_tokens=9, ignore_eos=True)
    pieces = [next(stream)]
    padded = np.zeros((3, 16), np.int32)
    padded[0, :10] = PROMPT[:-1]
    prompt = {
        "input_ids": padded, "cache_len": np.zeros(3, np.int32), "num_tokens": np.array([10, 0, 0], np.int32),
        "is_fresh": np.ones(3, bool),
    }  # fmt: skip
    last = decode_inputs(session, token=[PROMPT[-1], 0, 0], max_new=[7, 0, 0])
    session.run("prefill_16", prompt)
    outputs = session.run("decode", last | {"cache_len": np.array([10, 0, 0], np.int32), "is_fresh": np.zeros(3, bool)})
    assert outputs["num_new"].tolist() == [7, 0, 0] and outputs["tokens"][0, :7].tolist() == GREEDY[:7]
    outputs = session.run("generate_16", prompt | last)
    assert outputs["num_new"].tolist() == [7, 0, 0] and outputs["tokens"][0, :7].tolist() == GREEDY[:7]
    assert join(pieces + list(stream))[1] == CASES[0]["greedy"][:9]  # a stream notices that its caches are gone
    with pytest.raises(UserError, match="takes inputs .*, given are \\['input_ids'\\]"):
        session.run("prefill_16", {"input_ids": padded})


def test_timings(session):
    outs = session.generate([[7], PROMPT, CASES[2]["prompt"], [8]], max_new_tokens=[5, 20, 1, 3], ignore_eos=True)
    first, second = outs[0].timings, outs[3].timings
    assert first is outs[2].timings is not second
    assert (first.prefill_tokens, first.decode_tokens, first.decode_steps) == (0 + 10 + 22, 26, 20)
    assert (second.prefill_tokens, second.decode_tokens, second.decode_steps) == (0, 3, 3)
    assert first.prefill_ms > 0 and second.prefill_ms == 0 and second.prefill_tokens_per_s == 0
    for timings in (first, second):
        assert timings.decode_ms_per_token * timings.decode_steps == pytest.approx(timings.decode_ms)
        assert timings.decode_tokens_per_s * timings.decode_ms == pytest.approx(1e3 * timings.decode_tokens)
        assert timings.weight_bytes == session.weight_bytes_per_token
        assert timings.decode_gb_per_s * timings.decode_ms_per_token * 1e6 == pytest.approx(timings.weight_bytes)
    assert all(session.timings_s[key] > 0 for key in ("open", "load", "compile"))


def test_weight_bytes_are_what_a_step_reads(reference, texts):
    sizes = {parameter.name: parameter.spec.num_bytes for parameter in reference.model.parameters()}
    assert reference.weight_bytes_per_token == sum(sizes.values()) - sizes["transformer.wpe.weight"]
    assert texts.weight_bytes_per_token == sum(p.spec.num_bytes for p in texts.model.parameters()) - 512 * 256 * 4


def test_report(texts):
    from poptransformer.report import report

    outs = texts.generate([TEXT, TEXT, TEXT], max_new_tokens=4)
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in report(texts, outs).split("\n"))
    assert lines["decode"].endswith("ms/token over 12 tokens in 8 steps")
    assert lines["prefill"].endswith(f"ms for {3 * (len(outs[0].prompt_token_ids) - 1)} tokens")
    assert lines["batch size"] == "2, up to 128 tokens a row"
    assert report(texts, []).count("\n") == len(lines) - 1


def test_device_info(reference, xla):
    assert reference.device_info.platform == "numpy" and reference.memory_bandwidth_gb_per_s() is None
    assert xla.device_info.platform in ("cpu", "cuda", "tpu") and xla.device_info.name


def test_random_weights(tiny, tmp_path):
    with Session(DICT, random_weights=True, batch_size=2) as session:
        assert session.tokenizer is None and session.eos_token_ids == (49,) and session.max_length == 40
        first = ids(session.generate([[1, 2], [3]], max_new_tokens=6))
    with Session(DICT, random_weights=True, batch_size=2) as session:
        assert ids(session.generate([[1, 2], [3]], max_new_tokens=6)) == first
    shutil.copy(tiny / "config.json", tmp_path)
    with Session(tmp_path, random_weights=True, backend="reference") as session:
        assert len(session.generate([1], max_new_tokens=2, ignore_eos=True)[0].token_ids) == 2
    with Session(tiny, random_weights=True, backend="reference") as session:
        assert ids(session.generate(PROMPT, max_new_tokens=9, ignore_eos=True)) != [GREEDY[:9]]


def test_the_default_max_length_is_at_most_2048():
    with Session(DICT | {"n_positions": 4096}, random_weights=True, backend="reference") as session:
        assert session.max_length == 2048
    with Session(DICT | {"n_positions": 4096}, random_weights=True, backend="reference", max_length=3000) as session:
        assert session.max_length == 3000


def test_compiled_programs_are_kept_where_asked(tiny, tmp_path):
    folder = tmp_path / "programs"
    with Session(tiny, max_length=7, execution_cache_dir=str(folder)) as session:
        session.generate([1], max_new_tokens=1)
    assert any(folder.iterdir())
    with Session(tiny, max_length=8, execution_cache_dir="") as session:
        session.generate([1], max_new_tokens=1)
    with Session(tiny, max_length=7, execution_cache_dir=folder) as session:
        assert len(session.generate([1], max_new_tokens=1)[0].token_ids) == 1


# ---- errors

NUMBERS = "wanted a whole number of at least 1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "fp7"}, "precision='fp7' is not supported; this version has fp32, bf16, fp16"),
        ({"precision": None}, "precision=None is not supported"),
        ({"precision": ["fp32"]}, "precision=['fp32'] is not supported"),
        ({"kv_cache": "int3"}, "kv_cache='int3' is not supported; this version has fp32, bf16, fp16"),
        *[({"batch_size": value}, f"batch_size={value!r}: {NUMBERS}") for value in (0, -1, 2.0, "two", True, None)],
        *[({"max_length": value}, f"max_length={value!r}: {NUMBERS}") for value in (0, -1, 2.0, "two", True)],
        ({"max_length": 62}, "max_length=62 is more than the model's 61 positions; set at most 61"),
        ({"num_replicas": 2}, "num_replicas=2: tensor parallelism is not there yet; set num_replicas: 1"),
        ({"num_replicas": 0}, f"num_replicas=0: {NUMBERS}"),
        ({"layers_per_device": [1, 2]}, "layers_per_device=[1, 2]: several devices are not there yet; set [3] or auto"),
        ({"layers_per_device": [1, 1]}, "layers_per_device=[1, 1] adds up to 2; the model has 3 layers"),
        ({"layers_per_device": []}, "layers_per_device=[] adds up to 0; the model has 3 layers"),
        ({"layers_per_device": [4, -1]}, "layers_per_device=[4, -1]: wanted auto, or a list of layer counts"),
        ({"layers_per_device": 3}, "layers_per_device=3: wanted auto, or a list of layer counts"),
        ({"layers_per_device": "all"}, "layers_per_device='all': wanted auto, or a list of layer counts"),
        ({"backend": "tf"}, "backend='tf' is not supported; this version has xla, reference"),
        ({"backend": None}, "backend=None is not supported"),
        ({"platform": "gameboy"}, "platform='gameboy' is unknown; choose one of auto, cpu, cuda, tpu"),
        ({"custom_ops": "maybe"}, "custom_ops='maybe': wanted true, false or auto"),
        ({"random_weights": "maybe"}, "random_weights='maybe': wanted true or false"),
        ({"execution_cache_dir": 5}, "execution_cache_dir=5: wanted a folder"),
    ],
)
def test_arguments_that_cannot_be_used(tiny, arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Session(tiny, **arguments)


@pytest.mark.parametrize(
    "arguments", [{"num_replicas": 2}, {"layers_per_device": [1, 2]}, {"precision": "int4"}, {"backend": "popart"}]
)
def test_what_is_not_built_yet(tiny, arguments):
    with pytest.raises(UnsupportedError):
        Session(tiny, **arguments)


@pytest.mark.parametrize("layers", [None, "auto", [3], (3,)])
def test_one_stage(tiny, layers):
    with Session(
        tiny, backend="reference", layers_per_device=layers, batch_size=np.int64(2), max_length=np.int32(20)
    ) as session:
        assert (session.batch_size, session.max_length) == (2, 20) and type(session.max_length) is int


def test_a_platform_that_is_not_there(tiny):
    import jax

    there = {device.platform for device in jax.local_devices()}
    for platform, name in (("cuda", "gpu"), ("tpu", "tpu")):
        if name not in there:
            wanted = f"platform='{platform}': JAX sees no such device here, only {', '.join(sorted(there))}"
            with pytest.raises(UserError, match=re.escape(wanted)):
                Session(tiny, platform=platform)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "model=None: wanted a folder, a .safetensors file, a hub name or a dict"),
        (5, "model=5: wanted a folder"),
        ("", "model is an empty string"),
        ("./nowhere", "./nowhere: no such file or folder"),
        (pathlib.Path("nowhere"), "nowhere: no such file or folder"),
        ({}, "config.json: model_type=None is not supported"),
        (DICT, "a model given as a dict: there are no weights; set random_weights: true"),
    ],
)
def test_models_that_cannot_be_opened(model, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Session(model)


def test_damaged_folders(tiny, tmp_path):
    with pytest.raises(UserError, match="no checkpoint: it has neither config.json nor model.safetensors"):
        Session(tmp_path)
    shutil.copy(tiny / "config.json", tmp_path)
    with pytest.raises(UserError, match="there are no weights; set random_weights: true to run without a checkpoint"):
        Session(tmp_path)
    weights = (tiny / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-1000])
    with pytest.raises(
        UserError, match=r"model\.safetensors: truncated: its header describes 203864 bytes, the file has 202864"
    ):
        Session(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        Session(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        Session(tmp_path)


def test_a_missing_shard(tiny, tmp_path):
    shutil.copy(tiny / "config.json", tmp_path)
    weight_map = {"transformer.wte.weight": "model-00001-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=r"1 of the 1 shards .* are missing: model-00001-of-00002\.safetensors"):
        Session(tmp_path)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([], {}, "no prompts; give a string, a list of token ids, or a list of those"),
        (None, {}, "no prompts"),
        ((x for x in ([1], [2])), {}, "is no prompt; give a string"),
        ([257], {}, "prompt 0: token id 257 is outside the vocabulary of 257"),
        ([-1], {}, "prompt 0: token id -1 is outside the vocabulary of 257"),
        ([[1], [1.5]], {}, "prompt 1: wanted a string or whole numbers, not [1.5]"),
        (
            [[1] * 62, [2], [3] * 70],
            {},
            "prompt 0 has 62 tokens; prompt 2 has 70 tokens; max_length is 61: shorten the prompt or raise",
        ),
        ([1] * 61, {}, "prompt 0: 61 tokens fill max_length=61, which leaves no room for a new one"),
        ([1], {"temperature": float("nan")}, "temperature=nan: wanted a number of at least 0"),
        ([1], {"temperature": -0.5}, "temperature=-0.5: wanted a number of at least 0"),
        ([1], {"top_p": float("nan")}, "top_p=nan: wanted a number in (0, 1]"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens=0: wanted a whole number of at least 1"),
        ([1], {"topk": 5}, "unknown generation setting 'topk'; did you mean 'top_k'?"),
        ([[1], [2]], {"seed": [1, 2, 3]}, "seed: 3 values for 2 prompts; give one value, or one for each prompt"),
        ([[1], [2]], {"top_k": [1, -2]}, "prompt 1: top_k=-2: wanted a whole number of at least 0"),
        ([1], {"stop_token_ids": [257]}, "stop_token_ids: 257 is outside the vocabulary of 257"),
        ([1], {"stop_token_ids": range(70)}, "stop_token_ids: 71 with the model's own; at most 64 are supported"),
        ([1], {"stop": 5.5}, "stop=(5.5,): wanted strings that are not empty"),
    ],
)
def test_calls_that_cannot_be_used(tiny, monkeypatch, prompts, settings, message):
    """Refused before any device work."""
    with Session(tiny, backend="reference") as session:
        monkeypatch.setattr(session._engine, "load", lambda *_: pytest.fail("began to work"))
        with pytest.raises(UserError, match=re.escape(message)):
            session.generate(prompts, **settings)
        assert not session._engine.graphs
