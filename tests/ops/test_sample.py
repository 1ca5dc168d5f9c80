"""sample, repetition_penalty and mark_tokens."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_op import SIZES, compiled, hypothesis_settings, normal, reference, refusal, run_op, xla
from tolerance import assert_close

from poptransformer import ops
from poptransformer.backends.xla import sample as lowering
from poptransformer.ops.sample import gumbel_noise, keep_mask, threefry2x32

f32, i32, u32 = np.float32, np.int32, np.uint32
NAMES = ("logits", "temperature", "top_k", "top_p", "min_p", "seed", "position")
INF = np.inf


def draw(**values):
    return ops.sample(*(values[name] for name in NAMES))


def rows(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0):
    """Inputs of sample; settings are numbers or one number for each row."""
    logits = np.asarray(logits, f32)
    count = len(logits)

    def each(value, dtype):
        return np.broadcast_to(np.asarray(value), count).astype(dtype)

    halves = np.stack([each(np.asarray(seed) & 0xFFFFFFFF, u32), each(np.asarray(seed) >> 32, u32)], -1)
    settings = each(temperature, f32), each(top_k, i32), each(top_p, f32), each(min_p, f32)
    return dict(zip(NAMES, [logits, *settings, halves, each(position, i32)], strict=True))


@jax.jit
def kept_by_lowering(scaled, top_k, top_p, min_p):
    return lowering._keep_mask(scaled, top_k, top_p, min_p)


def kept(scaled, top_k=0, top_p=1.0, min_p=0.0):
    """The tokens of one row that may be chosen, as the reference and the lowering see it; they must agree."""
    scaled = np.asarray(scaled, f32)
    wanted = keep_mask(scaled, top_k, float(f32(top_p)), float(f32(min_p)))
    actual = np.asarray(kept_by_lowering(scaled[None], np.array([top_k], i32), np.array([top_p], f32), np.array([min_p], f32)))[
        0
    ]
    assert actual.tolist() == wanted.tolist(), (scaled, top_k, top_p, min_p)
    return np.flatnonzero(wanted).tolist()


# ---- randomness


@pytest.mark.parametrize(
    "counter, key, wanted",
    [
        # The lines "threefry2x32 20 <counter> <key> <result>" of Random123's tests/kat_vectors; compared is the first word.
        ((0x00000000, 0x00000000), (0x00000000, 0x00000000), 0x6B200159),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), 0x1CB996FC),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), 0xC4923A9C),
    ],
)
def test_threefry_known_answers(counter, key, wanted):
    counter, key = (tuple(np.array([word], u32) for word in words) for words in (counter, key))
    assert threefry2x32(key, counter).tolist() == [wanted]
    assert np.asarray(jax.jit(lowering._threefry2x32)(key, counter)).tolist() == [wanted]


def test_noise_is_gumbel_and_the_same_for_both():
    """Mean 0.5772, variance pi^2 / 6; the bounds are four standard errors of 200 000 draws."""
    seed, position = np.array([[7, 1], [7, 2], [8, 1], [7, 1]], u32), np.array([3, 3, 3, 4], i32)
    noise = gumbel_noise(seed, position, 50_000)
    assert noise.dtype == f32 and np.isfinite(noise).all()
    assert abs(noise.mean() - 0.57722) < 4 * np.sqrt(1.645 / noise.size)
    assert abs(noise.var() - np.pi**2 / 6) < 4 * np.sqrt(4.4 * 1.645**2 / noise.size)
    assert np.abs(np.corrcoef(noise) - np.eye(4)).max() < 4 / np.sqrt(50_000)
    actual = jax.jit(lowering._gumbel_noise, static_argnums=2)(seed, position, 50_000)
    assert_close(np.asarray(actual), noise, atol=2e-6)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 5}, {"temperature": 2.0, "top_p": 0.6}, {"min_p": 0.2}])
def test_frequencies_follow_the_softmax(settings):
    """Chi-square over what is kept, 20 000 draws: other seeds, other positions, other high halves of the seed."""
    logits = np.array([2.0, 1.0, 0.5, 0.0, -0.3, -1.0, -INF], f32)
    scaled = logits / settings.get("temperature", 1)
    keep = keep_mask(scaled.astype(f32), settings.get("top_k", 0), settings.get("top_p", 1.0), settings.get("min_p", 0.0))
    weights = np.where(keep, np.exp(scaled), 0)
    count = 20_000
    run = compiled(xla(), draw, **rows(np.zeros((count, 7))))
    many = np.arange(count)
    for seed, position in ((many, 5), (99, many), (many << 32, 5)):
        tokens = run(**rows(np.tile(logits, (count, 1)), seed=seed, position=position, **settings))
        seen, wanted = np.bincount(tokens, minlength=7), count * weights / weights.sum()
        assert not seen[~keep].any()
        # 1 in 10 000 draws of five degrees of freedom or fewer is above 25.7
        assert ((seen - wanted)[keep] ** 2 / wanted[keep]).sum() < 25.7, (seen, wanted)


# ---- which tokens may be chosen


def test_kept_sets():
    x = [1.0, 4.0, 3.0, 2.0]
    assert kept(x) == [0, 1, 2, 3]
    assert kept(x, top_k=1) == [1] and kept(x, top_k=2) == [1, 2]
    assert kept(x, top_k=4) == kept(x, top_k=5) == kept(x, top_k=2**31 - 1) == [0, 1, 2, 3]
    # probabilities 0.644, 0.237, 0.087, 0.032 of 4, 3, 2, 1
    assert kept(x, top_p=0.64) == [1] and kept(x, top_p=0.65) == [1, 2] and kept(x, top_p=0.969) == [0, 1, 2, 3]
    assert kept(x, top_p=1e-30) == kept(x, top_p=np.finfo(f32).tiny) == [1]
    assert kept(x, top_p=1.0) == [0, 1, 2, 3]
    # of the first two alone: 0.731 and 0.269
    assert kept(x, top_k=2, top_p=0.72) == [1] and kept(x, top_k=2, top_p=0.74) == [1, 2]
    # relative to the best: 1, 0.368, 0.135, 0.0498
    assert kept(x, min_p=1.0) == [1] and kept(x, min_p=0.36) == [1, 2] and kept(x, min_p=0.049) == [0, 1, 2, 3]
    assert kept(x, top_k=3, top_p=0.9, min_p=0.3) == [1, 2]


def test_equal_logits_are_kept_or_dropped_together():
    x = [2.0, 5.0, 5.0, 2.0, 5.0, -1.0]
    for settings in ({"top_k": 1}, {"top_k": 3}, {"top_p": 1e-6}, {"top_p": 0.9}, {"min_p": 1.0}, {"top_k": 2, "top_p": 0.5}):
        assert kept(x, **settings) == [1, 2, 4], settings
    assert kept(x, top_k=4) == kept(x, top_k=5) == [0, 1, 2, 3, 4]
    assert kept([0.0, -0.0, -1.0, 0.0], top_k=1) == kept([0.0, -0.0, -1.0, 0.0], top_p=0.1) == [0, 1, 3]
    assert kept([3.0] * 17, top_k=1) == kept([-3.0] * 17, top_p=0.1) == list(range(17))


def test_forbidden_tokens_are_never_kept():
    x = [-INF, 1.0, -INF, 2.0, -INF]
    assert kept(x) == kept(x, top_k=3) == kept(x, top_k=9) == kept(x, top_p=0.99) == kept(x, min_p=0.1) == [1, 3]
    assert kept(x, top_k=1) == kept(x, top_p=0.5) == kept(x, min_p=0.5) == [3]
    assert kept([-INF, -5.0, -INF]) == kept([-INF, -5.0, -INF], top_k=2, top_p=0.3, min_p=1.0) == [1]


def test_large_and_tiny_logits():
    assert kept([1e30, -1e30, 1e30], top_p=0.5) == [0, 2]
    assert kept([88.0, 89.0, 100.0], top_p=0.9999) == [2]
    assert kept([1e-30, 0.0, -1e-30], top_k=1) == [0]


@hypothesis_settings(60)
@given(
    values=st.lists(st.integers(-6, 6), min_size=5, max_size=5),
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([0.013, 0.31, 0.57, 0.83, 0.991, 1.0]),
    min_p=st.sampled_from([0.0, 0.007, 0.11, 0.61, 1.0]),
)
def test_kept_sets_with_many_ties(values, top_k, top_p, min_p):
    """Five logits in steps of 0.75: ties are common, borders that fall on top_p or min_p exactly are not."""
    x = np.array(values) * 0.75
    tokens = kept(x, top_k, top_p, min_p)
    assert int(np.argmax(x)) in tokens
    assert tokens == np.flatnonzero(x >= x[tokens].min()).tolist(), "the best ones, whole groups of equals"


@pytest.mark.parametrize("size", [3, 17, 127, 1000])
def test_kept_sets_equal_hugging_face(size):
    torch = pytest.importorskip("torch", reason="pip install -r requirements-dev.txt")
    transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt")
    for number, (top_k, top_p, min_p) in enumerate(
        [(1, 1, 0), (5, 1, 0), (0, 0.3, 0), (0, 0.9, 0), (0, 1, 0.05), (0, 1, 0.5), (40, 0.95, 0.02), (7, 0.5, 0.3)]
    ):
        x = normal(size, seed=number, scale=2)
        scores = torch.tensor(x)[None]
        if top_k:
            scores = transformers.TopKLogitsWarper(top_k)(None, scores)
        if top_p < 1:
            scores = transformers.TopPLogitsWarper(top_p)(None, scores)
        if min_p:
            scores = transformers.MinPLogitsWarper(min_p)(None, scores)
        assert kept(x, top_k, top_p, min_p) == torch.isfinite(scores[0]).nonzero()[:, 0].tolist()


# ---- sample


@pytest.mark.parametrize("size", SIZES)
def test_lowering_equals_reference(size):
    """Rows with settings of every kind side by side; the seeds are such that no two tokens are nearly equal."""
    logits = normal((12, size), seed=size, scale=3)
    logits[3, 1:] = -INF
    settings = {
        "temperature": [0, 1, 0.5, 1, 2, 1, 1, 0, 100, 1, 0.1, 1e-38],
        "top_k": [0, 0, 1, 5, size + 9, 3, 0, 4, 0, 0, 17, 0],
        "top_p": [1, 1, 1, 1, 1, 0.8, 0.5, 0.5, 1, 1e-6, 0.97, 1],
        "min_p": [0, 0, 0, 0, 0, 0.01, 0, 0, 0.3, 0, 0.001, 0],
    }
    wanted, actual = [], []
    engines = [compiled(engine, draw, **rows(logits)) for engine in (reference(), xla())]
    for position in range(8):
        arrays = rows(logits, **settings, seed=np.arange(12) * 2**31, position=position)
        for run, results in zip(engines, (wanted, actual), strict=True):
            results.append(run(**arrays))
    assert_close(np.stack(actual), np.stack(wanted))
    best = logits.argmax(-1)
    for row in (0, 2, 3, 7, 9, 11):  # greedy, one token kept, one token not forbidden, or next to no temperature
        assert all(tokens[row] == best[row] for tokens in wanted)
    assert actual[0].dtype == i32 and len({tuple(tokens) for tokens in wanted}) > 1 or size == 1


def test_greedy_takes_the_first_of_equals_whatever_else_is_set():
    logits = [[1, 3, 3, -INF], [-INF, -INF, -2, -2], [-0.0, 0.0, -1, 0.0]]
    for engine in (reference(), xla()):
        tokens = run_op(engine, draw, **rows(logits, temperature=0, top_k=2, top_p=0.5, min_p=0.5, seed=3, position=[1, 2, 3]))
        assert tokens.tolist() == [1, 2, 0]


def test_a_row_draws_the_same_in_any_batch():
    """Same logits, seed and position: alone, beside others, in another place, with greedy neighbours."""
    logits = normal((5, 127), scale=0.5)
    inputs = rows(
        logits, seed=[5, 6, 7, 8, 9], position=[0, 10, 20, 30, 40], temperature=[1, 0.8, 1.5, 1, 1], top_k=[0, 9, 0, 0, 3]
    )
    for engine in (reference(), xla()):
        whole, single = (compiled(engine, draw, **{k: v[:n] for k, v in inputs.items()}) for n in (5, 1))
        tokens = whole(**inputs)
        assert_close(whole(**{name: array[::-1] for name, array in inputs.items()})[::-1], tokens)
        for b in range(5):
            assert single(**{name: array[b : b + 1] for name, array in inputs.items()}).tolist() == [tokens[b]]
            neighbours = {name: array.copy() for name, array in inputs.items()}
            others = np.arange(5) != b
            neighbours["temperature"][others], neighbours["logits"][others] = 0, 1
            assert whole(**neighbours)[b] == tokens[b]
        draws = {int(whole(**inputs | {"position": np.full(5, p, i32)})[2]) for p in range(20)}
        assert len(draws) > 5, "the position changes the draw"


# ---- repetition_penalty, mark_tokens


def test_repetition_penalty_equals_hugging_face():
    torch = pytest.importorskip("torch", reason="pip install -r requirements-dev.txt")
    transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt")
    logits, ids = normal((3, 129), scale=3), np.random.default_rng(0).integers(0, 129, (3, 40))
    logits[:, 5], penalty, seen = 0, np.array([1.3, 0.7, 1], f32), np.zeros((3, 129), bool)
    np.put_along_axis(seen, ids, True, 1)
    wanted = [
        transformers.RepetitionPenaltyLogitsProcessor(float(p))(torch.tensor(ids[b : b + 1]), torch.tensor(logits[b : b + 1]))
        for b, p in enumerate(penalty)
    ]
    for engine in (reference(), xla()):
        result = run_op(engine, ops.repetition_penalty, logits=logits, seen=seen, penalty=penalty)
        assert_close(result, torch.cat(wanted).numpy())
        assert_close(result[2], logits[2], rtol=0, atol=0)


def test_repetition_penalty_of_forbidden_tokens():
    logits, seen = np.array([[2, -2, 0, -INF]] * 2, f32), np.array([[True] * 4, [False] * 4])
    for engine in (reference(), xla()):
        result = run_op(engine, ops.repetition_penalty, logits=logits, seen=seen, penalty=np.array([2, 2], f32))
        assert_close(result, np.array([[1, -4, 0, -INF], [2, -2, 0, -INF]], f32))


@pytest.mark.parametrize("T", [1, 17])
def test_mark_tokens(T):
    """Padding counts for nothing, whatever ids it has; what was marked stays; an id may come twice."""
    vocab_size, generator = 129, np.random.default_rng(T)
    ids, counts = generator.integers(0, vocab_size, (4, T)).astype(i32), np.array([T, 0, 1, T // 2], i32)
    seen = generator.random((4, vocab_size)) < 0.1
    wanted = seen.copy()
    for b, count in enumerate(counts):
        for token in ids[b, :count]:
            wanted[b, token] = True
    ids[1:, -1:] = np.where(counts[1:, None] < T, 0, ids[1:, -1:])
    for engine in (reference(), xla()):
        assert_close(run_op(engine, ops.mark_tokens, seen=seen, token_ids=ids, num_tokens=counts), wanted)


SAMPLE = [((2, 5), f32), ((2,), f32), ((2,), i32), ((2,), f32), ((2,), f32), ((2, 2), u32), ((2,), i32)]


def replaced(place, spec):
    return [*SAMPLE[:place], spec, *SAMPLE[place + 1 :]]


@pytest.mark.parametrize(
    "build, specs, message",
    [
        (ops.sample, replaced(0, ((2, 5), np.float16)), "wants float32 logits [B, V]"),
        (ops.sample, replaced(0, ((5,), f32)), "wants float32 logits [B, V]"),
        (ops.sample, replaced(1, ((3,), f32)), "temperature must be float32[2], not float32[3]"),
        (ops.sample, replaced(2, ((2,), f32)), "top_k must be int32[2], not float32[2]"),
        (ops.sample, replaced(3, ((), f32)), "top_p must be float32[2], not float32[]"),
        (ops.sample, replaced(4, ((2,), i32)), "min_p must be float32[2], not int32[2]"),
        (ops.sample, replaced(5, ((2,), u32)), "seed must be uint32[2, 2], not uint32[2]"),
        (ops.sample, replaced(6, ((2,), np.int64)), "position must be int32[2], not int64[2]"),
        (ops.repetition_penalty, [((2, 5), f32), ((2, 4), bool), ((2,), f32)], "seen must be bool[2, 5], not bool[2, 4]"),
        (ops.repetition_penalty, [((2, 5), f32), ((2, 5), bool), ((5,), f32)], "penalty must be float32[2], not float32[5]"),
        (ops.repetition_penalty, [((5,), f32), ((5,), bool), ((1,), f32)], "wants float32 logits [B, V]"),
        (ops.mark_tokens, [((2, 5), f32), ((2, 3), i32), ((2,), i32)], "wants bool seen [B, V]"),
        (ops.mark_tokens, [((2, 5), bool), ((2,), i32), ((2,), i32)], "wants token ids [B, T]"),
        (ops.mark_tokens, [((2, 5), bool), ((3, 3), i32), ((2,), i32)], "token_ids must be int32[2, 3], not int32[3, 3]"),
        (ops.mark_tokens, [((2, 5), bool), ((2, 3), i32), ((3,), i32)], "num_tokens must be int32[2], not int32[3]"),
    ],
)
def test_what_is_refused(build, specs, message):
    refused = refusal(build, *specs)
    assert refused.startswith(f"{build.__name__}(") and message in refused


def test_the_best_of_a_row_on_the_cpu_is_argmax():
    """The first of equals, the first NaN, infinities; in rows of one element and many."""
    from poptransformer.backends.xla.sample import _best, _best_on_cpu

    for width in (1, 2, 127, 1000):
        rows = np.random.default_rng(width).integers(-3, 4, (6, width)).astype(np.float32)
        rows[1], rows[2, width // 2 :], rows[3, -1], rows[4, width // 3] = -np.inf, np.nan, np.inf, -np.inf
        assert np.asarray(_best_on_cpu(rows)).tolist() == np.asarray(_best(rows)).tolist() == rows.argmax(-1).tolist()
