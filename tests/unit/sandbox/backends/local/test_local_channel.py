"""Replies whose caller was cancelled, and replies that cannot be read."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock_sandbox.backends.local.channel import Channel, ChannelClosed
from penstock_sandbox.backends.local.spawner import wire
from penstock_sandbox.domain.errno import Refused


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


@contextmanager
def _out_of_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()
    gc.disable()  # what it closes makes room for others
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        gc.enable()


@pytest.mark.requirement("R49")
@pytest.mark.parametrize("op", ["open_read", "listen"])
async def test_a_reply_without_its_descriptor_for_lack_of_descriptors_fails_its_own_request_alone(op: str) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read_end, write_end = os.pipe()
    with theirs, Channel(ours, lambda _: None, lambda: None) as channel:
        asking, other = (asyncio.create_task(channel.request({"op": one})) for one in (op, "stat"))
        await asyncio.sleep(0)
        for _ in range(2):
            assert wire.receive(theirs) is not None
        wire.send(theirs, {"seq": 1}, [write_end])
        os.close(write_end)
        with _out_of_descriptors():
            channel._readable()
        with pytest.raises(Refused) as caught:
            await asking
        assert caught.value.errno == errno.EMFILE
        assert not channel.closed and not channel.failed
        wire.send(theirs, {"seq": 2})
        assert (await other)[0] == {"seq": 2}
    # Its last copy is closed, so the pipe ends.
    os.set_blocking(read_end, False)
    assert os.read(read_end, 1) == b""
    os.close(read_end)


@pytest.mark.requirement("R49")
@pytest.mark.parametrize("long", [False, True], ids=["what-was-made-is-unknown", "the-message-itself-is-lost"])
async def test_a_reply_without_its_descriptors_ends_the_channel_where_its_request_made_something(long: bool) -> None:
    """As a file with a name of its own, or a process; a long message is in a descriptor itself."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = []
    with theirs, Channel(ours, lambda _: None, lambda: ends.append(True)) as channel:
        asking = asyncio.create_task(channel.request({"op": "open_read" if long else "open_write"}))
        await asyncio.sleep(0)
        wire.send(theirs, {"seq": 1, "name": "x" * (100_000 if long else 1)}, [0, 0])
        with _out_of_descriptors():
            channel._readable()
        with pytest.raises(ChannelClosed):
            await asking
        assert channel.failed
    assert ends == [True]


@pytest.mark.requirement("R23", "R49")
async def test_a_cancelled_request_whose_reply_loses_its_descriptors_is_only_dropped() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, Channel(ours, lambda _: None, lambda: None) as channel:
        asking = asyncio.create_task(channel.request({"op": "open_read"}))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        wire.send(theirs, {"seq": 1}, [0])
        with _out_of_descriptors():
            channel._readable()
        assert not channel.closed and not channel._replies
