"""Weights are moved into huge pages, and are what they were."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poptransformer.backends.xla import huge_pages
from poptransformer.backends.xla.huge_pages import use_huge_pages


def mapped_huge_bytes(array):
    """Bytes in huge pages of the mapping that an array lies in."""
    address = array.unsafe_buffer_pointer()
    with open("/proc/self/smaps", encoding="ascii") as file:
        inside = False
        for line in file:
            if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(match[1], 16) <= address < int(match[2], 16)
            elif inside and line.startswith("AnonHugePages:"):
                return int(line.split()[1]) << 10
    raise AssertionError("no such mapping")


def random_array(size):
    numbers = np.random.default_rng(0).standard_normal(size, np.float32)
    return jnp.negative(jax.device_put(numbers, jax.local_devices(backend="cpu")[0])).block_until_ready()


def test_arrays_are_moved_and_stay_the_same():
    if not huge_pages._page_bytes():
        pytest.skip("the system has no huge pages, or never uses them")
    array = random_array(6 << 20)  # 24 MiB: a mapping of its own
    before = np.array(array)
    thread = use_huge_pages([array])
    thread.join(60)
    assert not thread.is_alive()
    if not mapped_huge_bytes(array):
        pytest.skip("this kernel cannot move memory into huge pages (Linux 6.1 can), or has none left")
    assert mapped_huge_bytes(array) >= 20 << 20
    np.testing.assert_array_equal(np.asarray(array), before)


def test_where_there_are_none(monkeypatch, tmp_path):
    array = random_array(100)
    monkeypatch.setattr(huge_pages, "SETTINGS", tmp_path)
    assert use_huge_pages([array]) is None
    (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    assert use_huge_pages([array]) is None
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    use_huge_pages([array]).join()
    use_huge_pages([]).join()


def test_ranges_that_are_not_mapped_are_left_out():
    page = 2 << 20
    assert huge_pages._collapse(page, 3 * page, page) == 0
    assert list(huge_pages._runs([1, 2, 3, 7, 9, 10])) == [(1, 4), (7, 8), (9, 11)] and list(huge_pages._runs([])) == []


def test_a_session_moves_its_weights(monkeypatch):
    from session_cases import DICT

    from poptransformer import Session
    from poptransformer.backends.xla import engine

    moved = []
    monkeypatch.setattr(engine, "use_huge_pages", lambda arrays: moved.append(len(list(arrays))))
    with Session(DICT, random_weights=True, platform="cpu") as session:
        session.compile()
        assert moved == [len(list(session.model.parameters()))]
