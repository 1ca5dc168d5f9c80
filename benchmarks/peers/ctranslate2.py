"""CTranslate2's Generator."""

from __future__ import annotations

import json
import pathlib

import ctranslate2

from benchmarks.peers.engine import serve


class Engine:
    def __init__(self, model, precision, threads, batch_size, max_length, options):
        self.words = json.loads((pathlib.Path(model) / "vocabulary.json").read_text(encoding="utf-8"))
        self.end_word = self.words[options["unused_id"]]  # one that a greedy run does not meet: it would stop early
        self.generator = ctranslate2.Generator(
            str(model), device="cpu", compute_type=options["compute_type"], inter_threads=1, intra_threads=threads
        )

    def generate(self, prompts, num_new):
        results = self.generator.generate_batch(
            [[self.words[token] for token in prompt] for prompt in prompts], max_length=num_new, min_length=num_new,
            sampling_topk=1, beam_size=1, include_prompt_in_result=False, end_token=[self.end_word],
        )  # fmt: skip
        return [result.sequences_ids[0] for result in results]


if __name__ == "__main__":
    serve(Engine)
