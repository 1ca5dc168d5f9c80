"""What the parity tests of all families share: engines, golden numbers, and random checkpoints run by transformers.

A family's test says which golden checkpoint and which variants of its config there are; the comparisons are here. The word
that counts is that of Hugging Face transformers in float32: kept numbers in tests/golden, or asked live where it is installed.
"""

import json

import numpy as np
import pytest
from conftest import REPOSITORY
from tolerance import assert_close

from poptransformer import Session
from poptransformer.models import find_model
from poptransformer.register import REGISTER

LIBRARY = REPOSITORY / "custom_ops" / "build" / "libcustom_ops_cpu.so"
needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason="custom_ops/build/libcustom_ops_cpu.so is missing: run `make`")

REFERENCE = {"backend": "reference"}
ENGINES = {"reference": REFERENCE, "xla": {"custom_ops": False}, "xla-custom-ops": {"custom_ops": True, "platform": "cpu"}}
EACH_ENGINE = [
    pytest.param(engine, id=name, marks=needs_library if "custom" in name else ()) for name, engine in ENGINES.items()
]
SIXTEEN_BITS = ["bf16", "fp16"]
VOCAB_SIZE, MAX_LENGTH = 131, 61  # of the random checkpoints
IDS = [int(i) for i in np.random.default_rng(5).integers(0, VOCAB_SIZE, MAX_LENGTH)]
# Logits are sums over hundreds of float32 products, in an order of each engine's own, and have deviations of 1 to 8.
# Worst seen: 1.7e-5 of golden ones, 4e-5 of random checkpoints.
GOLDEN_FLOAT32 = {"rtol": 1e-5, "atol": 3e-5}
FLOAT32 = {"rtol": 0, "atol": 1e-4}


def golden_folder(family):
    """Folder of a tiny checkpoint that tests/golden/make_kin.py has made: vocabulary 263, rows of 67, BOS 260, EOS 261, 262."""
    return REPOSITORY / "tests" / "golden" / family


def golden_cases(family):
    """The kept numbers of it."""
    return json.loads((REPOSITORY / "tests" / "golden" / f"{family}.json").read_text(encoding="utf-8"))["cases"]


def check_golden(family, engine):
    """Logits of the prompts, and the greedy tokens of all of them in one uneven batch."""
    cases = golden_cases(family)
    with Session(golden_folder(family), batch_size=len(cases), max_length=67, **engine) as session:
        assert session.eos_token_ids == (261, 262)
        # A compiled graph serves one length: the longest prompt stands for all there.
        for case in cases if engine == REFERENCE else [max(cases, key=lambda case: len(case["prompt"]))]:
            logits = session.logits(case["prompt"])
            assert logits.shape == (len(case["prompt"]), 263) and logits.dtype == np.float32
            assert_close(logits[case["positions"]][:, case["tokens"]], np.float32(case["logits"]), **GOLDEN_FLOAT32)
        outs = session.generate([case["prompt"] for case in cases], max_new_tokens=41, ignore_eos=True)
        assert [out.token_ids for out in outs] == [case["greedy"] for case in cases]


def check_same_as_golden(family, folder):
    """A checkpoint is the golden one, however its files say so."""
    case = golden_cases(family)[1]
    with Session(folder, max_length=67, **REFERENCE) as session:
        logits = session.logits(case["prompt"])
        assert_close(logits[case["positions"]][:, case["tokens"]], np.float32(case["logits"]), **GOLDEN_FLOAT32)


def check_sixteen_bits(family, precision):
    """In 16 bits, results are no further from float32 than those of transformers in the same precision."""
    check_folder_in_sixteen_bits(golden_folder(family), precision, vocab_size=263, num_tokens=64)


