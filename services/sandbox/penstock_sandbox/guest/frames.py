"""The protocol between the service and a guest agent: numbered frames over byte streams that may break at any byte.

Purpose: both ends import this module (it is the first part of the program that runs in the sandbox), so that there is
one codec and one account of frames sent, kept and received.

A frame is a header, ``length, kind, stream, number``, then its payload. A numbered frame is delivered exactly once: the
sender keeps it until it is acknowledged; after each new attachment the two ends exchange the number of the last frame
received (HELLO) and continue from there. READY, HELLO and ACK have number 0: they belong to one attachment.

Invariants
- No cut loses or duplicates a numbered frame: ``Ledger.hear`` accepts each number once, in order.
- Kept frames are bounded: while ``Ledger.full`` a sender stops reading its sources, and a peer that makes it
  ``Ledger.overfull`` all the same is not served any more.
- A protocol violation by the peer raises ``Malformed``: the service does not trust what it receives.
"""

from __future__ import annotations

import base64
import binascii
import collections
import json
import struct
from typing import Any, Deque, Dict, Iterator, List, NamedTuple, Tuple

from penstock_sandbox.guest.handshake import ARMOUR

VERSION = 2

HEADER = struct.Struct("!IBIQ")
_NUMBER = struct.Struct("!Q")
_AMOUNT = struct.Struct("!I")

# Control messages: argv and environment together may be 2 MiB on Linux, and grow as JSON.
MAX_PAYLOAD = 8 * 1024 * 1024
# Maximum piece of output, files and connections.
PIECE = 64 * 1024
# Maximum bytes and frames that one end keeps unacknowledged; beyond them only what is essential is sent.
KEPT = 16 * 1024 * 1024
KEPT_FRAMES = 50_000
# Maximum bytes of a stream that are sent and not yet consumed by their reader.
BULK_WINDOW = 1024 * 1024
ENDPOINT_WINDOW = 256 * 1024

_ACK_FRAMES = 256
_ACK_BYTES = 1024 * 1024

READY, HELLO, ACK, REQUEST, REPLY, EVENT, DATA, END, RESET, CREDIT, OPEN = range(1, 12)
_UNNUMBERED = (READY, HELLO, ACK)

# Set on streams that the guest agent opens (connections to its endpoint), not on the service's.
FROM_ATTENDANT = 0x80000000

Message = Dict[str, Any]


class Malformed(Exception):
    """The peer violated the protocol."""


class Frame(NamedTuple):
    """One frame; ``number`` is 0 for those that belong to an attachment."""

    kind: int
    stream: int
    number: int
    payload: bytes


def encode(kind: int, stream: int, number: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), kind, stream, number) + payload


class Decoder:
    """Splits one attachment's bytes into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    @property
    def between(self) -> bool:
        """Whether no frame is partly received."""
        return not self._pending

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames completed by ``data``. Raises Malformed."""
        pending = self._pending
        pending += data
        start = 0
        try:
            while len(pending) - start >= HEADER.size:
                length, kind, stream, number = HEADER.unpack_from(pending, start)
                if length > MAX_PAYLOAD:
                    raise Malformed("a payload of %d bytes" % length)
                if not READY <= kind <= OPEN or (number == 0) != (kind in _UNNUMBERED):
                    raise Malformed("a frame of kind %d with number %d" % (kind, number))
                end = start + HEADER.size + length
                if end > len(pending):
                    break
                payload = bytes(pending[start + HEADER.size : end])
                start = end
                yield Frame(kind, stream, number, payload)
        finally:
            del pending[:start]


