"""BaseModel: a config, layers, and how the checkpoint's tensors reach the layers' parameters."""

from __future__ import annotations

import functools
import logging

from poptransformer.checkpoint.saved import check_saved
from poptransformer.checkpoint.weights import WantedWeight, match_weights
from poptransformer.errors import UserError
from poptransformer.graph import Parameter
from poptransformer.layers import BaseLayer

logger = logging.getLogger(__name__)


class BaseModel(BaseLayer):
    """Base of all models. A family says which checkpoint keys it reads by overriding the class attributes and methods here.

    Attributes:
      ignored_keys: regular expressions of checkpoint keys that are no weights (buffers of the original code).
    """

    ignored_keys: tuple[str, ...] = ()

    def checkpoint_keys(self, parameter_name: str) -> tuple[str, ...]:
        """Keys under which checkpoints hold a parameter, in order of preference."""
        return (parameter_name,)

    def is_transposed(self, parameter_name: str) -> bool:
        """Whether checkpoints hold a matrix as [in_features, out_features]."""
        return False

    def transform(self, parameter_name: str, array):
        """Turn a checkpoint's tensor, in the parameter's shape (and its dtype, if it is not packed), into the parameter: for
        rows in another order, say. Most are taken as they are.
        """
        return array

    def shape_meaning(self, parameter_name: str) -> str:
        """How the shape in the checkpoint follows from the config, for error messages: "(hidden_size, 3 * hidden_size)"."""
        return ""

    def named_parameters(self) -> dict[str, Parameter]:
        """All parameters by name."""
        return {parameter.name: parameter for parameter in self.parameters()}

    def attach_checkpoint(self, checkpoint) -> None:
        """Give each parameter the function that reads it. Nothing is read yet.

        Raises: UserError naming every missing, extra and misshapen weight.
        """
        parameters = self.named_parameters()
        if checkpoint.saved:
            check_saved(checkpoint.saved, parameters, checkpoint)
            for name, parameter in parameters.items():
                parameter.load = functools.partial(checkpoint.map, name)
            return
        wanted = {
            name: WantedWeight(
                self.checkpoint_keys(name),
                parameter.logical_shape[::-1] if self.is_transposed(name) else parameter.logical_shape,
                self.shape_meaning(name),
            )
            for name, parameter in parameters.items()
        }
        for name, key in match_weights(wanted, checkpoint, self.ignored_keys).items():
            parameters[name].load = functools.partial(self._load, checkpoint, key, parameters[name])

    def _load(self, checkpoint, key, parameter):
        dtype, is_transposed = None if parameter.packing else parameter.dtype, self.is_transposed(parameter.name)
        if parameter.packing and type(self).transform is BaseModel.transform:
            packed = checkpoint.read_packed(key, parameter.packing, transpose=is_transposed)
            if packed is not None:
                return packed
        array = checkpoint.read(key, dtype=dtype, transpose=is_transposed)
        array = self.transform(parameter.name, array)
        try:
            return parameter.packing.pack(array) if parameter.packing else array
        except UserError as error:
            raise UserError(f"{key}: {error}") from None
