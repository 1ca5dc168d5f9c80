"""Sessions whose KV cache has bytes: how far they are from a float32 cache on real text, decoding, what they take."""

import numpy as np
import pytest
from session_cases import ids

from poptransformer import Session, UnsupportedError

BOUND = 0.005  # of the loss; seen: 0.0003 for int8, 0.0011 for fp8
NUM_TOKENS = 490


@pytest.fixture(scope="module")
def page(pocket):
    """Token ids of the validation text, and their loss with a float32 cache."""
    with Session(pocket) as session:
        ids = session.tokenizer.encode((pocket / "valid.txt").read_text(encoding="utf-8")[:4000])[:NUM_TOKENS]
        return ids, -float(session.score(ids).mean())


@pytest.mark.parametrize("kv_cache", ["fp8", "int8"])
def test_loss_on_text(pocket, page, kv_cache):
    ids, exact = page
    losses = []
    for custom_ops in ("auto", False):
        with Session(pocket, kv_cache=kv_cache, custom_ops=custom_ops) as session:
            losses.append(-float(session.score(ids).mean()))
    assert all(0 < abs(loss / exact - 1) < BOUND for loss in losses), (losses, exact)
    assert losses[0] == pytest.approx(losses[1], rel=5e-4)  # sums in another order give some other codes


@pytest.mark.parametrize("kv_cache, elements", [("fp8", 64), ("int8", 68)])
def test_decoding(pocket, page, kv_cache, elements):
    """Token by token it picks what the logits of the whole row say: prefill and decode store the same."""
    with Session(pocket, kv_cache=kv_cache, batch_size=2, max_length=64) as session:
        states = session.model.states()
        assert {state.shape[-1] * state.dtype.itemsize for state in states} == {elements}
        new = ids(session.generate([page[0][:9], page[0][30:33]], max_new_tokens=12, ignore_eos=True))
        for prompt, tokens in zip((page[0][:9], page[0][30:33]), new, strict=True):
            best = session.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :].argmax(-1)
            assert list(best) == list(tokens)


def test_a_model_without_one(pocket):
    config = {"model_type": "rwkv", "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "attention_hidden_size": 16}
    with pytest.raises(UnsupportedError, match="kv_cache='int8' is not supported: this model has no KV cache"):
        Session(config | {"context_length": 32, "intermediate_size": 64}, random_weights=True, kv_cache="int8")
    with pytest.raises(UnsupportedError, match="kv_cache='fp4' is not supported; this version has fp32, bf16, fp16, fp8, int8"):
        Session(pocket, kv_cache="fp4")


def test_reference_equals_kernel(pocket, page):
    results = []
    for engine in ({"backend": "reference"}, {}):
        with Session(pocket, kv_cache="int8", **engine) as session:
            results.append(session.score(page[0][:24]))
    np.testing.assert_allclose(*results, rtol=1e-3, atol=1e-3)  # a code may differ where sums do in their last bit