def check_folder_in_sixteen_bits(folder, precision, vocab_size, num_tokens):
    """As check_sixteen_bits, for a checkpoint of rows of at least num_tokens + 3."""
    torch, transformers = import_torch_and_transformers()
    ids = [int(i) for i in np.random.default_rng(1).integers(0, vocab_size, num_tokens)]
    logits = []
    for dtype in (torch.float32, {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        with torch.no_grad():
            logits.append(model(torch.tensor([ids])).logits[0].float().numpy())
    wanted, theirs = logits
    with Session(folder, precision=precision, max_length=num_tokens + 3, custom_ops=False) as session:
        ours = rms(session.logits(ids) - wanted)
    assert 0 < ours < 1.05 * rms(theirs - wanted)  # seen: 0.74 to 0.97 times theirs; another CPU sums in another order


def check_chunks(family, monkeypatch):
    """A prompt in chunks of 16 tokens gives the logits that it gives at once."""
    ids = [int(i) for i in np.random.default_rng(0).integers(0, 263, 67)]
    with Session(golden_folder(family), max_length=67, **REFERENCE) as session:
        whole = session.logits(ids)
        monkeypatch.setattr("poptransformer.generation.wave.MAX_BUCKET", 16)
        assert_close(session.logits(ids), whole, rtol=1e-5, atol=3e-5)


def rms(array):
    """Root of the mean square."""
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))


# ---- random checkpoints, run by transformers as it is installed


def check_variant(folder, config, engine=REFERENCE):
    """Logits of all positions, and greedy tokens of two rows: each must be the best that transformers sees there."""
    hugging_face = write_random_checkpoint(folder, config)
    with Session(folder, batch_size=2, max_length=MAX_LENGTH, **engine) as session:
        assert_close(session.logits(IDS), hugging_face(IDS), **FLOAT32)
        prompts = [IDS[:3], IDS[10:42]]
        for prompt, out in zip(prompts, session.generate(prompts, max_new_tokens=12, ignore_eos=True), strict=True):
            assert len(out.token_ids) == 12
            best = hugging_face(prompt + out.token_ids)[len(prompt) - 1 : -1].argmax(-1)
            assert out.token_ids == best.tolist()


def write_random_checkpoint(folder, config, draw_weights=None):
    """Write config.json and random weights as transformers names them; gives a function of ids to its logits [T, V].

    Args:
      draw_weights: function of a model and a seed; None takes that of tests/golden/tiny.py.
    """
    torch, transformers = import_torch_and_transformers()
    save_file = pytest.importorskip("safetensors.torch").save_file
    import tiny

    (folder / "config.json").write_text(json.dumps(config))
    hf_config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").eval()
    (draw_weights or tiny.draw_weights)(model, seed=11)
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    if hf_config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def logits(ids):
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].numpy()

    return logits


def import_torch_and_transformers():
    return [
        pytest.importorskip(name, reason=f"needs {name}: pip install -r requirements-dev.txt")
        for name in ("torch", "transformers")
    ]


# ---- files and sizes


def rewrite(family, folder, change=dict, **keys):
    """Write the golden checkpoint into a folder, with its tensors (in float32) and keys of its config changed."""
    numpy_files = pytest.importorskip("safetensors.numpy")
    from poptransformer.checkpoint.reader import Checkpoint

    source = Checkpoint.open(golden_folder(family))
    tensors = change({name: np.array(source.read(name, dtype=np.float32)) for name in source.names()})
    (folder / "config.json").write_text(json.dumps(source.config | keys))
    numpy_files.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def build(config, max_length=2048):
    """The model of a config in 16 bits, without weights."""
    model_class, half = find_model(config), np.dtype(np.float16)
    with REGISTER.scope(
        batch_size=2, max_length=max_length, world_size=1, dtype=half, weight_dtype=half, cache_dtype=half, packing=None
    ):
        return model_class(model_class.config_class.from_hf(config))


def num_elements(model):
    """Elements of all its weights."""
    return sum(int(np.prod(parameter.shape)) for parameter in model.parameters())
