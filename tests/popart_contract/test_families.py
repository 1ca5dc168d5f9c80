"""The real engine through the stand-in: every family generates on backend popart what it generates on backend xla.

On one IPU, with its layers over 2 and 4 IPUs, with its weights over 2 and 4 replicas, and both.
"""

import contextlib
import functools
import json

import numpy as np
import pytest
from conftest import REPOSITORY
from popart_contract.standin.module import installed
from tolerance import assert_close

from poptransformer import Session

GOLDEN = REPOSITORY / "tests" / "golden"
NUM_NEW, MAX_LENGTH = 9, 40
# family -> checkpoint, file of golden numbers and key in it, layers of each stage for two and four IPUs
FAMILIES = {
    "gpt2": (REPOSITORY / "examples" / "gpt2" / "gpt2-pocket", ("gpt2", "gpt2-pocket"), [4, 4], [2, 2, 2, 2]),
    "chatglm6b": (GOLDEN / "chatglm6b", ("chatglm6b",), [1, 1], [1, 0, 1, 0]),
    "chatglm2": (GOLDEN / "chatglm2", ("chatglm2",), [1, 1], [0, 1, 0, 1]),
    "llama": (GOLDEN / "llama", ("llama",), [1, 1], [1, 0, 0, 1]),
    "rwkv": (GOLDEN / "rwkv", ("rwkv",), [2, 1], [1, 1, 1, 0]),
}
KIN = ["bloom", "chatglm3", "gemma", "gpt_neox", "mistral", "opt", "phi", "qwen2", "qwen3"]
FAMILIES_AND_KIN = FAMILIES | {name: (GOLDEN / name, (name,), [2, 1] if name == "chatglm3" else [1, 1], None) for name in KIN}
# layout -> replicas, stages, SDK, options
LAYOUTS = {
    "one": (1, 1, "3.2.0", {}),
    "stages-2": (1, 2, "3.4.0", {}),
    "stages-4": (1, 4, "3.2.0", {}),
    "tp-2": (2, 1, "3.2.0", {}),
    "tp-4": (4, 1, "3.4.0", {}),
    "tp-2-stages-2": (2, 2, "3.4.0", {}),
    "stepwise": (1, 2, "3.4.0", {"prefill": "stepwise"}),
}
FLOAT32 = {"rtol": 0, "atol": 1e-4}  # logits of deviation 1 to 8, as in tests/parity.py
# Logits in float16, of deviation 1 to 5, against float32; worst seen: 0.018 in Llama.
FLOAT16 = {"rtol": 0, "atol": 0.04}


@contextlib.contextmanager
def popart_session(family, layout="one", **more):
    """A Session of a family on the stand-in, and the machine it runs on."""
    replicas, stages, sdk, options = LAYOUTS[layout]
    folder, _, two, four = FAMILIES_AND_KIN[family]
    placed = {"popart": options, "num_replicas": replicas, "layers_per_device": {1: None, 2: two, 4: four}[stages]}
    with installed(sdk=sdk) as machine:
        with Session(folder, backend="popart", max_length=MAX_LENGTH, **{"batch_size": 2} | placed | more) as session:
            yield session, machine
        assert machine.attached == 0, "the device was given back"


@functools.cache
def cases(family):
    """Two prompts of unequal length, and what Hugging Face (or the family's own code) generates after them."""
    file, *keys = FAMILIES_AND_KIN[family][1]
    numbers = json.loads((GOLDEN / f"{file}.json").read_text(encoding="utf-8"))
    for key in keys:
        numbers = numbers[key]
    return [case for case in numbers["cases"] if len(case["prompt"]) < 18][:2]


@functools.cache
def by_xla(family):
    """The same on backend xla: (token ids, logprobs) of each prompt."""
    with Session(FAMILIES[family][0], batch_size=2, max_length=MAX_LENGTH) as session:
        return generate(session, family)


def generate(session, family):
    """Greedy tokens and their log-probabilities."""
    prompts = [case["prompt"] for case in cases(family)]
    outs = session.generate(prompts, max_new_tokens=NUM_NEW, ignore_eos=True, logprobs=True)
    return [out.token_ids for out in outs], [out.logprobs for out in outs]


def nodes_of(graph):
    """All nodes, those of bodies included."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from nodes_of(attribute.g)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, layout):
    token_ids, logprobs = by_xla(family)
    assert token_ids == [case["greedy"][:NUM_NEW] for case in cases(family)]
    with popart_session(family, layout) as (session, machine):
        found_ids, found_logprobs = generate(session, family)
    assert found_ids == token_ids
    assert_close(np.float32(found_logprobs), np.float32(logprobs), **FLOAT32)
    check_placement(machine, *LAYOUTS[layout][:2], FAMILIES[family][2:])


@pytest.mark.parametrize("family", KIN)
def test_their_kin(family):
    """What these add (slopes, windows, parallel blocks, tied heads) against the kept numbers, in the widest layout."""
    with popart_session(family, "tp-2-stages-2") as (session, machine):
        assert generate(session, family)[0] == [case["greedy"][:NUM_NEW] for case in cases(family)]
    check_placement(machine, 2, 2, ([1, 1], None))


def check_placement(machine, replicas, stages, layers):
    """The model that has run is spread as it was asked to be: embeddings are on the first IPU, the head on the last."""
    layers = {1: [1], 2: layers[0], 4: layers[1]}[stages]
    view = machine.sessions[-1]._program.view
    numbers = [a.i for node in nodes_of(view.proto.graph) for a in node.attribute if a.name == "__ipu_number"]
    assert (
        set(numbers) == {0, stages - 1} | {i for i, count in enumerate(layers) if count}
        and view.num_ipus == replicas * stages
        and view.replicas == replicas
    )
    cut = [name for name in view.initializers if view.group(name).count == replicas > 1]
    stored = sum(len(view.initializers[name].raw_data) for name in view.initializers)
    shared = sum(len(view.initializers[name].raw_data) for name in view.initializers if name not in cut)
    collectives = [node for node in nodes_of(view.proto.graph) if node.op_type.startswith("ReplicatedAll")]
    if replicas == 1:
        assert not cut and not collectives
    else:
        assert collectives and shared < stored / 10, "nearly all weights are cut"


@pytest.mark.parametrize("layout", ["one", "tp-2-stages-2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_float16(family, layout):
    case = cases(family)[1]
    with popart_session(family, layout, precision="fp16", batch_size=1) as (session, machine):
        found = session.logits(case["prompt"])
    kinds = {tensor.data_type for tensor in machine.sessions[-1]._program.view.proto.graph.initializer}
    assert 10 in kinds, "weights are FLOAT16"
    expected = np.float32(case["logits"])
    assert_close(found[case["positions"]][:, case["tokens"]], expected, **FLOAT16)
