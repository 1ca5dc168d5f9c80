"""A checkpoint as the rest of the package sees it: configuration, names, shapes, and tensors one at a time."""

import functools
import logging
import os
import pathlib

from poptransformer.checkpoint.formats import FORMATS, HOW_TO_CONVERT, OTHER_FORMATS, choose_weights, find_format
from poptransformer.checkpoint.json_file import is_present, read_json
from poptransformer.checkpoint.saved import read_saved
from poptransformer.checkpoint.source import resolve_source
from poptransformer.errors import UnsupportedError, UserError, near_miss

logger = logging.getLogger(__name__)


class Checkpoint:
    """A folder with config.json and weights, whole or in shards, or one file with all of it; made by ``Checkpoint.open``.

    Attributes:
      path: the folder, or the file that holds all.
      num_bytes: size of all weights, as stored.
      saved: a Saved if Session.save_quantized wrote the weights, else None.
    """

    def __init__(self, path, files=(), is_whole=False):
        """Take a folder, or a file that holds all, and a list of (TensorFile, names of its tensors that count)."""
        self.path = pathlib.Path(path)
        self._files = [file for file, _ in files]
        self._is_whole = is_whole
        self._file_of = {name: file for file, names in files for name in names}
        self.num_bytes = sum(file.num_bytes(name) for name, file in self._file_of.items())
        one = self._files[0] if len(self._files) == 1 else None
        self.saved = read_saved(one.path, getattr(one, "metadata", {})) if one else None

    @classmethod
    def open(cls, source, weights=True):
        """Find a checkpoint and check the headers of all its files; no weight is read yet.

        Args:
          source: a folder, one file of weights (config.json is looked for beside it, unless it is a GGUF file, which holds
            all), or a hub name.
          weights: False leaves the weights alone, and unfetched: for random ones.
        Raises: UserError or UnsupportedError, naming the files, if something is missing, damaged or has no reader.
        """
        path = resolve_source(source, weights=weights)
        if path.is_file():
            folder, files = path.parent, _open_one(find_format(path), path, weights)
        else:
            folder, files = path, _open_folder(path, weights)
        is_whole = bool(files) and files[0][0].config is not None
        checkpoint = cls(files[0][0].path if is_whole else folder, files, is_whole)
        logger.debug(
            "%s: %d weights in %d files, %d bytes",
            path,
            len(checkpoint._file_of),
            len(checkpoint._files),
            checkpoint.num_bytes,
        )
        return checkpoint

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Close the files; arrays that were read stay."""
        for file in self._files:
            file.close()

    @property
    def has_config(self):
        """Whether there is a config.json."""
        return is_present(self.path / "config.json")

    @functools.cached_property
    def config(self):
        """What config.json says, as a dict. Raises: UserError if it is missing or broken."""
        if self._is_whole:
            return self._files[0].config
        return read_json(self.path / "config.json")

    @functools.cached_property
    def generation_config(self):
        """What generation_config.json says, as a dict; empty if there is none."""
        return {} if self._is_whole else read_json(self.path / "generation_config.json", is_optional=True)

    @property
    def has_weights(self):
        """False for a folder that has a configuration only."""
        return bool(self._file_of)

    def names(self):
        """Return the names of all weights."""
        return list(self._file_of)

    def shape(self, name):
        """Return a weight's shape, as stored."""
        return self._find(name).shape(name)

    def dtype(self, name):
        """Return a weight's NumPy dtype, as stored. Raises: UnsupportedError for a dtype without a reader."""
        return self._find(name).dtype(name)

    def stored_dtype(self, name):
        """Return the name of a weight's dtype, "float32" for one; a dtype without a reader has the file's name for it."""
        return self._find(name).stored_dtype(name)

    def read(self, name, dtype=None, transpose=False, index=None):
        """Read one weight, or a part of it, into a new 64-byte aligned array; see TensorFile.read.

        Args:
          name: one of names().
          dtype: NumPy dtype of the result; None keeps the stored one.
          transpose: True swaps the axes of a matrix (after index has been taken).
          index: tuple of slices with step 1, in the stored layout; None takes all.
        """
        return self._find(name).read(name, dtype=dtype, transpose=transpose, index=index)

    def map(self, name):
        """Return a weight of a saved model where it lies in the file; see TensorFile.map."""
        return self._find(name).map(name)

    def read_packed(self, name, packing, transpose=False, cut=None, rank=0):
        """Read a matrix, or a rank's part, that is stored in codes as packed weights have them; None if it is not; see
        TensorFile.read_packed.
        """
        return self._find(name).read_packed(name, packing, transpose, cut, rank)

    def _find(self, name):
        try:
            return self._file_of[name]
        except KeyError:
            raise UserError(f"{self.path}: no weight {name!r}{near_miss(name, self._file_of)}") from None


