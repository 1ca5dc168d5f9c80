"""Compiles and runs a program's folder with PopART. The one file that imports popart.

It stands alone, and keeps to Python 3.8 and NumPy: the Poplar SDK's popart is built for the Python of its system, which may be
older than this package's. So it runs in three ways: inside this package, as a process of its own that a Session talks to
(`--serve`), and as the script of an exported folder:

    python3 run_popart.py              compile, and say how it went
    python3 run_popart.py --ids 1,2,3  generate from token ids
    python3 run_popart.py --device ipu_model
"""

import argparse
import contextlib
import io
import json
import os
import struct
import sys
import time

FORMAT = 1  # of options.json
INSTALL = (
    "the Poplar SDK is not active in {python}: get it from Graphcore (https://www.graphcore.ai/downloads), unpack it, and in "
    "this shell run `source <sdk>/poplar-*/enable.sh` and `source <sdk>/popart-*/enable.sh` (SDK 3.x also has `source "
    "<sdk>/enable`); `pip install popart` installs something else. If the SDK wants another Python, name that: popart.python. "
    "See docs/ipu.md"
)


class PopartError(Exception):
    """What went wrong, in one line for whoever asked."""


def import_popart():
    """The module popart of the Poplar SDK. Raises: PopartError where there is none, or where it comes too late."""
    try:
        import popart
    except ImportError as error:
        if "onnx" in sys.modules and "onnx" in str(error):
            raise PopartError(
                "popart must be imported before onnx, which something in this process has imported already; let PopART run in "
                "a process of its own: set popart.python to the interpreter that has the SDK"
            ) from None
        raise PopartError(f"{INSTALL.format(python=sys.executable)} ({error})") from None
    if not hasattr(popart, "InferenceSession"):
        where = getattr(popart, "__file__", "?")
        raise PopartError(f"the module popart at {where} is not Graphcore's; {INSTALL.format(python=sys.executable)}")
    return popart


class Session:
    """A program on a device.

    Args:
      folder: what write_folder has written.
      device: a device that is open already, or None to open the one that options.json asks for.
    """

    _loaded = None  # whose program is on the device: several share one, and take turns

    def __init__(self, folder, device=None, kind=None):
        popart = import_popart()
        self.popart = popart
        with open(os.path.join(folder, "options.json")) as file:
            self.options = json.load(file)
        if self.options["format"] != FORMAT:
            raise PopartError("{}: options.json has format {}, not {}".format(folder, self.options["format"], FORMAT))
        if kind:
            self.options["device"]["kind"] = kind
        self.device = device or open_device(popart, self.options["device"])
        anchors = {name: popart.AnchorReturnType("All") for name in self.options["anchors"]}
        begin = time.time()
        folder = os.path.abspath(folder)
        with _inside(folder) if self.options["is_portable"] else contextlib.nullcontext():
            self.session = popart.InferenceSession(
                fnModel=os.path.join(folder, self.options["model"]),
                dataFlow=popart.DataFlow(self.options["batches_per_step"], anchors),
                deviceInfo=self.device,
                userOptions=self._session_options(),
                name=self.options["name"],
            )
        self.is_offline = self.options["device"]["kind"] == "offline"
        self.session.prepareDevice(loadEngine=not self.is_offline)
        if not self.is_offline:
            self.session.weightsFromHost()
            self.anchors = self.session.initAnchorArrays()
            Session._loaded = self
        self.compile_seconds = time.time() - begin

    def _session_options(self):
        options = self.popart.SessionOptions()
        for name, value in self.options["session_options"].items():
            if isinstance(value, dict):
                target = getattr(options, name)  # a copy that writes back on item assignment only
                for key, text in value.items():
                    target[key] = text
            elif isinstance(value, str) and value.startswith("VirtualGraphMode."):
                setattr(options, name, getattr(self.popart.VirtualGraphMode, value.partition(".")[2]))
            else:
                setattr(options, name, value)
        return options

    def run(self, feeds):
        """Arrays by name, [batches, ...] where there are several batches a step -> outputs by name, of one replica."""
        import numpy as np

        if self.is_offline:
            raise PopartError("popart.device=offline compiles only; to run choose ipu, or ipu_model")
        feeds = {name: np.array(feeds[name], spec["dtype"], order="C") for name, spec in self.options["inputs"].items()}
        if Session._loaded is not self:
            self.session.loadEngineAndConnectStreams()
            self.session.weightsFromHost()
            Session._loaded = self
        self.session.run(self.popart.PyStepIO(feeds, self.anchors))
        batches, replicas = self.options["batches_per_step"], self.options["num_replicas"]
        outputs = {}
        for name, spec in self.options["outputs"].items():
            found = self.anchors[name].reshape([batches, replicas] + spec["shape"])[:, 0]
            outputs[name] = np.array(found if batches > 1 else found[0])
        return outputs

    def read_tokens(self, feeds, outputs, row):
        """The new tokens of a row."""
        start = int(feeds["num_tokens"][row]) if self.options["generation"]["is_stepwise"] else 0
        return outputs["tokens"][row][start : start + int(outputs["num_new"][row])].tolist()

    def export(self, path):
        """Write the executable, for hosts that load it in place of compiling."""
        self.session.compileAndExport(path)

    def close(self):
        """Give the device back."""
        self.session = None
        if Session._loaded is self:
            Session._loaded = None
        if not self.is_offline and self.options["device"]["kind"] == "ipu":
            self.device.detach()


