"""LeadingEngine: the engine of a cluster's first process, which tells the others what it does; and what those do."""

from __future__ import annotations

from poptransformer.backends.xla.cluster import Channel
from poptransformer.backends.xla.engine import XlaEngine
from poptransformer.errors import UserError


class LeadingEngine(XlaEngine):
    """An XlaEngine whose every step the other processes of its cluster take as well; see `follow`."""

    def __init__(self, *args, cluster, **kwargs):
        super().__init__(*args, cluster=cluster, **kwargs)
        self._channel = Channel(cluster)
        self._is_open = True

    def load(self, parameters, progress=None, stages_of=None):
        self._channel.announce("load")
        with self._channel.cluster.failure_told():
            super().load(parameters, progress, stages_of)

    def compile(self, name, graph):
        self._channel.announce("compile", name)
        with self._channel.cluster.failure_told():
            super().compile(name, graph)

    def _run_one(self, name, inputs):
        self._channel.announce("run", name, inputs)
        return super()._run_one(name, inputs)

    def reset_states(self):
        self._channel.announce("reset")
        super().reset_states()

    def close(self):
        if self._is_open:
            self._is_open = False
            self._channel.announce("close")
        super().close()


def follow(engine: XlaEngine, channel: Channel, parameters, build_graph) -> None:
    """Do what the leader's engine does until it closes.

    Args:
      engine: this process's own.
      parameters: those of the model.
      build_graph: (name) -> Graph.
    Raises: whatever goes wrong here; the other processes end with it, too.
    """
    with channel.cluster.failure_told():
        while (command := channel.next_command()).word != "close":
            if command.word == "load":
                engine.load(parameters, stages_of=build_graph("decode").stages_of())
            elif command.word == "compile":
                engine.compile(command.name, build_graph(command.name))
            elif command.word == "run":
                engine.run(command.name, command.inputs)
            elif command.word == "reset":
                engine.reset_states()
            else:
                raise UserError(
                    f"process 0 says {command.word!r}, which this version does not know; run one version everywhere"
                )
