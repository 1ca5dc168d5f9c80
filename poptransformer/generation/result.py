"""What a generation gives back."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Timings:
    """Where the time of one wave of rows went. Rows that ran side by side share one Timings.

    Attributes:
      prefill_ms, prefill_tokens: time and number of prompt tokens put into the caches (padding not counted).
      decode_ms: time in runs of the decode graph.
      decode_steps: steps of the decode loop, each giving at most one token to each row.
      decode_tokens: tokens generated, all rows together.
      weight_bytes: bytes of weights that one step reads.
    """

    prefill_ms: float = 0.0
    prefill_tokens: int = 0
    decode_ms: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0
    weight_bytes: int = 0

    @property
    def prefill_tokens_per_s(self):
        return 1e3 * self.prefill_tokens / self.prefill_ms if self.prefill_ms else 0.0

    @property
    def decode_ms_per_token(self):
        """Milliseconds per step: what a row waits for its next token."""
        return self.decode_ms / self.decode_steps if self.decode_steps else 0.0

    @property
    def decode_tokens_per_s(self):
        """Tokens of all rows together per second."""
        return 1e3 * self.decode_tokens / self.decode_ms if self.decode_ms else 0.0

    @property
    def decode_gb_per_s(self):
        """Weight bytes read per second of decoding, in GB (1e9 bytes)."""
        return self.weight_bytes / self.decode_ms_per_token / 1e6 if self.decode_steps else 0.0


@dataclasses.dataclass
class Generation:
    """One row's result.

    Attributes:
      text: the new text, without the prompt, stop strings and special tokens; None without a tokenizer.
      token_ids: the new tokens, a stop id that ended the row included.
      logprobs: natural logarithm of the model's probability of each new token (before temperature and penalties); None
        unless asked for.
      finish_reason: "stop" (a stop id or stop string) or "length" (max_new_tokens or max_length).
      prompt_token_ids: the prompt as the model saw it.
      seed: the seed that was used.
      timings: of the wave the row ran in.
    """

    text: str | None
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str
    prompt_token_ids: list[int]
    seed: int
    timings: Timings


@dataclasses.dataclass
class Piece:
    """A part of a stream.

    Attributes:
      text: new text, whole characters only, "" if there is none yet; None without a tokenizer.
      token_ids: new tokens.
      logprobs: as in Generation, for these tokens.
      row: index of the prompt it belongs to.
      finish_reason: None until the row's last piece.
      generation: all of the row, with its last piece; None before.
    """

    text: str | None
    token_ids: list[int]
    logprobs: list[float] | None
    row: int
    finish_reason: str | None = None
    generation: Generation | None = None
