"""Devices: the table, this machine, and what is refused."""

import pytest

from poptransformer.errors import UnsupportedError, UserError
from poptransformer.planning import devices
from poptransformer.planning.devices import DEVICES, find_device, this_machine


def test_ipus_have_900_mb_in_1472_tiles_of_624_kib():
    for name in ("mk2", "bow", "c600"):
        ipu = find_device(name)
        assert ipu.kind == "ipu" and ipu.memory_bytes == 900_000_000
        assert (ipu.num_tiles, ipu.tile_bytes) == (1472, 638_976)
        assert ipu.memory_bytes < ipu.num_tiles * ipu.tile_bytes
    assert DEVICES["mk2"].bandwidth_gb_per_s < DEVICES["c600"].bandwidth_gb_per_s < DEVICES["bow"].bandwidth_gb_per_s


def test_names_are_found_in_any_letter_case():
    assert find_device("H200") == DEVICES["h200"]
    assert (find_device("h200").memory_bytes, find_device("h200").bandwidth_gb_per_s) == (141 * 10**9, 4800)


def test_figures_can_be_given():
    device = find_device("l4", memory_gb=22.5, bandwidth_gb_per_s=270)
    assert (device.name, device.memory_bytes, device.bandwidth_gb_per_s) == ("l4", 22_500_000_000, 270)


def test_this_machine_has_the_memory_that_the_system_says(monkeypatch):
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}
    monkeypatch.setattr(devices.os, "sysconf", pages.__getitem__)
    machine = find_device("cpu")
    assert 0 < machine.memory_bytes <= 4_096_000
    assert machine.is_shared and machine.bandwidth_gb_per_s is None
    assert find_device("cpu", memory_gb=2).memory_bytes == 2_000_000_000


def test_a_container_has_less_than_its_machine(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(devices, "CGROUP_LIMITS", (str(tmp_path / "absent"), str(limit)))
    limit.write_text("max\n")
    whole = this_machine().memory_bytes
    limit.write_text(f"{whole // 3}\n")
    assert this_machine().memory_bytes == whole // 3


def test_a_system_that_does_not_say_is_refused(monkeypatch):
    def refuse(name):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(devices.os, "sysconf", refuse)
    with pytest.raises(UserError, match="device='cpu': the system does not say how much memory there is; give memory_gb"):
        find_device("cpu")


def test_an_unknown_device_is_refused_with_the_list():
    with pytest.raises(UnsupportedError, match=r"device='h20' is not known; did you mean 'h200'\?; there are cpu, mk2, bow"):
        find_device("h20")
    with pytest.raises(UnsupportedError, match="device='abacus' is not known; there are cpu"):
        find_device("abacus")


@pytest.mark.parametrize("figure", [{"memory_gb": 0}, {"memory_gb": float("nan")}, {"bandwidth_gb_per_s": -1}])
def test_figures_that_are_none_are_refused(figure):
    with pytest.raises(UserError, match=f"{next(iter(figure))}=.*wanted a number greater than 0"):
        find_device("bow", **figure)
