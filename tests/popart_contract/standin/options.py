"""SessionOptions and Patterns."""

from __future__ import annotations

import copy
import os

from popart_contract.standin.binding import NAMESPACE, NotModelled, bound, default_value, is_absent
from popart_contract.standin.errors import popart_exception
from popart_contract.standin.facts import API

# FACTS (d): these return a copy that writes back on item assignment only.
COPIED = ("engineOptions", "convolutionOptions", "lstmOptions", "matmulOptions", "reportOptions", "gclOptions")


class _WritesBack(dict):
    """A copy of a dict-like option: setting an item reaches the option, `update` and the rest reach the copy only."""

    def __init__(self, owner, name, values):
        super().__init__(values)
        self._owner, self._name = owner, name

    def __setitem__(self, key, value):
        if type(key) is not str or type(value) is not str:
            raise TypeError(f"popart.SessionOptions.{self._name} takes str -> str, given {key!r}: {value!r}")
        super().__setitem__(key, value)
        self._owner._values[self._name][key] = value


@bound("ExperimentalSettings")
class ExperimentalSettings:
    """Settings that the stand-in only stores."""

    def __init__(self):
        self._customTransformApplierSettings = {}


@bound("SessionOptions")
class SessionOptions:
    """All options with their defaults; setting one that PopART lacks, or a value of another type, raises."""

    def __init__(self):
        self._values = {}
        known = API["SessionOptions"]
        for name, kind in known["attributes"].items():
            if name in known["defaults"]:
                try:
                    self._values[name] = default_value(known["defaults"][name])
                except NameError:
                    continue  # a settings class that the stand-in does not have
            elif kind in NAMESPACE:
                self._values[name] = NAMESPACE[kind]()
        for variable in ("POPART_CACHE_DIR", "POPXL_CACHE_DIR"):
            if os.environ.get(variable):
                self._values.update(enableEngineCaching=True, cachePath=os.environ[variable])

    def getGlobalReplicationFactor(self):
        """R: FACTS (b)."""
        values = self._values
        if values["enableDistributedReplicatedGraphs"]:
            return values["globalReplicationFactor"]
        return values["replicatedGraphCount"] if values["enableReplicatedGraphs"] else 1

    def __getattribute__(self, name):
        if name.startswith("_") or name in API["SessionOptions"]["methods"]:
            return object.__getattribute__(self, name)
        if name not in API["SessionOptions"]["attributes"] or is_absent("SessionOptions", name):
            raise AttributeError(f"popart.SessionOptions has no attribute {name!r}")
        values = object.__getattribute__(self, "_values")
        if name not in values:
            raise NotModelled(f"popart.SessionOptions.{name} is not modelled by the stand-in")
        if name in COPIED:
            return _WritesBack(self, name, values[name])
        return copy.copy(values[name]) if isinstance(values[name], (list, set, dict)) else values[name]


def _storing(checked):
    def __setattr__(self, name, value):
        if name == "_values":
            return object.__setattr__(self, name, value)
        if name.startswith("_"):
            raise AttributeError(f"popart.SessionOptions has no attribute {name!r}")
        checked(self, name, value)
        object.__getattribute__(self, "__dict__").pop(name, None)
        self._values[name] = copy.copy(value) if isinstance(value, (list, tuple, set, dict)) else value

    return __setattr__


SessionOptions.__setattr__ = _storing(SessionOptions.__setattr__)


@bound("Patterns")
class Patterns:
    """Which rewriting patterns run. The stand-in rewrites nothing; it checks the names that it knows."""

    def __init__(self, level=None, patterns=()):
        self._enabled = {}
        for name in patterns:
            self.enablePattern(name, True)

    def enablePattern(self, arg0, arg1):
        """Turn one on or off; a name that is none raises."""
        if arg0 not in API["Patterns"]["attributes"]:
            raise popart_exception(f"no pattern {arg0!r}")
        self._enabled[arg0] = arg1

    def isPatternEnabled(self, arg0):
        """Whether it runs."""
        return self._enabled.get(arg0, True)

    def enableRuntimeAsserts(self, arg0):
        """Nothing to do here."""
