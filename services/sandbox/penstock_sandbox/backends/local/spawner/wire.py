"""Messages between service, spawner and helpers: one dictionary per SOCK_SEQPACKET packet, with descriptors.

Invariants: both ends run the same interpreter, so the encoding is ``marshal`` (fast, no import cost, and the peer is
trusted: it is our own process on a socket pair). A message too long for a packet is sent in a memfd. Only the sockets
may block, by their mode.
"""

from __future__ import annotations

import errno
import marshal
import os
import socket
from array import array
from collections.abc import Sequence
from typing import Any, Final, cast

Message = dict[str, Any]

FIRST_PROGRAM: Final = 5
"""Bubblewrap's descriptor of the first process's program, which its arguments name."""

# The default socket buffer is 208 KiB and counts overhead; longer messages use a memfd.
_INLINE_LIMIT = 48 * 1024
_MAX_DESCRIPTORS = 16
_INT = array("i")
_INLINE, _BY_DESCRIPTOR = b"\0", b"\1"
_ANCILLARY_BYTES = socket.CMSG_LEN(_MAX_DESCRIPTORS * _INT.itemsize)
# Plain numbers: combining the socket module's own is slower than receiving.
_CLOEXEC, _NO_SIGNAL = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_NOSIGNAL)
_CUT, _LOST = int(socket.MSG_TRUNC), int(socket.MSG_CTRUNC)
_SOCKET, _RIGHTS = int(socket.SOL_SOCKET), int(socket.SCM_RIGHTS)


class DescriptorsLost(OSError):
    """A message arrived whole, but without its descriptors: this process has no free one. ``message`` is it."""

    def __init__(self, message: Message) -> None:
        super().__init__(errno.EMFILE, "a message arrived without its descriptors: too many files are open")
        self.message = message


def send(channel: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Sends one message. Raises BlockingIOError if a non-blocking channel is full, OSError if it is closed."""
    body = marshal.dumps(message)
    if len(body) <= _INLINE_LIMIT:
        _send(channel, (_INLINE, body), descriptors)
        return
    memory = os.memfd_create("penstock-message", os.MFD_CLOEXEC)
    try:
        view = memoryview(body)
        while view:
            view = view[os.write(memory, view) :]
        _send(channel, (_BY_DESCRIPTOR,), (memory, *descriptors))
    finally:
        os.close(memory)


def _send(channel: socket.socket, parts: Sequence[bytes], descriptors: Sequence[int]) -> None:
    rights = ((_SOCKET, _RIGHTS, array("i", descriptors)),) if descriptors else ()
    channel.sendmsg(parts, rights, _NO_SIGNAL)


def receive(channel: socket.socket) -> tuple[Message, list[int]] | None:
    """Receives one message and its descriptors, or None at the end. The caller owns (and closes) the descriptors.

    Raises DescriptorsLost, OSError for a message that is not whole.
    """
    # Not socket.recv_fds: it ignores its flags, and a descriptor without close-on-exec would leak into sandboxes.
    packet, ancillary, flags, _ = channel.recvmsg(_INLINE_LIMIT + 1024, _ANCILLARY_BYTES, _CLOEXEC)
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if level == _SOCKET and kind == _RIGHTS:
            descriptors.extend(memoryview(data)[: len(data) - len(data) % _INT.itemsize].cast("i"))
    if not packet:
        return None
    if flags & (_CUT | _LOST):
        for descriptor in descriptors:
            os.close(descriptor)
        # The kernel drops descriptors for which there is no room, and gives all bytes all the same.
        if not flags & _CUT and packet[:1] == _INLINE:
            raise DescriptorsLost(cast(Message, marshal.loads(packet[1:])))
        raise OSError("a message was truncated: the process is out of file descriptors")
    if packet[:1] == _INLINE:
        return cast(Message, marshal.loads(packet[1:])), descriptors
    memory = descriptors.pop(0)
    try:
        size = os.fstat(memory).st_size
        parts = []
        offset = 0
        while offset < size:
            part = os.pread(memory, size - offset, offset)
            if not part:
                raise OSError("a message ended early")
            parts.append(part)
            offset += len(part)
        return cast(Message, marshal.loads(b"".join(parts))), descriptors
    finally:
        os.close(memory)