def list_devices(popart):
    """How many devices of each kind there are: {"Ipu with 1 IPU": 4}."""
    found = {}
    for device in popart.DeviceManager().enumerateDevices():
        kind = "{} {}".format(str(device.type).rpartition(".")[2], device.ipuVersion).strip()
        found[kind] = found.get(kind, 0) + 1
    return found


def open_device(popart, wanted):
    """The device that options.json asks for. Raises: PopartError where there is none."""
    manager, kind, count = popart.DeviceManager(), wanted["kind"], wanted["num_ipus"]
    if kind == "cpu":
        return manager.createCpuDevice()
    if kind == "ipu_model":
        return manager.createIpuModelDevice({"numIPUs": count, "ipuVersion": wanted["ipu_version"]})
    if kind == "offline":
        return manager.createOfflineIPUDevice(opts={"numIPUs": count, "ipuVersion": wanted["ipu_version"]})
    device = manager.tryAcquireAvailableDevice(numIpus=count)
    if device is None:
        raise PopartError(f"no {count} IPUs are free; `gc-monitor` shows who has them, vipu creates partitions of that size")
    return device


@contextlib.contextmanager
def _inside(folder):
    """Work in a folder: PopART opens external weights relative to the working directory."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# ---- a process of its own: requests come on standard input, answers go to standard output


def serve(requests, answers):
    """Answer requests until there are none. Each is a line of JSON, then arrays; see `send` and `receive`."""
    sessions, device = {}, None
    while True:
        request, arrays = receive(requests)
        if request is None:
            return
        try:
            result, outputs = {}, {}
            if request["do"] == "version":
                popart = import_popart()
                result = {"version": popart.versionString(), "python": sys.version.split()[0]}
            elif request["do"] == "devices":
                result = {"devices": list_devices(import_popart())}
            elif request["do"] == "open":
                session = Session(request["folder"], device)
                device = sessions[request["name"]] = session
                device = session.device
                result = {"compile_seconds": session.compile_seconds}
            elif request["do"] == "run":
                outputs = sessions[request["name"]].run(arrays)
            send(answers, dict(result, ok=True), outputs)
        except PopartError as error:
            send(answers, {"ok": False, "kind": "PopartError", "error": str(error)})
        except Exception as error:
            send(answers, {"ok": False, "kind": type(error).__name__, "error": str(error)})


def send(stream, message, arrays=None):
    """Write a message and arrays: two lengths, JSON, and an .npz."""
    import numpy as np

    packed = io.BytesIO()
    if arrays:
        np.savez(packed, **arrays)
    text, data = json.dumps(message).encode(), packed.getvalue()
    stream.write(struct.pack("<QQ", len(text), len(data)) + text + data)
    stream.flush()


def receive(stream):
    """What `send` has written; (None, {}) at the end of the stream."""
    import numpy as np

    head = stream.read(16)
    if len(head) < 16:
        return None, {}
    text, data = (stream.read(length) for length in struct.unpack("<QQ", head))
    arrays = {}
    if data:
        with np.load(io.BytesIO(data), allow_pickle=False) as packed:
            arrays = {name: packed[name] for name in packed.files}
    return json.loads(text.decode()), arrays


# ---- the script of an exported folder


def greedy_feeds(options, ids, max_new):
    """Inputs of a `generate` program for one prompt of token ids, greedy; the other rows of the batch rest."""
    import numpy as np

    inputs, feeds = options["inputs"], {}
    batches = [options["batches_per_step"]] if options["batches_per_step"] > 1 else []
    for name, spec in inputs.items():
        feeds[name] = np.full(batches + spec["shape"], -1 if name == "stop_ids" else 0, spec["dtype"])
        if name in ("top_p", "repetition_penalty"):
            feeds[name][...] = 1
    length = inputs["input_ids"]["shape"][1]
    steps = options["outputs"]["tokens"]["shape"][1]
    if options["generation"]["is_stepwise"]:  # the outputs have the prompt's steps as well
        steps -= length
    if not 1 <= len(ids) <= length + 1:
        raise PopartError(f"the program takes prompts of 1 to {length + 1} tokens, given are {len(ids)}")
    first = (0,) * (len(batches) + 1)
    feeds["input_ids"][first][: len(ids) - 1] = ids[:-1]
    for name, number in (("num_tokens", len(ids) - 1), ("token", ids[-1]), ("max_new", min(max_new, steps))):
        if name in feeds:
            feeds[name][first] = number
    ends = (options.get("generation") or {}).get("eos_token_ids", [])
    feeds["stop_ids"][first][: len(ends)] = ends
    return feeds, first


def main(arguments=None):
    """The command line of an exported folder."""
    parser = argparse.ArgumentParser(description="Compile and run this folder's program with PopART.")
    parser.add_argument("folder", nargs="?", default=os.path.dirname(os.path.abspath(__file__)), help="default: this one")
    parser.add_argument("--serve", action="store_true", help="answer requests on standard input (for a Session)")
    parser.add_argument("--device", choices=("ipu", "ipu_model", "cpu", "offline"), help="default: as exported")
    parser.add_argument("--ids", help="token ids of a prompt, with commas between")
    parser.add_argument("--max-new", type=int, default=64, help="the most tokens to generate (default 64)")
    parser.add_argument("--executable", help="write the compiled program to this file")
    given = parser.parse_args(arguments)
    if given.serve:
        answers = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # whatever else is printed must not come between the answers
        serve(sys.stdin.buffer, answers)
        return
    session = Session(given.folder, kind=given.device)
    print("compiled {} in {:.1f} s".format(session.options["name"], session.compile_seconds))
    if given.executable:
        session.export(given.executable)
        print("wrote", given.executable)
    if given.ids:
        feeds, first = greedy_feeds(session.options, [int(text) for text in given.ids.split(",")], given.max_new)
        begin = time.time()
        outputs = session.run(feeds)
        seconds, count = time.time() - begin, int(outputs["num_new"][first])
        print("tokens:", session.read_tokens(feeds, outputs, first))
        print(f"{seconds:.3f} s for {count} tokens, prefill and transfers included")


if __name__ == "__main__":
    try:
        main()
    except PopartError as problem:
        sys.exit(f"error: {problem}")
