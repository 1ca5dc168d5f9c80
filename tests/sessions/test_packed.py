"""Sessions with packed weights: how far they are from float32 on real text, kernels beside plain XLA, batches, settings."""

import numpy as np
import pytest
from conftest import REPOSITORY
from session_cases import ids

from poptransformer import Session, UnsupportedError

POCKET = REPOSITORY / "examples" / "gpt2" / "gpt2-pocket"
# precision, group_size -> how far the loss on a page of text may be from float32's. Seen: 0.001 for int8, 0.007 for int4 and
# 0.002 for fp8.
LOSS = {("fp8", None): 0.01, ("int8", None): 0.005, ("int8", -1): 0.005, ("int4", None): 0.04, ("int4", 128): 0.04}


@pytest.fixture(scope="module")
def page():
    """490 token ids of the validation text, and their log-probabilities in float32."""
    with Session(POCKET) as session:
        ids = session.tokenizer.encode((POCKET / "valid.txt").read_text(encoding="utf-8")[:4000])[:490]
        return ids, session.score(ids)


@pytest.mark.parametrize("precision, group_size", LOSS)
def test_loss_on_text(page, precision, group_size):
    """The kernel, plain XLA and NumPy read the same bytes; only the kernel rounds activations."""
    ids, exact = page
    losses = {}
    for engine in ("kernel", "plain"):
        with Session(POCKET, precision=precision, group_size=group_size, custom_ops=engine == "kernel" and "auto") as session:
            losses[engine] = -float(session.score(ids).mean())
    wanted = -float(exact.mean())
    for loss in losses.values():
        assert 0 < abs(loss / wanted - 1) < LOSS[precision, group_size]
    assert abs(losses["kernel"] / losses["plain"] - 1) < 0.004


FAMILIES = ("bloom", "chatglm2", "chatglm3", "chatglm6b", "gemma", "gpt2", "gpt_neox", "llama", "opt", "phi", "qwen3", "rwkv")


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_packed(family):
    """Tiny random models, which 8 bits hardly change; a matrix that was packed wrongly would."""
    ids = [251, 3, 1, 4, 1, 5, 9, 254, 6, 5, 3, 5]  # as a ChatGLM-6B has them: a blank, and where its filling begins
    folder, logits = REPOSITORY / "tests" / "golden" / family, {}
    for precision in ("fp32", "int8", "fp8"):
        with Session(folder, precision=precision, backend="reference", max_length=32) as session:
            logits[precision] = session.logits(ids).ravel()
            packed = [parameter for parameter in session.model.parameters() if parameter.packing]
    assert len(packed) > session.config.num_layers
    assert np.corrcoef(logits["fp32"], logits["int8"])[0, 1] > 0.995  # seen: 0.997 and more
    assert np.corrcoef(logits["fp32"], logits["fp8"])[0, 1] > 0.97


def test_reference_equals_plain_xla(page):
    ids = page[0][:20]
    results = []
    for engine in ({"backend": "reference"}, {"custom_ops": False}):
        with Session(POCKET, precision="int4", kv_cache="fp32", **engine) as session:
            results.append(session.score(ids))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_rows_beside_others_and_alone(page):
    prompts = [page[0][:3], page[0][5:40], page[0][7:8], page[0][100:117]]
    with Session(POCKET, precision="int8", batch_size=4) as session:
        together = ids(session.generate(prompts, max_new_tokens=12, ignore_eos=True))
    with Session(POCKET, precision="int8") as session:
        alone = ids(session.generate(prompts, max_new_tokens=12, ignore_eos=True))
        assert "int8" in str(session.precision)
        packed_bytes = session.weight_bytes_per_token
    assert together == alone
    with Session(POCKET) as session:
        assert 0.25 < packed_bytes / session.weight_bytes_per_token < 0.30


def test_random_weights():
    config = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 36, "n_head": 2, "n_layer": 2, "n_positions": 40}
    for backend in ("xla", "reference"):
        with Session(config, random_weights=True, precision="int4", group_size=64, backend=backend) as session:
            assert len(session.generate([1, 2], max_new_tokens=5)[0].token_ids) == 5


def test_wrong_settings():
    for wrong, message in (
        ({"precision": "int8", "group_size": 7}, "group_size=7"),
        ({"group_size": 32}, "goes with precision"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            Session(POCKET, **wrong)
