"""Session.generate: batches, prompts, sampling, and how rows end."""

import json
import re
import shutil

import numpy as np
import pytest
from session_cases import CASES, DICT, GOLDEN, GREEDY, MIXED, PROMPT, TEXT, generate_rows, ids, join, whole

from poptransformer import Session, UserError

# ---- batches


def test_a_batch_equals_each_row_alone(xla, alone):
    """Any neighbours, any place in the batch, more rows than the batch has room for."""
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    assert list(map(len, alone)) == [15] * 6 + [1]
    generator = np.random.default_rng(0)
    for count in (1, 2, 3, 3, 3, 7, 7):
        order = generator.permutation(len(MIXED))[:count]
        assert generate_rows(xla, [MIXED[i] for i in order]) == [alone[i] for i in order], order


def test_a_batch_equals_each_row_alone_on_the_reference(reference, alone):
    assert generate_rows(reference, MIXED[:4]) == alone[:4]


def test_waves_keep_the_order(session):
    prompts = [[7], PROMPT, CASES[2]["prompt"], CASES[3]["prompt"]] * 2
    greedy = [CASES[i]["greedy"][:5] for i in (0, 1, 2, 3)] * 2
    outs = session.generate(prompts, max_new_tokens=5, ignore_eos=True)
    assert ids(outs) == greedy
    assert [out.prompt_token_ids for out in outs] == prompts
    timings = [id(out.timings) for out in outs]
    assert timings[0] == timings[2] != timings[3] == timings[5] != timings[6] == timings[7]


def test_rows_that_all_end_at_once(session):
    outs = session.generate([[7], PROMPT, [9]], max_new_tokens=1)
    assert [len(out.token_ids) for out in outs] == [1, 1, 1]
    outs = session.generate([[7], [7], [7]], stop_token_ids=CASES[0]["greedy"][0])
    assert [(out.token_ids, out.finish_reason) for out in outs] == [([CASES[0]["greedy"][0]], "stop")] * 3


# ---- prompts


@pytest.mark.parametrize(
    "prompt",
    [
        PROMPT,
        tuple(PROMPT),
        np.array(PROMPT),
        np.array(PROMPT, np.uint8),
        [PROMPT],
        np.array([PROMPT]),
        [np.int32(i) for i in PROMPT],
    ],
    ids=["list", "tuple", "array", "uint8", "list of one", "matrix", "numpy scalars"],
)
def test_prompts_of_ids(session, prompt):
    (out,) = session.generate(prompt, max_new_tokens=4, ignore_eos=True)
    assert out.token_ids == GREEDY[:4] and out.prompt_token_ids == PROMPT and out.text is None


def test_prompts_of_text_and_ids_together(texts):
    tokens = texts.tokenizer.encode(TEXT)
    outs = texts.generate([TEXT, tokens, tuple(tokens)], max_new_tokens=5)
    assert ids(outs) == [GOLDEN["gpt2-pocket"]["cases"][0]["greedy"][:5]] * 3
    assert [out.text for out in outs] == [", there was a little"] * 3


@pytest.mark.parametrize("empty", [[[]], np.zeros(0, np.int32), [()]])
def test_an_empty_prompt_begins_with_bos(session, empty):
    assert session.generate(empty, max_new_tokens=4)[0].prompt_token_ids == [255]
    assert ids(session.generate(empty, max_new_tokens=4)) == ids(session.generate([255], max_new_tokens=4))


def test_an_empty_text_begins_with_bos(texts):
    (out,) = texts.generate("", max_new_tokens=4)
    assert out.prompt_token_ids == [0] and len(out.token_ids) == 4


def test_an_empty_prompt_without_bos():
    with Session(DICT, random_weights=True, backend="reference") as session:
        with pytest.raises(
            UserError, match=re.escape("prompt 0: is empty, and the model has no token to begin with (bos_token_id)")
        ):
            session.generate([[]])


def test_a_checkpoint_without_tokenizer_refuses_text(reference):
    for call in (reference.generate, reference.stream, reference.logits, reference.score):
        with pytest.raises(UserError, match="prompt 0: is text, but the checkpoint has no tokenizer; give token ids"):
            call("Hello")
    with pytest.raises(UserError, match=re.escape("stop=('x',): the checkpoint has no tokenizer; use stop_token_ids")):
        reference.generate([1], stop="x")


