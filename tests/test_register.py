"""REGISTER: scoped values, one set for each thread, and the errors."""

import threading

import pytest

from poptransformer import UserError
from poptransformer.register import REGISTER, Register


@pytest.fixture
def register():
    register = Register()
    register.declare("batch_size", "rows")
    register.declare("max_length", "positions")
    return register


def test_scopes_nest_and_put_the_old_values_back(register):
    with register.scope(batch_size=1, max_length=8) as inside:
        assert inside is register and (register.batch_size, register.max_length) == (1, 8)
        with register.scope(batch_size=2):
            assert (register.batch_size, register.max_length) == (2, 8)
        assert register.batch_size == 1
        with pytest.raises(RuntimeError), register.scope(batch_size=3):
            raise RuntimeError
        assert register.batch_size == 1
    with pytest.raises(UserError, match=r"'batch_size' has no value here; set it with REGISTER.scope\(batch_size=...\)"):
        _ = register.batch_size


def test_falsy_values_are_values(register):
    with register.scope(batch_size=0, max_length=None):
        assert register.batch_size == 0 and register.max_length is None


def test_unknown_keys_come_with_the_near_miss(register):
    for use in (lambda: register.batchsize, lambda: register.scope(batchsize=1).__enter__()):
        with pytest.raises(UserError) as caught:
            use()
        message = "unknown register key 'batchsize'; did you mean 'batch_size'?; keys: batch_size, max_length"
        assert str(caught.value) == message
    with pytest.raises(UserError, match="unknown register key 'colour'; keys: "):
        _ = register.colour
    with register.scope(batch_size=1), pytest.raises(UserError), register.scope(batch_size=2, batchsize=3):
        pass
    assert not hasattr(register, "_private"), "Python's own look-ups get the error they expect"


def test_a_second_declaration_is_an_error(register):
    with pytest.raises(UserError, match="'batch_size' is already declared: rows"):
        register.declare("batch_size", "bytes")


def test_each_thread_has_its_own_values(register):
    """Two threads hold different values at the same moment; neither sees the other's nor the starter's."""
    meeting, seen = threading.Barrier(2, timeout=30), {}

    def work(size):
        before = "none"
        try:
            before = register.batch_size
        except UserError:
            pass
        with register.scope(batch_size=size):
            meeting.wait()
            first = register.batch_size
            meeting.wait()
            with register.scope(batch_size=10 * size):
                meeting.wait()
                seen[size] = (before, first, register.batch_size)
                meeting.wait()

    with register.scope(batch_size=7):
        threads = [threading.Thread(target=work, args=(size,)) for size in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert register.batch_size == 7
    assert seen == {1: ("none", 1, 10), 2: ("none", 2, 20)}


def test_registers_are_independent_and_the_real_one_is_empty_by_itself(register):
    with register.scope(batch_size=5), pytest.raises(UserError, match="no value here"):
        _ = REGISTER.batch_size
    with REGISTER.scope(batch_size=1, max_length=2, weight_dtype=3, packing=None, dtype=4, cache_dtype=5, world_size=6):
        assert REGISTER.world_size == 6
