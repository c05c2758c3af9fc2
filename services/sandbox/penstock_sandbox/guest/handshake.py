"""Constants of the exchange around the frames on a connection to the guest agent.

It imports nothing, so that ``deliver`` starts at once.
"""

from __future__ import annotations

ATTACH, OUTPUT, DELIVER = b"attach\n", b"output\n", b"deliver\n"
"""First line of a peer: its role."""
TAKEN, BAD = b"ok\n", b"bad\n"
"""The daemon's answer to data that was put."""
ARMOUR = b"PNSTK "
"""Prefix of a base64 line where the channel carries text; other lines are ignored."""
NO_GUEST = 69
"""Exit code of ``attach`` and ``deliver`` where no guest agent listens: it has ended, and its sandbox with it."""