# ---- sampling


def test_seeds(session):
    def draw(**settings):
        return ids(session.generate(PROMPT, max_new_tokens=20, temperature=1.5, ignore_eos=True, **settings))

    assert draw(seed=1) == draw(seed=1) == draw(seed=np.int32(1)) == draw(seed=[1])
    assert draw(seed=1) != draw(seed=2) != draw(seed=1 + 2**32)
    assert draw(seed=-1) == draw(seed=2**64 - 1)
    (first,) = session.generate(PROMPT, max_new_tokens=20, temperature=1.5)
    (second,) = session.generate(PROMPT, max_new_tokens=20, temperature=1.5)
    assert first.seed != second.seed
    (again,) = session.generate(PROMPT, max_new_tokens=20, temperature=1.5, seed=first.seed)
    assert again.token_ids == first.token_ids


def test_both_backends_draw_the_same(reference, xla):
    settings = {"max_new_tokens": 10, "temperature": 1.2, "top_k": 30, "top_p": 0.9, "seed": [1, 2, 3]}
    prompts = [PROMPT, [5], CASES[2]["prompt"]]
    assert ids(reference.generate(prompts, **settings)) == ids(xla.generate(prompts, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0},
        {"temperature": 0, "top_k": 50},
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1},
        {"temperature": 1e-300},
    ],
    ids=str,
)
def test_greedy_in_many_ways(session, settings):
    assert ids(session.generate(PROMPT, max_new_tokens=12, ignore_eos=True, seed=4, **settings)) == [GREEDY[:12]]


def test_top_k_above_the_vocabulary_is_all_of_it(session):
    settings = {"max_new_tokens": 12, "seed": 5, "temperature": 1.0}
    assert ids(session.generate(PROMPT, top_k=10**30, **settings)) == ids(session.generate(PROMPT, **settings))
    assert ids(session.generate(PROMPT, top_k=257, **settings)) == ids(session.generate(PROMPT, **settings))


def test_top_k_keeps_to_the_best(xla):
    for seed in range(5):
        (out,) = xla.generate(PROMPT, max_new_tokens=10, top_k=3, temperature=5.0, seed=seed, ignore_eos=True)
        logits = xla.logits(PROMPT + out.token_ids)[len(PROMPT) - 1 : -1]
        assert all(token in np.argsort(row)[-3:] for row, token in zip(logits, out.token_ids, strict=True))


def test_repetition_penalty(session):
    (plain,) = session.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    (new,) = session.generate(PROMPT, max_new_tokens=30, ignore_eos=True, repetition_penalty=1e30)
    assert len(set(plain.token_ids)) < 20
    assert len(set(new.token_ids)) == 30 and not set(new.token_ids) & set(PROMPT)
    (old,) = session.generate(PROMPT, max_new_tokens=30, ignore_eos=True, repetition_penalty=1e-30)
    assert set(old.token_ids) <= set(PROMPT)
    # Tokens of earlier calls don't count.
    assert ids(session.generate(PROMPT, max_new_tokens=30, ignore_eos=True, repetition_penalty=1e30)) == [new.token_ids]


# ---- ends


def test_stop_ids(session):
    first = GREEDY[5]
    end = GREEDY.index(first) + 1
    (out,) = session.generate(PROMPT, stop_token_ids=first, ignore_eos=True)
    assert (out.token_ids, out.finish_reason) == (GREEDY[:end], "stop")
    outs = session.generate([PROMPT] * 3, stop_token_ids=[[first], [], [GREEDY[0]]], max_new_tokens=10, ignore_eos=True)
    assert ids(outs) == [GREEDY[:end], GREEDY[:10], GREEDY[:1]]
    assert [out.finish_reason for out in outs] == ["stop", "length", "stop"]
    many = [i for i in range(257) if i not in GREEDY][:63]
    assert ids(session.generate(PROMPT, stop_token_ids=[*many, first], ignore_eos=True)) == [GREEDY[:end]]


