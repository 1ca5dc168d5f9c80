"""The same model on an NVIDIA GPU gives the CPU's tokens. Runs where JAX sees a GPU."""

import pathlib

import numpy as np
import pytest

from poptransformer import Session

POCKET = pathlib.Path(__file__).resolve().parents[2] / "examples/gpt2/gpt2-pocket"
PROMPTS = ["Once upon a time", "The old man opened the box and", "Mia"]


def has_gpu():
    import jax

    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


pytestmark = pytest.mark.skipif(not has_gpu(), reason="no NVIDIA GPU: install jax[cuda13] on a machine with one")


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def sessions(request):
    options = dict(precision=request.param, batch_size=2, custom_ops="auto")
    with Session(POCKET, platform="cpu", **options) as cpu, Session(POCKET, platform="cuda", **options) as cuda:
        yield request.param, cpu, cuda


def test_greedy_and_sampled_tokens_are_those_of_the_cpu(sessions):
    precision, cpu, cuda = sessions
    if precision != "fp32":
        pytest.skip("16-bit rounding differs between devices: their logits are compared below")
    for settings in ({}, {"top_k": 5, "seed": 3}, {"top_p": 0.9, "seed": 4, "repetition_penalty": 1.2}):
        expected, actual = (session.generate(PROMPTS, max_new_tokens=100, **settings) for session in (cpu, cuda))
        assert [row.token_ids for row in actual] == [row.token_ids for row in expected]


def test_logits_are_those_of_the_cpu(sessions):
    precision, cpu, cuda = sessions
    expected, actual = cpu.logits(PROMPTS[1]), cuda.logits(PROMPTS[1])
    tolerance = 1e-3 if precision == "fp32" else 0.15  # bf16: 8 bits of mantissa, logits up to about 20
    assert np.abs(actual - expected).max() < tolerance
    assert cuda.device_info.platform == "cuda"
