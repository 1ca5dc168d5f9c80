"""The library of custom ops: found, checked, refused with the command that helps."""

import ctypes
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest

from poptransformer.backends.xla import custom_ops
from poptransformer.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILT = ROOT / custom_ops.DEFAULT_LIBRARY

needs_library = pytest.mark.skipif(not BUILT.is_file(), reason=f"{custom_ops.DEFAULT_LIBRARY} not built; run `make`")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build a wrong library with")


@pytest.fixture
def fresh(monkeypatch):
    """The module as if nothing had been loaded."""
    monkeypatch.setattr(custom_ops, "_loaded", None)
    monkeypatch.delenv(custom_ops.LIBRARY_VARIABLE, raising=False)
    return monkeypatch


def message():
    with pytest.raises(UserError) as caught:
        custom_ops.load_cpu_library()
    return str(caught.value)


def compile_library(path, source):
    code = path.with_suffix(".cc")
    code.write_text(source)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", path, code], check=True)
    return path


def stand_in(path, manifest):
    """A library with our symbols and that manifest."""
    source = """
        extern "C" {
        const char* poptransformer_manifest() { return MANIFEST; }
        const char* poptransformer_isa() { return "portable"; }
        int poptransformer_num_threads() { return 1; }
        double poptransformer_read_bandwidth_gb_per_s(long long, int) { return 0; }
        }
    """
    literal = '"' + manifest.replace("\n", "\\n") + '"'
    return compile_library(path, textwrap.dedent(source).replace("MANIFEST", literal))


def test_missing(fresh, tmp_path):
    fresh.setattr(custom_ops, "__file__", str(tmp_path / "poptransformer" / "backends" / "xla" / "custom_ops.py"))
    assert message() == (
        f"{tmp_path}/custom_ops/build/libcustom_ops_cpu.so not found; build it with `make` in a checkout of the project, "
        "or set custom_ops: false for the plain XLA lowering"
    )


def test_missing_where_the_environment_says(fresh):
    fresh.setenv(custom_ops.LIBRARY_VARIABLE, "/no/such/library.so")
    assert message().startswith("/no/such/library.so, named by POPTRANSFORMER_CUSTOM_OPS, not found; build it with `make`")


def test_not_a_library(fresh, tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"half a file")
    fresh.setenv(custom_ops.LIBRARY_VARIABLE, str(broken))
    assert message().startswith(f"{broken} cannot be loaded (")


@needs_compiler
def test_foreign(fresh, tmp_path):
    foreign = compile_library(tmp_path / "foreign.so", 'extern "C" int answer() { return 42; }')
    fresh.setenv(custom_ops.LIBRARY_VARIABLE, str(foreign))
    assert f"{foreign} is not a library of poptransformer's custom ops" in message()
    assert "build one with `make`" in message()


@needs_compiler
def test_built_for_another_jaxlib(fresh, tmp_path):
    fresh.setenv(custom_ops.LIBRARY_VARIABLE, str(stand_in(tmp_path / "old.so", "ffi 7 9\nop attention 1\n")))
    assert "old.so is out of date: it was built for XLA FFI 7.9, and jaxlib " in message()
    assert "rebuild it with `make`, or set custom_ops: false" in message()


@needs_compiler
def test_out_of_date(fresh, tmp_path):
    ffi = "ffi {} {}\n".format(*custom_ops._running_ffi_version())
    fresh.setattr(custom_ops, "OPS", {"attention": 2, "linear": 1})
    fresh.setenv(custom_ops.LIBRARY_VARIABLE, str(stand_in(tmp_path / "old.so", ffi + "op attention 1\n")))
    assert "old.so is out of date: it lacks linear; its attention has version 1, wanted 2; rebuild" in message()


@needs_library
def test_loaded_once():
    library = custom_ops.load_cpu_library()
    assert custom_ops.load_cpu_library() is library
    assert library.ops == tuple(custom_ops.OPS)
    assert library.isa in ("portable", "avx2", "avx512") and library.num_threads >= 1
    assert library.read_bandwidth_gb_per_s(num_bytes=8 << 20, num_repetitions=1) > 0


@needs_library
def test_the_environment_names_another_place(tmp_path):
    copy = shutil.copy(BUILT, tmp_path / "elsewhere.so")
    probe = "from poptransformer.backends.xla import custom_ops; print(custom_ops.load_cpu_library().path)"
    environment = os.environ | {custom_ops.LIBRARY_VARIABLE: str(copy), "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(copy)


CGROUPS = {
    "v2, quota at the parent": ("0::/pod/box", {"pod/cpu.max": "250000 100000", "pod/box/cpu.max": "max 100000"}, 3),
    "v2, tightest counts": ("0::/pod/box", {"pod/cpu.max": "250000 100000", "pod/box/cpu.max": "100000 100000"}, 1),
    "v2, path of the host": ("0::/kubepods/xyz", {"cpu.max": "150000 100000"}, 2),
    "v2, no limit": ("0::/", {"cpu.max": "max 100000"}, 0),
    "v1": ("4:cpu,cpuacct:/a", {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 1),
    "v1, linked name": ("4:cpuacct,cpu:/", {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
    "v1, no limit": ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 0),
    "other controllers": ("8:memory:/a\n3:cpuset:/a", {"cpuset/a/cpu.max": "100000 100000"}, 0),
    "nonsense": ("x\n0::", {"cpu.max": "none"}, 0),
    "no cgroups": ("", {}, 0),
}


@needs_library
@pytest.mark.parametrize("case", CGROUPS)
def test_cgroup_quota(case, tmp_path):
    groups, files, wanted = CGROUPS[case]
    for name, text in [("proc/self/cgroup", groups), *((f"sys/fs/cgroup/{name}", text) for name, text in files.items())]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    library = ctypes.CDLL(str(BUILT))
    library.poptransformer_cgroup_cpu_limit.argtypes = (ctypes.c_char_p,)
    assert library.poptransformer_cgroup_cpu_limit(str(tmp_path).encode()) == wanted