def test_stop_strings(texts):
    (plain,) = texts.generate(TEXT, max_new_tokens=30)
    for stop in ("little girl", "girl named L", " named", "y who", ["zzz", "named Lily"], "l", ", there"):
        (out,) = texts.generate(TEXT, max_new_tokens=30, stop=stop)
        end = min(at for at in map(plain.text.find, [stop] if isinstance(stop, str) else stop) if at >= 0)
        assert (out.text, out.finish_reason) == (plain.text[:end], "stop"), stop
        assert out.token_ids == plain.token_ids[: len(out.token_ids)]
        assert join(texts.stream(TEXT, max_new_tokens=30, stop=stop)) == whole(out)
    outs = texts.generate([TEXT, TEXT, TEXT], max_new_tokens=30, stop=[[" girl"], [], ["lived", " who"]])
    assert [out.text for out in outs] == [plain.text.partition(" girl")[0], plain.text, plain.text.partition(" who")[0]]
    assert [out.finish_reason for out in outs] == ["stop", "length", "stop"]


def test_text_is_held_back_only_while_it_may_be_a_stop_string(texts):
    (plain,) = texts.generate(TEXT, max_new_tokens=12)
    stop = plain.text[-4:] + "never"
    pieces = list(texts.stream(TEXT, max_new_tokens=12, stop=stop))
    assert join(pieces) == whole(plain)
    sent = "".join(piece.text for piece in pieces[:-1])
    assert plain.text.startswith(sent) and not sent.endswith(plain.text[-4:])


def test_every_eos_of_both_files(tiny, tmp_path, caplog):
    folder = shutil.copytree(tiny, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [CASES[0]["greedy"][2], 256]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [GREEDY[1], 9999, -1], "bos_token_id": None}))
    with Session(folder, backend="reference", batch_size=2) as session:
        assert session.eos_token_ids == (CASES[0]["greedy"][2], 256, GREEDY[1])
        assert "eos_token_id: [9999, -1] are outside the vocabulary of 257 and are ignored" in caplog.text
        outs = session.generate([[7], PROMPT], max_new_tokens=10)
        assert [(out.token_ids, out.finish_reason) for out in outs] == [
            (CASES[0]["greedy"][:3], "stop"),
            (GREEDY[:2], "stop"),
        ]
        outs = session.generate([[7], PROMPT], max_new_tokens=10, ignore_eos=[True, False])
        assert ids(outs) == [CASES[0]["greedy"][:10], GREEDY[:2]]
        assert [out.finish_reason for out in outs] == ["length", "stop"]


def test_lengths(session):
    assert [len(session.generate(PROMPT, max_new_tokens=n, ignore_eos=True)[0].token_ids) for n in (1, 2, 37)] == [1, 2, 37]
    for length in (60, 59, 45):
        (out,) = session.generate(list(range(length)), ignore_eos=True)
        assert (len(out.token_ids), out.finish_reason) == (61 - length, "length")
    (out,) = session.generate(list(range(50)), ignore_eos=True, max_new_tokens=10**30)
    assert len(out.token_ids) == 11


def test_max_length_of_one_and_two(tiny):
    with Session(tiny, backend="reference", max_length=1) as session:
        assert session.logits([7]).shape == (1, 257)
        with pytest.raises(UserError, match="prompt 0: 1 tokens fill max_length=1, which leaves no room for a new one"):
            session.generate([7])
    with Session(tiny, max_length=2, batch_size=2) as session:
        assert ids(session.generate([[7], [3], [7]])) == [[CASES[0]["greedy"][0]], [int(session.logits([3])[0].argmax())]] + [
            [CASES[0]["greedy"][0]]
        ]
        assert session.score([7, 9]).shape == (1,)


def test_a_stop_string_ends_the_work_soon_and_only_kept_tokens_count(texts):
    plain = texts.generate(TEXT, max_new_tokens=60)[0]
    out = texts.generate(TEXT, max_new_tokens=60, stop=plain.text[:6])[0]
    assert out.text == "" and out.finish_reason == "stop"
    assert out.timings.decode_tokens == len(out.token_ids) < out.timings.decode_steps <= 8


def test_the_tokenizer_names_the_ends_that_the_configs_do_not(pocket, tmp_path):
    folder = shutil.copytree(pocket, tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | {"eos_token_id": None, "bos_token_id": None}))
    with Session(folder, backend="reference") as session:
        assert session.eos_token_ids == (0,)
        assert session.generate("", max_new_tokens=1)[0].prompt_token_ids == [0]
