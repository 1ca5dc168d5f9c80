"""Row: one prompt's way from tokens to text, with its stop conditions. Knows no device."""

from __future__ import annotations

import dataclasses

from poptransformer.generation.result import Generation, Piece, Timings
from poptransformer.generation.settings import GenerationSettings
from poptransformer.generation.stops import StopStrings
from poptransformer.tokenizers import StreamDetokenizer


@dataclasses.dataclass
class Row:
    """State of one row of a wave.

    Attributes:
      index: which of the caller's prompts it is.
      prompt_ids: the prompt, at least one token.
      settings: what the row wants.
      stop_ids: all token ids that end it.
      max_new: the most new tokens, max_length and max_new_tokens taken together.
      tokenizer: None for a checkpoint without one; the row then has no text.
      inputs: the model's row_inputs for the prompt.
    """

    index: int
    prompt_ids: list[int]
    settings: GenerationSettings
    stop_ids: tuple[int, ...]
    max_new: int
    tokenizer: object | None
    inputs: dict[str, int] = dataclasses.field(default_factory=dict)
    new_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self):
        self._texts = []
        self._detokenizer = StreamDetokenizer(self.tokenizer) if self.tokenizer else None
        self._stops = StopStrings(self.settings.stop)

    @property
    def ids(self):
        """Prompt and new tokens."""
        return self.prompt_ids + self.new_ids

    def take(self, token_ids, logprobs) -> Piece:
        """Add new tokens, up to the one that ends the row; the rest is dropped.

        Returns: the Piece that they make.
        """
        before, texts = len(self.new_ids), []
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            self.new_ids.append(int(token_id))
            self.logprobs.append(float(logprob))
            if token_id in self.stop_ids:
                self.finish_reason = "stop"
            elif self._detokenizer:
                text, is_stopped = self._stops.push(self._detokenizer.push([int(token_id)]))
                texts.append(text)
                if is_stopped:
                    self.finish_reason = "stop"
                    break
            if not self.finish_reason and len(self.new_ids) >= self.max_new:
                self.finish_reason = "length"
            if self.finish_reason:
                texts.append(self._flush())
                break
        text = "".join(texts)
        self._texts.append(text)
        return Piece(
            text if self.tokenizer else None,
            self.new_ids[before:],
            self.logprobs[before:],
            self.index,
            self.finish_reason,
        )

    def _flush(self):
        if not self._detokenizer:
            return ""
        text = self._stops.push(self._detokenizer.flush())[0] + self._stops.flush()
        if self._stops.is_stopped:  # what came out last may complete a stop string
            self.finish_reason = "stop"
        return text

    def result(self, with_logprobs: bool, timings: Timings) -> Generation:
        """The row's Generation, once it has finished."""
        return Generation(
            "".join(self._texts) if self.tokenizer else None, self.new_ids, self.logprobs if with_logprobs else None,
            self.finish_reason, self.prompt_ids, self.settings.seed, timings,
        )  # fmt: skip
