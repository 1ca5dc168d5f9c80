"""RWKV-4 against Hugging Face: golden numbers everywhere, live where torch is installed; states, names, errors, sizes."""

import json
import logging
import re

import numpy as np
import pytest
from conftest import REPOSITORY
from parity import EACH_ENGINE, needs_library, rms
from tolerance import assert_close

from poptransformer import Session, UnsupportedError, UserError
from poptransformer.models import find_model
from poptransformer.models.rwkv import ORIGINAL, RWKVConfig
from poptransformer.register import REGISTER
from poptransformer.report import report

GOLDEN = json.loads((REPOSITORY / "tests" / "golden" / "rwkv.json").read_text(encoding="utf-8"))["cases"]
PROMPTS, GREEDY = ([case[key] for case in GOLDEN] for key in ("prompt", "greedy"))
TINY = REPOSITORY / "tests" / "golden" / "rwkv"  # vocabulary 259, trained on 67 tokens, BOS and EOS 256, halved after layer 1
# Logits are sums over hundreds of float32 products in an order of each engine's own. Worst seen: 7.4e-6 of the golden ones,
# 2.1e-5 of the variants (tied, whose logits have a deviation of 5.6).
FLOAT32 = {"rtol": 1e-5, "atol": 3e-5}


@pytest.fixture(scope="module", params=EACH_ENGINE)
def session(request):
    """One Session of four rows for each engine: what one test leaves in the states is there when the next begins."""
    with pytest.MonkeyPatch.context() as patch, Session(TINY, batch_size=4, **request.param) as session:
        for name in ("MIN_BUCKET", "MAX_BUCKET"):  # fewer programs to compile, and more rows in chunks
            patch.setattr(f"poptransformer.generation.wave.{name}", 32)
        yield session


# ---- golden numbers, and what happens to a row's state


def test_golden(session):
    """Logits of each prompt, and the greedy tokens of all four in one uneven batch."""
    assert session.eos_token_ids == (256,) and session.max_length == 67
    for case in GOLDEN:
        logits = session.logits(case["prompt"])
        assert logits.shape == (len(case["prompt"]), 259) and logits.dtype == np.float32
        assert_close(logits[case["positions"]][:, case["tokens"]], np.float32(case["logits"]), **FLOAT32)
    outs = session.generate(PROMPTS, max_new_tokens=41, ignore_eos=True)
    assert [out.token_ids for out in outs] == GREEDY


def test_waves_of_rows_in_any_place(session):
    """Six prompts in waves of four, which begin in states that others have left, then each by itself."""
    order = [3, 1, 2, 0, 2, 3]
    outs = session.generate([PROMPTS[i] for i in order], max_new_tokens=12, ignore_eos=True)
    assert [out.token_ids for out in outs] == [GREEDY[i][:12] for i in order]
    for prompt, greedy in zip(PROMPTS, GREEDY, strict=True):
        assert session.generate(prompt, max_new_tokens=12, ignore_eos=True)[0].token_ids == greedy[:12]


def test_rows_at_rest_and_streams_that_take_turns(session):
    """Rows stop at different times; two streams and a call in between each fill the states again."""
    lengths = [2, 33, 1, 18]
    first = session.stream(PROMPTS, max_new_tokens=lengths, ignore_eos=True)
    second = session.stream(PROMPTS[::-1], max_new_tokens=9, ignore_eos=True)
    rows = {"first": [[] for _ in PROMPTS], "second": [[] for _ in PROMPTS]}
    streams = {"first": first, "second": second}
    turn = 0
    while streams:
        name = list(streams)[turn % len(streams)]
        turn += 1
        piece = next(streams[name], None)
        if piece is None:
            del streams[name]
        else:
            rows[name][piece.row] += piece.token_ids
        if turn == 3:
            session.generate([5, 6], max_new_tokens=3)
    assert rows["first"] == [greedy[:length] for greedy, length in zip(GREEDY, lengths, strict=True)]
    assert rows["second"] == [greedy[:9] for greedy in GREEDY[::-1]]


