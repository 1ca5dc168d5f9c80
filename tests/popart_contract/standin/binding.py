"""Classes that take exactly the names, arguments and types that the real bindings have.

`bound(name)` dresses a class: every method gets the argument check of the API table, names that the table lacks are a
mistake here, names that only the table has raise `NotModelled`, and attributes can be set only where the table has them
and the type fits.
"""

from __future__ import annotations

import enum
import functools
import types

import numpy as np
from popart_contract.standin.errors import popart_exception
from popart_contract.standin.facts import API
from popart_contract.standin.machine import MACHINE

NAMESPACE: dict = {}  # what defaults are evaluated in: the names made so far, and `popart.NAME` for each of them
_POSITIONAL_ONLY = {"TensorInfo"}  # beside arguments called argN
_INTEGERS = {"int", "int64_t", "unsigned", "size_t", "uint32_t"}


class NotModelled(popart_exception):
    """PopART has this, the stand-in does not: no test may rest on it."""


def fits(kind: str, value) -> bool:
    """Whether pybind would take a value for a C++ type (bool for numbers, and numpy scalars, are refused on purpose)."""
    if kind in _INTEGERS:
        return type(value) is int and (kind in ("int", "int64_t") or value >= 0)
    if kind in ("float", "double"):
        return type(value) in (int, float)
    if kind in ("string", "TensorId"):
        return type(value) is str
    if kind == "bool":
        return type(value) is bool
    if kind == "array":
        return isinstance(value, np.ndarray)
    if kind == "dict":
        return type(value) is dict
    if kind == "Shape":
        return isinstance(value, (list, tuple)) and all(type(size) is int for size in value)
    if kind == "AnchorReturnTypeMap":
        return fits("map<TensorId, AnchorReturnType>", value)
    if kind.startswith("vector<"):
        return isinstance(value, (list, tuple)) and all(fits(kind[7:-1], item) for item in value)
    if kind.startswith("set<"):
        return isinstance(value, set) and all(fits(kind[4:-1], item) for item in value)
    if kind.startswith("map<"):
        key, item = kind[4:-1].split(", ", 1)
        return isinstance(value, dict) and all(fits(key, k) and fits(item, v) for k, v in value.items())
    return kind in NAMESPACE and isinstance(value, NAMESPACE[kind])


def default_value(text: str):
    """The value of a default as the tables write it, for example `SyncPattern.Full`."""
    return eval(text, {"__builtins__": {"set": set}}, NAMESPACE)


def is_absent(name: str, attribute: str) -> bool:
    """Whether the SDK of the machine is 3.2 and has no such attribute."""
    return MACHINE.is_3_2 and attribute in API[name].get("absent_in_3_2", {}).get("attributes", ())


def match(name, overloads, types_of, args, kwargs) -> dict:
    """Bind arguments to the first overload that takes them. Raises: TypeError, as pybind does, with what there is."""
    for number, arguments in enumerate(overloads):
        kinds = types_of[number] if types_of else [None] * len(arguments)
        names = [argument.partition("=")[0] for argument in arguments]
        if len(args) > len(names):
            continue
        values = dict(zip(names, args, strict=False))
        is_positional = name.partition(".")[0] in _POSITIONAL_ONLY
        by_name = {key for key in names if not key.startswith("arg") and not is_positional}
        if set(kwargs) - by_name or set(kwargs) & set(values):
            continue
        values.update(kwargs)
        if any("=" not in argument and key not in values for key, argument in zip(names, arguments, strict=True)):
            continue
        given = zip(names, kinds, strict=True)
        if any(key in values and kind is not None and not fits(kind, values[key]) for key, kind in given):
            continue
        for key, argument in zip(names, arguments, strict=True):
            if key not in values:
                values[key] = default_value(argument.partition("=")[2])
        return values
    taken = " or ".join(f"({', '.join(arguments)})" for arguments in overloads) or "nothing"
    shown = [type(value).__name__ for value in args] + [f"{key}: {type(value).__name__}" for key, value in kwargs.items()]
    raise TypeError(f"popart.{name} takes {taken}, given ({', '.join(shown)})")


def bound(name: str):
    """Decorator for the implementation of one class of the API."""
    known = API[name]
    methods, attributes = known.get("methods", {}), known.get("attributes", {})

    def dress(cls):
        surplus = {key for key in vars(cls) if not key.startswith("_")} - set(methods) - set(attributes)
        assert not surplus, f"{name}: the API has no {sorted(surplus)}"
        for method, overloads in methods.items():
            _dress_method(cls, name, method, overloads, known.get("method_types", {}).get(method))
        create = vars(cls).get("__init__")

        def __init__(self, *args, **kwargs):
            if not known.get("init"):
                raise TypeError(f"popart.{name}: No constructor defined!")
            values = match(name, known["init"], known.get("init_types"), args, kwargs)
            if create:
                create(self, **values)

        def __setattr__(self, key, value):
            if key.startswith("_"):
                return object.__setattr__(self, key, value)
            if key not in attributes or is_absent(name, key):
                raise AttributeError(f"popart.{name} has no attribute {key!r}")
            if key in known.get("readonly", ()):
                raise AttributeError(f"popart.{name}.{key} cannot be set")
            if not fits(attributes[key], value):
                raise TypeError(f"popart.{name}.{key} is a {attributes[key]}, given {type(value).__name__} {value!r}")
            object.__setattr__(self, key, value)

        cls.__init__, cls.__setattr__ = __init__, __setattr__
        cls.__name__ = cls.__qualname__ = name
        NAMESPACE[name] = cls
        return cls

    return dress


def _dress_method(cls, name, method, overloads, types_of):
    body = vars(cls).get(method)
    if method.startswith("__"):
        return
    if body is None:

        def body(self, **values):
            raise NotModelled(f"popart.{name}.{method} is not modelled by the stand-in")

    @functools.wraps(body)
    def checked(self, *args, **kwargs):
        return body(self, **match(f"{name}.{method}", overloads, types_of, args, kwargs))

    setattr(cls, method, checked)


def bound_function(name: str):
    """Decorator for a function of the API."""
    known = API[name]

    def dress(function):
        @functools.wraps(function)
        def checked(*args, **kwargs):
            overloads = known.get("init") or [[]]
            return function(**match(name, overloads, [known["arg_types"]] if "arg_types" in known else None, args, kwargs))

        NAMESPACE[name] = checked
        return checked

    return dress


def _make_enums():
    for name, known in API.items():
        if known["kind"] == "enum":
            members = enum.Enum(name, known["values"], module="popart")
            members.__int__ = lambda self: self.value
            NAMESPACE[name] = members


_make_enums()
NAMESPACE["popart"] = types.SimpleNamespace()  # `module` fills it
