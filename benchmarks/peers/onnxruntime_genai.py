"""ONNX Runtime GenAI, its Generator loop."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime_genai

from benchmarks.peers.engine import serve


class Engine:
    def __init__(self, model, precision, threads, batch_size, max_length, options):
        config = onnxruntime_genai.Config(str(model))
        session_options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        # An end-of-sequence token that a greedy run does not meet: it would stop early.
        config.overlay(
            json.dumps({"model": {"eos_token_id": options["unused_id"], "decoder": {"session_options": session_options}}})
        )
        self.model = onnxruntime_genai.Model(config)

    def generate(self, prompts, num_new):
        length = len(prompts[0])
        parameters = onnxruntime_genai.GeneratorParams(self.model)
        parameters.set_search_options(do_sample=False, max_length=length + num_new, batch_size=len(prompts))
        generator = onnxruntime_genai.Generator(self.model, parameters)
        generator.append_tokens(np.array(prompts, np.int32))
        for _ in range(num_new):
            generator.generate_next_token()
        return [[int(token) for token in generator.get_sequence(row)[length:]] for row in range(len(prompts))]


if __name__ == "__main__":
    serve(Engine)
