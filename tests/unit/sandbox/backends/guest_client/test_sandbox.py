"""A sandbox whose agent stops what its programs are started and killed by: nothing waits for it without an end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.unit.sandbox.backends.guest_client.peers import Peer

from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_sandbox.backends.guest_client.sandbox import BackendHooks, GuestSandbox, ProcessDefaults
from penstock_sandbox.domain.backend import ProcessHandle, ProcessSink, RawExit
from penstock_sandbox.domain.model import Stream

AT_ONCE = 0.0
"""Seconds: a wait that is over before any answer."""


class Sink(ProcessSink):
    """Nobody watches the process."""

    def output(self, stream: Stream, data: bytes) -> None:
        return

    def closed(self, stream: Stream) -> None:
        return

    def exited(self, exit: RawExit) -> None:  # noqa: A002
        return

    def lost(self, reason: str = "") -> None:
        return


@asynccontextmanager
async def served(peer: Peer, **limits: float) -> AsyncIterator[tuple[GuestSandbox, list[str]]]:
    """A sandbox that a peer serves, and why it was lost."""

    async def destroy() -> None:
        return

    reasons: list[str] = []
    hooks = BackendHooks(reasons.append, destroy)
    sandbox = GuestSandbox("s", peer.open, ProcessDefaults("/", "/", "agent", {}), hooks, **limits)
    try:
        await sandbox.open()
        yield sandbox, reasons
    finally:
        await sandbox.destroy()


async def start(sandbox: GuestSandbox) -> ProcessHandle:
    """Start a program."""
    return await sandbox.start(["true"], {}, "/", Sink(), stdin=False, pty=None)


@pytest.mark.requirement("R37", "R41")
async def test_program_that_is_stopped_before_it_runs_is_killed_and_forgotten() -> None:
    peer = Peer(unanswered={"start"})
    async with served(peer, start_answer_s=AT_ONCE) as (sandbox, reasons):
        with pytest.raises(Unavailable) as caught:
            await start(sandbox)
        assert caught.value.reason == "START_UNANSWERED"
        await sandbox.make_directory("/later", 0o755)
        assert [request["op"] for request in peer.asked] == ["start", "kill", "forget", "mkdir"]
        assert len({request["process"] for request in peer.asked[:3]}) == 1
        assert not reasons
        assert not sandbox._processes


@pytest.mark.requirement("R40", "R93")
async def test_program_that_neither_starts_nor_dies_ends_its_sandbox() -> None:
    peer = Peer(unanswered={"start", "kill"})
    async with served(peer, start_answer_s=AT_ONCE, order_answer_s=AT_ONCE) as (sandbox, reasons):
        with pytest.raises(FailedPrecondition) as caught:
            await start(sandbox)
        assert caught.value.reason == "SANDBOX_LOST"
        assert reasons == ["TREE_SURVIVED"]


@pytest.mark.requirement("R40", "R93")
@pytest.mark.parametrize("order", ["kill", "signal"])
async def test_supervisor_that_answers_no_order_ends_its_sandbox(order: str) -> None:
    """An agent with the supervisor's own user can stop it."""
    peer = Peer(unanswered={order})
    async with served(peer, order_answer_s=AT_ONCE) as (sandbox, reasons):
        handle = await start(sandbox)
        await (handle.kill() if order == "kill" else handle.signal(15))
        assert reasons == ["TREE_SURVIVED"]
