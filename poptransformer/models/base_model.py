"""BaseModel: a config, layers, and how the checkpoint's tensors reach the layers' parameters."""

from __future__ import annotations

import functools
import logging

from poptransformer.checkpoint.parts import read_part
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

    def row_order(self, parameter_name: str):
        """For each row of a parameter the row of the checkpoint's tensor: an int array, or None where they are the same."""
        return None

    def transform(self, parameter_name: str, array):
        """Turn a checkpoint's tensor, or any part of it, in the parameter's dtype if it is not packed, into the parameter,
        element by element. Most are taken as they are.
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
            for parameter in parameters.values():
                parameter.load = functools.partial(self._load_saved, checkpoint, parameter)
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

    def _load(self, checkpoint, key, parameter, rank=0):
        name, packing, cut = parameter.name, parameter.packing, parameter.cut
        is_transposed, row_order = self.is_transposed(name), self.row_order(name)
        if packing and row_order is None and type(self).transform is BaseModel.transform:
            packed = self._read_packed(checkpoint, key, parameter, rank)
            if packed is not None:
                return packed
        array = read_part(
            checkpoint, key, parameter.logical_shape, cut, rank, row_order, None if packing else parameter.dtype, is_transposed
        )
        array = self.transform(name, array)
        try:
            return packing.pack(array) if packing else array
        except UserError as error:
            raise UserError(f"{key}: {error}") from None

    def _load_saved(self, checkpoint, parameter, rank=0):
        array, whole, cut = checkpoint.map(parameter.name), parameter.whole_packing, parameter.cut
        if cut is None:
            return array
        if whole is None:
            return cut.take(array, rank)
        if whole.can_take(cut):
            return whole.take(array, cut, rank)
        return parameter.packing.pack(cut.take(whole.unpack(array), rank))  # groups that a cut crosses are made anew

    def _read_packed(self, checkpoint, key, parameter, rank):
        """A rank's part of a matrix that is stored in codes already; None if it is not, or a cut crosses its groups."""
        whole, cut = parameter.whole_packing, parameter.cut
        if cut is not None and not whole.can_take(cut):
            return None
        packed = checkpoint.read_packed(key, whole, transpose=self.is_transposed(parameter.name))
        return packed if packed is None or cut is None else whole.take(packed, cut, rank)
