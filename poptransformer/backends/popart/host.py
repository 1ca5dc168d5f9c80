"""Where PopART runs: in this process, or in one of its own that has the SDK's Python."""

from __future__ import annotations

import contextlib
import logging
import subprocess

from poptransformer.backends.popart import runner
from poptransformer.errors import UserError

logger = logging.getLogger(__name__)


class LocalHost:
    """PopART in this process."""

    def __init__(self):
        with _as_user_errors():
            self._popart = runner.import_popart()
        self._sessions: dict[str, runner.Session] = {}
        self._device = None

    @property
    def version(self) -> str:
        return self._popart.versionString()

    def devices(self) -> dict[str, int]:
        """How many devices of each kind there are."""
        with _as_user_errors(self._popart):
            return runner.list_devices(self._popart)

    def open(self, name: str, folder) -> float:
        """Compile a program's folder under a name; gives the seconds it took."""
        with _as_user_errors(self._popart):
            session = runner.Session(str(folder), self._device)
        self._sessions[name], self._device = session, session.device
        return session.compile_seconds

    def run(self, name: str, feeds):
        with _as_user_errors(self._popart):
            return self._sessions[name].run(feeds)

    def close(self) -> None:
        """Forget the programs and give the device back."""
        sessions = list(self._sessions.values())
        self._sessions, self._device = {}, None
        for session in sessions[:1]:  # all are on one device
            session.close()


class WorkerHost:
    """PopART in a process of its own.

    Args:
      python: its interpreter, in an environment where the SDK is active.
    """

    def __init__(self, python):
        try:
            self._process = subprocess.Popen(
                [str(python), runner.__file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except OSError as error:
            raise UserError(f"popart.python={python}: cannot be started: {error.strerror}") from None
        self._python = python
        try:
            self.version = self._ask({"do": "version"})[0]["version"]
        except BaseException:
            self.close()
            raise

    def devices(self) -> dict[str, int]:
        """How many devices of each kind there are."""
        return self._ask({"do": "devices"})[0]["devices"]

    def open(self, name: str, folder) -> float:
        """Compile a program's folder under a name; gives the seconds it took."""
        return self._ask({"do": "open", "name": name, "folder": str(folder)})[0]["compile_seconds"]

    def run(self, name: str, feeds):
        return self._ask({"do": "run", "name": name}, feeds)[1]

    def close(self) -> None:
        """End the process, which gives the device back."""
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, request, arrays=None):
        try:
            runner.send(self._process.stdin, request, arrays)
            answer, outputs = runner.receive(self._process.stdout)
        except (OSError, ValueError):
            answer, outputs = None, {}
        if answer is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
            status = self._process.returncode
            raise UserError(
                f"popart.python={self._python}: the process of PopART has ended (status {status}); what it wrote is above"
            )
        if not answer["ok"]:
            prefix = "" if answer["kind"] == "PopartError" else f"{answer['kind']}: "
            raise UserError(f"popart: {prefix}{answer['error']}")
        return answer, outputs


@contextlib.contextmanager
def _as_user_errors(popart=None):
    """PopART's exceptions as UserError: what to do about them is in their text."""
    kinds = [getattr(popart, name) for name in ("popart_exception", "poplar_exception", "poplibs_exception") if popart]
    try:
        yield
    except runner.PopartError as error:
        raise UserError(f"popart: {error}") from None
    except tuple(kinds) as error:
        raise UserError(f"popart: {type(error).__name__}: {error}") from error
