"""PopART lowerings of softmax and token_log_prob, in float32."""

import numpy as np

from poptransformer.backends.popart.lowering import lowering


@lowering("softmax")
def softmax(emitter, x):
    return emitter.cast(emitter.softmax(emitter.widen(x)), x.dtype)


@lowering("token_log_prob")
def token_log_prob(emitter, logits, token_ids):
    vocab = emitter.constant(np.arange(logits.shape[-1], dtype=np.int32))
    is_token = emitter.equal(vocab, emitter.reshape(token_ids, (*token_ids.shape, 1)))
    top = emitter.reduce("ReduceMax", logits, keepdims=True)
    shifted = emitter.sub(logits, top)
    chosen = emitter.reduce("ReduceSum", emitter.where(is_token, shifted, 0.0))
    total = emitter.reduce("ReduceSum", emitter.unary("Exp", shifted))
    return emitter.sub(chosen, emitter.unary("Log", total))
