"""Runs inside an ``hf-sandbox`` job: buffers a command's output for callers that poll it.

Purpose: a command there is only answered when it has ended, so nothing can stream out of one. ``keep`` runs a command
in the background and buffers its output; ``take`` waits for the next part and ends.

A single file for Python 3.8, with the standard library only; it is sent to the job as text and not imported there.

Invariants
- Output is kept until a taker asks from a later byte, so that a lost response loses nothing.
- At most ``KEPT`` bytes are held: then the command waits. A buffer that is no longer polled ends with its command.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
import time

KEPT = 1024 * 1024
FORGOTTEN_S = 120.0
MORE, END, LOST = "more", "end", "lost"


class OutputBuffer:
    """The output of one command, from byte ``begin`` on."""

    def __init__(self, command: subprocess.Popen[bytes]) -> None:
        self._command = command
        self._changed = threading.Condition()
        self._held = bytearray()
        self._begin = 0
        self._ended = False
        self.asked_at = time.monotonic()

    def read(self) -> None:
        """Buffers output until it ends."""
        assert self._command.stdout is not None
        descriptor = self._command.stdout.fileno()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._held) < KEPT)
            data = os.read(descriptor, 65536)
            with self._changed:
                self._held += data
                self._ended = not data
                self._changed.notify_all()
            if not data:
                return

    def take(self, offset: int, wait_s: float) -> bytes:
        """Returns a first line (``more``, ``end CODE`` or ``lost``), then all from ``offset``, waiting for some."""
        with self._changed:
            self.asked_at = time.monotonic()
            if not self._begin <= offset <= self._begin + len(self._held):
                return (LOST + "\n").encode()
            del self._held[: offset - self._begin]
            self._begin = offset
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._held or self._ended, wait_s)
            self.asked_at = time.monotonic()
            over = self._ended and not self._held
            state = "%s %d" % (END, self._command.wait()) if over else MORE
            return (state + "\n").encode() + bytes(self._held)


def keep(path: str, argv: list[str]) -> None:
    """Runs ``argv`` and serves its output at ``path``, detached from the caller."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(8)
    if os.fork():
        # The parent exits once the socket is there.
        os._exit(0)
    os.setsid()
    command = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    buffer = OutputBuffer(command)
    threading.Thread(target=buffer.read, daemon=True).start()
    listener.settimeout(FORGOTTEN_S / 4)
    while time.monotonic() - buffer.asked_at < FORGOTTEN_S:
        try:
            taker, _ = listener.accept()
        except socket.timeout:  # another class than TimeoutError before Python 3.10
            continue
        threading.Thread(target=_serve, args=(taker, buffer), daemon=True).start()
    command.kill()
    os.unlink(path)


def _serve(taker: socket.socket, buffer: OutputBuffer) -> None:
    with taker:
        taker.settimeout(FORGOTTEN_S)
        asked = b""
        while not asked.endswith(b"\n"):
            more = taker.recv(100)
            if not more:
                return
            asked += more
        offset, wait_s = asked.split()
        taker.sendall(buffer.take(int(offset), float(wait_s)))


def take(path: str, offset: int, wait_s: float) -> None:
    """Prints a buffer's output."""
    with socket.socket(socket.AF_UNIX) as buffer:
        buffer.connect(path)
        buffer.sendall(b"%d %f\n" % (offset, wait_s))
        while True:
            data = buffer.recv(65536)
            if not data:
                return
            sys.stdout.buffer.write(data)


def main() -> None:
    """``keep --socket PATH -- ARGV...`` or ``take --socket PATH --offset N --wait SECONDS``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("keep", "take"))
    parser.add_argument("--socket", required=True)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--wait", type=float, default=0.0)
    arguments, argv = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, argv = arguments[:at], arguments[at + 1 :]
    options = parser.parse_args(arguments)
    if options.what == "keep":
        keep(options.socket, argv)
    else:
        take(options.socket, options.offset, options.wait)


if __name__ == "__main__":
    main()
