"""Arguments of Session: each is checked where it enters, before any device work; all raise UserError."""

from __future__ import annotations

import logging
import numbers
import os

from poptransformer.errors import UnsupportedError, UserError
from poptransformer.precision import precision as find_precision

logger = logging.getLogger(__name__)

DEFAULT_PRECISION = "fp32"
DEFAULT_MAX_LENGTH = 2048  # positions, where the model's own limit is higher: caches take a device's memory whether used or not
LARGEST_MAX_LENGTH = 2**30  # where the model sets no limit: positions are int32


def check_types(model, random_weights, execution_cache_dir) -> None:
    """Refuse values that no later step would name."""
    if not isinstance(model, (str, os.PathLike, dict)):
        raise UserError(f"model={model!r}: wanted a folder, a file of weights, a hub name or a dict")
    if not isinstance(random_weights, bool):
        raise UserError(f"random_weights={random_weights!r}: wanted true or false")
    if not isinstance(execution_cache_dir, (str, os.PathLike, type(None))):
        raise UserError(f"execution_cache_dir={execution_cache_dir!r}: wanted a folder")


def positive(name, value) -> int:
    """The value, a whole number of at least 1."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name}={value!r}: wanted a whole number of at least 1")
    return int(value)


def check_max_length(max_length, config, has_positions=True) -> int:
    """The most tokens of a row: what was asked for, within the limit of the model's config if its positions end there."""
    limit = config.max_seq_len
    if max_length is None:
        return min(limit, DEFAULT_MAX_LENGTH)
    max_length = positive("max_length", max_length)
    if not has_positions:
        if max_length > LARGEST_MAX_LENGTH:
            raise UserError(f"max_length={max_length} is more than can be counted; set at most {LARGEST_MAX_LENGTH}")
        return max_length
    if max_length > limit:
        why = getattr(config, "why_not_longer", "")
        raise UserError(
            f"max_length={max_length} is more than the model's {limit} positions{why and f' ({why})'}; set at most {limit}"
        )
    return max_length


def choose_precision(precision, kv_cache, group_size, saved):
    """The Precision: what was asked for; of a model that was saved with packed weights, its own.

    Args:
      precision, kv_cache, group_size: Session's arguments.
      saved: checkpoint.saved.Saved, or None for any other model.
    Raises: UserError if a saved model has another precision than asked for.
    """
    if saved is None:
        return find_precision(DEFAULT_PRECISION if precision is None else precision, kv_cache, group_size)
    for name, asked, own in (("precision", precision, saved.precision), ("group_size", group_size, saved.group_size)):
        if asked not in (None, own):
            what = "without groups" if own is None else f"in {own}" if name == "precision" else f"with group_size={own}"
            raise UserError(
                f"{name}={asked!r}: {saved.path} was saved {what}; leave {name} out, or give the model that it was made from"
            )
    return find_precision(saved.precision, kv_cache, saved.group_size)


def check_kv_cache(kv_cache, precision, model_class) -> None:
    """Refuse a precision of its own for the KV cache of a model that has none."""
    if kv_cache not in (None, precision) and not model_class.has_kv_cache:
        raise UnsupportedError(
            f"kv_cache={kv_cache!r} is not supported: this model has no KV cache, and its {model_class.memory} is float32 in "
            "every precision; leave kv_cache out"
        )


def count_stages(layers_per_device, num_layers, num_replicas, devices) -> int:
    """How many pipeline stages are asked for: as many as layers_per_device lists; for "auto", as `devices` has room for.

    Args:
      layers_per_device: None, "auto" or a list of layer counts.
      num_replicas: devices of one stage.
      devices: how many devices are to be used, or None for as many as the other two need.
    """
    if devices is not None:
        devices = positive("devices", devices)
    if layers_per_device is None or isinstance(layers_per_device, str) and layers_per_device == "auto":
        num_stages = 1 if devices is None or layers_per_device is None else devices // num_replicas
        if devices is not None and devices % num_replicas:
            raise UserError(f"devices={devices} is not a multiple of num_replicas={num_replicas}; set another number")
        if num_stages > num_layers:
            raise UserError(
                f"devices={devices} makes {num_stages} stages, but the model has {num_layers} layers; set at most "
                f"{num_layers * num_replicas} devices, or list layers_per_device"
            )
        num_stages = max(num_stages, 1)
    else:
        stages = list(layers_per_device) if isinstance(layers_per_device, (list, tuple)) else None
        if not stages or not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in stages):
            raise UserError(f"layers_per_device={layers_per_device!r}: wanted auto, or a list of layer counts")
        if sum(stages) != num_layers:
            raise UserError(f"layers_per_device={stages} adds up to {sum(stages)}; the model has {num_layers} layers")
        num_stages = len(stages)
    if devices is not None and devices != num_stages * num_replicas:
        stages = f"{num_stages} stage{'s' * (num_stages > 1)}"
        raise UserError(
            f"devices={devices}, but {stages} of {num_replicas} replica{'s' * (num_replicas > 1)} make "
            f"{num_stages * num_replicas}; set devices={num_stages * num_replicas}, or leave it out"
        )
    return num_stages


def token_ids_of(key, config, generation_config, vocab_size):
    """The ids that config.json and generation_config.json give under a key, each a number, a list or null."""
    found = []
    for source in (config, generation_config):
        value = source.get(key)
        found += value if isinstance(value, list) else [] if value is None else [value]
    wrong = [i for i in found if not isinstance(i, int) or not 0 <= i < vocab_size]
    if wrong:
        logger.warning("%s: %s are outside the vocabulary of %d and are ignored", key, wrong, vocab_size)
    return tuple(dict.fromkeys(i for i in found if i not in wrong))
