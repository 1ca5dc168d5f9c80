"""`popart` as a module, and the import hook that offers it."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys

from popart_contract.standin import devices, flow, options, session  # noqa: F401 - they fill NAMESPACE
from popart_contract.standin.binding import NAMESPACE, NotModelled, bound, bound_function
from popart_contract.standin.errors import (
    OutOfMemoryException,
    popart_exception,
    popart_runtime_error,
    poplar_exception,
    poplibs_exception,
)
from popart_contract.standin.facts import API
from popart_contract.standin.machine import MACHINE

LEVELS = ("TRACE", "DEBUG", "INFO", "WARN", "ERR", "CRITICAL", "OFF")


@bound("Logger")
class Logger:
    """PopART's own log; the stand-in writes none."""

    def setLevel(self, arg0):
        """Choose what is written."""
        if arg0.upper() not in (*LEVELS, "ERROR"):
            raise popart_exception(f"no log level {arg0!r}")


@bound_function("getLogger")
def getLogger(name):
    """The log of one part."""
    return Logger.__new__(Logger)


@bound_function("versionString")
def versionString():
    """The SDK's version; its real form is not known, so nothing may parse it."""
    return f"{MACHINE.sdk} (stand-in)"


@bound_function("packageHash")
def packageHash():
    """Not known."""
    raise NotModelled("popart.packageHash is not modelled by the stand-in")


@bound_function("versionNumber")
def versionNumber():
    """Its type is not known."""
    raise NotModelled("popart.versionNumber is not modelled by the stand-in")


for _exception in (popart_exception, popart_runtime_error, poplar_exception, poplibs_exception, OutOfMemoryException):
    NAMESPACE[_exception.__name__] = _exception
assert set(NAMESPACE) - {"popart"} == set(API), set(NAMESPACE) ^ set(API)
vars(NAMESPACE["popart"]).update({name: entry for name, entry in NAMESPACE.items() if name != "popart"})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives `import popart` the stand-in. As the real package does, it refuses to come after `onnx`: FACTS (h).

    What the process knows of onnx already is hidden until somebody imports it; a library cannot be loaded twice.
    """

    def __init__(self):
        self.hidden = {name: module for name, module in sys.modules.items() if name == "onnx" or name.startswith("onnx.")}
        self.specs = {name: module.__spec__ for name, module in self.hidden.items()}
        for name in self.hidden:
            del sys.modules[name]

    def find_spec(self, name, path=None, target=None):
        is_ours = name == "popart" or (name == "onnx" and self.hidden)
        return importlib.machinery.ModuleSpec(name, self, is_package=name == "onnx") if is_ours else None

    def create_module(self, spec):
        return self.hidden["onnx"] if spec.name == "onnx" else None

    def exec_module(self, module):
        if module.__name__ == "onnx":
            self.show()
        elif "onnx" in sys.modules:
            raise ImportError("popart must be imported before onnx")
        else:
            vars(module).update(vars(NAMESPACE["popart"]))

    def show(self):
        """End the hiding."""
        for name, module in self.hidden.items():
            module.__spec__ = self.specs[name]
        sys.modules.update(self.hidden)
        self.hidden = {}


@contextlib.contextmanager
def installed(**machine):
    """Offer the stand-in as `popart`, on a fresh machine, in a process that looks as if nobody had imported onnx yet.

    Args:
      machine: fields of Machine.
    """
    MACHINE.reset(**machine)
    before = sys.modules.pop("popart", None)
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield MACHINE
    finally:
        sys.meta_path.remove(finder)
        finder.show()
        sys.modules.pop("popart", None)
        if before is not None:
            sys.modules["popart"] = before
