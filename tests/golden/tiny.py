"""What makes tiny checkpoints: weights that all show in the logits, and a tokenizer of bytes."""

import math

import numpy as np
import tokenizers
import torch

BOS, EOS, END_OF_TURN = 260, 261, 262
MERGES = [("Ġ", "t"), ("h", "e"), ("i", "n"), ("Ġ", "a")]
VOCAB_SIZE = 256 + len(MERGES) + 3


def draw_weights(model, seed):
    """Draw all weights wide, norms and biases too, so that each of them shows in the logits.

    A tied table is drawn narrower: its rows are factors of the logits as well.
    """
    generator = np.random.default_rng(seed)
    is_tied, is_offset = model.config.tie_word_embeddings, model.config.model_type == "gemma"  # factors are 1 + weight there
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            drawn = generator.standard_normal(parameter.shape)
            if parameter.ndim == 1:
                drawn = 0.3 * drawn + (0 if name.endswith("bias") or is_offset else 1)
            elif "embed" in name and "out" not in name:
                drawn = 0.3 * drawn if is_tied else drawn
            else:
                drawn = 2 * drawn / math.sqrt(parameter.shape[1])
            parameter.copy_(torch.from_numpy(drawn.astype(np.float32)))


def write_tokenizer(folder, use_bos):
    """Write tokenizer.json and tokenizer_config.json: a token for each byte under its own number, four merges, <s> (260),
    </s> (261) and <|end|> (262).

    Args:
      use_bos: whether a text begins with <s>.
    """
    alphabet = byte_alphabet()
    vocabulary = {alphabet[byte]: byte for byte in range(256)}
    vocabulary |= {first + second: 256 + i for i, (first, second) in enumerate(MERGES)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, MERGES))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|end|>"])
    if use_bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", BOS)])
    assert backend.get_vocab_size() == VOCAB_SIZE and backend.token_to_id("<|end|>") == END_OF_TURN
    backend.save(str(folder / "tokenizer.json"), pretty=False)
    config = '{"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}\n'
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")


def byte_alphabet():
    """The character that byte-level tokenizers write for each byte: its own where that shows, else one from 256 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
