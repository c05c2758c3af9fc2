"""What is planned on the event loop is little work."""

from __future__ import annotations

import pytest

from penstock_codec.chat import Message
from penstock_interception.graph.inline import Room, TooLongInline


@pytest.mark.requirement("R32")
def test_very_long_instructions_leave_no_room() -> None:
    """They are read each time, and rendered the first time; an agent's usual ones leave room for what is new."""
    room = Room(8 << 10)
    room.take_instructions([Message.system("x" * 60_000), Message.user("y" * 10_000_000)])
    room.take("z" * 4_000)
    with pytest.raises(TooLongInline):
        Room(8 << 10).take_instructions([Message.system("x" * 100_000), Message.system("x" * 100_000)])
