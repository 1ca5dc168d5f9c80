"""ProgramWave: rows that one run of one program takes from prompt to end, for engines that keep nothing between two runs."""

from __future__ import annotations

import time

import numpy as np

from poptransformer.generation.result import Piece, Timings
from poptransformer.generation.row import Row
from poptransformer.generation.wave import MIN_BUCKET, bucket_length, check_finite, fill_chunks, row_inputs, settings_inputs
from poptransformer.models.sampling import Sampling


def generate_name(num_prompt: int, num_new: int, max_length: int, sampling: Sampling) -> str:
    """Name of the `generate` graph for prompts of up to num_prompt tokens (the last one not counted) and num_new new ones.

    Both are rounded up to powers of two: a program takes minutes to compile.
    """
    steps = min(max(MIN_BUCKET, 1 << (num_new - 1).bit_length()), max_length)
    return f"generate_{bucket_length(max(num_prompt, 1), max_length, True)}_{steps}_{sampling.name}"


class ProgramWave:
    """As Wave, but each call of `advance` runs the rows to their end, prompts included.

    A stream has one piece a row. The timings have prefill and decoding together, as `decode_ms`.

    Args:
      prepare: (graph name) -> None; compiles a graph when it is new.
      run: (graph name, inputs) -> outputs.
      rows: at most num_rows rows.
      num_rows: rows of one run, all its batches together.
      max_length: as the graphs are built.
      weight_bytes: bytes of weights that a decode step reads.
      is_stepwise: whether the programs are those of DecoderModel.build_generate_stepwise.
    """

    def __init__(
        self, prepare, run, rows: list[Row], num_rows: int, max_length: int, weight_bytes: int, is_stepwise: bool = False
    ):
        self.is_stepwise = is_stepwise
        self.prepare, self.run, self.rows = prepare, run, rows
        self.num_rows, self.max_length = num_rows, max_length
        self.timings = Timings(weight_bytes=weight_bytes)
        self._settings = settings_inputs(rows, num_rows)
        self._row_inputs = row_inputs([row.inputs for row in rows], num_rows)

    @property
    def is_finished(self):
        return all(row.finish_reason for row in self.rows)

    def fill(self) -> None:
        """Nothing to bring back: caches live in a run."""

    def advance(self, num_steps: int) -> list[Piece]:
        """Generate all tokens of each row that still runs, whatever num_steps says."""
        running = {i: row for i, row in enumerate(self.rows) if not row.finish_reason}
        token, max_new = (np.zeros(self.num_rows, np.int32) for _ in range(2))
        for i, row in running.items():
            token[i], max_new[i] = row.ids[-1], row.max_new - len(row.new_ids)
        before = [row.ids[:-1] if i in running else [] for i, row in enumerate(self.rows)]
        longest = max(len(ids) for ids in before)
        sampling = Sampling.of_rows(self._settings)
        name = generate_name(longest, int(max_new.max()), self.max_length, sampling)
        self.prepare(name)
        inputs = self._inputs(before)
        begin = time.perf_counter()
        outputs = self.run(name, inputs | self._row_inputs | {"token": token, "max_new": max_new} | {
            key: self._settings[key] for key in ("stop_ids", *sampling.inputs)
        })  # fmt: skip
        self.timings.decode_ms += 1e3 * (time.perf_counter() - begin)
        counts = outputs["num_new"]
        tokens, logprobs = outputs["tokens"], outputs["logprobs"]
        if self.is_stepwise:  # new tokens follow those of the prompt
            tokens, logprobs = (
                np.stack([np.roll(row, -start) for row, start in zip(both, inputs["num_tokens"], strict=True)])
                for both in (tokens, logprobs)
            )
        check_finite(self.rows, logprobs, counts)
        self.timings.prefill_tokens += sum(map(len, before))
        self.timings.decode_steps += int(counts.max())
        pieces = [row.take(tokens[i, : counts[i]].tolist(), logprobs[i, : counts[i]].tolist()) for i, row in running.items()]
        self.timings.decode_tokens += sum(len(piece.token_ids) for piece in pieces)
        return pieces

    def _inputs(self, before):
        # Prompts of one token have nothing to prefill; the graph still has a place for it.
        padded = before if any(before) else [[0]]
        ((_, inputs),) = fill_chunks(padded, self.num_rows, self.max_length, True)
        if not any(before):
            inputs["num_tokens"][:] = 0
        return {key: inputs[key] for key in ("input_ids", "num_tokens")}
