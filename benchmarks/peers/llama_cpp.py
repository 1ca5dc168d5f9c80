"""llama.cpp through the C API of llama-cpp-python: one context, a sequence for each row, the best token found with NumPy."""

from __future__ import annotations

import llama_cpp
import numpy as np

from benchmarks.peers.engine import serve


class Engine:
    def __init__(self, model, precision, threads, batch_size, max_length, options):
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = batch_size * max_length
        parameters.n_seq_max = batch_size
        parameters.n_batch = max(512, batch_size * max_length)
        parameters.n_ubatch = 512
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.kv_unified = False
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        self.batch = llama_cpp.llama_batch_init(parameters.n_batch, 0, 1)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def generate(self, prompts, num_new):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        new = [[] for _ in prompts]
        pending = [list(enumerate(prompt)) for prompt in prompts]  # of each row: (position, token) pairs
        while True:
            last = self._decode(pending)
            for row, at in enumerate(last):
                logits = llama_cpp.llama_get_logits_ith(self.context, at)
                new[row].append(int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax()))
            if len(new[0]) == num_new:
                return new
            pending = [[(len(prompt) + len(row) - 1, row[-1])] for prompt, row in zip(prompts, new, strict=True)]

    def _decode(self, pending):
        """Run the pairs of all rows; returns for each row the place of its last token in the batch."""
        batch, count, last = self.batch, 0, []
        for row, pairs in enumerate(pending):
            for index, (position, token) in enumerate(pairs):
                batch.token[count], batch.pos[count] = token, position
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, row
                batch.logits[count] = index == len(pairs) - 1
                count += 1
            last.append(count - 1)
        batch.n_tokens = count
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return last


if __name__ == "__main__":
    serve(Engine)
