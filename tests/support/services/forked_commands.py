"""A program `penstock` whose every start is a fork (`tests.support.services.forking`): for shells that tests run.

What a shell starts is no child of the tests' process, so the program asks that one for the fork: it passes its
arguments, environment, directory and standard streams, passes signals on, and ends as the fork ends.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

_COMMAND: Final = (sys.executable, "-m", "penstock.cli.main")
_LARGEST: Final = 1 << 17
_STREAMS: Final = 3
_PROGRAM: Final = """#!{interpreter} -IS
import json, os, signal, socket, sys
order = {{"argv": sys.argv[1:], "environment": dict(os.environ), "directory": os.getcwd()}}
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
    asking.connect({place!r})
    socket.send_fds(asking, [json.dumps(order).encode()], [0, 1, 2])
    pid = int(asking.recv(32))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = int(asking.recv(32))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def forked_commands() -> Iterator[Path]:
    """A directory with the program, to be first on a PATH. Call it from the main thread, with forks installed."""
    # The first start makes the process that forks, which ends with the thread that made it.
    subprocess.run([*_COMMAND, "--version"], check=True, stdout=subprocess.DEVNULL)
    # A socket's path may have 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="penstock-commands-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening,
    ):
        place = str(Path(folder, "socket"))
        listening.bind(place)
        listening.listen()
        program = Path(folder, "bin", "penstock")
        program.parent.mkdir()
        program.write_text(_PROGRAM.format(interpreter=sys.executable, place=place), encoding="utf-8")
        program.chmod(0o755)
        serving = threading.Thread(target=_serve, args=(listening,))
        serving.start()
        try:
            yield program.parent
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            serving.join()


def _serve(listening: socket.socket) -> None:
    with suppress(OSError):  # it is shut down
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_run, args=(connection,)).start()


def _run(connection: socket.socket) -> None:
    with connection:
        message, descriptors, _, _ = socket.recv_fds(connection, _LARGEST, _STREAMS)
        order: dict[str, Any] = json.loads(message)
        stdin, stdout, stderr = descriptors
        try:
            process = subprocess.Popen(
                [*_COMMAND, *order["argv"]],
                env=order["environment"],
                cwd=order["directory"],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        with suppress(OSError):  # the program that asked was killed
            connection.send(str(process.pid).encode())
        code = process.wait()
        with suppress(OSError):
            connection.send(str(code).encode())