def _open_folder(folder, weights):
    """Return [(TensorFile, names)] of a folder; empty if it has a configuration but no weights, or none are wanted."""
    present = _list_folder(folder)
    kind, chosen = choose_weights(present)
    if not weights and (kind is None or not kind.is_whole):
        return []
    if kind is None:
        other = [name for name in present if name.endswith(OTHER_FORMATS)]
        if other:
            raise UnsupportedError(f"{folder}: has {_listing(other)}, for which there is no reader; {HOW_TO_CONVERT}")
        if "config.json" not in present:
            raise UserError(f"{folder}: no checkpoint: it has neither config.json nor {FORMATS[0].weights_file}")
        return []
    for name in chosen:
        is_present(folder / name)  # a link that leads nowhere was listed, so that this can say so
    if len(chosen) > 1 or "-of-" in chosen[0]:
        if kind.weights_file:
            lacks = (
                f"but neither {kind.weights_file} nor {kind.index_file}, which says what belongs together; add the index, or"
            )
        else:
            lacks = "and nothing says what belongs together;"
        raise UserError(f"{folder}: has {_listing(chosen)}, {lacks} give one file as the model")
    name = chosen[0]
    passed_over = [
        other for other in present if (each := find_format(other)) not in (None, kind) and each.may_be_weights(other)
    ]
    if passed_over:
        logger.info("%s: reading %s and not %s", folder, name, _listing(passed_over))
    elif kind.weights_file and name not in (kind.weights_file, kind.index_file):
        logger.info("%s: no %s, reading %s", folder, kind.weights_file, name)
    return _open_shards(kind, folder / name) if name == kind.index_file else _open_one(kind, folder / name, weights)


def _list_folder(folder):
    """Return the names of all that may be files of the checkpoint, sorted."""
    # Under these names a folder is no stray but a mistake.
    standard = {name for each in FORMATS for name in (each.weights_file, each.index_file)}
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_symlink() or path.is_file() or path.name in standard)
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror})") from error


def _open_one(kind, path, weights):
    """Return [(TensorFile, names)] of a file; without weights no names, and nothing at all if it holds nothing else."""
    if not weights and not kind.is_whole:
        return []
    _note(kind, path)
    file = kind.file_class(path)
    if weights:
        file.check_weights()
    return [(file, file.names() if weights else [])]


def _note(kind, path):
    if kind.note:
        logger.info("%s: %s", path, kind.note)


def _open_shards(kind, index):
    """Open the shards that the index lists; any other file is ignored."""
    folder = index.parent
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: has no weight_map; fetch it again")
    names_of = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard in ("", "..") or pathlib.PurePath(shard).name != shard:
            raise UserError(f"{index}: {name} is said to be in {shard!r}, which is not a file name")
        names_of.setdefault(shard, []).append(name)
    missing = sorted(shard for shard in names_of if _is_broken_link(folder / shard) or not is_present(folder / shard))
    if missing:
        raise UserError(
            f"{folder}: {len(missing)} of the {len(names_of)} shards in {index.name} are missing: "
            f"{', '.join(missing)}; fetch them again"
        )
    foreign = sorted(shard for shard in names_of if not shard.endswith(kind.suffixes))
    if foreign:
        raise UserError(
            f"{index}: lists {_listing(foreign)}, which should be {kind.name} files (named *{', *'.join(kind.suffixes)}); "
            "index and shards are not of one checkpoint"
        )
    _note(kind, index)
    files = [(kind.file_class(folder / shard), names) for shard, names in sorted(names_of.items())]
    absent = [f"{name} ({file.path.name})" for file, names in files for name in sorted(set(names) - set(file.names()))]
    if absent:
        raise UserError(
            f"{index}: {len(absent)} of {len(weight_map)} weights are not in the shard it gives: "
            f"{_listing(sorted(absent))}; index and shards are not of one checkpoint"
        )
    return files


def _is_broken_link(path):
    return os.path.islink(path) and not os.path.exists(path)


def _listing(names, limit=8):
    """Join names with commas, the ones beyond the limit as a count."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
