"""From what a user calls a model to that model without its weights."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib

from poptransformer.checkpoint.json_file import read_json
from poptransformer.checkpoint.reader import Checkpoint
from poptransformer.errors import UserError, near_miss
from poptransformer.models import find_model, read_model_config
from poptransformer.models.decoder_model import DecoderModel
from poptransformer.planning.devices import Device
from poptransformer.planning.footprint import Footprint, measure
from poptransformer.planning.shapes import SHAPES, find_shape
from poptransformer.precision import Precision
from poptransformer.precision import precision as find_precision
from poptransformer.register import REGISTER
from poptransformer.session_arguments import check_kv_cache, check_max_length, positive


def read_config(model) -> dict:
    """The config.json of a model, or what stands for it.

    Args:
      model: a dict in the form of a config.json; the path of such a file; a folder, a file of weights or a GGUF file; the name
        of a shape in `shapes.SHAPES`; or a name on the Hugging Face hub, of which only the configuration is fetched.
    Raises: UserError if it is nowhere, with the names that are known; UnsupportedError for what no model here is.
    """
    if isinstance(model, dict):
        return model
    if not isinstance(model, (str, os.PathLike)):
        raise UserError(f"model={model!r}: wanted a folder, a file, a name or a dict")
    text = os.fspath(model)
    path = pathlib.Path(text).expanduser()
    if path.suffix == ".json" and path.is_file():
        return read_json(path)
    if path.exists():
        with Checkpoint.open(model, weights=False) as checkpoint:
            if checkpoint.has_config:
                return checkpoint.config
        with Checkpoint.open(model) as checkpoint:  # GGUF files, and families whose sizes the weights tell
            return read_model_config(checkpoint)
    shape = find_shape(text)
    if shape is not None:
        return shape.config
    try:
        with Checkpoint.open(model, weights=False) as checkpoint:
            return checkpoint.config
    except UserError as error:
        names = ", ".join(SHAPES)
        raise type(error)(f"{error}; shapes known without files are {names}{near_miss(text.lower(), SHAPES)}") from None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A model's config with the settings that its sizes depend on; checked as Session checks them.

    Attributes:
      name: what the user calls it.
      model_class, config: its family and that family's config.
      precision: of weights, activations and caches.
      batch_size, max_length: B and S.
    """

    name: str
    model_class: type[DecoderModel]
    config: object
    precision: Precision
    batch_size: int
    max_length: int

    def footprint(self, device: Device, num_replicas: int = 1, prefill_length: int | None = None) -> Footprint:
        """What each part takes on one of num_replicas ranks; see `footprint.measure`."""
        return measure(self.build(num_replicas), prefill_length, device.unpacks)

    def build(self, num_replicas: int = 1) -> DecoderModel:
        """The model as one of num_replicas ranks sees it, without weights."""
        with REGISTER.scope(
            batch_size=self.batch_size, max_length=self.max_length, world_size=num_replicas, dtype=self.precision.dtype,
            weight_dtype=self.precision.weight_dtype, cache_dtype=self.precision.cache_dtype, packing=self.precision.packing,
        ):  # fmt: skip
            return self.model_class(self.config)

    @functools.cached_property
    def num_parameters(self) -> int:
        """Weights of the model, a tied one once."""
        return sum(math.prod(parameter.logical_shape) for parameter in self.build().parameters())

    @property
    def most_replicas(self) -> int:
        """Ranks beyond which nothing is left to cut: query heads, or features where there are none."""
        return getattr(self.config, "num_heads", self.config.hidden_size)


def find_sizes(model, precision="fp32", kv_cache=None, group_size=None, batch_size=1, max_length=None) -> Sizes:
    """Find a model and check the settings; the arguments are those of Session.

    Raises: UserError, UnsupportedError as Session does.
    """
    config = read_config(model)
    model_class = find_model(config)
    family_config = model_class.config_class.from_hf(config)
    check_kv_cache(kv_cache, precision, model_class)
    return Sizes(
        name=config.get("model_type", "") if isinstance(model, dict) else os.fspath(model),
        model_class=model_class,
        config=family_config,
        precision=find_precision(precision, kv_cache, group_size),
        batch_size=positive("batch_size", batch_size),
        max_length=check_max_length(max_length, family_config, model_class.has_positions),
    )
