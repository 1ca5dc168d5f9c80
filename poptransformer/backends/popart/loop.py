"""PopART lowering of loop: one Loop on the device, which stops early."""

from poptransformer.backends.popart.lowering import lowering


@lowering("loop")
def loop(emitter, keep_going, *carried, max_steps, body):
    def write_body(inner, step, tensors):
        again, *results = emitter.root.evaluate(inner, body, [step, *tensors])
        return again, results

    return emitter.loop(max_steps, keep_going, carried, write_body)
