"""This project, as one of the engines."""

from __future__ import annotations

import os

from benchmarks.peers.engine import serve


class Engine:
    def __init__(self, model, precision, threads, batch_size, max_length, options):
        os.environ["POPTRANSFORMER_NUM_THREADS"] = str(threads)
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        from poptransformer import Session

        self.session = Session(model, precision=precision, batch_size=batch_size, max_length=max_length, **options)
        self.session.load()

    def generate(self, prompts, num_new):
        rows = self.session.generate(prompts, max_new_tokens=num_new, temperature=0, ignore_eos=True)
        return [row.token_ids for row in rows]


if __name__ == "__main__":
    serve(Engine)
