"""Session: a model on a device, ready to generate. It owns graph building, device config and the calls' order."""

from __future__ import annotations

import contextlib
import functools
import logging
import numbers
import pathlib
import threading
import time
from collections.abc import Iterable, Iterator

import numpy as np

from poptransformer.backends import join_cluster, make_engine
from poptransformer.checkpoint.reader import Checkpoint
from poptransformer.checkpoint.save import save_model
from poptransformer.description import Description, count_choices, lowering_table
from poptransformer.errors import UserError
from poptransformer.generation.prompts import encode_prompts, is_single
from poptransformer.generation.result import Generation, Piece
from poptransformer.generation.row import Row
from poptransformer.generation.settings import check_stop_ids, settings_per_row
from poptransformer.generation.wave import Wave, fill_chunks, row_inputs
from poptransformer.models import find_model, read_model_config
from poptransformer.models.decoder_model import DECODE_STEPS
from poptransformer.planning.balance import balance
from poptransformer.progress import Progress
from poptransformer.register import REGISTER
from poptransformer.session_arguments import (
    check_kv_cache,
    check_max_length,
    check_types,
    choose_precision,
    count_stages,
    positive,
    token_ids_of,
)
from poptransformer.tokenizers import load_tokenizer, save_tokenizer
from poptransformer.tokenizers.chat import encode_conversations, is_one

logger = logging.getLogger(__name__)

MAX_STREAM_STEPS = 8  # tokens of a row between two pieces of a stream


