"""The roll call before JAX joins processes: everybody comes, somebody does not, strangers, miscounts."""

import socket
import threading

import pytest

from poptransformer.backends.xla.roll_call import roll_call
from poptransformer.errors import UserError


def free_port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def call(port, count, *processes, timeout_s=5):
    """Run the roll call of each (process_id, num_processes) in a thread; returns their error messages, None for none."""
    results = {}

    def run(place, process_id, num_processes):
        try:
            results[place] = roll_call(f"localhost:{port}", num_processes, process_id, timeout_s)
        except UserError as error:
            results[place] = str(error)

    threads = [threading.Thread(target=run, args=(place, *process)) for place, process in enumerate(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(results) == count, "a process is still waiting"
    return [results[place] for place in range(count)]


def test_all_come():
    assert call(free_port(), 3, (0, 3), (1, 3), (2, 3)) == [None] * 3


def test_one_process_needs_nobody():
    roll_call("nowhere:1", 1, 0, 0.1)


def test_the_missing_are_named():
    lead, there = call(free_port(), 2, (0, 4), (2, 4), timeout_s=1)
    assert "process 1, 3 of 4 did not come within 1 s" in lead
    assert there == lead


def test_process_0_does_not_come():
    port = free_port()
    (text,) = call(port, 1, (1, 2), timeout_s=0.5)
    assert f"process 1 of 2 did not reach process 0 at localhost:{port} within 0.5 s (Connection refused)" in text


def test_two_with_one_number():
    results = call(free_port(), 3, (0, 3), (1, 3), (1, 3))
    assert results == ["distributed: two processes say that they are number 1"] * 3


def test_another_count():
    results = call(free_port(), 2, (0, 2), (1, 3))
    assert results == ["distributed: process 1 counts 3 processes, process 0 counts 2"] * 2


def test_the_port_is_taken():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot listen on port {port} \(Address already in use\)"):
            roll_call(f"localhost:{port}", 2, 0, 1)


def test_strangers_are_sent_away():
    port, done = free_port(), []

    def stranger():
        for _ in range(50):
            try:
                with socket.create_connection(("localhost", port), timeout=2) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    done.append(connection.recv(100))
                    return
            except OSError:
                threading.Event().wait(0.05)

    thread = threading.Thread(target=stranger)
    thread.start()
    late = threading.Timer(0.5, lambda: call(port, 1, (1, 2)))
    late.start()
    assert call(port, 1, (0, 2)) == [None]
    thread.join()
    late.join()
    assert done in ([b""], [])
