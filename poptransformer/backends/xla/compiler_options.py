"""Options of XLA's compiler that differ from its defaults, by platform."""

from __future__ import annotations

import os

# A command buffer is a CUDA graph. With loops and branches inside them, decoding goes on without the host, which else waits
# for the loop's condition and the choice of sampling in every token (40 to 50 us of 1.15 ms with 8 layers of Llama-2-7B on a
# H200); with kernels ordered by their data alone, small ones that do not depend on each other overlap (5 us a layer).
_GPU = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}
OPTIONS = {"gpu": _GPU}


def compiler_options(platform: str) -> dict[str, str] | None:
    """What `compile` of a lowered function takes, for a platform by JAX's name of it. XLA_FLAGS in the environment win."""
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in OPTIONS.get(platform, {}).items() if f"--{name}" not in flags} or None
