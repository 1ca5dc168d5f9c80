"""Models that Session.save_quantized wrote: parameters as the graph has them, packed matrices included.

The folder has config.json, the tokenizer's files and one model.safetensors. There each parameter stands under the model's own
name, in its own layout and dtype; what loading any other checkpoint does (casting, transposing, reordering rows, quantising)
has been done. A packed matrix is the uint8 array that packing.py describes. The header's metadata, strings as the format wants
them, say what the arrays mean:

    format      "poptransformer"
    version     of the form that this page describes, "1"
    precision   "int4"; group_size "32", or "" where the precision has none
    packings    JSON: parameter -> the fields of its Packing
"""

import dataclasses
import json

from poptransformer.errors import UserError
from poptransformer.packing import Packing

FORMAT, VERSION = "poptransformer", "1"
HOW_TO_SAVE = "python -m poptransformer.checkpoint.quantize"

SHOWN = 8  # names of a kind that a message lists


@dataclasses.dataclass(frozen=True)
class Saved:
    """What the metadata of a saved model says.

    Attributes:
      path: of the file.
      precision, group_size: as Session's arguments of those names; group_size may be None.
      packings: parameter name -> Packing, of packed ones.
    """

    path: object
    precision: str
    group_size: int | None
    packings: dict[str, Packing]


def describe_saved(precision, parameters) -> dict[str, str]:
    """The metadata for a model in a Precision with these Parameters."""
    packings = {each.name: dataclasses.asdict(each.packing) for each in parameters if each.packing}
    return {
        "format": FORMAT,
        "version": VERSION,
        "precision": precision.name,
        "group_size": str(precision.packing[1]) if precision.packing else "",
        "packings": json.dumps(packings, separators=(",", ":")),
    }


def read_saved(path, metadata) -> Saved | None:
    """Read a file's metadata; None if the file is not one of ours.

    Raises: UserError, naming the file, if it is of another version or does not say what it should.
    """
    if metadata.get("format") != FORMAT:
        return None
    if metadata.get("version") != VERSION:
        raise UserError(
            f"{path}: was saved in version {metadata.get('version')} of the format for packed models, and this release reads "
            f"version {VERSION}; save the model again with `{HOW_TO_SAVE}`"
        )
    try:
        group_size = int(metadata["group_size"]) if metadata["group_size"] else None
        packings = {name: Packing(**fields) for name, fields in json.loads(metadata["packings"]).items()}
        return Saved(path, metadata["precision"], group_size, packings)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, NotImplementedError) as error:
        raise UserError(
            f"{path}: its metadata does not say how the weights are packed ({type(error).__name__}: {error}); save the model "
            f"again with `{HOW_TO_SAVE}`"
        ) from error


def check_saved(saved, parameters, checkpoint) -> None:
    """Check that a saved model has just these parameters, as they are.

    Args:
      parameters: name -> Parameter.
      checkpoint: has names(), shape(name) and stored_dtype(name).
    Raises: UserError with all that is missing, left over or of another shape, dtype or packing.
    """
    present = set(checkpoint.names())
    missing, extra = sorted(set(parameters) - present), sorted(present - set(parameters))
    problems = [f"lacks {_listed(missing)}"] if missing else []
    problems += [f"has {_listed(extra)}, for which this model has no place"] if extra else []
    different = []
    for name, parameter in parameters.items():
        if name not in present:
            continue
        found = f"{checkpoint.stored_dtype(name)}{list(checkpoint.shape(name))}"
        packing = saved.packings.get(name)
        spec, wanted = parameter.whole_spec, parameter.whole_packing
        if found != str(spec) or packing != wanted:
            different.append(f"{name} is {_form(found, packing)}, wanted is {_form(spec, wanted)}")
    if different:
        problems.append("; ".join(different[:SHOWN]) + _more(different))
    if problems:
        raise UserError(
            f"{saved.path}: does not fit its config.json: {'; '.join(problems)}. Is the file damaged, or of another release? "
            f"Save the model again with `{HOW_TO_SAVE}`"
        )


def _form(spec, packing):
    return f"{spec} ({packing} of {packing.out_features} x {packing.in_features})" if packing else str(spec)


def _listed(names):
    return ", ".join(names[:SHOWN]) + _more(names)


def _more(names):
    return f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
