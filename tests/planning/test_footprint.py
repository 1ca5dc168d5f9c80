"""Footprints of all families against the models' own lists of parameters and states."""

import json
import math
import time
import tracemalloc

import pytest
from conftest import REPOSITORY

from poptransformer.planning.devices import find_device
from poptransformer.planning.footprint import measure
from poptransformer.planning.models import find_sizes
from poptransformer.planning.shapes import SHAPES

CONFIGS = {path.parent.name: path for path in sorted((REPOSITORY / "tests" / "golden").glob("*/config.json"))}
GLM = {
    "model_type": "glm", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 67, "pad_token_id": 0,
}  # fmt: skip
MODELS = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in CONFIGS.items()} | {"glm": GLM}


def build(model, num_replicas=1, **settings):
    return find_sizes(model, max_length=48, **settings).build(num_replicas)


@pytest.mark.parametrize("precision", ["fp16", "int8"])
@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("family", MODELS)
def test_the_parts_are_the_whole(family, num_replicas, precision):
    model = build(MODELS[family], num_replicas, precision=precision, batch_size=2)
    footprint = measure(model)
    whole = footprint.join(0, footprint.num_layers, True, True)
    assert whole.weights == {parameter.name: parameter.spec.num_bytes for parameter in model.parameters()}
    assert whole.caches == {state.name: state.spec.num_bytes for state in (*model.states(), model.seen)}
    assert (footprint.num_layers, footprint.num_replicas) == (model.config.num_layers, num_replicas)
    for block, layer in zip(model.blocks, footprint.layers, strict=True):
        assert set(layer.weights) == {parameter.name for parameter in block.parameters()}
        assert layer.caches and layer.activation_bytes > 0


@pytest.mark.parametrize("family", MODELS)
def test_a_step_reads_what_the_graph_says(family):
    model = build(MODELS[family], precision="bf16")
    whole = measure(model)
    whole = whole.join(0, whole.num_layers, True, True)
    assert sum(whole.weights[name] for name in whole.reads) == model.build_decode().parameter_bytes_read()


def test_embeddings_that_are_only_looked_up_are_not_read():
    footprint = measure(build(SHAPES["llama-2-7b"].config, precision="fp16"))
    assert footprint.first.weights == {"model.embed_tokens.weight": 32000 * 4096 * 2} and not footprint.first.reads
    assert footprint.last.reads == {"model.norm.weight", "lm_head.weight"}


def test_a_tied_embedding_is_at_both_ends_and_once_on_one_device():
    footprint = measure(build(SHAPES["gpt2"].config, precision="fp16"))
    table = 50257 * 768 * 2
    assert footprint.first.weights["transformer.wte.weight"] == footprint.last.weights["transformer.wte.weight"] == table
    whole = footprint.join(0, 12, True, True)
    assert sum(whole.weights.values()) == 124_439_808 * 2


def test_ranks_share_what_can_be_cut():
    """Of gpt2-xl's 25 heads a rank of 4 has 7, and its vocabulary is filled up; norms and some biases are whole on each."""
    whole, quarter = (sum(measure(build("gpt2-xl", ranks, precision="fp16")).layers[0].caches.values()) for ranks in (1, 4))
    assert quarter * 25 == whole * 7
    whole, quarter = (measure(build("gpt2-xl", ranks, precision="fp16")).join(0, 48, True, True) for ranks in (1, 4))
    assert 0.25 < sum(quarter.weights.values()) / sum(whole.weights.values()) < 0.28
    assert quarter.activation_bytes < whole.activation_bytes


def test_activations_grow_with_the_batch_and_the_prefill():
    def activations(prefill_length, batch_size):
        model = build("gpt2", precision="fp16", batch_size=batch_size)
        return measure(model, prefill_length).layers[5].activation_bytes

    assert activations(32, 1) == 2 * activations(16, 1)
    assert activations(16, 3) == 3 * activations(16, 1)
    assert activations(1000, 1) == activations(None, 1) == activations(48, 1)  # prefill is at most max_length


def test_attention_decides_the_activations_of_a_prefill():
    sizes = find_sizes("gpt2-xl", "fp16", max_length=1024)
    scores = 25 * 512 * 1024 * (4 + 2)
    activations = sizes.footprint(find_device("bow")).layers[3].activation_bytes
    assert scores < activations < 1.2 * scores


def test_no_array_is_made():
    tracemalloc.start()
    try:
        footprint = find_sizes("llama-2-7b", "fp16").footprint(find_device("h200"), 2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(sum(layer.weights.values()) for layer in footprint.layers) > 6e9
    assert peak < 20e6


def test_seven_billion_weights_are_measured_in_two_seconds():
    begin = time.process_time()
    find_sizes("llama-2-7b", "fp16").footprint(find_device("h200"))
    assert time.process_time() - begin < 2  # of the processor: 0.1 seen


def test_packed_weights_have_the_bits_that_their_groups_say():
    sizes = find_sizes("llama-2-7b", "int4")
    footprint = sizes.footprint(find_device("cpu", memory_gb=1))
    matrices = {name: num_bytes for name, num_bytes in footprint.layers[0].weights.items() if name.endswith("proj.weight")}
    shapes = {parameter.name: parameter.logical_shape for parameter in sizes.build().parameters()}
    assert len(matrices) == 7
    for name, num_bytes in matrices.items():
        assert num_bytes == math.prod(shapes[name]) * 5 // 8
