"""The whole op set: each op has a rule, reference, lowering, function, test and ONNX translation, or a listed gap."""

import importlib
import inspect
import pathlib
import re

import pytest

from poptransformer import ops
from poptransformer.backends.popart import lowering as popart
from poptransformer.backends.xla.engine import XlaEngine  # noqa: F401  fills the table of lowerings
from poptransformer.backends.xla.lowering import LOWERINGS
from poptransformer.onnx_writer import TRANSLATIONS
from poptransformer.ops import OPS

popart.load_families()
PACKAGE = pathlib.Path(ops.__file__).resolve().parents[1]
TESTS = pathlib.Path(__file__).resolve().parent
# Op -> the name of its function, where Python's own has the op's.
FUNCTIONS = {"slice": "slice_axis"}
# (op, what it lacks) -> why.
GAPS = {("loop", "reference"): "the body is a graph, which the reference engine walks"}


def function_of(name):
    return getattr(ops, FUNCTIONS.get(name, name))


@pytest.mark.parametrize("name", OPS)
def test_op_is_whole(name):
    op, gaps = OPS[name], set()
    assert op.name == name and callable(op.infer)
    if inspect.getsource(op.reference).count("raise AssertionError"):
        gaps.add((name, "reference"))
    if name not in LOWERINGS:
        gaps.add((name, "XLA lowering"))
    if name not in popart.LOWERINGS:
        gaps.add((name, "PopART lowering"))
    if name not in TRANSLATIONS:
        gaps.add((name, "ONNX translation"))
    function = function_of(name)
    if not (function.__doc__ or "").strip():
        gaps.add((name, "docstring"))
    assert function.__name__ in ops.__all__
    test_file = TESTS / f"test_{op.family}.py"
    if not test_file.is_file() or not re.search(rf"\b{name}\b", test_file.read_text()):
        gaps.add((name, "test"))
    assert gaps == {gap for gap in GAPS if gap[0] == name}


def test_nothing_is_left_over():
    """No lowering, translation or function without its op."""
    assert set(LOWERINGS) == set(popart.LOWERINGS) == set(TRANSLATIONS) == set(OPS)
    assert {*map(function_of, OPS)} == {getattr(ops, name) for name in ops.__all__ if name != "OPS"}
    assert {name for name, _ in GAPS} <= set(OPS)


def test_one_name_finds_everything():
    """A family is one file beside the others of its name."""
    families = {op.family for op in OPS.values()}
    for folder in (PACKAGE / "ops", PACKAGE / "backends" / "xla", PACKAGE / "backends" / "popart"):
        assert families <= {path.stem for path in folder.glob("*.py")}
    assert families == {path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py")} - {"op_set"}
    for name, op in OPS.items():
        assert hasattr(importlib.import_module(f"poptransformer.ops.{op.family}"), function_of(name).__name__)
