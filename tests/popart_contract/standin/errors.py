"""The exceptions of the stand-in, named as PopART's."""

from __future__ import annotations


class popart_exception(Exception):
    """What PopART raises."""


class popart_runtime_error(popart_exception):
    """What PopART raises while it runs."""


class poplar_exception(Exception):
    """What Poplar raises."""


class poplibs_exception(Exception):
    """What the Poplar libraries raise."""


class OutOfMemoryException(popart_exception):
    """A model does not fit the tiles. The stand-in has no memory to run out of and never raises it."""


CALL_RULES = {
    "fact_d_every_anchor_has_an_array": "PyStepIO has an array of the right type and size for each anchor",
    "fact_d_every_input_is_fed": "PyStepIO has an array for each stream, and no other",
    "fact_d_executables_are_for_hardware": "executables are saved and loaded for IPUs, real or offline",
    "fact_d_inputs_have_every_batch_and_replica": "elements x batchesPerStep x R, without R where the stream is broadcast",
    "fact_d_reports_are_found": "with a report option a missing profile.pop raises; a summary needs profiling",
    "fact_d_sessions_are_prepared_first": "prepareDevice comes before weights and runs",
    "fact_f_device_options_are_known": "an unknown option of a device raises",
    "fact_f_offline_devices_only_compile": "attach, detach and run raise on an offline device",
    "fact_h_model_is_bytes_or_a_path": "fnModel is bytes of a ModelProto or a path; a long string is never a path",
    "fact_h_protos_fit_protobuf": "a proto is at most 2 GiB, whatever its form",
    "fact_h_setup_gives_static_shapes": "each op's setup finds the shapes of its outputs in those of its inputs",
    "fact_i_constant_weights_stay": "resetHostWeights and writeWeights raise while constantWeights is True",
    "fact_i_fed_arrays_are_contiguous": "only C-contiguous arrays are fed",
    "fact_i_fed_arrays_have_the_type": "fed arrays have the exact type, but INT64 for INT32 and uint8 for float8",
    "strict_weights_are_sent_before_a_run": "constants would do without, but nobody should rest on it",
}  # what calls refuse, in words


class Refusal(popart_exception):
    """A model or a call breaks rules. `rules` names them, in the order of the problems.

    Args:
      problems: (name of the rule, what is wrong) pairs.
    """

    def __init__(self, problems):
        self.problems = list(problems)
        self.rules = list(dict.fromkeys(rule for rule, _ in self.problems))
        super().__init__("\n".join(f"{rule}: {text}" for rule, text in self.problems))


def refuse(rule: str, text: str):
    """Raise a Refusal by one of the rules about calls."""
    assert rule in CALL_RULES, rule
    raise Refusal([(rule, text)])
