"""The table of well-known shapes: counts of parameters as published, and names."""

import pytest

from poptransformer.models import find_model
from poptransformer.planning.models import find_sizes
from poptransformer.planning.shapes import SHAPES, find_shape

# Numbers of weights, tied ones once: from the models' cards and safetensors headers on the hub; RWKV's from its author's list
# (https://github.com/BlinkDL/RWKV-LM), which has them to the weight.
NUM_PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "smollm2-135m": 134_515_008,
    "chatglm-6b": 6_173_286_400,
    "chatglm2-6b": 6_243_584_000,
    "chatglm3-6b": 6_243_584_000,
    "rwkv-4-169m": 169_342_464,
    "rwkv-4-1.5b": 1_515_106_304,
    "rwkv-4-7b": 7_392_649_216,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_published_number_of_weights(name):
    assert find_sizes(name, "fp16").num_parameters == NUM_PARAMETERS[name]


def test_shapes_are_found_by_any_of_their_names():
    for name in ("llama-2-7b", "Llama-2-7B", "meta-llama/Llama-2-7b-hf", "llama-2-7b-hf"):
        assert find_shape(name) is SHAPES["llama-2-7b"]
    assert find_shape("llama-2") is None


def test_positions_end_where_the_models_do():
    limits = {name: find_model(shape.config).config_class.from_hf(shape.config).max_seq_len for name, shape in SHAPES.items()}
    assert limits["gpt2-xl"] == 1024 and limits["chatglm-6b"] == 2048 and limits["chatglm2-6b"] == 32768
    assert limits["llama-3.2-1b"] == 131072 and limits["rwkv-4-7b"] == 1024
