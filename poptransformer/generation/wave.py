"""Wave: up to batch_size rows that run side by side on the device."""

from __future__ import annotations

import time

import numpy as np

from poptransformer.errors import UserError
from poptransformer.generation.result import Piece, Timings
from poptransformer.generation.row import Row
from poptransformer.models.decoder_model import DECODE_STEPS, MAX_STOP_IDS

MIN_BUCKET = 16  # tokens; shorter prompts are padded to this
MAX_BUCKET = 512  # longer prompts are put into the caches in chunks of this
# What float32 and int32 arithmetic on the device can take without overflow; settings beyond are moved to the border.
DEVICE_RANGES = {
    "temperature": (1e-5, 1e5),
    "top_k": (1, 2**30),
    "top_p": (1e-6, 1),
    "min_p": (1e-30, 1),
    "repetition_penalty": (1e-6, 1e6),
}


def bucket_length(num_tokens: int, max_length: int, is_whole: bool = False) -> int:
    """Tokens per row of the prefill graph that takes num_tokens: a power of two in MIN_BUCKET .. MAX_BUCKET (is_whole: of at
    least num_tokens), or max_length where that is less.
    """
    bucket = MIN_BUCKET
    while bucket < (num_tokens if is_whole else min(num_tokens, MAX_BUCKET)):
        bucket *= 2
    return min(bucket, max_length)


def fill_chunks(rows_ids: list[list[int]], batch_size: int, max_length: int, is_whole: bool = False):
    """Cut rows of unequal length into the inputs of prefill runs, one chunk of all rows after the other.

    Args:
      is_whole: put everything into one chunk.
    Yields: (bucket length T, inputs that depend on the chunk): input_ids [B, T], cache_len [B], num_tokens [B].
    """
    begin = 0
    longest = max((len(ids) for ids in rows_ids), default=0)
    while begin < longest:
        bucket = bucket_length(longest - begin, max_length, is_whole)
        ids = np.zeros((batch_size, bucket), np.int32)
        cache_len, num_tokens = np.zeros(batch_size, np.int32), np.zeros(batch_size, np.int32)
        for row, row_ids in enumerate(rows_ids):
            chunk = row_ids[begin : begin + bucket]
            ids[row, : len(chunk)] = chunk
            cache_len[row], num_tokens[row] = min(begin, len(row_ids)), len(chunk)
        yield bucket, {"input_ids": ids, "cache_len": cache_len, "num_tokens": num_tokens}
        begin += bucket


def row_inputs(rows: list[dict[str, int]], batch_size: int) -> dict[str, np.ndarray]:
    """The model's numbers for each row as graph inputs [B] int32, zeros for rows that are not there."""
    names = rows[0] if rows else ()
    return {name: np.int32([row[name] for row in rows] + [0] * (batch_size - len(rows))) for name in names}


def settings_inputs(rows: list[Row], batch_size: int) -> dict[str, np.ndarray]:
    """The rows' sampling settings and stop ids as graph inputs; rows that are not there have those that change nothing."""
    inputs = {
        "temperature": np.zeros(batch_size, np.float32),
        "top_k": np.zeros(batch_size, np.int32),
        "top_p": np.ones(batch_size, np.float32),
        "min_p": np.zeros(batch_size, np.float32),
        "repetition_penalty": np.ones(batch_size, np.float32),
        "seed": np.zeros((batch_size, 2), np.uint32),
        "stop_ids": np.full((batch_size, MAX_STOP_IDS), -1, np.int32),
    }
    for i, row in enumerate(rows):
        for name, (low, high) in DEVICE_RANGES.items():
            value = getattr(row.settings, name)
            inputs[name][i] = 0 if value == 0 else min(max(value, low), high)
        inputs["seed"][i] = row.settings.seed_words()
        inputs["stop_ids"][i, : len(row.stop_ids)] = row.stop_ids
    return inputs


def check_finite(rows: list[Row], logprobs, counts) -> None:
    """Refuse tokens that were chosen from logits with a NaN: they mean nothing."""
    wrong = [row.index for i, row in enumerate(rows) if np.isnan(logprobs[i, : counts[i]]).any()]
    if wrong:
        raise UserError(
            f"prompt {', '.join(map(str, wrong))}: the model's logits are not finite; the weights hold NaN or infinity, "
            f"or a number grew beyond float16: set precision (and kv_cache) to bf16 or fp32"
        )


class Wave:
    """Rows that share the device's caches, and the calls that move them on.

    Args:
      prepare: (graph name) -> None; compiles a graph when it is new.
      run: (graph name, inputs) -> outputs.
      rows: at most batch_size rows.
      batch_size, max_length: as the graphs were built.
      weight_bytes: bytes of weights that a decode step reads, for the timings.
      is_whole: whether prompts are prefilled in one piece, however long.
    """

    def __init__(
        self, prepare, run, rows: list[Row], batch_size: int, max_length: int, weight_bytes: int, is_whole: bool = False
    ):
        self.prepare, self.run, self.rows = prepare, run, rows
        self.batch_size, self.max_length, self.is_whole = batch_size, max_length, is_whole
        self.timings = Timings(weight_bytes=weight_bytes)
        self._settings = settings_inputs(rows, batch_size)
        self._row_inputs = row_inputs([row.inputs for row in rows], batch_size)
        self._is_fresh = np.ones(batch_size, bool)

    @property
    def is_finished(self):
        return all(row.finish_reason for row in self.rows)

    def fill(self) -> None:
        """Put all tokens that the rows have, but the newest of each, into the caches. Also brings a wave back whose caches
        another call has overwritten.
        """
        self._is_fresh = np.ones(self.batch_size, bool)
        rows_ids = [row.ids[:-1] if not row.finish_reason else [] for row in self.rows]
        for bucket, inputs in fill_chunks(rows_ids, self.batch_size, self.max_length, self.is_whole):
            self.prepare(f"prefill_{bucket}")
            begin = time.perf_counter()
            self.run(f"prefill_{bucket}", inputs | self._row_inputs | {"is_fresh": self._is_fresh})
            self.timings.prefill_ms += 1e3 * (time.perf_counter() - begin)
            self.timings.prefill_tokens += int(inputs["num_tokens"].sum())
            self._is_fresh = np.zeros(self.batch_size, bool)

    def advance(self, num_steps: int) -> list[Piece]:
        """Generate up to num_steps tokens (at most DECODE_STEPS) of each row that still runs."""
        rows = self.batch_size
        token, cache_len, max_new = (np.zeros(rows, np.int32) for _ in range(3))
        for i, row in enumerate(self.rows):
            if not row.finish_reason:
                token[i], cache_len[i] = row.ids[-1], len(row.ids) - 1
                max_new[i] = min(num_steps, DECODE_STEPS, row.max_new - len(row.new_ids))
        self.prepare("decode")
        begin = time.perf_counter()
        inputs = {"token": token, "cache_len": cache_len, "max_new": max_new, "is_fresh": self._is_fresh}
        outputs = self.run("decode", inputs | self._row_inputs | self._settings)
        self.timings.decode_ms += 1e3 * (time.perf_counter() - begin)
        self._is_fresh = np.zeros(rows, bool)
        counts = outputs["num_new"]
        check_finite(self.rows, outputs["logprobs"], counts)
        self.timings.decode_steps += int(counts.max())
        pieces = [
            row.take(outputs["tokens"][i, : counts[i]].tolist(), outputs["logprobs"][i, : counts[i]].tolist())
            for i, row in enumerate(self.rows)
            if max_new[i]
        ]
        self.timings.decode_tokens += sum(len(piece.token_ids) for piece in pieces)
        return pieces
