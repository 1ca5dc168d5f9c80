"""What Session says of its device, graphs and timings."""

import re
import shutil

import numpy as np
import pytest
from session_cases import CASES, DICT, GREEDY, PROMPT, TEXT, ids, join

from poptransformer import Session, UserError


def test_closing(tiny):
    session = Session(tiny, batch_size=2)
    stream = session.stream(PROMPT, ignore_eos=True)
    next(stream)
    session.close()
    session.close()
    for call in (
        lambda: next(stream),
        lambda: session.generate(PROMPT),
        lambda: list(session.stream(PROMPT)),
        lambda: session.logits(PROMPT),
        lambda: session.score(PROMPT),
        lambda: session.run("decode", {}),
        session.compile,
    ):
        with pytest.raises(UserError, match="this Session is closed"):
            call()


def test_closing_before_the_first_call(tiny):
    with Session(tiny, backend="reference") as session:
        pass
    with pytest.raises(UserError, match="this Session is closed"):
        session.generate([1])


def test_the_context_manager_closes_after_an_error(tiny):
    with pytest.raises(ZeroDivisionError), Session(tiny, backend="reference") as session:
        _ = 1 / 0
    with pytest.raises(UserError, match="this Session is closed"):
        session.generate([1])


def test_compile_does_the_work_ahead(tiny, monkeypatch):
    with Session(tiny, backend="reference") as session:
        assert session.timings_s["load"] == 0 and not session._engine.graphs
        session.compile([1, 20, 61])
        assert set(session._engine.graphs) == {"decode", "prefill_32", "prefill_61"}
        monkeypatch.setattr(session._engine, "compile", lambda *_: pytest.fail("compiled again"))
        session.generate([PROMPT * 2], max_new_tokens=2)
        session.compile()


def test_graphs_by_name(session):
    for name in ("decode", "prefill_16", "logits_3", "score_61", "generate_8"):
        assert session.graph(name).name == name
    for name in ("", "decode_3", "prefill", "prefill_", "prefill_x", "prefill_-3", "prefill_1.5", "nonsense_3", "_3"):
        with pytest.raises(UserError, match="no graph .*; there are decode, prefill_T, logits_T, score_T and generate_T"):
            session.graph(name)
    for name in ("prefill_0", "logits_62", "score_9999999999999999999"):
        with pytest.raises(UserError, match="the length must be in 1 .. max_length=61"):
            session.graph(name)


def decode_inputs(session, **rows):
    count = session.batch_size
    inputs = {
        "temperature": np.zeros(count, np.float32), "top_k": np.zeros(count, np.int32), "top_p": np.ones(count, np.float32),
        "min_p": np.zeros(count, np.float32), "repetition_penalty": np.ones(count, np.float32),
        "seed": np.zeros((count, 2), np.uint32), "stop_ids": np.full((count, 64), -1, np.int32),
    }  # fmt: skip
    return inputs | {name: np.array(value, np.int32) for name, value in rows.items()}


def test_graphs_run_by_hand_give_what_generate_gives(session):
    stream = session.stream([7], max_new_tokens=9, ignore_eos=True)
    pieces = [next(stream)]
    padded = np.zeros((3, 16), np.int32)
    padded[0, :10] = PROMPT[:-1]
    prompt = {
        "input_ids": padded, "cache_len": np.zeros(3, np.int32), "num_tokens": np.array([10, 0, 0], np.int32),
        "is_fresh": np.ones(3, bool),
    }  # fmt: skip
    last = decode_inputs(session, token=[PROMPT[-1], 0, 0], max_new=[7, 0, 0])
    session.run("prefill_16", prompt)
    outputs = session.run("decode", last | {"cache_len": np.array([10, 0, 0], np.int32), "is_fresh": np.zeros(3, bool)})
    assert outputs["num_new"].tolist() == [7, 0, 0] and outputs["tokens"][0, :7].tolist() == GREEDY[:7]
    outputs = session.run("generate_16", prompt | last)
    assert outputs["num_new"].tolist() == [7, 0, 0] and outputs["tokens"][0, :7].tolist() == GREEDY[:7]
    assert join(pieces + list(stream))[1] == CASES[0]["greedy"][:9]  # a stream notices that its caches are gone
    with pytest.raises(UserError, match="takes inputs .*, given are \\['input_ids'\\]"):
        session.run("prefill_16", {"input_ids": padded})


def test_timings(session):
    outs = session.generate([[7], PROMPT, CASES[2]["prompt"], [8]], max_new_tokens=[5, 20, 1, 3], ignore_eos=True)
    first, second = outs[0].timings, outs[3].timings
    assert first is outs[2].timings is not second
    assert (first.prefill_tokens, first.decode_tokens, first.decode_steps) == (0 + 10 + 22, 26, 20)
    assert (second.prefill_tokens, second.decode_tokens, second.decode_steps) == (0, 3, 3)
    assert first.prefill_ms > 0 and second.prefill_ms == 0 and second.prefill_tokens_per_s == 0
    for timings in (first, second):
        assert timings.decode_ms_per_token * timings.decode_steps == pytest.approx(timings.decode_ms)
        assert timings.decode_tokens_per_s * timings.decode_ms == pytest.approx(1e3 * timings.decode_tokens)
        assert timings.weight_bytes == session.weight_bytes_per_token
        assert timings.decode_gb_per_s * timings.decode_ms_per_token * 1e6 == pytest.approx(timings.weight_bytes)
    assert all(session.timings_s[key] > 0 for key in ("open", "load", "compile"))


