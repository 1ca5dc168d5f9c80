"""Write `api.json` and `operators.json`: what this folder's stand-in knows of PopART.

    python tests/popart_contract/facts/extract.py FOLDER

FOLDER holds two descriptions of PopART 3.4.0 (graphcore/popart, branch sdk-release-3.4) that were read out of its public
sources, with what 3.2 lacks: `api.json`, the Python bindings, and `operators.json`, the operators that have a creator.
Only facts are kept, and of those only what a front end that hands PopART an ONNX model needs: names, arguments, defaults,
types and enum values; of operators their versions, the counts and types of inputs, and attributes.
"""

from __future__ import annotations

import json
import pathlib
import sys

NAMES = (
    # the session and what it is made from
    "InferenceSession", "SessionOptions", "DataFlow", "AnchorReturnType", "AnchorReturnTypeId", "PyStepIO", "PyWeightsIO",
    "TensorInfo", "InputShapeInfo", "InputSettings", "Patterns", "PatternsLevel", "ExperimentalSettings",
    # devices
    "DeviceManager", "DeviceInfo", "DeviceType", "DeviceConnectionType", "DeviceSelectionCriterion", "SyncPattern",
    # enums that appear in options, metadata and attributes
    "VirtualGraphMode", "TileSet", "ExchangeStrategy", "ReplicatedStreamMode", "DataType", "CommGroup", "CommGroupType",
    "VariableSettings", "VariableRetrievalMode", "RecomputationType", "SyntheticDataMode", "SubgraphCopyingStrategy",
    "MergeVarUpdateType", "ReductionType", "MeanReductionStrategy", "Instrumentation",
    # the rest
    "getLogger", "Logger", "versionString", "versionNumber", "packageHash", "popart_exception", "popart_runtime_error",
    "poplar_exception", "poplibs_exception", "OutOfMemoryException",
)  # fmt: skip
KEPT = (
    "init",
    "init_types",
    "methods",
    "method_types",
    "arg_types",
    "defaults",
    "values",
    "bases",
    "readonly",
    "absent_in_3_2",
)
OPSETS = ("10", "11")
DOMAINS = ("ai.onnx", "ai.graphcore")
# What is declared otherwise than it is read; the notes beside the operators say so.
INTEGERS = ["INT32", "INT64", "UINT32", "UINT64"]
READ_AS = {"Loop": {"M": INTEGERS}, "Pow2ScaleThenCast": {"metadata": ["INT32"]}, "CastThenPow2Scale": {"metadata": ["INT32"]},
           "DynamicSlice": {"O": INTEGERS}, "DynamicUpdate": {"O": INTEGERS},
           "Reshape": {"shape": ["INT64", "INT32"]}}  # fmt: skip
CONSTANT = {"Loop": (0,), "Reshape": (1,), "Clip": (1, 2)}  # inputs that the notes call constant


def main(folder: pathlib.Path):
    """Read the two files of `folder` and write those beside this script."""
    here = pathlib.Path(__file__).parent
    api = json.loads((folder / "api.json").read_text(encoding="utf-8"))
    operators = json.loads((folder / "operators.json").read_text(encoding="utf-8"))
    write(here / "api.json", {"_source": source(api), **{name: binding(api[name]) for name in NAMES}})
    write(here / "operators.json", operator_table(operators))


def source(described):
    meta = described["_meta"]
    return {key: meta[key] for key in ("source", "commit")}


def binding(described):
    """One name of the Python package, without what is private or empty."""
    kept = {"kind": described["kind"]}
    for key in KEPT:
        if described.get(key):
            kept[key] = described[key]
    attributes = {name: kind for name, kind in described["attributes"].items() if not name.startswith("_")}
    if attributes:
        kept["attributes"] = attributes
    return kept


def operator_table(operators):
    dtypes = {}
    table = {
        "_source": source(operators),
        "_default_opset": {domain: operators["_default_opset"][domain] for domain in DOMAINS},
        "_min_opset": operators["_min_opset"],
        "_max_opset": {domain: operators["_max_opset"][domain] for domain in DOMAINS},
        "_accepted": {opset: operators["_accepted_by_opset"][opset] for opset in OPSETS},
        "_rewritten": sorted(name for name in operators["_rewritten_before_op_lookup"] if " " not in name),
        "_absent_in_3_2": {domain: operators["_absent_in_3_2"][domain] for domain in DOMAINS},
    }
    for domain in DOMAINS:
        for name in operators[domain]:
            table[f"{domain}/{name}"] = {
                version: operator(name, described, dtypes) for version, described in operators["_details"][domain][name].items()
            }
    table["_dtypes"] = [names.split() for names in dtypes]
    return table


def operator(name, described, dtypes):
    """One version of one operator: [least, most] inputs, most outputs (-1: any number), and each input's dtypes by number."""

    inputs = described["inputs"] or []
    kept = {"inputs": described.get("load_time_inputs", described["num_inputs"]), "outputs": described["num_outputs"]}
    kept["dtypes"] = []
    for given in inputs:
        names = " ".join(sorted(READ_AS.get(name, {}).get(given["name"], given["dtypes"])))
        kept["dtypes"].append(dtypes.setdefault(names, len(dtypes)))
    constant = {place for place, given in enumerate(inputs) if given.get("constant")}
    constant |= {place for place in CONSTANT.get(name, ()) if place < len(inputs)}
    if constant:
        kept["constant"] = sorted(constant)
    kept["attributes"] = {
        key: {field: value for field, value in attribute.items() if field in ("type", "required", "default", "allowed")}
        for key, attribute in described["attributes"].items()
    }
    return kept


def write(path, table):
    """JSON with one entry a line, so that a change shows as one."""
    lines = (f" {json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in table.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]))
