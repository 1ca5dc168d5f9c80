"""DecoderModel: what all causal decoders share: caches, the prefill graph, the decode loop, scoring graphs.

A family adds `forward` (ids to hidden states) and `head` (hidden states to logits).

The prompt's last token is not prefilled: the decode loop takes it as its first input. So prefill only fills caches and
needs no head, and every new token, the first included, comes out of one place.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from poptransformer import ops
from poptransformer.graph import Graph, State, Value
from poptransformer.models.base_model import BaseModel
from poptransformer.register import REGISTER

MAX_STOP_IDS = 64  # stop ids of one row that the device looks for
DECODE_STEPS = 64  # the most tokens of a row in one run of the decode graph


@dataclasses.dataclass
class DecoderTokens:
    """What layers know about the tokens that pass through them.

    Attributes:
      position_ids: [B, T] int32, position of each token in its row; padding is held inside the model's range.
      cache_len: [B] int32, tokens of the row that the caches hold already.
      num_tokens: [B] int32, tokens of the row that count; the rest of the T is padding.
      row: the model's own `row_inputs`, each [B] int32.
      states: State -> its value; layers replace the values of the states they update.
    """

    position_ids: Value
    cache_len: Value
    num_tokens: Value
    row: dict[str, Value]
    states: dict[State, Value]


class DecoderModel(BaseModel):
    """Base of causal decoders.

    Args:
      config: the family's config dataclass; this class reads `vocab_size` and `max_seq_len`.

    Attributes:
      row_inputs: names of numbers that layers want to know of each row, beside its tokens; `describe_row` gives them.
      needs_whole_prompt: whether a prompt must be prefilled in one piece, as later tokens change what earlier ones see.
      has_positions: whether rows end at config.max_seq_len; False: they can go on beyond what the model was trained on.
      has_kv_cache: whether the states are keys and values, in the precision of the key kv_cache.
      memory: what the states are, for reports.
    """

    row_inputs: tuple[str, ...] = ()
    needs_whole_prompt = False
    has_positions = True
    has_kv_cache = True
    memory = "KV cache"

    def __init__(self, name, config):
        super().__init__(name)
        self.config = config
        self.batch_size, self.max_length = REGISTER.batch_size, REGISTER.max_length
        self.seen = State("generation.seen_tokens", (self.batch_size, config.vocab_size), np.dtype(bool))

    def forward(self, ids: Value, tokens: DecoderTokens) -> Value:
        """ids [B, T] int32 -> hidden states [B, T, D] after the last norm."""
        raise NotImplementedError(type(self).__name__)

    def head(self, hidden: Value) -> Value:
        """hidden [B, T, D] -> logits [B, T, V] float32."""
        raise NotImplementedError(type(self).__name__)

    def describe_row(self, ids: list[int]) -> dict[str, int]:
        """The numbers of `row_inputs` for a prompt. Raises: UserError if the prompt is not as the model wants it."""
        return {}

    def states(self) -> list[State]:
        """States of all layers (KV caches, recurrent states), in the order of the layers."""
        found, pending = [], [self]
        while pending:
            layer = pending.pop(0)
            found += [item for item in vars(layer).values() if isinstance(item, State) and item is not self.seen]
            pending += [item for item in layer._items() if hasattr(item, "parameters")]
        return found

    # ---- stages

    def place(self, layers_per_stage: list[int]) -> None:
        """Put the blocks on pipeline stages, in order; embeddings are on the first stage, the head on the last."""
        stages = [stage for stage, count in enumerate(layers_per_stage) for _ in range(count)]
        for block, stage in zip(self.blocks, stages, strict=True):
            block.stage = stage
        self.lm_head.stage = len(layers_per_stage) - 1

    def bytes_by_layer(self) -> tuple[list[int], int, int]:
        """Bytes of weights and states on one rank: of each block, of what comes before the blocks, and of what comes after
        them. What both ends use (a tied embedding) counts at both.
        """
        before = [block.stage for block in self.blocks], self.lm_head.stage
        self.place([0, *[1] * len(self.blocks), 0])
        graph = self.build_decode()
        for block, stage in zip(self.blocks, before[0], strict=True):
            block.stage = stage
        self.lm_head.stage = before[1]
        num_bytes = [0] * (len(self.blocks) + 2)
        stages = graph.stages_of()
        for table in (graph.parameters, graph.states):
            for name, (item, _) in table.items():
                for stage in stages[name]:
                    num_bytes[stage] += item.spec.num_bytes
        return num_bytes[1:-1], num_bytes[0], num_bytes[-1]

    # ---- graphs

    def build_prefill(self, num_new: int) -> Graph:
        """Graph that puts T = num_new tokens of each row into the caches.

        Inputs: input_ids [B, T], cache_len [B], num_tokens [B] and each of row_inputs [B] int32; is_fresh [B] bool: the row
        starts anew.
        """
        graph = Graph(f"prefill_{num_new}")
        ids, tokens, seen = self._prompt_inputs(graph, num_new)
        self.forward(ids, tokens)
        self._update_states(graph, tokens.states, seen)
        return graph

    def build_logits(self, num_new: int) -> Graph:
        """As build_prefill, with an output logits [B, T, V] float32 for the token after each."""
        graph = Graph(f"logits_{num_new}")
        ids, tokens, seen = self._prompt_inputs(graph, num_new)
        graph.output("logits", self.head(self.forward(ids, tokens)))
        self._update_states(graph, tokens.states, seen)
        return graph

    def build_score(self, num_new: int) -> Graph:
        """As build_logits, with an input target_ids [B, T] and an output logprobs [B, T] of those instead of the logits."""
        graph = Graph(f"score_{num_new}")
        ids, tokens, seen = self._prompt_inputs(graph, num_new)
        targets = graph.input("target_ids", ids.shape, np.int32)
        graph.output("logprobs", ops.token_log_prob(self.head(self.forward(ids, tokens)), targets))
        self._update_states(graph, tokens.states, seen)
        return graph

    def build_decode(self) -> Graph:
        """Graph that generates up to DECODE_STEPS tokens of each row in a loop on the device.

        Inputs, all [B] unless said: token (the row's newest, not yet in the caches), cache_len, max_new (the most tokens
        to generate in this run; 0 for a row at rest), is_fresh, each of row_inputs, stop_ids [B, MAX_STOP_IDS] (-1 where
        unused), the sampling settings temperature, top_k, top_p, min_p, repetition_penalty and seed [B, 2], as in the op
        `sample`.
        Outputs: tokens [B, DECODE_STEPS] int32 and logprobs float32, of which the first num_new [B] of each row count. A
        row ends with its stop id, which counts.
        """
        graph = Graph("decode")
        token, cache_len, max_new, stop_ids, settings = self._decode_inputs(graph)
        row = self._row_inputs(graph)
        seen = self._fresh_seen(graph, graph.input("is_fresh", (self.batch_size,), bool))
        states = {state: graph.state(state) for state in self.states()}
        states, seen = self._decode_loop(graph, token, cache_len, max_new, row, stop_ids, settings, states, seen)
        self._update_states(graph, states, seen)
        return graph

    def build_generate(self, num_new: int) -> Graph:
        """Prefill and decode loop in one graph, for compilers that want one program: inputs and outputs of both; `token`
        is the prompt's last, input_ids and num_tokens [B] the ones before it, `cache_len` is what the row had before.
        """
        graph = Graph(f"generate_{num_new}")
        ids, tokens, seen = self._prompt_inputs(graph, num_new)
        self.forward(ids, tokens)
        token, _, max_new, stop_ids, settings = self._decode_inputs(graph, tokens.cache_len)
        cache_len = tokens.cache_len + tokens.num_tokens
        states, seen = self._decode_loop(graph, token, cache_len, max_new, tokens.row, stop_ids, settings, tokens.states, seen)
        self._update_states(graph, states, seen)
        return graph

    # ---- their parts

    def _row_inputs(self, graph):
        return {name: graph.input(name, (self.batch_size,), np.int32) for name in self.row_inputs}

    def _tokens(self, graph, num_new, cache_len, num_tokens, row, states):
        offsets = graph.constant(np.arange(num_new, dtype=np.int32)[None])
        position_ids = ops.reshape(cache_len, (self.batch_size, 1)) + offsets
        position_ids = ops.minimum(position_ids, self.config.max_seq_len - 1)
        return DecoderTokens(position_ids, cache_len, num_tokens, row, states)

    def _fresh_seen(self, graph, is_fresh):
        fresh = ops.reshape(is_fresh, (self.batch_size, 1))
        return ops.logical_and(graph.state(self.seen), ops.logical_not(fresh))

    def _prompt_inputs(self, graph, num_new):
        rows = (self.batch_size,)
        ids = graph.input("input_ids", (self.batch_size, num_new), np.int32)
        cache_len = graph.input("cache_len", rows, np.int32)
        num_tokens = graph.input("num_tokens", rows, np.int32)
        seen = self._fresh_seen(graph, graph.input("is_fresh", rows, bool))
        states = {state: graph.state(state) for state in self.states()}
        tokens = self._tokens(graph, num_new, cache_len, num_tokens, self._row_inputs(graph), states)
        return ids, tokens, ops.mark_tokens(seen, ids, num_tokens)

    def _decode_inputs(self, graph, cache_len=None):
        rows = (self.batch_size,)
        token = graph.input("token", rows, np.int32)
        cache_len = cache_len or graph.input("cache_len", rows, np.int32)
        max_new = graph.input("max_new", rows, np.int32)
        stop_ids = graph.input("stop_ids", (*rows, MAX_STOP_IDS), np.int32)
        settings = {
            "temperature": graph.input("temperature", rows, np.float32),
            "top_k": graph.input("top_k", rows, np.int32),
            "top_p": graph.input("top_p", rows, np.float32),
            "min_p": graph.input("min_p", rows, np.float32),
            "seed": graph.input("seed", (*rows, 2), np.uint32),
            "repetition_penalty": graph.input("repetition_penalty", rows, np.float32),
        }
        return token, cache_len, max_new, stop_ids, settings

    def _decode_loop(self, graph, token, cache_len, max_new, row, stop_ids, settings, states, seen):
        rows = self.batch_size
        sampling = {key: value for key, value in settings.items() if key != "repetition_penalty"}
        names = list(states)

        def body(step, token, cache_len, is_active, num_new, out_tokens, out_logprobs, seen, *values):
            num_tokens = ops.cast(is_active, np.int32)
            column = ops.reshape(token, (rows, 1))
            seen = ops.mark_tokens(seen, column, num_tokens)
            tokens = self._tokens(step.graph, 1, cache_len, num_tokens, row, dict(zip(names, values, strict=True)))
            logits = ops.reshape(self.head(self.forward(column, tokens)), (rows, -1))
            cache_len = cache_len + num_tokens
            adjusted = ops.repetition_penalty(logits, seen, settings["repetition_penalty"])
            token = ops.sample(adjusted, **sampling, position=cache_len)
            num_new = num_new + num_tokens
            is_stop = ops.reduce_any(ops.equal(ops.reshape(token, (rows, 1)), stop_ids))
            is_active = is_active & ~is_stop & (num_new < max_new)
            logprobs = ops.token_log_prob(logits, token)
            out_tokens = ops.dynamic_update(out_tokens, ops.reshape(token, (rows, 1)), step, axis=1)
            out_logprobs = ops.dynamic_update(out_logprobs, ops.reshape(logprobs, (rows, 1)), step, axis=1)
            keep_going = ops.reduce_any(is_active)
            values = [tokens.states[name] for name in names]
            return keep_going, token, cache_len, is_active, num_new, out_tokens, out_logprobs, seen, *values

        is_active = max_new > 0
        zeros = np.zeros((rows, DECODE_STEPS))
        carried = [
            token, cache_len, is_active, graph.constant(np.zeros(rows, np.int32)),
            graph.constant(zeros.astype(np.int32)), graph.constant(zeros.astype(np.float32)),
            seen, *states.values(),
        ]  # fmt: skip
        results = ops.loop(DECODE_STEPS, ops.reduce_any(is_active), carried, body)
        _, _, _, num_new, out_tokens, out_logprobs, seen, *values = results
        graph.output("tokens", out_tokens)
        graph.output("logprobs", out_logprobs)
        graph.output("num_new", num_new)
        return dict(zip(names, values, strict=True)), seen

    def _update_states(self, graph, states, seen):
        graph.update_state(self.seen, seen)
        for state, value in states.items():
            graph.update_state(state, value)
