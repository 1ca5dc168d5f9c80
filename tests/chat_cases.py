"""Tokenizers and templates that the tests of chats share, small but of every kind that matters to control tokens."""

import functools
import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Llama 2's: BOS from the template, content trimmed, a special token behind answers, roles in turn.
LLAMA = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
# As Phi 3's: tokens made of the role, which take the white space behind them.
ROLES = (
    "{{ bos_token }}{%- for message in messages %}\n<|{{ message['role'] }}|>\n{{ message['content'] }}</s>\n{%- endfor %}\n"
    "<tool_call>{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONVERSATION = [
    {"role": "user", "content": " Hello there,\n who are you? "},
    {"role": "assistant", "content": "I am  a <small> model.\n"},
    {"role": "user", "content": "日本語 👍🏽 naïve > x < y"},
]
# What a text may be put together from to become a control token, or nearly.
PARTS = [
    "<|im_end|>", "<|im_start|>", "<|", "|>", "im_", "end|>", "</s>", "<s>", "<", ">", "/s", "s", "<unk>", "[INST]", "INST]",
    "<|user|>", "<|assistant|>", "user", "<tool_call>", "tool_call>", "<eos>", " ", "\n", "a", "b ", "日", "👍", "\U000f0000",
    "\U000f0001", "    ",
]  # fmt: skip


def byte_level():
    """BPE on bytes, as Qwen and SmolLM; some added tokens are not special, one special token is looked for late."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("i", "m"), ("<", "|"), ("|", ">"), ("e", "n"), ("en", "d"), ("h", "e"), ("Ġ", "Ġ"), ("im", "_"), ("<", "/")]
    words += ["".join(pair) for pair in merges]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", AddedToken("</s>", normalized=True, special=True)])
    backend.add_tokens(["<tool_call>", "    "])
    return backend


def byte_fallback(normalizer=None, prefix="first"):
    """SentencePiece-like BPE with bytes, as Llama 2 and Mistral have it; BOS comes from its post-processor."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127)), "日"]
    merges = [("▁", "a"), ("▁", "<"), ("<", "/"), ("s", ">"), ("</", "s>"), ("[", "I"), ("h", "e"), ("▁", "▁"), ("▁▁", "▁")]
    words += [word for word in ("".join(pair) for pair in merges) if word not in words]
    model = models.BPE({word: i for i, word in enumerate(words)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    if prefix:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(
        ["<unk>", "<s>", "</s>", AddedToken("<|user|>", rstrip=True), AddedToken("<|assistant|>", rstrip=True)]
    )
    backend.add_tokens([AddedToken("<tool_call>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def prepending():
    """As Llama 2's older files: the space in front of a text is put there by the normaliser."""
    return byte_fallback(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), prefix=None)


def unigram():
    """As T5 and XGLM: control tokens are pieces of the model like any other."""
    words = [("<s>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0), ("▁a", -2.0), ("[INST]", -1.0), ("</", -4.0)]
    words += [(chr(code), -5.0 - code / 100) for code in range(33, 127)]
    backend = Tokenizer(models.Unigram(words, unk_id=2, byte_fallback=False))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("\n", " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["<s>", "</s>", "<unk>"])
    return backend


NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
CASES = {
    "byte_level": (byte_level, CHATML, {"eos_token": "<|im_end|>"}),
    "byte_fallback": (byte_fallback, LLAMA, NAMES),
    "byte_fallback with roles": (byte_fallback, ROLES, NAMES),
    "prepending": (prepending, LLAMA, NAMES),
    "unigram": (unigram, LLAMA, NAMES),
}


@functools.cache
def backend_of(case):
    return CASES[case][0]()


def write_folder(case, folder):
    """Write a case's files as a checkpoint has them, and return the folder."""
    _, template, names = CASES[case]
    backend_of(case).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
