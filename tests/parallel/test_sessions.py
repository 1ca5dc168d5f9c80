"""What a Session does, over several devices: sampling, batches, streams, scores, long prompts, interrupts; caches in place."""

import numpy as np
import pytest
from parallel_cases import MAX_LENGTH, cases, open_session, shortest
from parallel_cases import join as join_parts
from session_cases import CASES, GREEDY, MIXED, PROMPT, generate_rows, ids, join, whole
from tolerance import assert_close

from poptransformer import Session

# Logits are sums in an order of each number of ranks' own.
FLOAT32 = {"rtol": 1e-5, "atol": 3e-5}
LAYOUTS = {
    "ranks": {"num_replicas": 4},
    "stages": {"layers_per_device": [1, 2]},
    "both": {"num_replicas": 2, "layers_per_device": "auto", "devices": 4},
}


@pytest.fixture(scope="module")
def one():
    with open_session("gpt2", batch_size=3, max_length=61) as session:
        yield session


@pytest.fixture(scope="module", params=LAYOUTS)
def session(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("poptransformer.generation.wave.MAX_BUCKET", 16)  # so that there are prompts of several chunks
        patch.setattr("poptransformer.backends.xla.staged_program.SMALL_BYTES", 0)  # caches of this size would be copied
        with open_session("gpt2", batch_size=3, max_length=61, **LAYOUTS[request.param]) as session:
            yield session


def test_rows_sample_what_they_sample_on_one_device(one, session):
    """Greedy, top_k, top_p, min_p, penalties and seeds side by side; seven rows in waves of three, prompts up to 40 tokens."""
    assert generate_rows(session, MIXED) == generate_rows(one, MIXED)


def test_golden_rows_in_waves(session):
    outs = session.generate([case["prompt"] for case in CASES], max_new_tokens=12, ignore_eos=True)
    assert ids(outs) == [case["greedy"][:12] for case in CASES]
    assert [out.finish_reason for out in outs] == ["length"] * len(CASES)


def test_padding_of_the_vocabulary_is_never_sampled(session):
    """257 tokens over 4 ranks are 260 rows: at a temperature that makes all alike, ids stay below 257."""
    outs = session.generate([[7]] * 3, max_new_tokens=50, temperature=1000.0, seed=[1, 2, 3], ignore_eos=True)
    found = {token for out in outs for token in out.token_ids}
    assert max(found) < 257 and len(found) > 100


def test_streams_join_to_the_whole(session):
    (out,) = session.generate(PROMPT, max_new_tokens=15, temperature=1.0, seed=4, top_k=9)
    pieces = list(session.stream(PROMPT, max_new_tokens=15, temperature=1.0, seed=4, top_k=9))
    assert join(pieces) == whole(out) and len(pieces) > 2
    first, other = session.stream(PROMPT, max_new_tokens=9), session.stream([7], max_new_tokens=9, ignore_eos=True)
    begun = next(first)
    assert join(list(other))[1] == CASES[0]["greedy"][:9]
    assert [*begun.token_ids, *join(list(first))[1]] == GREEDY[:9]


def test_logits_and_scores(one, session):
    """Of a prompt of several chunks."""
    prompt = list(range(3, 40))
    assert_close(session.logits(prompt), one.logits(prompt), **FLOAT32)
    assert_close(session.score(prompt), one.score(prompt), **FLOAT32)
    case = max(CASES, key=lambda case: len(case["prompt"]))
    logits = session.logits(case["prompt"])
    assert_close(logits[case["positions"]][:, case["tokens"]], np.float32(case["logits"]), **FLOAT32)


def test_caches_are_written_in_place(session):
    """Every cache has the memory that it had before the run, on every device."""
    session.generate(PROMPT, max_new_tokens=3)

    def pointers():
        states = {name: state for name, state in session._engine._states.items() if "cache" in name}
        return {
            (name, shard.device): shard.data.unsafe_buffer_pointer()
            for name, state in states.items()
            for shard in state.addressable_shards
        }

    before = pointers()
    session.generate([PROMPT, [7]], max_new_tokens=20, ignore_eos=True)
    assert pointers() == before
    assert len(before) == 6 * session.num_replicas
    devices = {device for _, device in before}
    assert len(devices) == session.num_replicas * len(session.layers_per_device)


@pytest.mark.parametrize("number", [0, 2])
def test_an_interrupt_between_two_pieces(session, monkeypatch, number):
    """Ctrl-C inside the decode loop, or when its program has taken the caches: the next call starts anew."""
    engine, count = session._engine, []
    session.generate([7], max_new_tokens=2)
    program = engine._programs["decode"]
    loops = [part for part in getattr(program, "_parts", ()) if hasattr(part, "parts")]
    run = loops[0].parts[-1].program if loops else program

    def interrupted(*arguments):
        results = run(*arguments)
        count.append(1)
        if len(count) > number or not loops:
            raise KeyboardInterrupt
        return results

    with monkeypatch.context() as patch:
        if loops:
            patch.setattr(loops[0].parts[-1], "program", interrupted)
        else:
            patch.setitem(engine._programs, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.generate(PROMPT, max_new_tokens=9)
    assert not any(np.asarray(state).any() for state in engine._states.values())
    assert ids(session.generate([[7], PROMPT], max_new_tokens=9, ignore_eos=True)) == [CASES[0]["greedy"][:9], GREEDY[:9]]


def test_close_frees_all_devices():
    session = open_session("llama", num_replicas=2, layers_per_device=[1, 1])
    case = shortest("llama")
    assert ids(session.generate([case["prompt"]], max_new_tokens=3)) == [case["greedy"][:3]]
    arrays = [array for places in session._engine._parameters.values() for array in places.values()]
    arrays += session._engine._states.values()
    session.close()
    assert len(arrays) > 20 and all(array.is_deleted() for array in arrays)


def test_random_weights_do_not_depend_on_the_ranks():
    """What is drawn for a matrix is cut: the ranks' parts joined are what one device draws."""
    config = {"model_type": "gpt2", "vocab_size": 51, "n_embd": 12, "n_head": 3, "n_layer": 1, "n_positions": 40}
    options = {"random_weights": True, "platform": "cpu", "custom_ops": False, "execution_cache_dir": ""}
    with Session(config, **options) as one, Session(config, num_replicas=2, **options) as two:
        one.load()
        two.load()
        whole = {name: np.asarray(places[0]) for name, places in one._engine._parameters.items()}
        for parameter in two.model.parameters():
            array = two._engine._parameters[parameter.name][0]
            shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
            parts = [np.asarray(shard.data) for shard in shards]
            assert np.array_equal(join_parts(parameter, parts), whole[parameter.name]), parameter.name
    assert whole["transformer.wte.weight"].std() == pytest.approx(0.02, rel=0.1)


def test_a_rows_own_numbers_reach_every_rank():
    """ChatGLM-6B's rows say where their context ends; prompts are not cut into chunks."""
    golden = [case for case in cases("chatglm6b") if len(case["prompt"]) < MAX_LENGTH - 10][:4]
    with open_session("chatglm6b", batch_size=4, num_replicas=2) as session:
        outs = session.generate([case["prompt"] for case in golden], max_new_tokens=8, ignore_eos=True)
    assert ids(outs) == [case["greedy"][:8] for case in golden]
