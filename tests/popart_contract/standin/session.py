"""InferenceSession: the order of calls, what goes in and out, caches and profiles."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import ChainMap

import numpy as np
import onnx
from popart_contract.standin import dtypes
from popart_contract.standin.binding import NAMESPACE, NotModelled, bound
from popart_contract.standin.errors import popart_exception, refuse
from popart_contract.standin.flow import describe
from popart_contract.standin.interpreter import run_graph
from popart_contract.standin.loading import load, read_proto
from popart_contract.standin.machine import MACHINE

REPORT_KEYS = ("autoReport.all", "autoReport.outputGraphProfile", "autoReport.outputExecutionProfile")
REPORT_FILES = ("profile.pop", "debug.cbor")
COMPILED_FOR = ("Ipu", "OfflineIpu")  # devices that executables are cached and saved for


@bound("InferenceSession")
class InferenceSession:
    """A model on a device."""

    def __init__(self, fnModel, dataFlow, deviceInfo, inputShapeInfo, patterns, userOptions, name):
        for value, kind in ((dataFlow, "DataFlow"), (deviceInfo, "DeviceInfo"), (inputShapeInfo, "InputShapeInfo"),
                            (userOptions, "SessionOptions")):  # fmt: skip
            _want(value, NAMESPACE[kind], kind)
        _want(name, str, "name")
        if patterns is not None:
            _want(patterns, NAMESPACE["Patterns"], "patterns")
        object.__setattr__(self, "dataFlow", dataFlow)
        self._device, self._options, self._name = deviceInfo, userOptions, name
        self._program = load(read_proto(fnModel), userOptions, deviceInfo, dataFlow, inputShapeInfo)
        object.__setattr__(self, "replicationFactor", max(self._program.view.replicas, 1))
        object.__setattr__(self, "accumulationFactor", userOptions.accumulationFactor)
        self._is_prepared = self._has_weights = self._is_cached = False
        self._runs = 0
        MACHINE.sessions.append(self)

    # ---- compile

    def prepareDevice(self, loadEngine):
        """Compile, or take a compiled program out of the cache."""
        options, is_compiled = self._options, self._device.type.name in COMPILED_FOR
        if options.enableEngineCaching and is_compiled:
            path = os.path.join(options.cachePath, f"{self._hash()}.popef")
            self._is_cached = os.path.exists(path)
            if self._is_cached:
                self._take_constants(path)
            else:
                os.makedirs(options.cachePath, exist_ok=True)
                self._write_constants(path)
        self._copy_reports()
        self._is_prepared = True

    def weightsFromHost(self):
        """Send the weights."""
        self._want_prepared("weightsFromHost")
        self._has_weights = True

    def compileAndExport(self, filename):
        """Compile and write an executable."""
        self.saveExecutable(filename)

    def saveExecutable(self, path, savePopartMetadata=True, saveVariables=True):
        """Write the executable; into a folder as executable.popef."""
        self._want_hardware("saveExecutable")
        self._write_constants(os.path.join(path, "executable.popef") if os.path.isdir(path) else path)

    def saveVariables(self, path):
        """Write the variables; into a folder as variables.popef."""
        self._want_hardware("saveVariables")
        self._write_constants(os.path.join(path, "variables.popef") if os.path.isdir(path) else path)

    def loadExecutable(self, filename):
        """Take an executable in place of compiling."""
        self._want_hardware("loadExecutable")
        if not os.path.isfile(filename):
            raise popart_exception(f"no file {filename}")
        self._take_constants(filename)
        self._is_prepared = True

    def loadEngineAndConnectStreams(self):
        """Nothing more to do here."""
        self._want_prepared("loadEngineAndConnectStreams")

    # ---- run

    def initAnchorArrays(self):
        """Empty arrays for the anchors: FACTS (d)."""
        anchors = {}
        for name in self.dataFlow.anchors():
            tensor = self._program.graph.types[name]
            shape = [size for size in self._anchor_counts(name) if size != 1]
            anchors[name] = np.zeros((*shape, *tensor.shape), dtypes.NUMPY[tensor.dtype])
        return anchors

    def run(self, stepio, debugName, programHandle=None):
        """Feed every batch of a step to all replicas and fill the anchors."""
        if programHandle is not None:
            raise popart_exception(f"no custom program {programHandle!r}")
        _want(stepio, NAMESPACE["PyStepIO"], "stepio")
        self._want_prepared("run")
        if self._device.connectionType.name == "Never":
            refuse("fact_f_offline_devices_only_compile", "run on an offline device")
        if self._program.weights and not self._has_weights:
            refuse("strict_weights_are_sent_before_a_run", "run before weightsFromHost")
        feeds = self._feeds(stepio._inputs)
        results = {name: [] for name in self.dataFlow.anchors()}
        outputs = self._outputs(stepio._outputs)
        for batch in range(self.dataFlow.batchesPerStep()):
            values = ChainMap(dict(self._program.weights))
            values.update({name: parts[batch] for name, parts in feeds.items()})
            run_graph(self._program.graph, values, self.replicationFactor)
            for name, found in results.items():
                found.append(np.stack(values[name]))
        for name, found in results.items():
            outputs[name][...] = self._returned(name, np.stack(found)).reshape(outputs[name].shape)
        self._runs += 1

    def _feeds(self, inputs):
        """name -> for each batch a list of arrays, one for each replica."""
        streams = self._program.streams
        lacking, unknown = sorted(set(streams) - set(inputs)), sorted(set(inputs) - set(streams))
        if lacking or unknown:
            refuse("fact_d_every_input_is_fed", f"no array for {lacking}, no input for {unknown}")
        batches, replicas = self.dataFlow.batchesPerStep(), self.replicationFactor
        feeds = {}
        for name, tensor in streams.items():
            array = _checked_array(name, inputs[name], tensor.dtype)
            is_one = self._program.view.number("__replicated_stream_mode", name, 1) == 0
            copies = 1 if is_one else replicas
            wanted = int(np.prod(tensor.shape, dtype=np.int64)) * batches * copies
            if array.size != wanted:
                text = f"{name}: {array.size} elements, wanted {wanted}: {tensor} of {batches} batches and {copies} replicas"
                refuse("fact_d_inputs_have_every_batch_and_replica", text)
            parts = array.reshape(batches, copies, *tensor.shape)
            feeds[name] = [[part[0]] * replicas if is_one else list(part) for part in parts]
        return feeds

    def _outputs(self, outputs):
        """The arrays that the caller gave for the anchors, checked."""
        lacking = sorted(set(self.dataFlow.anchors()) - set(outputs))
        if lacking:
            refuse("fact_d_every_anchor_has_an_array", f"no array for {lacking}")
        for name, like in self.initAnchorArrays().items():
            array = outputs[name]
            if array.dtype != like.dtype or array.size != like.size or not array.flags.c_contiguous:
                found, wanted = describe(array.dtype, array.shape), describe(like.dtype, like.shape)
                refuse("fact_d_every_anchor_has_an_array", f"{name}: {found}, wanted a C-contiguous {wanted}")
        return outputs

    def _anchor_counts(self, name):
        flow, replicas = self.dataFlow, self.replicationFactor
        kind, batches, accumulation = flow.art(name).id().name, flow.batchesPerStep(), self.accumulationFactor
        if kind in ("Final", "Sum"):
            return [replicas]
        return [batches // flow.art(name).rp() if kind == "EveryN" else batches, accumulation, replicas]

    def _returned(self, name, found):
        """found [batches, R, ...] as the anchor's return type wants it."""
        art = self.dataFlow.art(name)
        kind = art.id().name
        if kind == "Final":
            return found[-1]
        if kind == "Sum":
            return found.sum(0).astype(found.dtype)
        return found[art.rp() - 1 :: art.rp()] if kind == "EveryN" else found

    # ---- caches and reports

    def _hash(self):
        """What PopART's cache key covers: everything but the values of constants and weights (FACTS d)."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self._program.view.proto)
        tensors = list(proto.graph.initializer)
        pending = [proto.graph]
        while pending:
            for node in pending.pop().node:
                tensors += [attribute.t for attribute in node.attribute if attribute.HasField("t")]
                pending += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        for tensor in tensors:
            for field in ("raw_data", "float_data", "int32_data", "int64_data", "external_data", "data_location"):
                tensor.ClearField(field)
        flow, device = self.dataFlow, self._device
        anchors = [(name, flow.art(name).id().name, flow.art(name).rp()) for name in flow.anchors()]
        options = {
            key: value for key, value in self._options._values.items() if key not in ("cachePath", "experimentalSettings")
        }
        key = (proto.SerializeToString(deterministic=True), flow.batchesPerStep(), anchors, device.type, device.numIpus,
               device.ipuVersion, sorted(options.items(), key=str), MACHINE.sdk)  # fmt: skip
        return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little")

    def _write_constants(self, path):
        """An executable holds the constants; with constantWeights the weights are among them."""
        weights = self._program.weights if self._options.constantWeights else {}
        with open(path, "wb") as file:
            np.savez(file, **{f"{number}": np.stack(value) for number, value in enumerate(weights.values())})

    def _take_constants(self, path):
        weights = self._program.weights
        with np.load(path) as stored:
            for number, name in enumerate(weights if self._options.constantWeights else ()):
                weights[name] = list(stored[f"{number}"])

    def _copy_reports(self):
        """Poplar writes a profile where it is told to; PopART copies it beside the cache, and must find it: FACTS (d)."""
        engine_options = self._options.engineOptions
        folder = os.path.join(engine_options.get("autoReport.directory", "."), self._name)
        if engine_options.get("autoReport.all") == "true" and self._device.type.name != "Cpu":
            os.makedirs(folder, exist_ok=True)
            for name in REPORT_FILES:
                with open(os.path.join(folder, name), "w") as file:
                    file.write("written by the stand-in\n")
        if any(key in engine_options for key in REPORT_KEYS):
            if not os.path.exists(os.path.join(folder, "profile.pop")):
                refuse("fact_d_reports_are_found", f"no {os.path.join(folder, 'profile.pop')}")
            target = os.path.join(self._options.cachePath, self._name)
            os.makedirs(target, exist_ok=True)
            for name in REPORT_FILES:
                shutil.copy(os.path.join(folder, name), target)

    def getSummaryReport(self, resetProfile):
        """Needs profiling."""
        if not any(key in self._options.engineOptions for key in REPORT_KEYS):
            refuse("fact_d_reports_are_found", "getSummaryReport without profiling")
        return "a summary by the stand-in"

    # ---- weights of the running session

    def resetHostWeights(self, modelProtoOrFilename, ignoreWeightsInModelWithoutCorrespondingHostWeight):
        """Only variables can be changed."""
        self._want_variables("resetHostWeights")

    def writeWeights(self, arg0):
        """Only variables can be changed."""
        self._want_variables("writeWeights")

    def getInfo(self, arg0):
        """Type and shape of a tensor."""
        if arg0 not in self._program.graph.types:
            raise popart_exception(f"no tensor {arg0!r}")
        tensor = self._program.graph.types[arg0]
        return NAMESPACE["TensorInfo"](tensor.dtype, list(tensor.shape))

    def getAllTensorIds(self):
        """Names of all tensors of the main graph."""
        return set(self._program.graph.types)

    def setRandomSeed(self, seedValue):
        """The stand-in runs nothing random."""

    def _want_variables(self, call):
        if self._options.constantWeights:
            refuse("fact_i_constant_weights_stay", f"{call} while constantWeights is True")
        raise NotModelled(f"{call} is not modelled by the stand-in")

    def _want_prepared(self, call):
        if not self._is_prepared:
            refuse("fact_d_sessions_are_prepared_first", f"{call} before prepareDevice")

    def _want_hardware(self, call):
        if self._device.type.name not in COMPILED_FOR:
            refuse("fact_d_executables_are_for_hardware", f"{call} for a {self._device.type.name} device")


def _want(value, kind, name):
    if not isinstance(value, kind):
        raise TypeError(f"popart.InferenceSession: {name} is {type(value).__name__}")


def _checked_array(name, array, declared):
    """FACTS (i): exact dtype, but INT64 for INT32 and uint8 for float8; C-contiguous NumPy arrays only."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"popart.PyStepIO: {name} is {type(array).__name__}, wanted a NumPy array")
    if not array.flags.c_contiguous:
        refuse("fact_i_fed_arrays_are_contiguous", f"{name}: the array is not C-contiguous")
    wanted = dtypes.NUMPY[declared]
    if declared == "INT32" and array.dtype == np.int64:
        return array.astype(np.int32)
    if declared.startswith("FLOAT8") and array.dtype == np.uint8:
        return array.view(wanted)
    if array.dtype != wanted:
        refuse("fact_i_fed_arrays_have_the_type", f"{name}: {array.dtype}, wanted {wanted}")
    return array
