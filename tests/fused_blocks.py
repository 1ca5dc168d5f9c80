"""Decoder blocks of every kind, run as step programs and node by node."""

import collections
import contextlib
import dataclasses

import numpy as np
from run_op import normal, xla
from tolerance import TOLERANCE, assert_close

import poptransformer.backends.xla.engine as engine_module
from poptransformer import kv_cache
from poptransformer.float8 import FLOAT8
from poptransformer.graph import Graph, bfloat16
from poptransformer.layers import MLP, Attention, GatedMLP, LMHead, RMSNorm, Rope
from poptransformer.models.decoder_model import DecoderTokens
from poptransformer.register import REGISTER

f32, f16, i32 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int32)
CAPACITY = 90  # positions of a cache: two chunks of 64


@dataclasses.dataclass(frozen=True)
class Block:
    """A decoder block with a head."""

    batch_size: int = 1
    num_positions: int = 1
    hidden_size: int = 40
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 10
    intermediate_size: int = 50
    dtype: np.dtype = f32
    cache_dtype: np.dtype = f32
    packing: tuple | None = None
    norm: type = RMSNorm
    bias: bool = False
    is_qkv_fused: bool = False
    mlp: str = "gated"  # "gated", "gated, fused" or "plain"
    activation: str = "silu"
    rotary_dim: int | None = None  # None: no rope
    interleaved: bool = False
    qk_norm: type | None = None
    window: int | None = None
    alibi: bool = False
    is_parallel: bool = False
    is_prefix: bool = False  # the first new tokens see each other

    def build(self):
        """Graph of one step: inputs x, position_ids, cache_len, num_tokens, perhaps context_len; outputs hidden, logits."""
        with REGISTER.scope(
            batch_size=self.batch_size, max_length=CAPACITY, world_size=1, dtype=self.dtype, weight_dtype=self.dtype,
            cache_dtype=self.cache_dtype, packing=self.packing,
        ):  # fmt: skip
            rope = None
            if self.rotary_dim is not None:
                freq = 1e4 ** (-np.arange(0, self.rotary_dim, 2, dtype=np.float32) / self.rotary_dim)
                rope = Rope(freq.astype(np.float32), 1.25, self.interleaved)
            first, second, last = (self.norm(f"norm{i}", self.hidden_size, 1e-5) for i in range(3))
            attention = Attention(
                "attention", self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim, bias=self.bias, rope=rope,
                qkv=("qkv",) if self.is_qkv_fused else ("q", "k", "v"), qk_norm_eps=1e-5 if self.qk_norm else None,
                qk_norm=self.qk_norm or RMSNorm, window=self.window, use_prefix=self.is_prefix,
                alibi_slopes=0.5 ** np.arange(1, self.num_heads + 1) if self.alibi else None,
            )  # fmt: skip
            sizes = self.hidden_size, self.intermediate_size, self.activation
            if self.mlp == "plain":
                mlp = MLP("mlp", *sizes, bias=self.bias)
            else:
                mlp = GatedMLP("mlp", *sizes, bias=self.bias, gate_up="gate_up" if self.mlp == "gated, fused" else None)
            head = LMHead("head", self.hidden_size, 33)
        graph = Graph("step")
        rows = (self.batch_size,)
        x = graph.input("x", (*rows, self.num_positions, self.hidden_size), self.dtype)
        positions = graph.input("position_ids", (*rows, self.num_positions), i32)
        lengths = [graph.input(name, rows, i32) for name in ("cache_len", "num_tokens")]
        row = {"context_len": graph.input("context_len", rows, i32)} if self.is_prefix else {}
        states = {state: graph.state(state) for state in (attention.k_cache, attention.v_cache)}
        tokens = DecoderTokens(positions, *lengths, row, states)
        if self.is_parallel:
            x = x + attention(first(x), tokens) + mlp(second(x))
        else:
            x = x + attention(first(x), tokens)
            x = x + mlp(second(x))
        graph.output("hidden", x)
        graph.output("logits", head(last(x)))
        for state, value in tokens.states.items():
            graph.update_state(state, value)
        return graph

    def inputs(self, step):
        """Some rows rest, some have fewer tokens; they go on from where they are."""
        rng, row, count = np.random.default_rng(step), np.arange(self.batch_size), self.num_positions
        cache_len = ((row * 17 + 60 + step) % (CAPACITY - count - 1)).astype(np.int32)
        num_tokens = np.where(row % 3 == 1, 0, np.maximum(1, count - 3 * row)).astype(np.int32)
        inputs = {
            "x": rng.standard_normal((self.batch_size, count, self.hidden_size)).astype(self.dtype),
            "position_ids": cache_len[:, None] + np.arange(count, dtype=np.int32),
            "cache_len": cache_len,
            "num_tokens": num_tokens,
        }
        return inputs | ({"context_len": cache_len + count // 2} if self.is_prefix else {})


def give_weights(parameters):
    """Random weights large enough for every part to count."""
    for i, parameter in enumerate(parameters):
        array = normal(parameter.logical_shape, np.float32, i, 0.3 if len(parameter.shape) > 1 else 0.5)
        array = parameter.packing.pack(array) if parameter.packing else array.astype(parameter.dtype)
        parameter.load = lambda rank=0, array=array: array
    return parameters


@contextlib.contextmanager
def without_fusion():
    """Graphs compiled here run node by node."""
    kept = engine_module.fuse
    engine_module.fuse = lambda *_: None
    try:
        yield
    finally:
        engine_module.fuse = kept


def run_both(build, all_inputs):
    """Outputs and states of every run, from the same random states: fused, not fused; and what was taken."""
    results = []
    for is_fused in (True, False):
        graph = build()
        with contextlib.nullcontext() if is_fused else without_fusion():
            engine = xla(True)
            engine.load(give_weights([parameter for parameter, _ in graph.parameters.values()]))
            engine.compile("step", graph)
        for name, array in engine._states.items():
            head_dim = array.shape[-1] - (kv_cache.SCALE_BYTES if array.dtype == kv_cache.INT8 else 0)
            filled = kv_cache.store(normal((*array.shape[:-1], head_dim), seed=len(name)), array.dtype)
            engine._states[name] = engine.groups[0].put(filled)
        results.append([])
        for inputs in all_inputs:
            outputs = engine.run("step", inputs)
            results[-1].append(outputs | {name: kv_cache.load(np.asarray(array)) for name, array in engine._states.items()})
        if is_fused:
            taken = collections.Counter((choice.op, choice.lowering.partition(" (")[0]) for choice in engine.choices["step"])
        engine.close()
    return *results, taken


def check(block):
    fused, plain, taken = run_both(block.build, [block.inputs(step) for step in range(2)])
    assert {how for op, how in taken if op in ("linear", "packed_linear", "attention", "rope", "silu")} == {
        "kernel step_program"
    }
    # Sums of other lengths in float32. Between nodes the plain path rounds to 16 bits, the program does not. Packed: a hair's
    # breadth decides which of two codes an input is rounded to.
    factor = {f32: 5, bfloat16: 4, f16: 8}[block.dtype]
    rtol, atol = (0.02, 0.02) if block.packing else (factor * bound for bound in TOLERANCE[block.dtype])
    for ours, theirs in zip(fused, plain, strict=True):
        for name, expected in theirs.items():
            # A cache of few bits may round a key that differs in the last bit to its neighbour.
            few_bits = {f16: 2.0**-10, FLOAT8: 2.0**-3, kv_cache.INT8: 2.0**-6}.get(block.cache_dtype, 0)
            wide = expected.astype(np.float32)
            scale = max(1.0, float(np.abs(wide).max()))
            assert_close(ours[name].astype(np.float32), wide, rtol + few_bits, (atol + few_bits) * scale)
