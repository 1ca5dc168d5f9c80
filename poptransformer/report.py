"""What examples print: the text, and the block of figures."""

from __future__ import annotations

from poptransformer.description import lowering_line
from poptransformer.generation.result import Generation
from poptransformer.tokenizers.chat import conversations


def show(session, config) -> None:
    """Generate what a config asks for and print it: answers to its chat as a stream, or else what follows its prompts; then
    the figures. In a process that does not lead, work for the one that does, and print nothing.
    """
    if not session.leads:
        session.follow()
        return
    settings = config.generation_settings()
    if config.inputs.chat is None:
        generations = session.generate(config.inputs.prompts, **settings)
        print(transcript(config.inputs.prompts, generations))
    else:
        generations = print_chat(session, config.inputs.chat, settings)
    print(report(session, generations))


def transcript(prompts, generations: list[Generation]) -> str:
    """Each prompt with what came after it; token ids where there is no tokenizer.

    Args:
      prompts: strings or lists of token ids.
      generations: a Generation for each.
    Returns: lines of text.
    """
    return "\n".join(
        f"--- {prompt}\n{generation.token_ids if generation.text is None else generation.text}\n"
        for prompt, generation in zip(prompts, generations, strict=True)
    )


def print_chat(session, messages, settings: dict) -> list[Generation]:
    """Answer conversations one after the other; print each answer while it comes, under the message that it answers.

    Args:
      messages: as for Session.chat.
      settings: keyword arguments for Session.stream_chat.
    Returns: a Generation for each.
    """
    generations = []
    for conversation in conversations(messages):
        pieces = session.stream_chat(conversation, **settings)
        print("---", conversation[-1]["content"])
        for piece in pieces:
            print(piece.text, end="", flush=True)
        print("\n", flush=True)
        generations.append(piece.generation)
    return generations


def report(session, generations: list[Generation]) -> str:
    """Say what ran where, and how fast: figures of all waves together, beside the memory bandwidth measured now.

    Args:
      session: the Session that made the generations.
      generations: its results.
    Returns: lines of text.
    """
    waves = list({id(generation.timings): generation.timings for generation in generations}.values())
    prefill_ms = sum(wave.prefill_ms for wave in waves)
    prefill_tokens = sum(wave.prefill_tokens for wave in waves)
    decode_ms = sum(wave.decode_ms for wave in waves)
    steps = sum(wave.decode_steps for wave in waves)
    tokens = sum(wave.decode_tokens for wave in waves)
    ms_per_token = decode_ms / steps if steps else 0.0
    gb_per_s = session.weight_bytes_per_token / ms_per_token / 1e6 if steps else 0.0
    bandwidth = session.memory_bandwidth_gb_per_s()
    share = f"{gb_per_s / bandwidth:.0%} of the {bandwidth:.1f} GB/s measured now" if bandwidth else "bandwidth not measured"
    device = session.device_info
    lines = {
        "device": f"{device.platform}, {device.name}",
        "custom ops": device.custom_ops,
        "decode ops": lowering_line(session.describe().graphs["decode"]),
        "precision": f"{session.precision}, {session.model.memory} {session.model.states()[0].dtype.name}",
        "batch size": f"{session.batch_size}, up to {session.max_length} tokens a row",
        "weights": f"{session.weight_bytes_per_token / 1e6:.1f} MB read per token",
        "open": f"{session.timings_s['open']:.2f} s (config, tokenizer, device)",
        "load": f"{session.timings_s['load']:.2f} s",
        "compile": f"{session.timings_s['compile']:.2f} s",
        "prefill": f"{prefill_ms:.1f} ms for {prefill_tokens} tokens",
        "decode": f"{ms_per_token:.2f} ms/token over {tokens} tokens in {steps} steps",
        "read": f"{gb_per_s:.1f} GB/s, {share}",
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())
