"""The stand-in as `import popart` for a process of its own: with this folder, and tests/, on PYTHONPATH."""

import sys

if "onnx" in sys.modules:
    raise ImportError("popart must be imported before onnx")

from popart_contract.standin.binding import NAMESPACE
from popart_contract.standin.module import MACHINE

globals().update(vars(NAMESPACE["popart"]))
__all__ = ["MACHINE", *vars(NAMESPACE["popart"])]
