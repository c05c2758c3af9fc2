"""The session's book against a gate that loses streams, forgets sessions and cancels calls in any order."""

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.client import CallEnded, ModelCall, PenstockError, ResultRejected, SessionLost
from penstock.client.intercept.leases import Inbox, Leases
from penstock.interception.v1 import intercept_service_pb2 as pb


class Book(RuleBasedStateMachine):
    """The gate's truth beside the session's book.

    Each call is open at the gate, or ended there (`answered` by one result, or `cancelled`). What the session sends is
    read by the gate at once or, when the stream breaks, never.
    """

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._setup())
        self.count = 0
        self.lease = 0
        self.open: dict[str, str] = {}  # call id to its lease at the gate
        self.answered: dict[str, str] = {}  # call id to the reason of the first result
        self.cancelled: set[str] = set()
        self.unread: list[pb.CallResult] = []
        self.acknowledgements: list[str] = []
        self.handed: dict[str, list[ModelCall]] = {}
        self.futures: list[tuple[str, asyncio.Future[None]]] = []

    async def _setup(self) -> None:
        self.inbox = Inbox()
        self.leases = Leases(asyncio.Event(), self.inbox)

    def _on_loop(self, function: Any, *arguments: Any) -> Any:
        async def call() -> Any:
            return function(*arguments)

        return self.loop.run_until_complete(call())

    def _lease(self, call_id: str) -> None:
        self.lease += 1
        self.open[call_id] = f"l{self.lease}"
        message = pb.ModelCall(call_id=call_id, lease_id=self.open[call_id], rollout_id="r")
        self._on_loop(self.leases.leased, message)

    @rule()
    def a_call_comes(self) -> None:
        self.count += 1
        self._lease(f"c{self.count}")

    @rule()
    def the_trainer_takes_what_is_there(self) -> None:
        self._on_loop(self.inbox.finish)

        async def drain() -> None:
            while (call := await self.inbox.next_call()) is not None:
                self.handed.setdefault(call.call_id, []).append(call)
            await self.inbox._calls.get()  # the end that `finish` left for others

        self.loop.run_until_complete(drain())

    @precondition(lambda self: self.handed)
    @rule(data=st.data())
    def the_trainer_answers(self, data: st.DataObject) -> None:
        call_id = data.draw(st.sampled_from(sorted(self.handed)))
        result = pb.CallResult(call_id=call_id, failure=pb.CallFailure(reason=f"R{len(self.futures)}"))
        try:
            self.futures.append((call_id, self._on_loop(self.leases.answer, result)))
        except PenstockError as error:
            assert call_id in self.answered or call_id in self.cancelled or error.reason == "ANSWER_UNDER_WAY"

    @rule()
    def the_session_sends(self) -> None:
        while (results := self.leases.next_results()) is not None:
            ids = [result.call_id for result in results.results]
            assert len(ids) == len(set(ids))
            self.unread.extend(results.results)

    @rule()
    def the_gate_reads(self) -> None:
        for result in self.unread:
            call_id, said = result.call_id, result.failure.reason
            if call_id in self.open:
                del self.open[call_id]
                self.answered[call_id] = said
            if self.answered.get(call_id) == said:
                self.acknowledgements.append(call_id)
            else:
                reason = pb.ResultRejected.REASON_CALL_ENDED
                self._on_loop(self.leases.rejected, pb.ResultRejected(call_id=call_id, reason=reason))
        self.unread.clear()

    @rule()
    def acknowledgements_arrive(self) -> None:
        for call_id in self.acknowledgements:
            self._on_loop(self.leases.accepted, call_id)
        self.acknowledgements.clear()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def a_call_is_cancelled(self, data: st.DataObject) -> None:
        call_id = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[call_id]
        self.cancelled.add(call_id)
        self._on_loop(self.leases.cancelled, call_id, "AGENT_GONE")

    @rule(remembered=st.booleans())
    def the_stream_breaks(self, remembered: bool) -> None:
        self.unread.clear()
        self.acknowledgements.clear()
        if remembered:
            self._on_loop(self.leases.taken_up, frozenset(self.open))
        else:
            self._on_loop(self.leases.taken_up, None)
            for call_id in sorted(self.open):
                self._lease(call_id)

    @invariant()
    def a_call_that_is_open_is_handed_out_once(self) -> None:
        for call_id, calls in getattr(self, "handed", {}).items():
            assert len(calls) == 1, call_id

    @invariant()
    def what_is_sent_carries_the_newest_lease(self) -> None:
        for call_id, held in getattr(self, "leases", Leases(asyncio.Event(), Inbox()))._held.items():
            if call_id in self.open:
                assert held.lease_id == self.open[call_id]
                assert held.result is None or held.result.lease_id == held.lease_id

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        # After one more round trip on a stream that holds, every answer has its verdict and nothing is left.
        self.the_stream_breaks(remembered=True)
        self.the_session_sends()
        self.the_gate_reads()
        self.acknowledgements_arrive()
        for call_id, future in self.futures:
            assert future.done(), call_id
            error = future.exception()
            assert error is None or isinstance(error, ResultRejected)
            assert (error is None) <= (call_id in self.answered)
        assert set(self.leases._held) <= set(self.open)
        self._on_loop(self.leases.end, SessionLost("over"))
        assert len(self.leases) == 0
        self.loop.close()


TestBook = Book.TestCase
TestBook.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.requirement("R24")
async def test_after_the_end_every_answer_raises_what_the_session_ended_with() -> None:
    """A typed end."""
    leases = Leases(asyncio.Event(), Inbox())
    leases.leased(pb.ModelCall(call_id="c", lease_id="l"))
    under_way = leases.answer(pb.CallResult(call_id="c", release=pb.Release()))
    error = SessionLost("over")
    leases.end(error)
    with pytest.raises(SessionLost):
        await under_way
    with pytest.raises(SessionLost):
        leases.answer(pb.CallResult(call_id="c", release=pb.Release()))


@pytest.mark.requirement("R29")
async def test_an_answer_to_a_call_that_is_not_held_says_so() -> None:
    """A delivery is validated against its call."""
    with pytest.raises(CallEnded):
        Leases(asyncio.Event(), Inbox()).answer(pb.CallResult(call_id="c", release=pb.Release()))
