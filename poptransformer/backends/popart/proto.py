"""The package onnx, for its protobuf classes; imported only here."""

from __future__ import annotations

from poptransformer.errors import UserError


def load_onnx():
    """Import onnx.

    Raises: UserError if it is not installed.
    """
    try:
        import onnx
    except ImportError:
        raise UserError("backend popart writes ONNX and needs the package onnx: pip install onnx") from None
    return onnx
