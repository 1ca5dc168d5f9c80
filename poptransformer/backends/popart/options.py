"""PopartOptions: the keys of the group `popart`, and what they are in PopART's SessionOptions."""

from __future__ import annotations

import dataclasses
import pathlib
import re

from poptransformer.errors import UnsupportedError, UserError, near_miss

DEVICES = ("ipu", "ipu_model", "cpu", "offline")
IPU_VERSIONS = ("ipu2", "ipu21")  # Mk2 and Bow; C600
PREFILLS = ("whole", "stepwise")
PROFILES_FOLDER = "profiles"  # beside the working directory, where PopVision is pointed to
_NAME = re.compile(r"[\w.-]+")


@dataclasses.dataclass(frozen=True)
class PopartOptions:
    """How PopART compiles and where it runs.

    Attributes:
      device: "ipu"; "ipu_model", a simulation on the host; "cpu", Poplar's host device; "offline": compiles for IPUs that are
        not there.
      ipu_version: architecture of ipu_model and offline: "ipu2" (Mk2, Bow) or "ipu21" (C600).
      python: the interpreter that has the Poplar SDK, where it is not the one that runs this: PopART then works in a process
        of its own. None: this one.
      prefill: "whole": a prompt is taken in one pass before the decode loop. PopART then holds weights twice, for that pass and
        for the loop. "stepwise": token by token in the loop: weights once, and a step for each token of the prompt.
      check_memory: refuse a program that does not fit the IPUs, before it is compiled; see docs/planning.md.
      disable_outlining: equal parts of the graph do not share code: more memory, less time to compile.
      unstable_softmax: the largest element is not taken off first: quicker, and wrong for logits beyond 88.
      disable_matmul_multi_stage_reduce: sums of products are reduced in one stage.
      constant_folding_of_multiple_consumers: constants that several ops read are folded.
      use_loop_candidate_creator: repeated parts become loops.
      execution_cache_name: folder of compiled programs, within the cache folder; None: compile each time.
      profile_name: folder within `profiles` for PopVision's reports; None: no profile. Profiled programs are slower.
      enable_pipeline: several batches move through the stages of layers_per_device at once. Needs batch_per_step of at least
        as many.
      batch_per_step: batches of batch_size rows in one run.
    """

    device: str = "ipu"
    ipu_version: str = "ipu2"
    python: str | None = None
    prefill: str = "whole"
    check_memory: bool = True
    disable_outlining: bool = False
    unstable_softmax: bool = False
    disable_matmul_multi_stage_reduce: bool = False
    constant_folding_of_multiple_consumers: bool = True
    use_loop_candidate_creator: bool = False
    execution_cache_name: str | None = None
    profile_name: str | None = None
    enable_pipeline: bool = False
    batch_per_step: int = 1

    @classmethod
    def of(cls, values: dict | None) -> PopartOptions:
        """Check the keys of a group. Raises: UserError naming every key that is unknown or has a wrong value."""
        values = {} if values is None else values
        if not isinstance(values, dict):
            raise UserError(f"popart={values!r}: wanted a dict of options: {', '.join(_fields())}")
        unknown = [f"{key!r}{near_miss(key, _fields())}" for key in values if key not in _fields()]
        if unknown:
            raise UserError(f"popart: unknown option {', '.join(unknown)}; options: {', '.join(_fields())}")
        options = cls(**values)
        problems = list(options._problems())
        if problems:
            raise UserError("; ".join(problems))
        return options

    def _problems(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                yield f"popart.{field.name}={value!r}: wanted true or false"
        if self.device not in DEVICES:
            yield f"popart.device={self.device!r}: choose one of {', '.join(DEVICES)}"
        if self.prefill not in PREFILLS:
            yield f"popart.prefill={self.prefill!r}: choose one of {', '.join(PREFILLS)}"
        if self.ipu_version not in IPU_VERSIONS:
            yield f"popart.ipu_version={self.ipu_version!r}: choose one of {', '.join(IPU_VERSIONS)}"
        for key in ("execution_cache_name", "profile_name"):
            value = getattr(self, key)
            if value is not None and not (isinstance(value, str) and _NAME.fullmatch(value) and value.strip(".")):
                yield f"popart.{key}={value!r}: wanted the name of a folder"
        if not isinstance(self.python, (str, pathlib.Path, type(None))):
            yield f"popart.python={self.python!r}: wanted the path of a Python interpreter"
        steps = self.batch_per_step
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            yield f"popart.batch_per_step={steps!r}: wanted a whole number of at least 1"

    def check_placement(self, num_stages: int, num_replicas: int) -> None:
        """Refuse what the options and the number of IPUs do not allow together."""
        if num_replicas & (num_replicas - 1):
            raise UnsupportedError(
                f"num_replicas={num_replicas}: IPUs come in powers of two, so backend popart wants 1, 2, 4, ... replicas"
            )
        if num_replicas > 1 and self.device in ("ipu_model", "cpu"):
            raise UnsupportedError(
                f"num_replicas={num_replicas}: popart.device={self.device} has no replicas; use ipu or offline"
            )
        if num_stages > 1 and self.device == "cpu":
            raise UnsupportedError(f"layers_per_device: popart.device=cpu is one device, not {num_stages}; use ipu_model")
        if self.enable_pipeline and num_stages == 1:
            raise UserError("popart.enable_pipeline: one stage is no pipeline; set layers_per_device to several")
        if self.enable_pipeline and self.batch_per_step < num_stages:
            raise UserError(
                f"popart.batch_per_step={self.batch_per_step}: a pipeline of {num_stages} stages needs at least {num_stages}"
            )

    def session_options(self, num_replicas: int, has_packed_weights: bool) -> dict:
        """PopART's SessionOptions by name; members of an enum as "Enum.Member", the dict-like ones as dicts."""
        options = {
            "enableOutlining": not self.disable_outlining,
            "enableNonStableSoftmax": self.unstable_softmax,
            "enableConstantFoldingOfMultipleConsumers": self.constant_folding_of_multiple_consumers,
            "useLoopCandidateCreator": self.use_loop_candidate_creator,
            "enablePipelining": self.enable_pipeline,
            "virtualGraphMode": "VirtualGraphMode.Manual",
            "enableStableNorm": True,  # variances by differences from the mean, not by a difference of squares
            # Codes would be unpacked on the host, once and for all, were they constants.
            "constantWeights": not has_packed_weights,
        }
        if num_replicas > 1:
            options |= {"enableReplicatedGraphs": True, "replicatedGraphCount": num_replicas}
        if self.disable_matmul_multi_stage_reduce:
            options["matmulOptions"] = {"enableMultiStageReduce": "false"}
        if self.profile_name:
            options["engineOptions"] = {
                "autoReport.all": "true",
                "autoReport.directory": f"{PROFILES_FOLDER}/{self.profile_name}",
                "autoReport.executionProfileProgramRunCount": "2",
                "debug.allowOutOfMemory": "true",
            }
        return options


def _fields():
    return [field.name for field in dataclasses.fields(PopartOptions)]


def count_ipus(num_stages: int, num_replicas: int) -> int:
    """IPUs to ask for: a power of two for each replica, as hosts give them out."""
    return (1 << (num_stages - 1).bit_length()) * num_replicas