def test_decode_and_chunks_equal_one_prefill(session, monkeypatch):
    """Greedy tokens as decoding, and prefill in two chunks, see them, against the reference with the whole text at once."""
    prompts = [PROMPTS[0], PROMPTS[2]]
    for prompt, out in zip(prompts, session.generate(prompts, max_new_tokens=40, logprobs=True, ignore_eos=True), strict=True):
        text = prompt + out.token_ids
        with monkeypatch.context() as patch, Session(TINY, backend="reference") as reference:
            patch.setattr("poptransformer.generation.wave.MAX_BUCKET", 64)
            whole = reference.logits(text)
        assert_close(session.logits(text), whole, **FLOAT32)
        exact = whole[len(prompt) - 1 : -1].astype(np.float64)
        logprobs = exact[np.arange(40), out.token_ids] - np.log(np.exp(exact).sum(-1))
        assert_close(np.float32(out.logprobs), logprobs.astype(np.float32), **FLOAT32)


def test_a_later_token_leaves_earlier_logits_alone(session):
    first, second = session.logits([5, 6, 7, 8, 9]), session.logits([5, 6, 7, 8, 200])
    assert_close(first[:4], second[:4], rtol=0, atol=0)
    assert np.abs(first[4] - second[4]).max() > 0.1


def test_a_broken_row_does_not_reach_the_next_one():
    """A state full of NaN, as a prompt leaves it that overflows, is not looked at by whoever comes next."""
    with Session(TINY, backend="reference", batch_size=2) as session:
        session.compile(prompt_lengths=[3])
        for (state,) in session._engine._states.values():  # of the only rank
            if state.dtype == np.float32:
                state[:] = np.nan
        outs = session.generate([PROMPTS[0], PROMPTS[3]], max_new_tokens=8, ignore_eos=True)
        assert [out.token_ids for out in outs] == [GREEDY[0][:8], GREEDY[3][:8]]


# ---- longer rows than the model was trained on


def test_rows_may_outgrow_the_context_length():
    with Session(TINY, backend="reference", max_length=150) as session:
        out = session.generate(PROMPTS[2], max_new_tokens=127, ignore_eos=True)[0]
        assert out.token_ids[:41] == GREEDY[2] and len(out.token_ids) == 127
        logits = session.logits(PROMPTS[2] + out.token_ids)
        assert logits.shape == (150, 259)
        assert logits[22:-1].argmax(-1).tolist() == out.token_ids


def test_how_long_rows_may_be():
    for context_length, wanted in ((67, 67), (4096, 2048)):
        config = BASE | {"context_length": context_length}
        assert Session(config, random_weights=True, backend="reference").max_length == wanted
    longest = 2**30
    assert Session(BASE, random_weights=True, backend="reference", max_length=longest).max_length == longest
    with pytest.raises(UserError, match=f"max_length={longest + 1} is more than can be counted; set at most {longest}"):
        Session(BASE, random_weights=True, backend="reference", max_length=longest + 1)
    with pytest.raises(UserError, match="prompt 0 has 68 tokens; max_length is 67: shorten the prompt or raise max_length"):
        Session(TINY, backend="reference").generate([1] * 68)


# ---- 16 bits


