"""``deliver SOCKET``: delivers the armoured frames on standard input to the daemon at SOCKET, and ends.

Purpose: where input cannot be streamed into a sandbox, each piece of it starts this program: so it does nothing else,
and imports little. The other commands are in ``main``.

Invariants: exits with 0 once the daemon has received all of it, with NO_GUEST if there is none, else with 1.
"""

from __future__ import annotations

import binascii
import os
import socket
import sys

from penstock_sandbox.guest.handshake import ARMOUR, DELIVER, NO_GUEST, TAKEN

_READ = 64 * 1024


def main() -> int:
    """Delivers the frames; returns the exit code."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(sys.argv[2])
            sock.sendall(DELIVER)
            pending = b""
            while True:
                data = os.read(0, _READ)
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    if line.startswith(ARMOUR):
                        sock.sendall(binascii.a2b_base64(line[len(ARMOUR) :]))
                if not data:
                    break
            sock.shutdown(socket.SHUT_WR)
            return 0 if sock.recv(len(TAKEN)) == TAKEN else 1
    except (ConnectionRefusedError, FileNotFoundError) as error:
        sys.stderr.write("attendant: %s\n" % error)
        return NO_GUEST
    except (OSError, binascii.Error) as error:
        sys.stderr.write("attendant: %s\n" % error)
        return 1
