"""Tokenizers from a folder's files, beside what transformers makes of the same files."""

import concurrent.futures
import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from poptransformer.errors import UserError
from poptransformer.tokenizers import Tokenizer, load_tokenizer

POCKET = pathlib.Path(__file__).parents[2] / "examples" / "gpt2" / "gpt2-pocket"
TEXTS = [
    "Once upon a time",
    " leading and trailing ",
    "don't , stop . now !",
    "日本語 👍🏽 naïve",
    "a<|endoftext|>b",
    "",
    "\n\n  x\t",
]


@pytest.fixture
def folder(tmp_path):
    """A copy of the pocket model's tokenizer and configuration files, to change."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(POCKET / name, tmp_path)
    return tmp_path


def edit(path, **changes):
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**fields, **changes}))


def peer(path):
    """Return what transformers loads, with network access ruled out."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)


def assert_same(ours, theirs):
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    assert {i for i in range(ours.vocab_size) if ours.is_special(i)} == set(theirs.all_special_ids)


def test_pocket_model_as_transformers():
    ours = load_tokenizer(POCKET)
    assert_same(ours, peer(POCKET))
    assert ours.vocab_size == 4096
    text = (POCKET / "valid.txt").read_text(encoding="utf-8")[:20000]
    assert ours.encode(text) == peer(POCKET).encode(text)
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    "changes",
    [
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True, "eos_token": "<|im_end|>"},
        {"add_eos_token": False},
        {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "special": True}},
        {"additional_special_tokens": ["<|turn|>", "Once"]},
        {"added_tokens_decoder": {"4096": {"content": "<|x|>", "special": False, "normalized": False}}},
        {"clean_up_tokenization_spaces": True},
        {"bos_token": None},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_tokenizer_config_as_transformers(folder, changes):
    edit(folder / "tokenizer_config.json", **changes)
    if "bos_token" in changes and changes["bos_token"] is None:
        assert load_tokenizer(folder).bos_token_id == 0  # from config.json, where transformers has none
        return
    assert_same(load_tokenizer(folder), peer(folder))


def test_post_processor_as_transformers(folder):
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    fields = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    edit(folder / "tokenizer.json", post_processor=fields)
    assert load_tokenizer(folder).encode("") == [0]
    assert_same(load_tokenizer(folder), peer(folder))


def test_special_ids_without_tokenizer_config(folder):
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder).eos_token_id == 0  # config.json
    edit(folder / "config.json", eos_token_id=[7, 8])
    assert load_tokenizer(folder).eos_token_id == 7
    edit(folder / "special_tokens_map.json", eos_token={"content": "!"})
    assert load_tokenizer(folder).eos_token_id == 1
    (folder / "config.json").unlink()
    (folder / "special_tokens_map.json").unlink()
    assert load_tokenizer(folder).eos_token_id is None


def test_saved_truncation_and_padding_do_not_touch_prompts(folder):
    edit(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        },
    )
    text = "Once upon a time there was a little bird."
    assert load_tokenizer(folder).encode(text) == load_tokenizer(POCKET).encode(text)


