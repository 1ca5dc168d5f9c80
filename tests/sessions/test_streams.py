"""Session.stream, and several threads on one Session."""

import concurrent.futures
import itertools
import threading

import numpy as np
import pytest
from session_cases import CASES, GREEDY, MIXED, PROMPT, generate_rows, ids, join, whole

from poptransformer import Session, UserError

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
