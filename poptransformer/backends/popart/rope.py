"""PopART lowering of rope: angles and products in float32."""

import numpy as np

from poptransformer.backends.popart.lowering import lowering


@lowering("rope")
def rope(emitter, x, position_ids, inv_freq, attention_scale, interleaved):
    half, leading = inv_freq.shape[0], x.shape[:3]
    position = emitter.reshape(emitter.cast(position_ids, np.float32), (*position_ids.shape, 1, 1))
    angles = emitter.mul(position, inv_freq)  # [B, T, 1, rotary_dim / 2]
    cos, sin = emitter.unary("Cos", angles), emitter.unary("Sin", angles)
    if attention_scale != 1:
        cos, sin = emitter.mul(cos, attention_scale), emitter.mul(sin, attention_scale)
    sizes = [2 * half, x.shape[-1] - 2 * half] if x.shape[-1] > 2 * half else [2 * half]
    turning, *rest = emitter.split(x, sizes, 3)
    pairs = (half, 2) if interleaved else (2, half)
    a, b = emitter.split(emitter.reshape(emitter.widen(turning), (*leading, *pairs)), [1, 1], 4 if interleaved else 3)
    a, b = emitter.reshape(a, (*leading, half)), emitter.reshape(b, (*leading, half))
    first = emitter.sub(emitter.mul(a, cos), emitter.mul(b, sin))
    second = emitter.add(emitter.mul(b, cos), emitter.mul(a, sin))
    axis = 4 if interleaved else 3
    parts = [emitter.reshape(part, (*leading, half, 1) if interleaved else (*leading, 1, half)) for part in (first, second)]
    turned = emitter.cast(emitter.reshape(emitter.concat(parts, axis), turning.shape), x.dtype)
    return emitter.concat([turned, *rest], 3)