@pytest.mark.parametrize(
    ("precision", "engine"),
    [
        ("bf16", {"backend": "reference"}),
        ("fp16", {"backend": "reference"}),
        ("fp16", {"custom_ops": False}),
        pytest.param("bf16", {"custom_ops": True, "platform": "cpu"}, marks=needs_library),
    ],
    ids=["bf16-reference", "fp16-reference", "fp16-xla", "bf16-xla-custom-ops"],
)
def test_sixteen_bits_are_as_close_as_transformers(precision, engine):
    """Over six texts: of one alone, chance makes the ratio 0.8 to 1.1."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install -r requirements-dev.txt")
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -r requirements-dev.txt")
    texts, logits = np.random.default_rng(1).integers(0, 259, (6, 32)).tolist(), []
    for dtype in (torch.float32, {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]):
        model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=dtype).eval()
        with torch.no_grad():
            logits.append(model(torch.tensor(texts)).logits.float().numpy())
    wanted, theirs = logits
    with Session(TINY, precision=precision, **engine) as session:
        assert {state.dtype.name for state in session.model.states()} == {"float32"}
        ours = np.stack([session.logits(text) for text in texts])
    assert ours.dtype == np.float32
    assert 0 < rms(ours - wanted) < rms(theirs - wanted)  # seen: 0.95 times theirs in bf16, 0.94 to 0.99 in fp16


def test_rescaling_keeps_float16_finite(write):
    """A residual stream that grows with each layer to beyond 65504."""

    def change(tensors):
        return tensors | {
            name: tensor * np.float32(2000) for name, tensor in tensors.items() if name.endswith("feed_forward.value.weight")
        }

    ids, logits = PROMPTS[2], {}
    for rescale_every in (0, 1):
        folder = write(change, rescale_every=rescale_every)
        with Session(folder, backend="reference", precision="fp16") as rounded, Session(folder, backend="reference") as exact:
            with np.errstate(over="ignore", invalid="ignore"):
                logits[rescale_every] = rounded.logits(ids), exact.logits(ids)
    assert not np.isfinite(logits[0][0]).all() and np.isfinite(logits[0][1]).all()
    assert rms(logits[1][0] - logits[1][1]) < 0.02 * logits[1][1].std()


# ---- variants, against transformers as it is installed

BASE = {
    "model_type": "rwkv",
    "vocab_size": 131,
    "hidden_size": 26,
    "num_hidden_layers": 7,
    "context_length": 61,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VARIANTS = {
    "plain": {},
    "wide attention": {"attention_hidden_size": 35, "intermediate_size": 31},
    "narrow attention": {"attention_hidden_size": 9, "layer_norm_epsilon": 1e-2},
    "tied": {"tie_word_embeddings": True, "intermediate_size": 150},
    "never rescaled": {"rescale_every": 0},
    "never rescaled, as a negative number": {"rescale_every": -1},
    "rescaled after each layer": {"rescale_every": 1, "layer_norm_epsilon": 1e-3},
    "rescaled after two": {"rescale_every": 2, "attention_hidden_size": 27},
    "rescaled after the last": {"rescale_every": 7},
}
IDS = [int(i) for i in np.random.default_rng(5).integers(0, 131, 61)]


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    """A function that writes a variant's random checkpoint; gives its folder and transformers' model, once for each name."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install -r requirements-dev.txt")
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -r requirements-dev.txt")
    save_file = pytest.importorskip("safetensors.torch").save_file
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPOSITORY / "tests" / "golden")
        from make_rwkv import draw_weights
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("variant")
            (folder / "config.json").write_text(json.dumps(BASE | VARIANTS[name]))
            config = transformers.AutoConfig.from_pretrained(folder)
            save_file(draw_weights(config, seed=11), folder / "model.safetensors", metadata={"format": "pt"})
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

            def logits(ids):
                with torch.no_grad():
                    return model(torch.tensor([ids])).logits[0].numpy()

            made[name] = folder, logits, model
        return made[name]

    return make


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_live(variant, name):
    """Logits of all 61 positions, and greedy tokens of two rows: each must be the best that transformers sees there."""
    folder, hugging_face, _ = variant(name)
    with Session(folder, batch_size=2, backend="reference") as session:
        assert_close(session.logits(IDS), hugging_face(IDS), **FLOAT32)
        prompts = [IDS[:3], IDS[10:47]]
        for prompt, out in zip(prompts, session.generate(prompts, max_new_tokens=12, ignore_eos=True), strict=True):
            assert len(out.token_ids) == 12
            best = hugging_face(prompt + out.token_ids)[len(prompt) - 1 : -1].argmax(-1)
            assert out.token_ids == best.tolist()