def test_clean_up_of_word_piece(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["[UNK]", "do", "n't", ".", "stop"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).decode([1, 2, 4, 3]) == "do n't stop ."
    edit(tmp_path / "tokenizer_config.json", clean_up_tokenization_spaces=True)
    assert load_tokenizer(tmp_path).decode([1, 2, 4, 3]) == "don't stop."


def test_older_files_go_through_transformers(tmp_path):
    pytest.importorskip("transformers")
    fields = json.loads((POCKET / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(fields["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in fields["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    shutil.copy(POCKET / "config.json", tmp_path)
    ours = load_tokenizer(tmp_path)
    assert_same(ours, peer(tmp_path))
    assert ours.encode("Once upon a time") == load_tokenizer(POCKET).encode("Once upon a time")


def test_code_of_a_checkpoint_never_runs(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Tokenizer: pass\n")
    edit(tmp_path / "tokenizer_config.json", tokenizer_class="Theirs", auto_map={"AutoTokenizer": ["theirs.Tokenizer", None]})
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether it may"))
    with pytest.raises(UserError, match="transformers cannot read its tokenizer"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_in_python_goes_through_a_lock():
    from poptransformer.tokenizers.hugging_face import _PythonBackend

    class Peer:
        all_special_ids = [0]

        def __len__(self):
            return 3

        def encode(self, text, add_special_tokens):
            return [1] * len(text)

        def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
            return "".join("<ab"[i] for i in ids if i or not skip_special_tokens)

        def convert_ids_to_tokens(self, token_id):
            return "<ab"[token_id]

    tokenizer = Tokenizer(_PythonBackend(Peer()))
    assert tokenizer.encode("xy") == [1, 1]
    assert tokenizer.decode([0, 1, 2]) == "ab"
    assert tokenizer.decode([0, 1], skip_special_tokens=False) == "<a"
    assert tokenizer.is_special(0) and tokenizer.has_token(2) and not tokenizer.has_token(3)
    assert tokenizer.vocab_size == 3


def test_no_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None


def test_a_file_stands_for_its_folder():
    assert load_tokenizer(POCKET / "model.safetensors").vocab_size == 4096


def test_threads():
    tokenizer = load_tokenizer(POCKET)
    texts = [f"Once upon a time there were {i} birds." * 20 for i in range(40)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(tokenizer.encode, texts))
        assert list(pool.map(tokenizer.decode, ids)) == texts


def test_transformers_is_not_imported_for_tokenizer_json():
    code = (
        "import sys; from poptransformer.tokenizers import load_tokenizer;"
        f"load_tokenizer({str(POCKET)!r}).encode('a');"
        "assert not {'transformers', 'huggingface_hub', 'torch', 'jax'} & set(sys.modules), 'too much imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=pathlib.Path(__file__).parents[2])


def test_errors(folder, tmp_path):
    tokenizer = load_tokenizer(POCKET)
    with pytest.raises(UserError, match=r"^prompt is not valid Unicode text: character 12 \(from 0\) stands for no character$"):
        tokenizer.encode("half a pair \ud83d")
    with pytest.raises(UserError, match="a prompt is a string, not list"):
        tokenizer.encode(["a"])
    with pytest.raises(UserError, match="token ids are 0 to 4095, and -1 to 3 are given"):
        tokenizer.decode([3, -1])
    path = folder / "tokenizer_config.json"
    path.write_text("{")
    with pytest.raises(UserError, match=re.escape(f"{path}: not valid JSON")):
        load_tokenizer(folder)
    path.write_text("[]")
    with pytest.raises(UserError, match=re.escape(f"{path}: a JSON object is wanted, this is a list")):
        load_tokenizer(folder)
    path.unlink()
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:1000])
    with pytest.raises(UserError, match=re.escape(f"{path}: not a tokenizer that the tokenizers library can read")):
        load_tokenizer(folder)
    path.unlink()
    (folder / "vocab.json").write_text("{")
    with pytest.raises(UserError, match=re.escape(f"{folder}: transformers cannot read its tokenizer (vocab.json)")):
        load_tokenizer(folder)


def test_a_tokenizer_without_its_unknown_token(folder):
    edit(
        folder / "tokenizer.json",
        model={"type": "WordLevel", "vocab": {"Once": 1, "upon": 2}, "unk_token": "[UNK]"},
        pre_tokenizer=None,
        added_tokens=[],
    )
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=re.escape(f"{folder}: the tokenizer cannot encode this prompt: ") + ".*(?i:unk)"):
        load_tokenizer(folder).encode("a new word")


class Panic(BaseException):
    """As a panic in Rust arrives."""


@pytest.mark.parametrize(
    ("raised", "wanted"),
    [
        (Panic("index out of bounds"), UserError),
        (Exception("no such token"), UserError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (SystemExit(), SystemExit),
        (GeneratorExit(), GeneratorExit),
        (MemoryError(), MemoryError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_what_the_library_raises(raised, wanted):
    class Backend:
        decoder = None

        def get_vocab_size(self):
            return 3

        def get_added_tokens_decoder(self):
            return {}

        def encode(self, text):
            raise raised

        def decode(self, ids, skip_special_tokens):
            raise raised

    tokenizer = Tokenizer(Backend(), path="some/folder")
    for call, argument, verb in ((tokenizer.encode, "a", "encode this prompt"), (tokenizer.decode, [1], "decode these ids")):
        with pytest.raises(wanted) as caught:
            call(argument)
        if wanted is UserError:
            assert str(caught.value) == f"some/folder: the tokenizer cannot {verb}: {raised}"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder: 'x' is no token id"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder is [1]; an object, token id to token, is wanted"),
        ({"added_tokens_decoder": {"4096": 5}}, "added_tokens_decoder: 4096 is 5; text, or an object with content, is wanted"),
        (
            {"added_tokens_decoder": {"4096": {"content": "<x>", "lstrip": "yes"}}},
            "added_tokens_decoder: 4096: lstrip is 'yes'; true or false is wanted",
        ),
        ({"additional_special_tokens": 5}, "additional_special_tokens is 5; a list of tokens is wanted"),
        ({"additional_special_tokens": True}, "additional_special_tokens is True; a list of tokens is wanted"),
        ({"additional_special_tokens": "abc"}, "additional_special_tokens is 'abc'; a list of tokens is wanted"),
        ({"extra_special_tokens": {"a": 5}}, "extra_special_tokens is 5; text, or an object with content, is wanted"),
        ({"eos_token": "\ud800"}, "eos_token is '\\ud800', which is not valid Unicode text"),
        ({"bos_token": {"content": None, "special": True}}, "bos_token is {'content': None, 'special': True}; text, or an"),
    ],
)
def test_bad_tokens(folder, name, changes, message):
    edit(folder / name, **changes)
    with pytest.raises(UserError, match=re.escape(f"{folder / name}: {message}")):
        load_tokenizer(folder)


def test_all_bad_tokens_in_one_message(folder):
    edit(folder / "tokenizer_config.json", bos_token=5, additional_special_tokens=[6])
    with pytest.raises(UserError, match=r"bos_token is 5.*\n.*additional_special_tokens is 6"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "config.json"])
def test_files_that_cannot_be_read(folder, name, monkeypatch):
    path = folder / name
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match=re.escape(f"{path}: not valid JSON: nested too deeply")):
        load_tokenizer(folder)
    with monkeypatch.context() as patch:
        read_text = pathlib.Path.read_text

        def refuse(self, **options):
            if self == path:
                raise PermissionError(13, "Permission denied")
            return read_text(self, **options)

        patch.setattr(pathlib.Path, "read_text", refuse)
        with pytest.raises(UserError, match=re.escape(f"{path}: cannot be read (Permission denied)")):
            load_tokenizer(folder)
    path.unlink()
    path.symlink_to(name)
    with pytest.raises(UserError, match=re.escape(f"{path}: cannot be read (Too many levels of symbolic links)")):
        load_tokenizer(folder)


def test_a_folder_in_the_place_of_the_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    with pytest.raises(UserError, match=re.escape(f"{folder}/tokenizer.json: is a folder; a file is wanted")):
        load_tokenizer(folder)
