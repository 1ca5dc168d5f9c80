"""SmolLM2-135M-Instruct out of its GGUF file (Q4_1, embedding in Q8_0): greedy tokens, logits and tokens of texts.

Hugging Face's side is transformers' own reading of the file: names, order of rows, dequantised weights, in float32.
"""

import functools

import numpy as np
import pytest
from plain_bpe import TEXTS, PlainBPE
from tolerance import assert_close

from poptransformer import Session
from poptransformer.checkpoint import fetch
from poptransformer.checkpoint.gguf_header import GGUFHeader

# Looked for while tests are collected: later on they have a cache folder of their own.
PATH = fetch.find("smollm2")
pytestmark = pytest.mark.skipif(PATH is None, reason=f"smollm2 is not fetched: {fetch.how_to_fetch('smollm2')}")

PROMPTS = (
    "The three largest oceans on Earth are",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n",
    "Zwei mal drei macht",
    "In 1969, the first",
)
NUM_NEW = 64
LENGTH = 128  # of the rows


@pytest.fixture(scope="module")
def session():
    with Session(PATH, batch_size=len(PROMPTS), max_length=LENGTH) as session:
        yield session


@pytest.fixture(scope="module")
def hugging_face():
    """A function of token ids [B, T] that gives logits [B, T, V]."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install -r requirements-dev.txt")
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -r requirements-dev.txt")
    gguf = pytest.importorskip("gguf", reason="needs gguf: pip install -r requirements.txt")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # What from_pretrained(gguf_file=...) does, without the package that it wants for moving weights between devices.
    with torch.device("meta"):  # a model of that many layers, for its names
        names = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=30, hidden_size=64, vocab_size=8))
    with pytest.MonkeyPatch.context() as patch:
        # Made anew for every module of the model: 4 of 11 seconds.
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        read = load_gguf_checkpoint(str(PATH), return_tensors=True, model_to_load=names)
    config = transformers.LlamaConfig(**read["config"])
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    missing = model.load_state_dict(read["tensors"], strict=False, assign=True).missing_keys
    assert missing == ["lm_head.weight"]
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are no weights
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    def logits(ids):
        with torch.no_grad():
            return model(torch.tensor(ids)).logits.numpy()

    return logits


def test_equals_hugging_face(session, hugging_face):
    """64 greedy tokens of five prompts in one batch, each the best that Hugging Face sees after those before it."""
    outs = session.generate(list(PROMPTS), max_new_tokens=NUM_NEW, ignore_eos=True)
    rows = [out.prompt_token_ids + out.token_ids for out in outs]
    lengths = [len(row) for row in rows]
    # Padding on the right: no token sees it.
    padded = np.array([row + [0] * (LENGTH - len(row)) for row in rows], np.int32)
    wanted = hugging_face(padded[:, : max(lengths)].tolist())
    for out, logits in zip(outs, wanted, strict=True):
        first = len(out.prompt_token_ids) - 1
        assert len(out.token_ids) == NUM_NEW
        assert out.token_ids == logits[first : first + NUM_NEW].argmax(-1).tolist()
    inputs = {
        "input_ids": padded,
        "cache_len": np.zeros(len(rows), np.int32),
        "num_tokens": np.array(lengths, np.int32),
        "is_fresh": np.ones(len(rows), bool),
    }
    ours = session.run(f"logits_{LENGTH}", inputs)["logits"]
    for row, length in enumerate(lengths):
        # 1e-4 of the logits' standard deviation, which is 6 to 9 here. Worst seen: 2e-5 of it, 1.1e-4 as a number.
        assert_close(ours[row, :length], wanted[row, :length], rtol=0, atol=1e-4 * wanted[row, :length].std())


def test_end_and_chat(session):
    assert session.eos_token_ids == (2, 0)  # <|im_end|>, which the file names, and <|endoftext|>
    out = session.chat("What is the capital of France?", max_new_tokens=20)
    assert out.text == "The capital of France is Paris." and out.finish_reason == "stop"


def test_tokens(session):
    """Against plain Python: numbers are cut into digits, words as GPT-2 has them."""
    header = GGUFHeader(PATH)
    keys = ("tokens", "token_type", "merges")
    plain = PlainBPE({f"tokenizer.ggml.{key}": header.get(f"tokenizer.ggml.{key}", list) for key in keys}, "smollm")
    tokenizer = session.tokenizer
    assert tokenizer.vocab_size == session.config.vocab_size == 49152
    for text in (*TEXTS, *PROMPTS):
        ids = tokenizer.encode(text)
        assert ids == plain.encode(text), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
