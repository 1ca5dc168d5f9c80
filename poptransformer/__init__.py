"""PopTransformer: transformer models for inference, written once, compiled by XLA (and PopART).

    from poptransformer import Session

JAX, the tokenizers library and whatever else takes time to import comes when a Session needs it.
"""

from poptransformer.errors import UnsupportedError, UserError
from poptransformer.generation.result import Generation, Piece, Timings
from poptransformer.sessions import Session

__all__ = ["Generation", "Piece", "Session", "Timings", "UnsupportedError", "UserError"]
__version__ = "0.1.0"
