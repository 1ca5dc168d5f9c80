"""attention over a KV cache: the reference, the plain XLA lowering and, where it is built, the kernel."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_op import FLOATS, compiled, hypothesis_settings, normal, reference, refusal, run_op, xla
from tolerance import assert_close

from poptransformer import kv_cache, ops
from poptransformer.float8 import FLOAT8
from poptransformer.ops.attention import attention_reference

f32, i32 = np.float32, np.int32
CACHES = FLOATS | {"float8": FLOAT8, "int8": np.dtype(np.int8)}
ENGINES = ("reference", "xla", "custom_ops")
NAMES = ("query", "key", "value", "k_cache", "v_cache", "cache_len", "num_tokens")


def make_engine(name):
    return reference() if name == "reference" else xla(custom_ops=name == "custom_ops")


def attend(scale=0.3, window=None):
    """A function of the op's inputs by name; context_len and alibi_slopes may be among them."""

    def build(**values):
        required = [values.pop(name) for name in NAMES]
        return ops.attention(*required, scale, window=window, **values)

    return build


def problem(B=2, T=3, S=8, N=4, K=2, H=5, *, cache_len=(0, 0), num_tokens=None, dtype=f32, cache_dtype=f32, seed=0):
    """Random arrays; the caches hold numbers everywhere, also where no token has been."""
    shapes = [(B, T, N, H), (B, T, K, H), (B, T, K, H), (B, K, S, H), (B, K, S, H)]
    arrays = [normal(shape, dtype if i < 3 else np.float64, seed=seed + i) for i, shape in enumerate(shapes)]
    arrays[3:] = [kv_cache.store(array, cache_dtype) for array in arrays[3:]]
    num_tokens = [T] * B if num_tokens is None else num_tokens
    return dict(zip(NAMES, [*arrays, np.array(cache_len, i32), np.array(num_tokens, i32)], strict=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_equals_torch(engine):
    # torch 2.13.0, float64: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5) with q of two heads,
    # k and v of one that both read: k.expand(2, 3, 2)
    q = np.array([[[1, 0], [0, 2], [1, 1]], [[0.5, -1], [1, 1], [-1, 0]]], f32)  # [N, T, H]
    k, v = np.array([[1, 1], [0, 1], [2, -1]], f32), np.array([[1, 10], [2, 20], [4, 40]], f32)
    wanted = np.array(
        [[[1, 10], [1.5, 15], [2.09627448, 20.96274476]], [[1, 10], [1.37754067, 13.77540669], [2.06545156, 20.65451561]]], f32
    )
    arrays = problem(B=1, T=3, S=4, N=2, K=1, H=2, cache_len=[0])
    arrays |= {"query": q.swapaxes(0, 1)[None], "key": k[None, :, None], "value": v[None, :, None]}
    out, k_cache, v_cache = run_op(make_engine(engine), attend(0.5), **arrays)
    assert_close(out, wanted.swapaxes(0, 1)[None])
    assert_close(k_cache, np.concatenate([k[None, None], arrays["k_cache"][:, :, 3:]], 2), rtol=0, atol=0)
    assert_close(v_cache, np.concatenate([v[None, None], arrays["v_cache"][:, :, 3:]], 2), rtol=0, atol=0)


def test_reference_equals_a_formula_without_cache():
    """Everything in one einsum with a mask, in float64."""
    arrays = problem(B=3, T=6, S=6, N=6, K=3, H=4, cache_len=[0, 0, 0], dtype=np.float64, cache_dtype=np.float64)
    key, value = (np.repeat(arrays[name], 2, axis=2) for name in ("key", "value"))
    scores = 0.3 * np.einsum("btnh,bsnh->bnts", arrays["query"], key)
    weights = np.exp(np.where(np.tri(6, dtype=bool), scores, -np.inf))
    wanted = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), value)
    assert_close(attention_reference(*arrays.values(), scale=0.3)[0], wanted)


