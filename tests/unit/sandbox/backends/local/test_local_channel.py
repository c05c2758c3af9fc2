"""What becomes of replies whose caller gives up, and of those that cannot be read."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from penstock_sandbox.backends.local.channel import Channel, ChannelClosed
from penstock_sandbox.backends.local.spawner import wire


@pytest.mark.requirement("R23")
@pytest.mark.parametrize("arrived", [False, True], ids=["before-the-reply", "after-the-reply"])
async def test_the_descriptors_of_a_cancelled_request_are_closed(arrived: bool) -> None:
    """Also if the reply is there already, and only its caller has not been resumed yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read_end, write_end = os.pipe()
    with theirs, Channel(ours, lambda _: None, lambda: None) as channel:
        asking = asyncio.create_task(channel.request({"op": "listen"}))
        await asyncio.sleep(0)
        received = wire.receive(theirs)
        assert received is not None
        answered = channel._replies[received[0]["seq"]]
        if not arrived:
            asking.cancel()
        wire.send(theirs, {"seq": received[0]["seq"]}, [write_end])
        os.close(write_end)
        channel._readable()
        if arrived:
            assert answered.done()
            asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    # Its last copy is closed, so the pipe ends.
    os.set_blocking(read_end, False)
    assert os.read(read_end, 1) == b""
    os.close(read_end)


@pytest.mark.requirement("R49")
async def test_a_message_that_cannot_be_read_ends_the_channel_and_all_requests() -> None:
    """It may have been the reply that somebody waits for; a process out of descriptors gets such messages."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = []
    with theirs, Channel(ours, lambda _: None, lambda: ends.append(True)) as channel:
        asking = asyncio.create_task(channel.request({"op": "stat"}))
        await asyncio.sleep(0)
        # Longer than any message: the kernel cuts it.
        theirs.send(bytes(100 * 1024))
        channel._readable()
        with pytest.raises(ChannelClosed):
            await asking
        assert channel.failed
        with pytest.raises(ChannelClosed):
            await channel.request({"op": "stat"})
    assert ends == [True]
