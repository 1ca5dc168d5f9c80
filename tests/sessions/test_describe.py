"""What Session.describe says: which lowering each op took, and why."""

import logging
import re

import jax.numpy as jnp
import numpy as np
import pytest
from parity import needs_library
from run_op import xla
from session_cases import DICT

from poptransformer import Session, UserError, ops
from poptransformer.backends.engine import Choice
from poptransformer.backends.xla.lowering import Context
from poptransformer.description import count_choices, lowering_line, lowering_table
from poptransformer.graph import Graph

NO_KERNEL = "plain XLA: no kernel for this op"


def described(counted):
    """{op: {lowering: count}}."""
    table = {}
    for choice, count in counted:
        table.setdefault(choice.op, {})[str(choice)] = count
    return table


@needs_library
@pytest.mark.parametrize(("precision", "product"), [("fp32", "linear"), ("int8", "packed_linear")])
def test_kernels_are_named_and_counted(precision, product, caplog):
    caplog.set_level(logging.INFO, "poptransformer")
    with Session(DICT, random_weights=True, platform="cpu", custom_ops=True, precision=precision) as session:
        description = session.describe()
        isa = session._engine._library.isa
        graphs = {name: described(counted) for name, counted in description.graphs.items()}
        assert list(graphs) == ["decode"]
        decode = graphs["decode"]
        # Two layers of query, key and value in one, output, and two of the MLP; and the head.
        program = f"kernel step_program ({isa})"
        assert decode[product] == {program: 9}
        assert decode["attention"] == {program: 2}
        assert decode["layer_norm"] == {program: 5}
        assert decode["sample"] == {NO_KERNEL: 1}
        assert sum(sum(ways.values()) for ways in decode.values()) == len(
            [node for node in session.graph("decode").walk() if node.op != "loop"]
        )
        assert f"  {program}" in str(description) and f"9 {product}" in str(description)
        assert description.precision == precision and description.cache.startswith("KV cache float")
        assert description.weight_bytes_per_token == session.weight_bytes_per_token < description.weight_bytes
        num_bytes = 4 if precision == "fp32" else 2
        assert description.cache_bytes == 2 * 2 * 40 * 12 * num_bytes  # keys and values of two layers
        assert re.search(rf"ops of decode:\n +\d+  {re.escape(program)}", caplog.text)


@needs_library
def test_a_kernel_that_does_not_take_an_op_says_why():
    with Session(DICT, random_weights=True, platform="cpu", custom_ops=True, batch_size=9) as session:
        decode = described(session.describe().graphs["decode"])
        assert decode["linear"] == {"plain XLA: 9 rows in float32, the kernel takes up to 8": 9}
        assert list(decode["attention"]) == [f"kernel attention ({session._engine._library.isa})"]


@needs_library
@pytest.mark.parametrize(("precision", "is_rounded"), [("fp32", False), ("bf16", True), ("int4", True)])
def test_prefill_attends_in_tiles_where_products_are_rounded(precision, is_rounded):
    with Session(DICT, random_weights=True, platform="cpu", custom_ops=True, precision=precision, max_length=20) as session:
        session.compile([5])
        library, graphs = session._engine._library, session.describe().graphs
        is_tiled = is_rounded and library.has_tiles
        kernel = "kernel step_program (tiles)" if is_tiled else f"kernel attention ({library.isa})"
        assert described(graphs["prefill_16"])["attention"] == {kernel: 2}
        assert list(described(graphs["decode"])["attention"])[0].endswith(f"({library.isa})")


def test_without_custom_ops():
    with Session(DICT, random_weights=True, custom_ops=False, max_length=20) as session:
        session.compile([5])
        description = session.describe()
        for name in ("decode", "prefill_16"):
            graph = described(description.graphs[name])
            assert graph["attention"] == {"plain XLA: custom_ops is false": 2}
            assert graph["add"].keys() == {NO_KERNEL}
        assert "plain XLA: custom_ops is false" in str(description) and "none (plain XLA)" in str(description)


def test_the_reason_is_the_missing_library(monkeypatch):
    from poptransformer.backends.xla import custom_ops

    def missing():
        raise custom_ops.MissingLibraryError("libcustom_ops_cpu.so not found")

    monkeypatch.setattr(custom_ops, "load_cpu_library", missing)
    engine, graph = xla("auto"), Graph("product")
    x, weight = graph.input("x", (2, 3), np.float32), graph.input("w", (4, 3), np.float32)
    graph.output("y", ops.linear(x, weight, None))
    engine.compile("product", graph)
    assert engine.choices["product"] == [Choice("linear", "plain XLA", "the kernels are not built")]


def test_the_reference_backend(reference):
    decode = reference.describe().graphs["decode"]
    assert {choice.lowering for choice, _ in decode} == {"NumPy"} and all(not choice.reason for choice, _ in decode)


def test_a_closed_session_describes_nothing():
    session = Session(DICT, random_weights=True, backend="reference")
    session.close()
    with pytest.raises(UserError, match="this Session is closed"):
        session.describe()


def test_a_node_that_is_traced_twice_counts_once_and_nested_ones_are_apart():
    graph = Graph("inner")
    x = graph.input("x", (3,), jnp.float32)
    outer = ops.exp(x).graph.nodes[0]
    inner = ops.exp(x).graph.nodes[1]
    context = Context("cpu", frozenset(["exp"]), "avx2")
    for _ in range(2):
        with context.lowering(outer):
            assert not context.use_kernel("other") and not context.use_kernel("exp", lambda: "3 of them")
            with context.lowering(inner):
                assert context.use_kernel("exp") and context.use_kernel("exp", isa=lambda: "tiles")
    assert list(context.choices.values()) == [
        Choice("exp", "kernel exp (avx2), exp (tiles)"),
        Choice("exp", "plain XLA", "custom_ops is false; 3 of them"),
    ]


def test_the_table_and_the_line():
    choices = [Choice("add", "plain XLA", "no kernel")] * 60 + [Choice("mul", "plain XLA", "no kernel")]
    counted = count_choices([*choices, Choice("wkv", "kernel wkv (avx2)")])
    assert lowering_table(counted) == (
        "      1  kernel wkv (avx2)     wkv\n     61  plain XLA: no kernel  60 add, 1 mul"  # kernels first
    )
    assert lowering_line(counted) == "1 kernel wkv (avx2), 61 plain XLA"
    assert lowering_table(()) == "" and lowering_line(()) == ""
    many = [Choice(f"op_{number:02}", "plain XLA", "no kernel") for number in range(40)]
    lines = lowering_table(count_choices(many)).splitlines()
    assert len(lines) > 2 and max(map(len, lines)) <= 128 and lines[1].startswith(" " * 31)
