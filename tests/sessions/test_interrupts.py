"""Interrupts leave a Session usable."""

import itertools
import signal
import subprocess
import sys
import threading

import pytest
from conftest import REPOSITORY
from session_cases import CASES, GREEDY, PROMPT, ids, join

from poptransformer import Session


def interrupt_at(session, monkeypatch, number, is_after):
    """Raise KeyboardInterrupt in the session's run of this number, before the device works or after it has."""
    count, run = itertools.count(), session._engine._run_one

    def interrupted(name, inputs):
        is_now = next(count) == number
        if is_now and not is_after:
            raise KeyboardInterrupt
        outputs = run(name, inputs)
        if is_now:
            raise KeyboardInterrupt
        return outputs

    monkeypatch.setattr(session._engine, "_run_one", interrupted)


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_an_interrupt_leaves_the_session_usable(session, monkeypatch, number, is_after):
    other = session.stream([7], max_new_tokens=20, ignore_eos=True)
    first = next(other)
    with monkeypatch.context() as patch:
        interrupt_at(session, patch, number, is_after)
        with pytest.raises(KeyboardInterrupt):
            for _ in session.stream(PROMPT, ignore_eos=True):
                pass
    assert [*first.token_ids, *join(other)[1]] == CASES[0]["greedy"][:20]
    with monkeypatch.context() as patch:
        interrupt_at(session, patch, min(number, 1), is_after)
        with pytest.raises(KeyboardInterrupt):
            session.generate(PROMPT, ignore_eos=True)
    assert ids(session.generate([[7], PROMPT], max_new_tokens=20, ignore_eos=True)) == [CASES[0]["greedy"][:20], GREEDY[:20]]


def test_an_interrupt_when_the_device_has_taken_the_caches(xla, monkeypatch):
    """The program has overwritten the caches that it was given, and what it returned gets lost."""
    stream = xla.stream([7], max_new_tokens=20, ignore_eos=True)
    first, programs = next(stream), xla._engine._programs

    def interrupted(*args, program=programs["decode"]):
        program(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(programs, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            xla.generate(PROMPT)
    assert [*first.token_ids, *join(stream)[1]] == CASES[0]["greedy"][:20]
    assert ids(xla.generate(PROMPT, max_new_tokens=20, ignore_eos=True)) == [GREEDY[:20]]


def test_an_interrupt_while_loading_or_compiling(tiny, monkeypatch):
    with Session(tiny, backend="reference") as session:
        load, count = session._engine._load_one, itertools.count()

        def interrupted(*args):
            if next(count) in (3, 50):
                raise KeyboardInterrupt
            return load(*args)

        monkeypatch.setattr(session._engine, "_load_one", interrupted)
        compile_one, compiles = session._engine._compile_one, itertools.count()

        def compile_interrupted(*args):
            if next(compiles) == 1:
                raise KeyboardInterrupt
            return compile_one(*args)

        monkeypatch.setattr(session._engine, "_compile_one", compile_interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                session.generate(PROMPT)
        assert ids(session.generate(PROMPT, max_new_tokens=5)) == [GREEDY[:5]]


SIGNALLED = """
import sys
from poptransformer import Session

with Session(sys.argv[1], max_length=128) as session:
    text = "Once upon a time"
    wanted = session.generate(text, max_new_tokens=60)[0].token_ids
    kinds = {
        "stream": lambda: list(session.stream(text, ignore_eos=True)),
        "generate": lambda: session.generate(text, ignore_eos=True),
    }
    for kind, call in kinds.items():
        try:
            print("ready", flush=True)
            for _ in range(100000):
                call()
            sys.exit("no interrupt came")
        except KeyboardInterrupt:
            pass
        assert session.generate(text, max_new_tokens=60)[0].token_ids == wanted, kind
        print(kind, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_a_real_interrupt(pocket):
    command = [sys.executable, "-c", SIGNALLED, str(pocket)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(100, process.kill)
    timer.start()
    try:
        for kind, delay_s in (("stream", 0.31), ("generate", 0.23)):
            assert process.stdout.readline() == "ready\n"
            is_sent = threading.Event()

            def send(is_sent=is_sent, delay_s=delay_s):
                while not is_sent.wait(delay_s):
                    process.send_signal(signal.SIGINT)
                    delay_s = 30  # again, as Python drops an interrupt that comes while it collects garbage

            sender = threading.Thread(target=send)
            sender.start()
            line = process.stdout.readline()
            is_sent.set()
            sender.join()
            assert line == f"{kind}\n", process.communicate()[1]
        assert process.wait(30) == 0
    finally:
        timer.cancel()
        process.kill()
        process.wait()
