"""Hugging Face transformers, eager."""

from __future__ import annotations

import torch
import transformers

from benchmarks.peers.engine import serve


class Engine:
    def __init__(self, model, precision, threads, batch_size, max_length, options):
        torch.set_num_threads(threads)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        self.device = options.get("device", "cpu")
        if isinstance(model, dict):
            config = transformers.AutoConfig.for_model(**model)
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.model = self.model.to(self.device).eval()

    @torch.inference_mode()
    def generate(self, prompts, num_new):
        ids = torch.tensor(prompts, device=self.device)
        config = transformers.GenerationConfig(
            max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, eos_token_id=None, pad_token_id=0, bos_token_id=1
        )
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return out[:, ids.shape[1] :].tolist()


if __name__ == "__main__":
    serve(Engine)
