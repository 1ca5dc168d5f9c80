"""PopTransformer: transformer models for inference, written once, compiled by XLA (and PopART).

    from poptransformer import Session

Only light modules are imported here; JAX, tokenizers and checkpoint readers come when a Session needs them.
"""

from poptransformer.errors import UnsupportedError, UserError
from poptransformer.generation.result import Generation, Piece, Timings
from poptransformer.sessions import Session

__all__ = ["Generation", "Piece", "Session", "Timings", "UnsupportedError", "UserError"]
__version__ = "0.1.0"
