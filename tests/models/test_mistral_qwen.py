"""Golden checkpoints of Llama's kin; test_llama.py compares their variants live."""

import parity
import pytest

from poptransformer import Session


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_golden(family):
    parity.check_golden(family, parity.REFERENCE)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_chunks_equal_one_prefill(family, monkeypatch):
    """Mistral's rows outgrow its window of 23 tokens."""
    parity.check_chunks(family, monkeypatch)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma", "phi", "gpt_neox", "opt", "bloom"])
def test_text(family):
    """Text is bytes, "he", "in", " t" and " a" being tokens of their own; Llama, Mistral, Gemma and OPT begin with <s>."""
    with Session(parity.golden_folder(family), max_length=67, **parity.REFERENCE) as session:
        begin = [260] if family in ("llama", "mistral", "gemma", "opt") else []
        assert session.tokenizer.encode("the ink é t") == [*begin, 116, 257, 32, 258, 107, 32, 195, 169, 256]
        out = session.generate("the ink", max_new_tokens=3, ignore_eos=True)[0]
        assert out.prompt_token_ids == [*begin, 116, 257, 32, 258, 107]
        assert out.text == session.tokenizer.decode(out.token_ids)
