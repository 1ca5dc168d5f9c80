"""OpenVINO GenAI's LLMPipeline."""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.engine import serve


class Engine:
    def __init__(self, model, precision, threads, batch_size, max_length, options):
        self.pipeline = openvino_genai.LLMPipeline(str(model), "CPU", INFERENCE_NUM_THREADS=threads, **options)

    def generate(self, prompts, num_new):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_new
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        ids = np.array(prompts, np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        return [[int(token) for token in row] for row in self.pipeline.generate(inputs, config).tokens]


if __name__ == "__main__":
    serve(Engine)
