"""A roll call of the processes of a cluster, before JAX joins them: JAX takes the whole process down when one does not come."""

from __future__ import annotations

import contextlib
import os
import socket
import time

from poptransformer.errors import UserError

GREETING = "poptransformer"
GO = "go"
RETRY_S = 0.2


def roll_call(coordinator: str, num_processes: int, process_id: int, timeout_s: float) -> None:
    """Wait until all processes are there.

    Process 0 listens on the coordinator's port, which JAX uses afterwards; the others report there, and go on when it says so.

    Args:
      coordinator: "host:port" of process 0.
    Raises: UserError when the time is up, with those that did not come; when two have the same number, or count differently.
    """
    host, _, port = coordinator.rpartition(":")
    until = time.monotonic() + timeout_s
    if num_processes == 1:
        return
    if process_id == 0:
        _lead(int(port), num_processes, until, timeout_s)
    else:
        _report(coordinator, host.strip("[]"), int(port), num_processes, process_id, until, timeout_s)


def _lead(port, num_processes, until, timeout_s):
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(socket.create_server(("", port), backlog=num_processes))
        except OSError as error:
            why = os.strerror(error.errno)
            raise UserError(f"distributed: process 0 cannot listen on port {port} ({why}); choose another") from None
        there = {}
        while len(there) < num_processes - 1:
            server.settimeout(max(until - time.monotonic(), 0.01))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = [str(i) for i in range(1, num_processes) if i not in there]
                text = (
                    f"distributed: process {', '.join(missing)} of {num_processes} did not come within {timeout_s} s; is it "
                    f"started, and can it reach port {port} of process 0?"
                )
                _answer(there.values(), text)
                raise UserError(text) from None
            stack.enter_context(connection)
            problem = _welcome(connection, num_processes, there, until)
            if problem:
                _answer([connection, *there.values()], f"distributed: {problem}")
                raise UserError(f"distributed: {problem}")
        _answer(there.values(), GO)


def _welcome(connection, num_processes, there, until):
    """Enter a process that reports into `there`; returns what is wrong with it. Strangers to the port are sent away."""
    connection.settimeout(max(min(until - time.monotonic(), 5), 0.01))
    try:
        words = connection.makefile("r", encoding="utf-8").readline(200).split()
    except (OSError, UnicodeDecodeError):
        words = []
    if len(words) != 3 or words[0] != GREETING or not words[1].isdecimal() or not words[2].isdecimal():
        connection.close()
        return None
    number, count = int(words[1]), int(words[2])
    if count != num_processes:
        return f"process {number} counts {count} processes, process 0 counts {num_processes}"
    if number in there or not 0 < number < num_processes:
        return f"two processes say that they are number {number}"
    there[number] = connection
    return None


def _answer(connections, text):
    for connection in connections:
        with contextlib.suppress(OSError):  # it has gone: there is nobody to tell
            connection.sendall(f"{text}\n".encode())


def _report(coordinator, host, port, num_processes, process_id, until, timeout_s):
    problem = None
    while time.monotonic() < until:
        try:
            with socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.01)) as connection:
                connection.sendall(f"{GREETING} {process_id} {num_processes}\n".encode())
                connection.settimeout(max(until - time.monotonic(), 0.01) + 5)  # process 0 has the last word
                answer = connection.makefile("r", encoding="utf-8").readline().strip()
        except OSError as error:
            problem = error.strerror or str(error)
            time.sleep(RETRY_S)
            continue
        if answer == GO:
            return
        if answer:
            raise UserError(answer)
        problem = "it closed the connection"
        time.sleep(RETRY_S)
    raise UserError(
        f"distributed: process {process_id} of {num_processes} did not reach process 0 at {coordinator} within {timeout_s} s "
        f"({problem}); is it started, and is the address right?"
    )
