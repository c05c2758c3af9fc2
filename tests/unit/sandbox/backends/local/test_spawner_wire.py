"""Messages between the service, its spawner and the doors."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_sandbox.backends.local.spawner import seccomp, wire


@pytest.mark.requirement("R67")
@given(
    message=st.dictionaries(
        st.text(max_size=10), st.one_of(st.none(), st.integers(), st.text(), st.binary(), st.booleans()), max_size=8
    ),
    padding=st.sampled_from([0, 1000, 49_000, 300_000]),
    descriptors=st.integers(0, 4),
)
def test_a_message_of_any_size_arrives_with_its_descriptors(
    message: dict[str, object], padding: int, descriptors: int
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sent = [os.open("/dev/null", os.O_RDONLY) for _ in range(descriptors)]
    message["padding"] = b"x" * padding
    with ours, theirs:
        wire.send(ours, message, sent)
        received = wire.receive(theirs)
    assert received is not None
    assert received[0] == message and len(received[1]) == descriptors
    for descriptor in received[1]:
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)
    for descriptor in sent:
        os.close(descriptor)


@pytest.mark.requirement("R43")
def test_end_of_a_channel_is_reported() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        ours.close()
        assert wire.receive(theirs) is None
        with pytest.raises(OSError, match="pipe"):
            wire.send(theirs, {})


@pytest.mark.requirement("R13")
def test_the_filter_is_well_formed() -> None:
    """Every jump stays inside and the last word is an answer."""
    program = seccomp.program(allocates=True)
    if program is None:
        return
    code = [program[start : start + 8] for start in range(0, len(program), 8)]
    assert len(code) < 4096 and len(program) % 8 == 0
    for index, instruction in enumerate(code):
        assert index + 1 + max(instruction[2], instruction[3]) < len(code) or instruction[0] == 0x06
    assert code[-1][0] == 0x06