def test_transformers_own_state(variant):
    """Where attention is as wide as the model, transformers can carry a state as well: token by token."""
    torch = pytest.importorskip("torch")
    folder, _, model = variant("plain")
    with torch.no_grad():
        ids = model.generate(torch.tensor([IDS[:7]]), max_new_tokens=20, do_sample=False, use_cache=True, eos_token_id=-1)
    with Session(folder, backend="reference") as session:
        assert session.generate(IDS[:7], max_new_tokens=20, ignore_eos=True)[0].token_ids == ids[0, 7:].tolist()


# ---- files


@pytest.fixture
def write(tmp_path):
    """A function that writes the tiny checkpoint with tensors and keys of the config changed."""
    numpy_files = pytest.importorskip("safetensors.numpy")
    tensors = numpy_files.load_file(TINY / "model.safetensors")

    def write(change, **keys):
        config = json.loads((TINY / "config.json").read_text()) | keys
        (tmp_path / "config.json").write_text(json.dumps(config))
        numpy_files.save_file(change(tensors), tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    return write


# How the original code calls its weights, written out: nothing here is taken from the model's own table.
ORIGINAL_SUFFIXES = {
    "ln1.weight": "ln1.weight",
    "ln1.bias": "ln1.bias",
    "ln2.weight": "ln2.weight",
    "ln2.bias": "ln2.bias",
    "attention.time_decay": "att.time_decay",
    "attention.time_first": "att.time_first",
    "attention.time_mix_key": "att.time_mix_k",
    "attention.time_mix_value": "att.time_mix_v",
    "attention.time_mix_receptance": "att.time_mix_r",
    "attention.key.weight": "att.key.weight",
    "attention.value.weight": "att.value.weight",
    "attention.receptance.weight": "att.receptance.weight",
    "attention.output.weight": "att.output.weight",
    "feed_forward.time_mix_key": "ffn.time_mix_k",
    "feed_forward.time_mix_receptance": "ffn.time_mix_r",
    "feed_forward.key.weight": "ffn.key.weight",
    "feed_forward.receptance.weight": "ffn.receptance.weight",
    "feed_forward.value.weight": "ffn.value.weight",
}
ORIGINAL_NAMES = {
    "rwkv.embeddings.weight": "emb.weight",
    "rwkv.blocks.0.pre_ln.weight": "blocks.0.ln0.weight",
    "rwkv.blocks.0.pre_ln.bias": "blocks.0.ln0.bias",
    "rwkv.ln_out.weight": "ln_out.weight",
    "rwkv.ln_out.bias": "ln_out.bias",
    "head.weight": "head.weight",
} | {f"rwkv.blocks.{i}.{ours}": f"blocks.{i}.{theirs}" for i in range(3) for ours, theirs in ORIGINAL_SUFFIXES.items()}


def original(tensors):
    assert set(tensors) == set(ORIGINAL_NAMES)
    return {ORIGINAL_NAMES[name]: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "change",
    [
        original,
        lambda tensors: {name.removeprefix("rwkv."): tensor for name, tensor in tensors.items()},
        lambda tensors: {name if name == "head.weight" else f"rwkv.{name}": value for name, value in original(tensors).items()},
    ],
    ids=["original", "without prefix", "original with prefix"],
)
def test_other_names(write, change):
    with Session(write(change), backend="reference") as session:
        check_case(session)


def check_case(session):
    case = GOLDEN[1]
    logits = session.logits(case["prompt"])[case["positions"]][:, case["tokens"]]
    assert_close(logits, np.float32(case["logits"]), **FLOAT32)


def test_a_tied_weight_held_twice(write):
    def change(tensors):
        return tensors | {"head.weight": tensors["rwkv.embeddings.weight"].copy()}

    with Session(write(change, tie_word_embeddings=True), backend="reference") as session:
        assert "head.weight" not in session.model.named_parameters()


@pytest.fixture
def pth(tmp_path):
    """A function that writes tensors as an original .pth, which stands alone; gives its path."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install -r requirements-dev.txt")

    def write(change=lambda tensors: tensors):
        tensors = original(pytest.importorskip("safetensors.numpy").load_file(TINY / "model.safetensors"))
        path = tmp_path / "RWKV-4-tiny.pth"
        torch.save({name: torch.from_numpy(tensor) for name, tensor in change(tensors).items()}, path)
        return path

    return write


@pytest.mark.parametrize("is_folder", [False, True])
def test_an_original_file_without_config(pth, is_folder, caplog):
    path = pth()
    with caplog.at_level(logging.INFO, "poptransformer.models.rwkv"):
        session = Session(path.parent if is_folder else path, backend="reference")
    assert "no config.json: sizes are read off the weights" in caplog.text and "rescale_every 6" in caplog.text
    assert session.config == RWKVConfig(
        vocab_size=259, hidden_size=31, attention_hidden_size=37, intermediate_size=43, num_layers=3, max_seq_len=1024,
        norm_eps=1e-5, rescale_every=6, is_tied=False,
    )  # fmt: skip
    assert session.eos_token_ids == (0,) and session.max_length == 1024
    config = {"vocab_size": 259, "hidden_size": 31, "attention_hidden_size": 37, "intermediate_size": 43}
    (path.parent / "config.json").write_text(json.dumps(ORIGINAL | config | {"num_hidden_layers": 3}))
    with session, Session(path, backend="reference") as told:
        assert_close(session.logits(PROMPTS[1]), told.logits(PROMPTS[1]), rtol=0, atol=0)


def test_an_original_file_with_its_config(pth):
    path = pth()
    (path.parent / "config.json").write_bytes((TINY / "config.json").read_bytes())
    with Session(path, backend="reference") as session:
        check_case(session)


LATER = "the weights are of an RWKV that is not supported; RWKV-4 is"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t | {"blocks.0.att.ln_x.weight": np.ones(37, np.float32)}, UnsupportedError, LATER),
        (lambda t: {k: v for k, v in t.items() if not k.endswith("time_first")}, UnsupportedError, LATER),
        (lambda t: t | {"emb.weight": np.ones(5, np.float32)}, UserError, "emb.weight has shape (5,), which should be"),
        (lambda t: {k: v for k, v in t.items() if k != "emb.weight"}, UserError, "config.json"),
        (lambda t: {k: v for k, v in t.items() if not k.startswith("blocks.1.ln")}, UserError,
         "checkpoint lacks 4 of 60 weights: rwkv.blocks.1.ln1.weight"),
    ],
    ids=["later", "other", "misshapen", "no embedding", "missing"],
)  # fmt: skip
def test_original_files_that_do_not_fit(pth, change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Session(pth(change), backend="reference")


def test_all_problems_of_weights_in_one_message(write):
    def change(tensors):
        tensors = dict(tensors)
        del tensors["rwkv.ln_out.weight"], tensors["rwkv.blocks.1.attention.key.weight"]
        tensors["rwkv.blocks.0.attention.time_decay"] = np.zeros(31, np.float32)
        tensors["rwkv.blocks.0.feed_forward.time_mix_key"] = np.zeros(31, np.float32)
        tensors["rwkv.blocks.2.feed_forward.value.weight"] = np.zeros((43, 31), np.float32)
        tensors["rwkv.blocks.1.attention.gate.weight"] = np.zeros((37, 31), np.float32)
        return tensors

    with pytest.raises(UserError) as error:
        Session(write(change), backend="reference")
    message = str(error.value)
    for part in (
        "checkpoint lacks 2 of 60 weights: rwkv.blocks.1.attention.key.weight, rwkv.ln_out.weight",
        "rwkv.blocks.0.attention.time_decay: checkpoint has (31,), config gives (37,) = (attention_hidden_size,)",
        "rwkv.blocks.0.feed_forward.time_mix_key: checkpoint has (31,), config gives (1, 1, 31) = (1, 1, hidden_size)",
        "rwkv.blocks.2.feed_forward.value.weight: checkpoint has (43, 31), config gives (31, 43) = "
        "(hidden_size, intermediate_size)",
        "checkpoint has 1 weight that this model has no place for: rwkv.blocks.1.attention.gate.weight",
    ):
        assert part in message, f"{part!r} not in {message!r}"


# ---- configs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None, "vocab_size": 0}, "wanted positive whole numbers for vocab_size=0, hidden_size=None"),
        ({"attention_hidden_size": "9"}, "wanted positive whole numbers for attention_hidden_size='9'"),
        ({"context_length": -1}, "wanted positive whole numbers for context_length=-1"),
        ({"rescale_every": 1.5}, "rescale_every=1.5: wanted a whole number, 0 for never"),
        ({"rescale_every": None}, "rescale_every=None: wanted a whole number, 0 for never"),
        ({"layer_norm_epsilon": "small"}, "layer_norm_epsilon='small': wanted a number of at least 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes': wanted true or false"),
    ],
)
def test_configs_that_make_no_sense(change, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Session(BASE | change, random_weights=True, backend="reference")


def test_missing_keys_are_named_together():
    with pytest.raises(UserError, match=re.escape("vocab_size (missing), hidden_size (missing), num_hidden_layers (missing)")):
        Session({"model_type": "rwkv"}, random_weights=True)


def test_defaults_of_a_short_config():
    """As transformers fills them in."""
    config = RWKVConfig.from_hf({"model_type": "rwkv", "vocab_size": 9, "hidden_size": 5, "num_hidden_layers": 2})
    assert config == RWKVConfig(
        vocab_size=9, hidden_size=5, attention_hidden_size=5, intermediate_size=20, num_layers=2, max_seq_len=1024,
        norm_eps=1e-5, rescale_every=6, is_tied=False,
    )  # fmt: skip


def test_there_is_no_kv_cache():
    with pytest.raises(
        UnsupportedError, match="kv_cache='bf16' is not supported: this model has no KV cache, and its recurrent"
    ):
        Session(BASE, random_weights=True, backend="reference", kv_cache="bf16")
    with Session(TINY, backend="reference", precision="bf16") as session:
        text = report(session, session.generate([[7]], max_new_tokens=3))
    assert re.search(r"^precision +bf16, recurrent state float32$", text, re.MULTILINE)


# ---- full sizes, built without weights


@pytest.mark.parametrize(
    ("hidden_size", "num_layers", "num_parameters"),  # of transformers 5.24.0's RwkvForCausalLM
    [pytest.param(768, 12, 169342464, id="169m"), pytest.param(5120, 40, 14148597760, id="14b")],
)
def test_full_sizes(hidden_size, num_layers, num_parameters):
    config = {"model_type": "rwkv", "vocab_size": 50277, "hidden_size": hidden_size, "num_hidden_layers": num_layers}
    model_class = find_model(config)
    half = np.dtype(np.float16)
    with REGISTER.scope(
        batch_size=2, max_length=2048, world_size=1, dtype=half, weight_dtype=half, cache_dtype=half, packing=None
    ):
        model = model_class(model_class.config_class.from_hf(config))
    parameters = model.named_parameters()
    assert sum(int(np.prod(parameter.shape)) for parameter in parameters.values()) == num_parameters
    assert len(parameters) == 6 + 18 * num_layers
    assert {state.dtype.name for state in model.states()} == {"float32"}
    per_row = sum(int(np.prod(state.shape)) for state in model.states()) // 2
    assert per_row == 5 * num_layers * hidden_size  # whatever the length
    decode, prefill, logits = model.build_decode(), model.build_prefill(64), model.build_logits(64)
    assert set(decode.parameters) == set(parameters)
    assert logits.outputs["logits"].shape == (2, 64, 50277) and not prefill.outputs
    in_float32 = 2 * num_layers * hidden_size  # time_decay and time_first
    assert decode.parameter_bytes_read() == 2 * (num_parameters - 50277 * hidden_size + in_float32)


def test_saved_graphs_pass_the_checker(tmp_path):
    onnx = pytest.importorskip("onnx", reason="needs onnx: pip install onnx")
    for precision in ("fp32", "bf16"):
        session = Session(BASE, backend="reference", precision=precision, random_weights=True)
        for name in ("decode", "generate_8"):
            session.graph(name).save_onnx(tmp_path / "graph.onnx")
            onnx.checker.check_model(tmp_path / "graph.onnx", full_check=True)
