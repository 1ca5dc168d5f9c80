"""Write a model's folder: weights as the graph has them, configuration and tokenizer; as a whole or not at all."""

import contextlib
import json
import os
import pathlib
import shutil
import tempfile

from poptransformer.checkpoint.safetensors_writer import write_safetensors
from poptransformer.checkpoint.saved import describe_saved
from poptransformer.errors import UserError

SPARE_BYTES = 64 << 20  # for the header, the tokenizer and whatever else the disk wants beside the weights


def save_model(folder, precision, parameters, config, generation_config, save_tokenizer):
    """Write a folder that Session opens; see saved.py.

    Args:
      folder: must not be there yet, or be empty.
      precision: the Precision that the parameters have.
      parameters: Parameters with their `load` set; each is read once, one at a time.
      config, generation_config: dicts, what the files of these names will say; no file for an empty one.
      save_tokenizer: called with a folder to write the tokenizer's files into.
    Returns: the folder as a pathlib.Path.
    Raises: UserError if it cannot be written; nothing half done stays behind.
    """
    folder = pathlib.Path(folder).expanduser()
    try:
        _check_free(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        needed = sum(parameter.spec.num_bytes for parameter in parameters) + SPARE_BYTES
        if (free := shutil.disk_usage(folder.parent).free) < needed:
            raise UserError(f"{folder}: {free >> 20} MB are free there, and {needed >> 20} MB are needed")
        scratch = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            tensors = {each.name: (each.shape, each.dtype, each.load) for each in parameters}
            write_safetensors(scratch / "model.safetensors", tensors, describe_saved(precision, parameters))
            for name, fields in (("config.json", config), ("generation_config.json", generation_config)):
                if fields:
                    (scratch / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
            save_tokenizer(scratch)
            _set_mode(scratch)
            os.replace(scratch, folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    except OSError as error:
        raise UserError(f"{error.filename or folder}: the model cannot be saved there ({error.strerror or error})") from error
    return folder


def _check_free(folder):
    if folder.is_symlink() or folder.exists():
        if not folder.is_dir() or folder.is_symlink():
            raise UserError(f"{folder}: is there already and is no folder; give another name")
        if any(folder.iterdir()):
            raise UserError(f"{folder}: is there already and not empty; give another name, or remove it first")


def _set_mode(scratch):
    """Give a folder of mkdtemp, which is the user's alone, the mode that mkdir gives."""
    with contextlib.suppress(OSError):
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(scratch, 0o777 & ~mask)
