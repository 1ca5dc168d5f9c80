"""What all tests share: devices, a compile cache of their own, and the models they run."""

import os
import pathlib

# One thread for NumPy's products: tests run on several cores already, and threads that wait for each other on a busy machine
# make a small product ten times as slow. Works because nothing has imported NumPy yet.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
NUM_DEVICES = 8  # virtual CPU devices of the test process; a program of one device takes the first

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)  # before anything starts JAX, which makes its devices then


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory):
    """Keep tests out of the user's cache folder; a program that several tests compile is compiled once."""
    old = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if old is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = old


@pytest.fixture(scope="session")
def tiny():
    """Folder of the random GPT-2 with odd sizes: vocabulary 257, 61 positions, no tokenizer, BOS 255, EOS 256."""
    return REPOSITORY / "tests" / "golden" / "gpt2"


@pytest.fixture(scope="session")
def pocket():
    """Folder of the trained gpt2-pocket: vocabulary 4096, 512 positions, BOS and EOS 0."""
    return REPOSITORY / "examples" / "gpt2" / "gpt2-pocket"
