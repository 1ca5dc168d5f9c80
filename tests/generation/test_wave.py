"""How rows are cut into prefill runs, and what a wave asks of the device, with a device that only writes down."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poptransformer.generation.row import Row
from poptransformer.generation.settings import GenerationSettings
from poptransformer.generation.wave import DEVICE_RANGES, MAX_BUCKET, MIN_BUCKET, Wave, bucket_length, fill_chunks
from poptransformer.models.decoder_model import DECODE_STEPS, MAX_STOP_IDS


@pytest.mark.parametrize(
    ("num_tokens", "max_length", "bucket"),
    [(0, 512, 16), (1, 512, 16), (16, 512, 16), (17, 512, 32), (500, 512, 512), (513, 2048, 512), (9999, 10**6, 512)]
    + [(1, 1, 1), (3, 7, 7), (33, 61, 61), (32, 61, 32), (100, 100, 100)],
)
def test_bucket_length(num_tokens, max_length, bucket):
    assert bucket_length(num_tokens, max_length) == bucket


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_buckets_are_few_and_never_over_max_length(num_tokens, max_length):
    bucket = bucket_length(num_tokens, max_length)
    assert 1 <= bucket <= max_length
    assert bucket == max_length or (bucket & (bucket - 1) == 0 and MIN_BUCKET <= bucket <= MAX_BUCKET)
    assert bucket >= min(num_tokens, max_length, MAX_BUCKET)
    assert bucket in (MIN_BUCKET, max_length) or bucket < 2 * num_tokens


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=4), st.integers(0, 2), st.integers(0, 300))
def test_chunks_joined_give_the_rows(lengths, spare_rows, spare_positions):
    batch_size, max_length = len(lengths) + spare_rows, max(max(lengths) + spare_positions, 1)
    rows = [list(range(1000 * row, 1000 * row + length)) for row, length in enumerate(lengths)]
    joined = [[] for _ in range(batch_size)]
    for bucket, inputs in fill_chunks(rows, batch_size, max_length):
        assert bucket <= max_length
        assert inputs["input_ids"].shape == (batch_size, bucket)
        assert {key: array.dtype for key, array in inputs.items()} == dict.fromkeys(
            ("input_ids", "cache_len", "num_tokens"), np.dtype(np.int32)
        )
        assert inputs["num_tokens"].max() > 0, "a run for nothing"
        for row in range(batch_size):
            assert inputs["cache_len"][row] == len(joined[row])
            assert inputs["cache_len"][row] + inputs["num_tokens"][row] <= max_length
            joined[row] += inputs["input_ids"][row, : inputs["num_tokens"][row]].tolist()
    assert joined == rows + [[]] * spare_rows


def test_rows_without_tokens_need_no_run():
    assert list(fill_chunks([[], []], 2, 10)) == []
    assert list(fill_chunks([], 2, 10)) == []


class Device:
    """Answers decode runs with the row's newest token plus one, and keeps all that it is asked."""

    def __init__(self):
        self.prepared, self.runs = [], []

    def prepare(self, name):
        self.prepared.append(name)

    def run(self, name, inputs):
        self.runs.append((name, {key: array.copy() for key, array in inputs.items()}))
        if name != "decode":
            return {}
        token, counts = inputs["token"], inputs["max_new"]
        tokens = token[:, None] + 1 + np.arange(DECODE_STEPS, dtype=np.int32)
        return {"tokens": tokens, "logprobs": np.zeros(tokens.shape, np.float32), "num_new": counts}


def make_wave(device, prompts, max_new, batch_size=None, max_length=200, **settings):
    rows = [
        Row(i, list(prompt), GenerationSettings(**settings), (), new, None)
        for i, (prompt, new) in enumerate(zip(prompts, max_new, strict=True))
    ]
    return Wave(device.prepare, device.run, rows, batch_size or len(rows), max_length, 1000)


def test_calls_of_a_wave():
    device = Device()
    wave = make_wave(device, [range(10, 50), [7]], [3, 70], batch_size=3)
    wave.fill()
    assert device.prepared == ["prefill_64"]
    _, inputs = device.runs[0]
    assert inputs["num_tokens"].tolist() == [39, 0, 0] and inputs["is_fresh"].all()
    assert inputs["input_ids"][0, :39].tolist() == list(range(10, 49))
    pieces = wave.advance(2)
    _, inputs = device.runs[1]
    assert not inputs["is_fresh"].any()
    assert inputs["token"].tolist() == [49, 7, 0] and inputs["cache_len"].tolist() == [39, 0, 0]
    assert inputs["max_new"].tolist() == [2, 2, 0]
    assert [piece.token_ids for piece in pieces] == [[50, 51], [8, 9]]
    wave.advance(1000)
    _, inputs = device.runs[2]
    assert inputs["token"].tolist() == [51, 9, 0] and inputs["cache_len"].tolist() == [41, 2, 0]
    assert inputs["max_new"].tolist() == [1, 64, 0]
    assert wave.rows[0].finish_reason == "length" and not wave.is_finished
    pieces = wave.advance(64)
    _, inputs = device.runs[3]
    assert inputs["max_new"].tolist() == [0, 4, 0]
    assert [piece.row for piece in pieces] == [1] and wave.is_finished
    assert wave.rows[1].new_ids == list(range(8, 78))
    timings = wave.timings
    assert (timings.prefill_tokens, timings.decode_tokens, timings.decode_steps) == (39, 73, 70)
    assert timings.weight_bytes == 1000 and timings.decode_ms > 0


def test_filling_again_leaves_finished_rows_out():
    device = Device()
    wave = make_wave(device, [[1, 2, 3], [1, 2, 3, 4]], [1, 5])
    wave.fill()
    wave.advance(2)
    wave.fill()
    _, inputs = device.runs[-1]
    assert inputs["num_tokens"].tolist() == [0, 5] and inputs["is_fresh"].all()
    assert inputs["input_ids"][1, :5].tolist() == [1, 2, 3, 4, 5]


def test_prompts_of_one_token_are_fresh_when_decoded():
    device = Device()
    wave = make_wave(device, [[5], [6]], [1, 1])
    wave.fill()
    assert device.runs == []
    wave.advance(1)
    assert device.runs[0][1]["is_fresh"].all()
    assert wave.is_finished


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ({"temperature": 1e300}, "temperature", 1e5),
        ({"temperature": 1e-300}, "temperature", np.float32(1e-5)),
        ({"temperature": 0.0}, "temperature", 0),
        ({"top_k": 2**70}, "top_k", 2**30),
        ({"top_p": 1e-300}, "top_p", np.float32(1e-6)),
        ({"min_p": 1e-300}, "min_p", np.float32(1e-30)),
        ({"repetition_penalty": 1e300}, "repetition_penalty", 1e6),
        ({"repetition_penalty": 1e-300}, "repetition_penalty", np.float32(1e-6)),
    ],
)
def test_settings_are_held_inside_what_the_device_can_take(settings, name, value):
    device = Device()
    wave = make_wave(device, [[5]], [1], batch_size=2, **settings)
    wave.advance(1)
    inputs = device.runs[0][1]
    assert inputs[name][0] == value
    assert inputs["stop_ids"].shape == (2, MAX_STOP_IDS) and (inputs["stop_ids"] == -1).all()
    neutral = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    assert {key: inputs[key][1] for key in DEVICE_RANGES} == neutral