class Ledger:
    """One end's record of a conversation: the frames ``sent`` and not acknowledged, and the last one ``received``."""

    def __init__(self) -> None:
        self.sent = 0
        self._kept: Deque[Tuple[int, bytes]] = collections.deque()
        self._kept_bytes = 0
        self.received = 0
        self._unacknowledged_frames = 0
        self._unacknowledged_bytes = 0

    @property
    def full(self) -> bool:
        """Whether so much is kept that only essential frames should be sent."""
        return self._kept_bytes >= KEPT or len(self._kept) >= KEPT_FRAMES

    @property
    def overfull(self) -> bool:
        """Whether more is kept than an honest peer ever leaves unacknowledged: requests may be large, but are few."""
        return self._kept_bytes > 4 * KEPT or len(self._kept) > 2 * KEPT_FRAMES

    def number_frame(self, kind: int, stream: int, payload: bytes) -> bytes:
        """Numbers a frame and keeps it; returns its bytes."""
        self.sent += 1
        frame = encode(kind, stream, self.sent, payload)
        self._kept.append((self.sent, frame))
        self._kept_bytes += len(frame)
        return frame

    def acknowledged(self, number: int) -> None:
        """The peer has received everything up to ``number``."""
        if number > self.sent:
            raise Malformed("frame %d is acknowledged, of %d" % (number, self.sent))
        while self._kept and self._kept[0][0] <= number:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def after(self, number: int) -> List[bytes]:
        """Returns the frames after ``number``, the peer's last. Raises Malformed if they are no longer kept."""
        self.acknowledged(number)
        if self.sent - len(self._kept) != number:
            raise Malformed("frame %d was acknowledged before, now only %d" % (self.sent - len(self._kept), number))
        return [frame for _, frame in self._kept]

    def receive(self, frame: Frame) -> bool:
        """Records a numbered frame; returns False for a duplicate. Raises Malformed if one is missing."""
        if frame.number <= self.received:
            return False
        if frame.number != self.received + 1:
            raise Malformed("frame %d follows %d" % (frame.number, self.received))
        self.received = frame.number
        self._unacknowledged_frames += 1
        self._unacknowledged_bytes += HEADER.size + len(frame.payload)
        return True

    def acknowledgement(self) -> bytes:
        """Returns an ACK's bytes if one is due, else nothing."""
        if self._unacknowledged_frames < _ACK_FRAMES and self._unacknowledged_bytes < _ACK_BYTES:
            return b""
        self._unacknowledged_frames = self._unacknowledged_bytes = 0
        return encode(ACK, 0, 0, _NUMBER.pack(self.received))


def parse_number(payload: bytes) -> int:
    try:
        (number,) = _NUMBER.unpack(payload)
    except struct.error as error:
        raise Malformed("an acknowledgement of %d bytes" % len(payload)) from error
    return int(number)


def pack_amount(amount: int) -> bytes:
    """Returns the payload of a CREDIT."""
    return _AMOUNT.pack(amount)


def parse_amount(payload: bytes) -> int:
    """Returns the number of bytes in a CREDIT."""
    try:
        (amount,) = _AMOUNT.unpack(payload)
    except struct.error as error:
        raise Malformed("a credit of %d bytes" % len(payload)) from error
    return int(amount)


def pack_message(message: Message) -> bytes:
    """Returns a control payload. File names may be any bytes: they are encoded as Python's surrogate escapes."""
    return json.dumps(message, separators=(",", ":")).encode()


def parse_message(payload: bytes) -> Message:
    """Returns a control payload's content. Raises Malformed."""
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise Malformed("no JSON: %s" % error) from error
    if not isinstance(message, dict):
        raise Malformed("no JSON object")
    return message


def armour(data: bytes) -> bytes:
    """Returns bytes as lines of printable ASCII, for channels that are not 8-bit clean."""
    lines = []
    for start in range(0, len(data), PIECE):
        lines += [ARMOUR, base64.b64encode(data[start : start + PIECE]), b"\n"]
    return b"".join(lines)


class Unarmour:
    """Reverses ``armour``. Lines without its prefix, such as a login shell's greetings, are skipped."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Returns the bytes completed by ``data``. Raises Malformed."""
        *lines, rest = (bytes(self._pending) + data).split(b"\n")
        if len(rest) > 2 * MAX_PAYLOAD:
            raise Malformed("a line of %d bytes" % len(rest))
        self._pending = bytearray(rest)
        clear = []
        for line in lines:
            if line.startswith(ARMOUR):
                try:
                    clear.append(base64.b64decode(line[len(ARMOUR) :].strip(), validate=True))
                except binascii.Error as error:
                    raise Malformed("a line that is not base64") from error
        return b"".join(clear)
