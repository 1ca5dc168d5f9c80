"""The two fact files, as tables: see facts/extract.py for how they were made."""

from __future__ import annotations

import functools
import json
import pathlib

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "facts"


def _read(name):
    table = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return {key: entry for key, entry in table.items() if not key.startswith("_")}, {
        key.lstrip("_"): entry for key, entry in table.items() if key.startswith("_")
    }


API, _ = _read("api.json")
OPERATORS, ABOUT_OPERATORS = _read("operators.json")


@functools.cache
def registered_version(domain: str, kind: str, opset: int) -> int | None:
    """The version of an operator that PopART takes at an opset: the highest that is not above it; None without one."""
    versions = [int(version) for version in OPERATORS.get(f"{domain}/{kind}", {})]
    return max((version for version in versions if version <= opset), default=None)


@functools.cache
def operator(domain: str, kind: str, version: int) -> dict:
    """What is known of one version of an operator; `dtypes` are lists of names, one for each input."""
    known = dict(OPERATORS[f"{domain}/{kind}"][str(version)])
    known["dtypes"] = [ABOUT_OPERATORS["dtypes"][place] for place in known["dtypes"]]
    return known
