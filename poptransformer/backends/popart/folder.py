"""A program as a folder: model.onnx, its weights, options.json, and the script that compiles and runs it.

The folder needs nothing of this package: an IPU host with the Poplar SDK compiles and runs it with `python3 run_popart.py`.
"""

from __future__ import annotations

import json
import pathlib
import shutil

from poptransformer.backends.popart import runner
from poptransformer.backends.popart.options import PopartOptions, count_ipus
from poptransformer.backends.popart.program import Program
from poptransformer.backends.popart.weights_file import INSIDE_UP_TO, WEIGHTS_FILE, put_beside, put_inside
from poptransformer.errors import UserError

MODEL_FILE, OPTIONS_FILE, SCRIPT = "model.onnx", "options.json", "run_popart.py"


def write_folder(
    program: Program, options: PopartOptions, folder, *, has_packed_weights=False, is_portable=False, cache_folder=None,
    generation=None, progress=None,
) -> pathlib.Path:  # fmt: skip
    """Write a program into a folder, which is made.

    Args:
      is_portable: all weights go into a file beside the model, named relative to the folder, and the script is added, so that
        the folder can be moved to another host. Otherwise small weights are in the model, large ones under an absolute path.
      cache_folder: folder of PopART's compiled programs; None for no cache.
      generation: what the script needs to know to generate with the program, or None.
      progress: called with each Weight that has been written.
    Raises: UserError if the folder cannot be written.
    """
    folder = pathlib.Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_beside = is_portable or program.weight_bytes > INSIDE_UP_TO
        if is_beside:
            path = folder / WEIGHTS_FILE
            digest = put_beside(program, path, WEIGHTS_FILE if is_portable else str(path.resolve()), progress)
        else:
            digest = put_inside(program, progress)
        (folder / MODEL_FILE).write_bytes(program.model.SerializeToString())
        described = describe(program, options, digest, has_packed_weights, cache_folder)
        described |= {"weights": {WEIGHTS_FILE: program.weight_bytes} if is_beside else {}, "generation": generation}
        described["is_portable"] = is_portable  # external weights are then named relative to the folder
        (folder / OPTIONS_FILE).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        if is_portable:
            shutil.copyfile(runner.__file__, folder / SCRIPT)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error
    return folder


def describe(program, options, digest, has_packed_weights=False, cache_folder=None) -> dict:
    """options.json: everything about a session that is not in the model."""
    session_options = options.session_options(program.num_replicas, has_packed_weights)
    if cache_folder:
        # PopART's own key leaves the weights' values out, though they are part of the program: FACTS on caching.
        session_options |= {"enableEngineCaching": True, "cachePath": str(pathlib.Path(cache_folder) / digest[:16])}
    return {
        "format": runner.FORMAT,
        "name": program.name,
        "model": MODEL_FILE,
        "digest": digest,
        "device": {
            "kind": options.device,
            "num_ipus": count_ipus(program.num_stages, program.num_replicas),
            "ipu_version": options.ipu_version,
        },
        "num_replicas": program.num_replicas,
        "batches_per_step": options.batch_per_step,
        "session_options": session_options,
        "anchors": list(program.outputs),
        "inputs": {name: {"dtype": spec.dtype.name, "shape": list(spec.shape)} for name, spec in program.inputs.items()},
        "outputs": {name: {"dtype": spec.dtype.name, "shape": list(spec.shape)} for name, spec in program.outputs.items()},
    }
