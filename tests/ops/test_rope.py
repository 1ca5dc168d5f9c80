"""rope."""

import numpy as np
import pytest
from run_op import FLOATS, compiled, normal, reference, refusal, run_op, xla
from tolerance import assert_close

from poptransformer import ops

f32, i32 = np.float32, np.int32


def frequencies(rotary_dim, theta=10000.0):
    return (theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)).astype(f32)


def turn(x, position_ids, inv_freq, engine=None, **options):
    arrays = {"x": x, "position_ids": np.asarray(position_ids, i32), "inv_freq": inv_freq}
    return run_op(engine or reference(), lambda **values: ops.rope(**values, **options), **arrays)


def by_complex_numbers(x, position_ids, inv_freq, attention_scale=1.0, interleaved=False):
    """The same in another way, in float64: a pair is a complex number, which is multiplied by exp(i * angle)."""
    half = len(inv_freq)
    turned, rest = x[..., : 2 * half].astype(np.float64), x[..., 2 * half :].astype(np.float64)
    pairs = turned.reshape(*x.shape[:3], half, 2) if interleaved else turned.reshape(*x.shape[:3], 2, half).swapaxes(-1, -2)
    angles = position_ids[..., None, None] * inv_freq.astype(np.float64)
    result = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles) * attention_scale
    pairs = np.stack([result.real, result.imag], -1)
    turned = (pairs if interleaved else pairs.swapaxes(-1, -2)).reshape(turned.shape)
    return np.concatenate([turned, rest], -1).astype(x.dtype)


@pytest.mark.parametrize("make_engine", [reference, xla])
def test_equals_transformers(make_engine):
    # transformers 5.24.0: LlamaRotaryEmbedding(LlamaConfig(hidden_size=4, num_attention_heads=1)) at positions 3 and 100,
    # then apply_rotary_pos_emb, of q = [[1, 2, 3, 4]] both times
    x = np.broadcast_to(np.array([1, 2, 3, 4], f32), (1, 2, 1, 4))
    wanted = np.array(
        [[-1.41335249, 1.87911808, -2.82885742, 4.0581913], [2.38141584, -2.28527927, 2.08059072, 3.84415126]], f32
    )
    assert_close(turn(x, [[3, 100]], frequencies(4), make_engine()).reshape(2, 4), wanted)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rotary_dim, head_dim", [(2, 2), (6, 7), (10, 10), (64, 128), (128, 129), (0, 3)])
def test_lowering_and_reference_equal_complex_numbers(rotary_dim, head_dim, dtype, interleaved):
    x = normal((2, 3, 5, head_dim), FLOATS[dtype])
    position_ids = np.array([[0, 1, 2], [7, 60, 199]], i32)
    options = {"attention_scale": 1.3, "interleaved": interleaved}
    wanted = by_complex_numbers(x, position_ids, frequencies(rotary_dim), **options)
    atol = 5e-5 if dtype == "float32" else None  # an angle of 199 in float32 is right to 1e-5
    for engine in (reference(), xla()):
        assert_close(turn(x, position_ids, frequencies(rotary_dim), engine, **options), wanted, atol=atol)


@pytest.mark.parametrize("interleaved", [False, True])
def test_lengths_stay_and_products_depend_on_distance(interleaved):
    query, key, inv_freq = normal((1, 6, 2, 12)), normal((1, 6, 2, 12), seed=1), frequencies(8)

    def build(query, key, positions, inv_freq):
        return [ops.rope(x, positions, inv_freq, interleaved=interleaved) for x in (query, key)]

    arrays = {"query": query, "key": key, "positions": np.arange(6, dtype=i32)[None], "inv_freq": inv_freq}
    for engine in (reference(), xla()):
        run = compiled(engine, build, **arrays)
        q, k = run(**arrays).values()
        moved_q, moved_k = run(**arrays | {"positions": arrays["positions"] + i32(31)}).values()
        assert_close(np.linalg.norm(q, axis=-1), np.linalg.norm(query, axis=-1))
        assert_close(q[..., 8:], query[..., 8:], rtol=0, atol=0)
        assert_close(q[:, 0], query[:, 0], rtol=0, atol=0)  # position 0 turns nothing
        scores, moved = (np.einsum("btnh,bsnh->bnts", *pair) for pair in ((q, k), (moved_q, moved_k)))
        assert_close(moved, scores, atol=1e-4)  # angles up to 36 in float32
        assert np.abs(moved_q - q).max() > 0.5


def test_long_positions():
    """Beyond the integers that 16 bits hold; the angles are float32 whatever x is."""
    x, positions = normal((1, 3, 1, 64), FLOATS["bfloat16"]), np.array([[2049, 65537, 131071]], i32)
    slow = frequencies(64, 1e9)[16:]  # angles below 5 radians, which float32 has to 1e-6
    for engine in (reference(), xla()):
        assert_close(turn(x, positions, slow, engine), by_complex_numbers(x, positions, slow))


SPECS = [((2, 3, 4, 6), f32), ((2, 3), i32), ((3,), f32)]


@pytest.mark.parametrize(
    "place, spec, message",
    [
        (0, ((2, 3, 24), f32), "wants x [B, T, N, H]"),
        (0, ((2, 3, 4, 6), i32), "wants a floating dtype"),
        (0, ((2, 3, 4, 5), f32), "3 pairs turn 6 features, x has 5"),
        (1, ((2, 4), i32), "position_ids must be int32 [2, 3]"),
        (1, ((2, 3), np.int64), "position_ids must be int32 [2, 3]"),
        (2, ((3, 1), f32), "inv_freq must be float32 [rotary_dim / 2]"),
        (2, ((3,), np.float16), "inv_freq must be float32 [rotary_dim / 2]"),
    ],
)
def test_what_is_refused(place, spec, message):
    specs = [*SPECS]
    specs[place] = spec
    refused = refusal(ops.rope, *specs)
    assert refused.startswith("rope(") and refused.endswith(message)
