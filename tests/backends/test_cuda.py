"""The same model on an NVIDIA GPU gives the CPU's tokens. Runs where JAX sees a GPU."""

import contextlib
import json
import pathlib

import numpy as np
import pytest

from poptransformer import Session
from poptransformer.backends.xla.packed_linear_gpu import few_rows_product
from poptransformer.backends.xla.packed_rows import rearrange
from poptransformer.packing import Packing

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
POCKET = REPOSITORY / "examples/gpt2/gpt2-pocket"
GOLDEN = REPOSITORY / "tests/golden"
FAMILIES = sorted(path.stem for path in GOLDEN.glob("*.json") if path.stem not in ("gpt2", "chatglm_variants"))
PROMPTS = ["Once upon a time", "The old man opened the box and", "Mia"]


def has_gpu():
    import jax

    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


pytestmark = pytest.mark.skipif(not has_gpu(), reason="no NVIDIA GPU: install jax[cuda13] on a machine with one")


@pytest.fixture(scope="module")
def sessions():
    """(on the CPU, on the GPU) for each precision."""
    with contextlib.ExitStack() as stack:
        yield {
            precision: [
                stack.enter_context(Session(POCKET, platform=platform, precision=precision, batch_size=2))
                for platform in ("cpu", "cuda")
            ]
            for precision in ("fp32", "bf16")
        }


def test_greedy_and_sampled_tokens_are_those_of_the_cpu(sessions):
    """In fp32: 16-bit rounding differs between devices, and their logits are compared below."""
    cpu, cuda = sessions["fp32"]
    for settings in ({}, {"top_k": 5, "seed": 3}, {"top_p": 0.9, "seed": 4, "repetition_penalty": 1.2}):
        expected, actual = (session.generate(PROMPTS, max_new_tokens=100, **settings) for session in (cpu, cuda))
        assert [row.token_ids for row in actual] == [row.token_ids for row in expected]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 0.15)])
def test_logits_are_those_of_the_cpu(sessions, precision, tolerance):
    """bf16 has 8 bits of mantissa, for logits up to about 20."""
    cpu, cuda = sessions[precision]
    expected, actual = cpu.logits(PROMPTS[1]), cuda.logits(PROMPTS[1])
    assert np.abs(actual - expected).max() < tolerance
    assert cuda.device_info.platform == "cuda"


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_gives_its_golden_tokens(family):
    """All prompts in one uneven batch, and the logits of one."""
    cases = json.loads((GOLDEN / f"{family}.json").read_text(encoding="utf-8"))["cases"]
    with Session(GOLDEN / family, platform="cuda", batch_size=len(cases)) as session:
        num_new = [len(case["greedy"]) for case in cases]
        outs = session.generate([case["prompt"] for case in cases], max_new_tokens=num_new, ignore_eos=True)
        assert [out.token_ids for out in outs] == [case["greedy"] for case in cases]
        case = cases[1]
        logits = session.logits(case["prompt"])[case["positions"]][:, case["tokens"]]
        assert np.abs(logits - np.float32(case["logits"])).max() < 1e-3


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_packed_weights_give_the_logits_of_the_cpu(precision):
    """Both unpack in plain XLA; the CPU is asked not to round activations as its kernel does."""
    logits = []
    for platform in ("cpu", "cuda"):
        with Session(POCKET, platform=platform, precision=precision, kv_cache="fp32", custom_ops=False) as session:
            logits.append(session.logits(PROMPTS[1]))
    assert np.abs(logits[0] - logits[1]).max() < 1e-2


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_packed_kernel_gives_what_its_interpreter_gives(kind):
    """Numbers of rows and of outputs that the blocks of threads do not divide, too."""
    import jax
    import jax.numpy as jnp

    generator = np.random.default_rng(0)
    multiply = jax.jit(few_rows_product, static_argnums=(2, 3))
    cases = (32, 50, 4096, 1), (64, 33, 130, 3), (128, 9, 11008, 8), (-1, 17, 1600, 1)
    for group_size, num_outputs, num_inputs, num_rows in cases:
        packing = Packing(kind, group_size, num_outputs, num_inputs)
        packed = packing.pack(generator.standard_normal((num_outputs, num_inputs), np.float32))
        x, results = generator.standard_normal((num_rows, num_inputs), np.float32), []
        for platform in ("cpu", "cuda"):
            with jax.default_device(jax.devices(platform)[0]):
                rows = rearrange(jnp.asarray(packed), packing)
                results.append(np.asarray(multiply(jnp.asarray(x), rows, packing, platform == "cpu")))
        assert np.abs(results[0] - results[1]).max() < 1e-4 * np.abs(results[0]).max()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_packed_kernel_costs_little_accuracy(precision):
    """Rows of 8 positions are the longest prompts whose tokens the kernel takes together."""
    losses = []
    for custom_ops in (False, True):
        with Session(POCKET, platform="cuda", precision=precision, max_length=8, custom_ops=custom_ops) as session:
            assert ("packed_linear" in session.device_info.custom_ops) == custom_ops
            ids = session.tokenizer.encode((POCKET / "valid.txt").read_text(encoding="utf-8")[:600])
            losses.append(-np.concatenate([session.score(ids[at : at + 8]) for at in range(0, 120, 8)]).mean())
    assert 0 < abs(losses[1] / losses[0] - 1) < 5e-3