@pytest.mark.parametrize("custom_ops", [False, True])
@pytest.mark.parametrize(
    "dtype, cache_dtype, T, H",
    [
        ("float32", "float32", 1, 64),
        ("float32", "float32", 17, 3),
        ("bfloat16", "bfloat16", 1, 128),
        ("bfloat16", "bfloat16", 3, 129),
        ("float16", "float16", 1, 17),
        ("float16", "float16", 129, 16),
        ("float32", "bfloat16", 1, 127),
        ("float32", "float16", 3, 17),
        ("bfloat16", "float32", 1, 1),
        ("float32", "float8", 1, 17),
        ("float32", "int8", 1, 17),
        ("float32", "float8", 17, 64),
        ("float32", "int8", 17, 64),
        ("bfloat16", "float8", 3, 5),
        ("bfloat16", "int8", 3, 5),
    ],
)
def test_lowerings_equal_the_reference(dtype, cache_dtype, T, H, custom_ops):
    """Rows at the beginning, in the middle, with padding, at rest and up to the last position of the cache."""
    S = 131
    cache_len, num_tokens = [0, S - T, 1, 5, S], [T, T, (T + 1) // 2, 0, 0]
    arrays = problem(
        5, T, S, 6, 3, H, cache_len=cache_len, num_tokens=num_tokens, dtype=FLOATS[dtype], cache_dtype=CACHES[cache_dtype]
    )
    build = attend(H**-0.5)
    wanted, actual = run_op(reference(), build, **arrays), run_op(xla(custom_ops), build, **arrays)
    # The plain lowering rounds queries and weights to the cache's dtype when that has 16 bits; of bytes it makes float32.
    narrow = min((dtype, cache_dtype), key=("bfloat16", "float16", "float32", "float8", "int8").index)
    rtol, atol = {"float32": (1e-5, 2e-6), "float16": (2e-3, 2e-3), "bfloat16": (1e-2, 2e-2)}[narrow]
    assert_close(actual[0], wanted[0], rtol, atol)
    for result, expected in zip(actual[1:], wanted[1:], strict=True):
        assert_close(result, expected, rtol=0, atol=0)
    for b, count in enumerate(num_tokens):
        assert not actual[0][b, count:].any(), "padding gives zeros"


@pytest.mark.parametrize("custom_ops", [False, True])
@hypothesis_settings(5)
@given(data=st.data())
def test_any_shape(custom_ops, data):
    B, K, H = (data.draw(st.sampled_from(sizes), name) for sizes, name in (([1, 3], "B"), ([1, 2], "K"), ([1, 3, 17], "H")))
    N, T = K * data.draw(st.integers(1, 3), "group"), data.draw(st.sampled_from([1, 2, 7]), "T")
    S = T + data.draw(st.integers(0, 5), "room")
    cache_len = data.draw(st.lists(st.integers(0, S), min_size=B, max_size=B), "cache_len")
    num_tokens = [min(T, S - begin) for begin in cache_len]
    arrays = problem(B, T, S, N, K, H, cache_len=cache_len, num_tokens=num_tokens)
    wanted, actual = run_op(reference(), attend(), **arrays), run_op(xla(custom_ops), attend(), **arrays)
    for result, expected in zip(actual, wanted, strict=True):
        assert_close(result, expected, atol=5e-6)


OPTIONS = {
    "window 1": {"window": 1},
    "window 3": {"window": 3},
    "wide window": {"window": 2**40},
    "context": {"context_len": [0, 17, 7, 0, 999, -3]},
    "slopes": {"alibi_slopes": [0.5, 0.25, 0, -1, 2**-8, 3]},
    "slopes and window": {"alibi_slopes": [0.5, 0.25, 0, -1, 2**-8, 3], "window": 4},
    "slopes and context": {"alibi_slopes": [0.5, 0.25, 0, -1, 2**-8, 3], "context_len": [2, 9, 12, 4, 1, 17]},
}


def with_options(arrays, window=None, context_len=None, alibi_slopes=None):
    """(arrays with those of the options, window)"""
    if context_len is not None:
        arrays = arrays | {"context_len": np.array(context_len, i32)}
    if alibi_slopes is not None:
        arrays = arrays | {"alibi_slopes": np.array(alibi_slopes, f32)}
    return arrays, window


@pytest.mark.parametrize("options", OPTIONS)
def test_reference_equals_a_formula_with_options(options):
    """Everything in one einsum with mask and bias spelt out, in float64, for rows that are new or have a past."""
    B, T, S, N, K = 6, 7, 17, 6, 2
    cache_len, num_tokens = [0, 10, 3, 5, 0, 9], [7, 7, 4, 0, 6, 1]
    arrays = problem(B, T, S, N, K, 3, cache_len=cache_len, num_tokens=num_tokens, dtype=np.float64, cache_dtype=np.float64)
    arrays, window = with_options(arrays, **OPTIONS[options])
    out, k_cache, v_cache = attention_reference(**arrays, scale=0.3, window=window)
    slopes = np.float64(OPTIONS[options].get("alibi_slopes", [0] * N))
    context_len = OPTIONS[options].get("context_len", [0] * B)
    for b in range(B):
        p, s = cache_len[b] + np.arange(num_tokens[b])[:, None], np.arange(S)[None]
        visible = ((s <= p) | (s < context_len[b])) & (p - s < (window or S)) & (s < cache_len[b] + num_tokens[b])
        keys, values = (np.repeat(cache[b], N // K, axis=0) for cache in (k_cache, v_cache))  # [N, S, H]
        scores = 0.3 * np.einsum("tnh,nsh->nts", arrays["query"][b, : num_tokens[b]], keys)
        weights = np.exp(np.where(visible, scores + slopes[:, None, None] * (s - p), -np.inf))
        wanted = np.einsum("nts,nsh->tnh", weights / weights.sum(-1, keepdims=True), values)
        assert_close(out[b, : num_tokens[b]], wanted)
        assert not out[b, num_tokens[b] :].any()


@pytest.mark.parametrize("custom_ops", [False, True])
@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.parametrize("options", OPTIONS)
def test_lowerings_equal_the_reference_with_options(options, T, custom_ops):
    cache_len, num_tokens = [0, 17 - T, 3, 5, 0, 9], [T, T, (T + 1) // 2, 0, T, 1]
    cache_dtype = (f32, np.int8, FLOAT8)[list(OPTIONS).index(options) % 3]
    arrays = problem(6, T, 17, 6, 2, 5, cache_len=cache_len, num_tokens=num_tokens, cache_dtype=cache_dtype)
    arrays, window = with_options(arrays, **OPTIONS[options])
    build = attend(window=window)
    wanted, actual = run_op(reference(), build, **arrays), run_op(xla(custom_ops), build, **arrays)
    assert_close(actual[0], wanted[0], 1e-5, 5e-6)
    for result, expected in zip(actual[1:], wanted[1:], strict=True):
        assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("T, S", [(1, 1), (1, 6), (4, 6), (8, 6)])
@pytest.mark.parametrize("engine", ENGINES)
def test_padding_writes_nothing_anywhere(engine, T, S):
    """Every cache_len with every number of tokens that fits, cache_len + T > S and T > S among them, and a full cache."""
    run = compiled(make_engine(engine), attend(), **problem(1, T, S, 2, 1, 3, cache_len=[0]))
    for cache_len in range(S + 1):
        for count in range(min(T, S - cache_len) + 1):
            arrays = problem(1, T, S, 2, 1, 3, cache_len=[cache_len], num_tokens=[count])
            results = run(**arrays)
            for name, new, result in (("k_cache", "key", results["1"]), ("v_cache", "value", results["2"])):
                wanted = arrays[name].copy()
                wanted[0, 0, cache_len : cache_len + count] = arrays[new][0, :count, 0]
                assert_close(result, wanted, rtol=0, atol=0)
            assert not results["0"][0, count:].any()
            assert np.isfinite(results["0"]).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_properties(engine):
    """On one compiled program of B = 3, T = 6, S = 12."""
    arrays = problem(3, 6, 12, 4, 2, 5, cache_len=[0, 4, 6], num_tokens=[6, 5, 6])
    run = compiled(make_engine(engine), attend(), **arrays)
    out, k_cache, _ = run(**arrays).values()

    # a later token leaves earlier outputs as they were
    changed = {name: array.copy() for name, array in arrays.items()}
    for name in ("query", "key", "value"):
        changed[name][:, 4:] += 3
    later = run(**changed)["0"]
    assert_close(later[:, :4], out[:, :4], rtol=0, atol=0)
    assert np.abs(later[:, 4] - out[:, 4]).max() > 1e-2

    # what a row's cache holds past its length does not matter
    for b, begin in enumerate(arrays["cache_len"]):
        changed["k_cache"][b, :, begin:] = 77
        changed["v_cache"][b, :, begin:] = -77
    assert_close(run(**arrays | {name: changed[name] for name in ("k_cache", "v_cache")})["0"], out, rtol=0, atol=0)

    # permuting the batch permutes the results
    order = [2, 0, 1]
    permuted = run(**{name: array[order] for name, array in arrays.items()})
    assert_close(permuted["0"], out[order])
    assert_close(permuted["1"], k_cache[order], rtol=0, atol=0)

    # all values equal: so is their average; scores of any size
    flat = arrays | {"value": np.full_like(arrays["value"], 0.5), "v_cache": np.full_like(arrays["v_cache"], 0.5)}
    for factor in (0, 1, 1e4):
        result = run(**flat | {"query": arrays["query"] * f32(factor)})["0"]
        for b, count in enumerate(arrays["num_tokens"]):
            assert_close(result[b, :count], np.full((count, 4, 5), 0.5, f32))

    # in pieces: 2 tokens, then 4, equal 6 at once
    first = run(**arrays | {"num_tokens": np.full(3, 2, i32)})
    rest = {name: np.roll(arrays[name], -2, axis=1) for name in ("query", "key", "value")}
    rest |= {"k_cache": first["1"], "v_cache": first["2"], "cache_len": arrays["cache_len"] + i32(2)}
    second = run(**rest, num_tokens=arrays["num_tokens"] - i32(2))
    assert_close(np.concatenate([first["0"][:, :2], second["0"][:, :4]], 1), out, atol=5e-6)
    assert_close(second["1"], k_cache, rtol=0, atol=0)


@pytest.mark.parametrize("bad", ["key", "value"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cache_dtype", ["float32", "float8", "int8"])
def test_what_is_not_finite_stays_in_its_row(engine, bad, cache_dtype):
    """Who sees it is told; neither other rows nor the prompt that has the cache next are touched."""
    arrays = problem(2, 4, 6, 2, 1, 3, cache_len=[0, 0], cache_dtype=CACHES[cache_dtype])
    run = compiled(make_engine(engine), attend(), **arrays)
    wanted = run(**arrays)["0"]
    arrays[bad][0, 2] = [np.inf, np.nan, -np.inf]
    with np.errstate(invalid="ignore"):
        out, k_cache, v_cache = run(**arrays).values()
    assert_close(out[1], wanted[1], rtol=0, atol=0)
    assert not np.isfinite(out[0, 2:]).all(axis=-1).any()
    arrays |= {"k_cache": k_cache, "v_cache": v_cache, "num_tokens": np.array([2, 4], i32)}
    assert_close(run(**arrays)["0"][0, :2], wanted[0, :2], rtol=0, atol=0)


SPECS = {
    "query": ((2, 3, 4, 5), f32),
    "key": ((2, 3, 2, 5), f32),
    "value": ((2, 3, 2, 5), f32),
    "k_cache": ((2, 2, 8, 5), f32),
    "v_cache": ((2, 2, 8, 5), f32),
    "cache_len": ((2,), i32),
    "num_tokens": ((2,), i32),
}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query": ((2, 3, 20), f32)}, "wants query [B, T, N, H] and key [B, T, K, H]"),
        ({"key": ((2, 4, 2, 5), f32)}, "key must be [2, 3, K, 5]"),
        ({"value": ((2, 3, 2, 6), f32)}, "key and value differ in shape"),
        ({name: ((2, 3, 3, 5), f32) for name in ("key", "value")}, "4 query heads cannot share 3 key/value heads evenly"),
        ({name: ((2, 3, 0, 5), f32) for name in ("key", "value")}, "4 query heads cannot share 0 key/value heads evenly"),
        ({"key": ((2, 3, 2, 5), np.float16)}, "query, key and value differ in dtype"),
        ({name: (SPECS[name][0], i32) for name in ("query", "key", "value")}, "wants a floating dtype"),
        ({"k_cache": ((2, 4, 8, 5), f32)}, "caches of float32 must be [2, 2, S, 5]"),
        ({"v_cache": ((2, 2, 9, 5), f32)}, "the two caches differ"),
        (
            {name: ((2, 2, 8, 5), i32) for name in ("k_cache", "v_cache")},
            "the caches must have a floating dtype, float8_e4m3fn or int8",
        ),
        ({name: ((2, 2, 8, 5), np.int8) for name in ("k_cache", "v_cache")}, "caches of int8 must be [2, 2, S, 9]"),
        ({"cache_len": ((2,), np.int64)}, "cache_len must be int32 [2]"),
        ({"num_tokens": ((1,), i32)}, "num_tokens must be int32 [2]"),
    ],
)
def test_what_is_refused(changes, message):
    refused = refusal(lambda *values: ops.attention(*values, 1.0), *(SPECS | changes).values())
    assert refused.startswith("attention(") and refused.endswith(message)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 0}, "window=0 must be a positive whole number"),
        ({"window": 2.0}, "window=2.0 must be a positive whole number"),
        ({"window": True}, "window=True must be a positive whole number"),
        ({"context_len": ((3,), i32)}, "context_len must be int32 [2]"),
        ({"context_len": ((2,), f32)}, "context_len must be int32 [2]"),
        ({"alibi_slopes": ((2,), f32)}, "alibi_slopes must be float32 [4]"),
        ({"alibi_slopes": ((4,), np.float16)}, "alibi_slopes must be float32 [4]"),
        ({"context_len": ((2,), i32), "window": 3}, "a window together with context_len is not supported"),
    ],
)
def test_options_that_are_refused(options, message):
    specs = {name: spec for name, spec in options.items() if name != "window"}

    def build(*values):
        named = dict(zip(specs, values[len(SPECS) :], strict=True))
        ops.attention(*values[: len(SPECS)], 1.0, window=options.get("window"), **named)

    refused = refusal(build, *SPECS.values(), *specs.values())
    assert refused.startswith("attention(") and refused.endswith(message)
