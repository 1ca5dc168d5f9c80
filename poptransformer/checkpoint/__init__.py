"""Checkpoints: where they lie, what is in them, and one tensor at a time out of them."""

from poptransformer.checkpoint.reader import Checkpoint
from poptransformer.checkpoint.source import resolve_source
from poptransformer.checkpoint.weights import WantedWeight, match_weights

__all__ = ["Checkpoint", "WantedWeight", "match_weights", "resolve_source"]
