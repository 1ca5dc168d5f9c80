"""What the tests of tensor parallelism and stages share: golden checkpoints, Sessions over devices, models on ranks."""

import json

import numpy as np
import pytest
from conftest import REPOSITORY
from parity import LIBRARY

from poptransformer import Session
from poptransformer.checkpoint.reader import Checkpoint
from poptransformer.models import find_model, read_model_config
from poptransformer.precision import precision as find_precision
from poptransformer.register import REGISTER

GOLDEN = REPOSITORY / "tests" / "golden"
FAMILIES = (
    "bloom", "chatglm2", "chatglm3", "chatglm6b", "gemma", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi", "qwen2",
    "qwen3", "rwkv",
)  # fmt: skip
WORLD_SIZES = (2, 3, 4, 8)
MAX_LENGTH = 60


def cases(family):
    """Prompts of a golden checkpoint and the greedy tokens that float32 gives."""
    found = json.loads((GOLDEN / f"{family}.json").read_text(encoding="utf-8"))
    return (found["gpt2-tiny"] if family == "gpt2" else found)["cases"]


def shortest(family):
    """The case with the shortest prompt: of one token but for ChatGLM-6B's, so that only the decode graph is compiled."""
    return min(cases(family), key=lambda case: len(case["prompt"]))


def open_session(family, **options):
    """A Session of a golden checkpoint; with backend xla on virtual CPU devices."""
    options = {"max_length": MAX_LENGTH} | options
    if options.get("backend") != "reference":
        options = {"platform": "cpu", "custom_ops": LIBRARY.exists()} | options
    return Session(GOLDEN / family, **options)


def build_model(source, world_size=1, precision="fp32", group_size=None, batch_size=1, max_length=32, **options):
    """The model of a checkpoint (a folder or file) as one rank of world_size sees it, with its weights attached."""
    checkpoint = Checkpoint.open(source)
    config = read_model_config(checkpoint)
    model_class, kinds = find_model(config), find_precision(precision, None, group_size)
    with REGISTER.scope(
        batch_size=batch_size, max_length=max_length, world_size=world_size, dtype=kinds.dtype,
        weight_dtype=kinds.weight_dtype, cache_dtype=kinds.cache_dtype, packing=kinds.packing, **options,
    ):  # fmt: skip
        model = model_class(model_class.config_class.from_hf(config))
    model.attach_checkpoint(checkpoint)
    return model


def join(parameter, parts):
    """The whole of a weight out of all ranks' parts; NaN where no rank has it. Zeros that fill up must be zeros."""
    if parameter.cut is None:
        assert all(np.array_equal(part, parts[0]) for part in parts)
        return parts[0]
    whole = np.full(parameter.logical_shape, np.nan, parts[0].dtype)
    for rank, part in enumerate(parts):
        indices = parameter.cut.indices(rank)
        part, target = np.moveaxis(part, parameter.cut.axis, 0), np.moveaxis(whole, parameter.cut.axis, 0)
        assert not part[indices < 0].any(), f"{parameter.name}: rank {rank} is not filled up with zeros"
        place = indices[indices >= 0]
        held, part = target[place], part[indices >= 0]
        assert (np.isnan(held) | (held == part)).all(), f"{parameter.name}: ranks that share rows differ"
        target[place] = part
    return whole


@pytest.fixture
def bytes_read(monkeypatch):
    """A list that grows by the bytes of each read of a file of tensors; columns between two runs are skipped, not read."""
    import os

    counts, preadv = [], os.preadv

    def counting(*arguments):
        counts.append(preadv(*arguments))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counting)
    for module in ("tensor_file", "gguf_file"):
        monkeypatch.setattr(f"poptransformer.checkpoint.{module}.MIN_SKIP_BYTES", -1)
    return counts
