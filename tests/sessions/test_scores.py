"""Session.logits, Session.score, and log-probabilities of generations."""

import numpy as np
import pytest
from session_cases import PROMPT, TEXT
from tolerance import assert_close

from poptransformer import UserError


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
