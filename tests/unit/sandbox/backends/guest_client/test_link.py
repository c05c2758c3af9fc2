"""A link to what answers in a guest agent's place: whatever that says, however little it reads, memory is bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.support.waiting import eventually
from tests.unit.sandbox.backends.guest_client.peers import Peer, acknowledgement, ready

from penstock_sandbox.backends.guest_client.link import Link
from penstock_sandbox.backends.guest_client.sandbox import by_what_serves_it
from penstock_sandbox.backends.guest_client.stream import Stream
from penstock_sandbox.guest import frames


@asynccontextmanager
async def attached(peer: Peer) -> AsyncIterator[tuple[Link, list[str]]]:
    """A link that resets every connection, and the reasons of its loss. It does not mind silence."""
    lost: list[str] = []

    def refuse(stream: Stream, _: int) -> None:
        stream.reset()

    link = Link(peer.open, lambda _: None, refuse, lost.append, judge=by_what_serves_it, heartbeat_s=3600)
    try:
        await link.open()
        yield link, lost
    finally:
        await link.aclose()


@pytest.mark.requirement("R14", "R80", "R93")
async def test_peer_that_acknowledges_nothing_it_caused_loses_its_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refused connection is a frame that is kept until it is acknowledged."""
    monkeypatch.setattr(frames, "KEPT_FRAMES", 8)
    peer = Peer()
    async with attached(peer) as (_, lost):
        peer.pipes[0].say(peer.opened(16))
        await peer.pipes[0].said()
        assert lost == [], "within the limit"
        peer.pipes[0].say(peer.opened(1000))
        await eventually(lambda: bool(lost) or len(peer.heard) > 1000, "it is lost, or has got an answer to each")
        assert lost == ["ATTENDANT_MISBEHAVED"]


@pytest.mark.requirement("R14", "R80")
async def test_peer_may_not_acknowledge_what_was_not_sent_yet() -> None:
    """Else what waits for a peer that does not read would have no bound."""
    peer = Peer()
    async with attached(peer) as (_, lost):
        peer.pipes[0].say(peer.opened(3) + acknowledgement(3))
        await eventually(lambda: peer.pipes[0].is_closed, "the pipe is closed")
        assert lost == [], "another pipe may be better"


@pytest.mark.requirement("R14", "R80")
async def test_second_greeting_in_a_pipe_breaks_it() -> None:
    """Each is answered, whether or not the peer reads."""
    peer = Peer()
    async with attached(peer):
        peer.pipes[0].say(ready())
        await eventually(lambda: peer.pipes[0].is_closed, "the pipe is closed")
        assert [frame.kind for frame in peer.heard] == [frames.HELLO]


@pytest.mark.requirement("R14", "R80")
async def test_peer_that_does_not_read_has_one_acknowledgement_waiting() -> None:
    """The newest: it stands for all before."""
    peer = Peer()
    async with attached(peer):
        pipe = peer.pipes[0]
        pipe.say(b"".join(peer.numbered(frames.CREDIT, 9, frames.pack_amount(1)) for _ in range(1024)))
        await pipe.said()
        await eventually(lambda: len(peer.heard) > 1, "what was received is acknowledged")
        heard = [(frame.kind, frame.payload) for frame in peer.heard[1:]]
        assert heard == [(frames.ACK, (1024).to_bytes(8, "big"))]


@pytest.mark.requirement("R14", "R80")
async def test_piece_of_no_bytes_breaks_its_pipe() -> None:
    """It takes nothing of a stream's window, so any number of them would be kept for a reader."""
    peer = Peer()
    async with attached(peer) as (link, _):
        stream = link.stream(window=frames.BULK_WINDOW, credit=0)
        peer.pipes[0].say(peer.numbered(frames.DATA, stream.number))
        await eventually(lambda: peer.pipes[0].is_closed, "the pipe is closed")