def test_weight_bytes_are_what_a_step_reads(reference, texts):
    sizes = {parameter.name: parameter.spec.num_bytes for parameter in reference.model.parameters()}
    assert reference.weight_bytes_per_token == sum(sizes.values()) - sizes["transformer.wpe.weight"]
    assert texts.weight_bytes_per_token == sum(p.spec.num_bytes for p in texts.model.parameters()) - 512 * 256 * 4


def test_report(texts):
    from poptransformer.report import report

    outs = texts.generate([TEXT, TEXT, TEXT], max_new_tokens=4)
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in report(texts, outs).split("\n"))
    assert lines["decode"].endswith("ms/token over 12 tokens in 8 steps")
    assert lines["prefill"].endswith(f"ms for {3 * (len(outs[0].prompt_token_ids) - 1)} tokens")
    assert lines["batch size"] == "2, up to 128 tokens a row"
    assert report(texts, []).count("\n") == len(lines) - 1


def test_device_info(reference, xla):
    assert reference.device_info.platform == "numpy" and reference.memory_bandwidth_gb_per_s() is None
    assert xla.device_info.platform in ("cpu", "cuda", "tpu") and xla.device_info.name


def test_random_weights(tiny, tmp_path):
    with Session(DICT, random_weights=True, batch_size=2) as session:
        assert session.tokenizer is None and session.eos_token_ids == (49,) and session.max_length == 40
        first = ids(session.generate([[1, 2], [3]], max_new_tokens=6))
    with Session(DICT, random_weights=True, batch_size=2) as session:
        assert ids(session.generate([[1, 2], [3]], max_new_tokens=6)) == first
    shutil.copy(tiny / "config.json", tmp_path)
    with Session(tmp_path, random_weights=True, backend="reference") as session:
        assert len(session.generate([1], max_new_tokens=2, ignore_eos=True)[0].token_ids) == 2
    with Session(tiny, random_weights=True, backend="reference") as session:
        assert ids(session.generate(PROMPT, max_new_tokens=9, ignore_eos=True)) != [GREEDY[:9]]


def test_the_default_max_length_is_at_most_2048():
    with Session(DICT | {"n_positions": 4096}, random_weights=True, backend="reference") as session:
        assert session.max_length == 2048
    with Session(DICT | {"n_positions": 4096}, random_weights=True, backend="reference", max_length=3000) as session:
        assert session.max_length == 3000


def test_compiled_programs_are_kept_where_asked(tiny, tmp_path):
    folder = tmp_path / "programs"
    with Session(tiny, max_length=7, execution_cache_dir=str(folder)) as session:
        session.generate([1], max_new_tokens=1)
    assert any(folder.iterdir())
    with Session(tiny, max_length=8, execution_cache_dir="") as session:
        session.generate([1], max_new_tokens=1)
    with Session(tiny, max_length=7, execution_cache_dir=folder) as session:
        assert len(session.generate([1], max_new_tokens=1)[0].token_ids) == 1


def test_compile_takes_any_iterable_and_refuses_lengths_that_do_not_fit(tiny):
    with Session(tiny, backend="reference") as session:
        session.compile(length for length in (5, 40))
        assert {name for name in session._engine.graphs if "prefill" in name} == {"prefill_16", "prefill_61"}
        with pytest.raises(UserError, match=r"prompt_lengths: \[0, 62\] are not in 1 .. max_length=61"):
            session.compile([0, 61, 62])


def test_a_program_runs_once_before_its_first_use_and_changes_nothing(tiny):
    """The run that compiling ends with has no token that counts, also between two chunks of a prompt."""
    with Session(tiny, backend="reference", max_length=61) as session:
        session.run("prefill_16", {
            "input_ids": np.arange(16, dtype=np.int32)[None], "cache_len": np.zeros(1, np.int32),
            "num_tokens": np.full(1, 16, np.int32), "is_fresh": np.ones(1, bool),
        })  # fmt: skip
        before = {name: array.copy() for name, (array,) in session._engine._states.items()}  # of the only rank
        assert any(array.any() for array in before.values())
        for name in ("decode", "prefill_32", "logits_16", "score_16", "generate_16"):
            session._prepare(name)
        for name, (array,) in session._engine._states.items():
            np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("lengths", [5, ["a"], [1.5]])
def test_compile_refuses_what_is_no_length(tiny, lengths):
    with Session(tiny, backend="reference") as session, pytest.raises(UserError, match="prompt_lengths"):
        session.compile(lengths)