class Session:
    """A model, its weights on a device, and its compiled graphs.

    `generate`, `chat`, their streams, `score` and `logits` are what it is for; `describe`, `compile`, `run`, `graph`,
    `device_info` and `timings_s` show what is under them. Weights are read and graphs compiled at the first call that needs
    them, or by `compile()`. Calls from several threads queue. Use as a context manager, or call `close()`, to free the
    device's memory.

    Rows do not influence each other: in fp32 a prompt's tokens are the same in every batch size and place. Sums may be made
    in another order where batch sizes or prompt lengths take another program (above 8 rows, say), so logits agree to rounding
    only, and in bf16 and fp16 two tokens that are nearly as good may change places.

        with Session(model="examples/gpt2/gpt2-pocket", precision="bf16") as session:
            print(session.generate("Once upon a time", max_new_tokens=64)[0].text)

    Args:
      model: a folder, a file of weights with its config.json beside it, a GGUF file, a name on the Hugging Face hub, or
        a dict in the form of a config.json (with random_weights=True).
      backend: "xla" or "reference" (NumPy, slow, for tests).
      platform: "auto", "cpu", "cuda" or "tpu" (backend xla).
      precision: "fp32" (None takes that), "bf16", "fp16", or "int8", "int4" or "fp8" for packed weights. A model that
        `save_quantized` wrote has its own, for which None stands.
      kv_cache: "fp32", "bf16", "fp16", "fp8" or "int8" for the KV cache; None takes that of the activations, fp16 beside packed
        weights. fp8 is e4m3, int8 has a scale for each position and head.
      group_size: weights that share a scale, for int8 and int4: 32 (None takes that), 64, 128, or -1 for the whole row.
      batch_size: rows that run side by side, B. More prompts run in waves.
      max_length: the most tokens of a row, prompt and new ones together, S; None takes the model's limit, at most 2048.
        RWKV has no limit but what it was trained on (context_length): that is for None, and any length can be set.
      devices: how many devices to use: num_replicas times the stages; None takes what those two need. CPU devices beyond the
        first are virtual.
      num_replicas: tensor-parallel ranks: devices that share every weight of a layer.
      layers_per_device: a list of the layers of each pipeline stage, or "auto": stages of about the same bytes for all
        `devices`; None: one stage.
      custom_ops: "auto", True or False: whether this project's kernels run, see XlaEngine.
      execution_cache_dir: folder for compiled programs; None for the user's cache folder, "" for none. This is JAX's
        persistent compile cache, a setting of the whole process: the last Session's folder holds.
      random_weights: draw weights instead of reading them, to measure speed without a checkpoint. Each backend draws its own.
      distributed: several processes, on one host or many, that share num_replicas: "auto" where Slurm, Open MPI or Kubernetes
        started them, or a dict of coordinator ("host:port" of process 0), num_processes, process_id and timeout_s. Each of them
        opens the Session with the same arguments; the one that `leads` uses it, the others call `follow`.
    Raises: UserError for a value, file or config that cannot be used, before any device work.
    """

    def __init__(
        self, model, *, backend="xla", platform="auto", devices=None, precision=None, kv_cache=None, group_size=None,
        batch_size=1, max_length=None, num_replicas=1, layers_per_device=None, custom_ops="auto", execution_cache_dir=None,
        random_weights=False, distributed=None,
    ):  # fmt: skip
        begin = time.perf_counter()
        check_types(model, random_weights, execution_cache_dir)
        self._cluster = join_cluster(backend, distributed)
        with contextlib.nullcontext() if self._cluster is None else self._cluster.failure_told():
            self.batch_size = positive("batch_size", batch_size)
            self.num_replicas = positive("num_replicas", num_replicas)
            choose_precision(precision, kv_cache, group_size, None)  # what is wrong with them needs no file to be seen
            self._open(model, random_weights)
            self.precision = choose_precision(precision, kv_cache, group_size, self._checkpoint and self._checkpoint.saved)
            num_stages = self._build_model(kv_cache, max_length, layers_per_device, devices, random_weights)
            self._engine = make_engine(
                backend, platform, custom_ops, execution_cache_dir, self.num_replicas, num_stages, self._cluster
            )
            self._channel = None if self.leads else self._cluster.channel()
        self._lock = threading.Lock()  # held while the device works: calls queue
        self._wave = None  # whose tokens the caches hold
        self._is_loaded = self._is_closed = False
        self._progress = Progress()
        #: seconds spent so far: "open" (config, tokenizer, device), "load" (weights) and "compile" (all graphs)
        self.timings_s = {"open": time.perf_counter() - begin, "load": 0.0, "compile": 0.0}

    def _open(self, model, random_weights):
        self._checkpoint = None if isinstance(model, dict) else Checkpoint.open(model, weights=not random_weights)
        self._hf_config = model if isinstance(model, dict) else read_model_config(self._checkpoint)

    def _build_model(self, kv_cache, max_length, layers_per_device, devices, random_weights):
        """Build the model, place it, and read what else the checkpoint says, but no weights; returns the number of stages."""
        config = self._hf_config
        model_class = find_model(config)
        self.config = model_class.config_class.from_hf(config)
        check_kv_cache(kv_cache, self.precision.name, model_class)
        num_stages = count_stages(layers_per_device, self.config.num_layers, self.num_replicas, devices)
        self.max_length = check_max_length(max_length, self.config, model_class.has_positions)
        with REGISTER.scope(
            batch_size=self.batch_size, max_length=self.max_length, world_size=self.num_replicas, dtype=self.precision.dtype,
            weight_dtype=self.precision.weight_dtype, cache_dtype=self.precision.cache_dtype, packing=self.precision.packing,
        ):  # fmt: skip
            self.model = model_class(self.config)
        #: layers of each pipeline stage
        self.layers_per_device = self._place(layers_per_device, num_stages)
        if not random_weights:
            if self._checkpoint is None or not self._checkpoint.has_weights:
                where = self._checkpoint.path if self._checkpoint else "a model given as a dict"
                raise UserError(f"{where}: there are no weights; set random_weights: true to run without a checkpoint")
            self.model.attach_checkpoint(self._checkpoint)
        self.tokenizer = load_tokenizer(self._checkpoint.path) if self._checkpoint else None
        generation_config = self._checkpoint.generation_config if self._checkpoint else {}
        # The tokenizer's own say counts where the model's files name no such token.
        tokenizer_ids = {key: getattr(self.tokenizer, key, None) for key in ("eos_token_id", "bos_token_id")}
        self.eos_token_ids, bos_token_ids = (
            token_ids_of(key, config, generation_config, self.config.vocab_size)
            or token_ids_of(key, tokenizer_ids, {}, self.config.vocab_size)
            for key in tokenizer_ids
        )
        self._bos_token_id = bos_token_ids[0] if bos_token_ids else None
        return num_stages

    # ---- generation

    def generate(self, prompts, *, logprobs=False, **settings) -> list[Generation]:
        """Generate text for one prompt or many.

        Args:
          prompts: a string, a list of token ids, or a list of those. More than batch_size of them run in waves.
          logprobs: whether the results tell each token's log-probability.
          settings: fields of GenerationSettings; a list gives each prompt its own value.
        Returns: a Generation for each prompt, in their order.
        Raises: UserError for prompts or settings that cannot be used, before any device work.
        """
        return self._generate(self._rows(prompts, settings), logprobs)

    def stream(self, prompts, *, logprobs=False, **settings) -> Iterator[Piece]:
        """As `generate`, but gives the text piece by piece as it comes; the pieces of a row joined are its whole text.

        A row's last piece has its Generation. The arguments are checked at once, the work begins with the first piece.
        Closing the iterator stops it. Between two pieces other calls may use the Session; the stream then fills the caches
        again and goes on, in fp32 with the tokens it would have had anyway (in 16 bits rounding may differ, see the class).
        """
        return self._stream(self._rows(prompts, settings), logprobs)

    def chat(self, messages, *, logprobs=False, **settings) -> Generation | list[Generation]:
        """Answer a conversation or many, written as the model was trained on: by its chat template, or as ChatGLM has it.

        Control tokens come from that form only: what messages spell of them is plain text. An answer is the text of its
        tokens, ends where the model's turn does, and makes the next message with `{"role": "assistant", "content": text}`.

        Args:
          messages: a list of `{"role": "system" | "user" | "assistant", "content": text}` whose last is not the
            assistant's, or the text of one question; or a list of those. What else a model takes, see its ChatFormat.
          logprobs, settings: as for `generate`.
        Returns: a Generation; a list of them for a list of conversations.
        Raises: UserError for conversations or settings that cannot be used, before any device work.
        """
        results = self._generate(self._chat_rows(messages, settings), logprobs)
        return results[0] if is_one(messages) else results

    def stream_chat(self, messages, *, logprobs=False, **settings) -> Iterator[Piece]:
        """As `chat`, but as a stream; see `stream`."""
        return self._stream(self._chat_rows(messages, settings), logprobs)

    # ---- what the model thinks of given tokens

    def logits(self, prompt) -> np.ndarray:
        """Logits for the token after each token of a text: float32 [T, V] for T tokens."""
        ids = self._encode_one(prompt)
        return np.concatenate(list(self._each_chunk(ids, self._describe([ids]), "logits")))

    def score(self, prompt) -> np.ndarray:
        """Natural log-probability of each token of a text given those before it: float32 [T - 1], as the first has none.

        Args:
          prompt: a string or token ids, at least two tokens.
        """
        ids = self._encode_one(prompt)
        if len(ids) < 2:
            raise UserError(f"score needs at least two tokens, the prompt has {len(ids)}")
        return np.concatenate(list(self._each_chunk(ids[:-1], self._describe([ids]), "logprobs", targets=ids[1:])))

    # ---- saving

    def save_quantized(self, folder) -> pathlib.Path:
        """Save the model in the precision it has here, packed weights as they are, for a Session that opens at once.

        `Session(folder)` then maps the weights instead of reading and packing them, and takes the precision from the file.
        A weight is read from the model's own files, one at a time; nothing runs on the device. See checkpoint/saved.py.

        Args:
          folder: must not be there yet, or be empty.
        Returns: the folder.
        Raises: UserError if there are no weights to save or the folder cannot be written; nothing half done stays behind.
        """
        self._check_open()
        if self.num_replicas != 1:
            raise UserError(
                f"num_replicas={self.num_replicas}: weights are cut; save the model from a Session with num_replicas: 1"
            )
        parameters = list(self.model.parameters())
        if any(parameter.load is None for parameter in parameters):
            raise UserError("random_weights=true: there are no weights to save; give a model that has some")
        path = self._checkpoint.path
        return save_model(
            folder, self.precision, parameters, self._hf_config, self._checkpoint.generation_config,
            functools.partial(save_tokenizer, self.tokenizer, path),
        )  # fmt: skip

    # ---- device

    def load(self) -> None:
        """Put the weights on the device, if they are not there yet."""
        with self._lock:
            self._load()

    def compile(self, prompt_lengths=()) -> None:
        """Load the weights and compile the decode graph, and the prefill graphs that prompts of these lengths need.

        Args:
          prompt_lengths: numbers of tokens, each in 1 .. max_length.
        """
        if not isinstance(prompt_lengths, Iterable):
            raise UserError(f"prompt_lengths={prompt_lengths!r}: wanted a list of whole numbers")
        prompt_lengths = list(prompt_lengths)
        wrong = [n for n in prompt_lengths if not isinstance(n, numbers.Integral) or not 1 <= n <= self.max_length]
        if wrong:
            raise UserError(f"prompt_lengths: {wrong} are not in 1 .. max_length={self.max_length}")
        with self._lock:
            self._prepare("decode")
            for length in prompt_lengths:
                for bucket, _ in self._chunks([0] * (length - 1)):
                    self._prepare(f"prefill_{bucket}")

    def run(self, name: str, inputs) -> dict[str, np.ndarray]:
        """Run one graph directly: "decode", or "prefill", "logits", "score" or "generate" with a length, as "prefill_64".

        The inputs and outputs are those of DecoderModel's `build_<name>`. The caches stay as the graph leaves them until
        another call uses the Session.
        """
        with self._lock:
            self._wave = None
            return self._run(name, inputs)

    def graph(self, name: str):
        """Build the graph that `run` would run under this name."""
        kind, _, length = str(name).partition("_")
        build = getattr(self.model, f"build_{kind}", None)
        if build is None or (not length.isdecimal() if kind != "decode" else bool(length)):
            raise UserError(f"no graph {name!r}; there are decode, prefill_T, logits_T, score_T and generate_T")
        if length and not 1 <= int(length) <= self.max_length:
            raise UserError(f"graph {name!r}: the length must be in 1 .. max_length={self.max_length}")
        return build(int(length)) if length else build()

    def describe(self) -> Description:
        """Say what runs and how: device, precision, bytes, and which lowering each op of the compiled graphs took and why.

        The decode graph is compiled for that, if it is not yet. Print the result, or read its attributes.
        """
        with self._lock:
            self._prepare("decode")
            states = self.model.states()
            return Description(
                device=self.device_info,
                precision=str(self.precision),
                weight_bytes=sum(parameter.spec.num_bytes for parameter in self.model.parameters()),
                weight_bytes_per_token=self.weight_bytes_per_token,
                cache=f"{self.model.memory} {states[0].dtype.name}",
                cache_bytes=sum(state.spec.num_bytes for state in states),
                graphs={name: count_choices(choices) for name, choices in self._engine.choices.items()},
            )

    @property
    def leads(self) -> bool:
        """Whether this process may generate: True but for the processes of a cluster after the first, which `follow`."""
        return self._cluster is None or self._cluster.leads

    def follow(self) -> None:
        """Work for the process that leads until it closes its Session. Raises: whatever goes wrong; the others end with it."""
        if self.leads:
            raise UserError("this process leads; only the other processes of a distributed Session follow")
        from poptransformer.backends.xla.leading_engine import follow

        with self._lock:
            follow(self._engine, self._channel, list(self.model.parameters()), self.graph)

    @property
    def device_info(self):
        """Platform, device and custom ops in use."""
        return self._engine.device_info

    def memory_bandwidth_gb_per_s(self) -> float | None:
        """Measure how fast the device reads its memory, now; None where the backend cannot tell."""
        with self._lock:
            self._check_open()
            return self._engine.memory_bandwidth_gb_per_s()

    @functools.cached_property
    def weight_bytes_per_token(self) -> int:
        """Bytes of weights that one decode step reads: all but the rows of embeddings that are not looked up."""
        return self.graph("decode").parameter_bytes_read()

    def close(self) -> None:
        """Free the device's memory. The Session cannot be used afterwards; closing twice is fine."""
        with self._lock:
            self._engine.close()
            if self._checkpoint:
                self._checkpoint.close()
            self._is_closed = True

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    # ---- inside

    def _generate(self, rows, logprobs):
        results = []
        for begin in range(0, len(rows), self.batch_size):
            wave = self._new_wave(rows[begin : begin + self.batch_size])
            with self._lock:
                # A stop string is looked for between runs: short ones at first, so that little is generated in vain.
                num_steps = MAX_STREAM_STEPS if any(row.settings.stop for row in wave.rows) else DECODE_STEPS
                while not wave.is_finished:
                    self._advance(wave, num_steps)
                    num_steps = min(2 * num_steps, DECODE_STEPS)
            results += [row.result(logprobs, wave.timings) for row in wave.rows]
        return results

    def _stream(self, rows, logprobs):
        for begin in range(0, len(rows), self.batch_size):
            wave, num_steps = self._new_wave(rows[begin : begin + self.batch_size]), 1
            while not wave.is_finished:
                with self._lock:
                    new = self._advance(wave, num_steps)
                num_steps = min(2 * num_steps, MAX_STREAM_STEPS)
                for piece in new:
                    if not logprobs:
                        piece.logprobs = None
                    if piece.finish_reason:
                        piece.generation = rows[piece.row].result(logprobs, wave.timings)
                    yield piece

    def _place(self, layers_per_device, num_stages):
        if num_stages == 1:
            return [self.config.num_layers]
        counts = balance(*self.model.bytes_by_layer(), num_stages) if layers_per_device == "auto" else list(layers_per_device)
        self.model.place(counts)
        return counts

    def _encode(self, prompts):
        encoded = encode_prompts(prompts, self.tokenizer, self.config.vocab_size, self._bos_token_id)
        long = [f"prompt {i} has {len(ids)} tokens" for i, ids in enumerate(encoded) if len(ids) > self.max_length]
        if long:
            raise UserError(f"{'; '.join(long)}; max_length is {self.max_length}: shorten the prompt or raise max_length")
        return encoded

    def _describe(self, encoded):
        """The model's row_inputs for each prompt."""
        described, problems = [], []
        for index, ids in enumerate(encoded):
            try:
                described.append(self.model.describe_row(ids))
            except UserError as error:
                problems.append(f"prompt {index}: {error}")
        if problems:
            raise UserError("; ".join(problems))
        return described

    def _chunks(self, ids):
        return fill_chunks([ids], self.batch_size, self.max_length, self.model.needs_whole_prompt)

    def _encode_one(self, prompt):
        if not is_single(prompt):
            raise UserError("wanted one prompt, a string or a list of token ids; call once for each of several")
        return self._encode([prompt])[0]

    def _check_open(self):
        if self._is_closed:
            raise UserError("this Session is closed")
        if not self.leads:
            raise UserError("process 0 leads this Session; here only follow() can be called")

    def _chat_rows(self, messages, settings):
        prompts, ends = encode_conversations(messages, self.tokenizer)
        return self._rows(prompts, settings, [token_id for token_id in ends if token_id < self.config.vocab_size])

    def _rows(self, prompts, settings, more_ends=()):
        self._check_open()
        encoded = self._encode(prompts)
        full = [f"prompt {i}" for i, ids in enumerate(encoded) if len(ids) == self.max_length]
        if full:
            raise UserError(
                f"{', '.join(full)}: {self.max_length} tokens fill max_length={self.max_length}, which leaves no room for a "
                f"new one; shorten the prompt or raise max_length"
            )
        described = self._describe(encoded)
        rows = []
        for index, (ids, row) in enumerate(zip(encoded, settings_per_row(len(encoded), **settings), strict=True)):
            ends = () if row.ignore_eos else (*self.eos_token_ids, *more_ends)
            stop_ids = tuple(dict.fromkeys((*ends, *row.stop_token_ids)))
            check_stop_ids(stop_ids, self.config.vocab_size)
            if row.stop and self.tokenizer is None:
                raise UserError(f"stop={row.stop!r}: the checkpoint has no tokenizer; use stop_token_ids")
            room = self.max_length - len(ids)
            max_new = min(room, row.max_new_tokens or room)
            rows.append(Row(index, ids, row, stop_ids, max_new, self.tokenizer, described[index]))
        return rows

    def _new_wave(self, rows):
        return Wave(
            self._prepare, self._engine.run, rows, self.batch_size, self.max_length, self.weight_bytes_per_token,
            self.model.needs_whole_prompt,
        )  # fmt: skip

    def _advance(self, wave, num_steps):
        """Move a wave on; the lock is held. Whatever breaks the run off leaves the caches to nobody."""
        resident, self._wave = self._wave, None
        if resident is not wave:
            if wave.timings.decode_steps:
                logger.info("another call used the Session between two pieces of a stream: filling the caches again")
            wave.fill()
        pieces = wave.advance(num_steps)
        self._wave = wave
        return pieces

    def _each_chunk(self, ids, described, output, targets=None):
        kind = "logits" if targets is None else "score"
        row = row_inputs(described, self.batch_size)
        with self._lock:
            self._wave, done = None, 0
            for bucket, inputs in self._chunks(ids):
                inputs |= row
                count = int(inputs["num_tokens"][0])
                inputs["is_fresh"] = np.ones(self.batch_size, bool)
                if targets is not None:
                    inputs["target_ids"] = np.zeros_like(inputs["input_ids"])
                    inputs["target_ids"][0, :count] = targets[done : done + count]
                yield self._run(f"{kind}_{bucket}", inputs)[output][0, :count]
                done += count

    def _run(self, name, inputs):
        self._prepare(name)
        return self._engine.run(name, inputs)

    def _load(self):
        self._check_open()
        if not self._is_loaded:
            with self._timed("load", "loaded the weights"):
                parameters = list(self.model.parameters())
                with self._progress.loading(sum(parameter.spec.num_bytes for parameter in parameters)) as tick:
                    stages_of = self.graph("decode").stages_of()
                    self._engine.load(parameters, lambda parameter: tick(parameter.spec.num_bytes), stages_of)
            self._is_loaded = True

    def _prepare(self, name):
        """Load the weights and compile a graph, if that has not been done."""
        self._load()
        if name not in self._engine.graphs:
            with self._timed("compile", f"compiled {name}"), self._progress.compiling(name):
                graph = self.graph(name)
                self._engine.compile(name, graph)
                # A program's first run takes XLA longer, whatever it computes: here with no token that counts.
                self._engine.run(name, {key: np.zeros(value.shape, value.dtype) for key, value in graph.inputs.items()})
            logger.info("ops of %s:\n%s", name, lowering_table(count_choices(self._engine.choices[name])))

    @contextlib.contextmanager
    def _timed(self, key, what):
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        self.timings_s[key] += seconds
        logger.info("%s in %.2f s", what, seconds)
