"""Slots go to whoever has the fewest for its weight: never too many, and nobody waits in vain."""

from __future__ import annotations

import asyncio
import contextvars
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock_chassis.aio.fair_queue import FairQueue

OWNERS = (None, "a", "b", "c")
Owner = str | None


async def pass_turns() -> None:
    """Lets everything run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


class SlotsMachine(RuleBasedStateMachine):
    """Slots against a model that says who must be served next."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stamps = itertools.count()
        # The model: those that wait, in order; since when each owner has not been served.
        self.queue: list[tuple[Owner, asyncio.Task[None]]] = []
        self.since: dict[Owner, int] = {}
        self.held: list[Owner] = []

    @initialize(
        most=st.integers(1, 4),
        limit=st.none() | st.integers(1, 3),
        weights=st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * len(OWNERS)),
    )
    def begin(self, most: int, limit: int | None, weights: tuple[float, ...]) -> None:
        self.most, self.weights = most, dict(zip(OWNERS, weights, strict=True))
        self.most_per_owner = limit
        self.slots = FairQueue[Owner](most, self.limit, self.weights.__getitem__)

    def limit(self, owner: Owner) -> int | None:
        return None if owner is None else self.most_per_owner

    def room(self, owner: Owner) -> bool:
        limit = self.limit(owner)
        return len(self.held) < self.most and (limit is None or self.held.count(owner) < limit)

    def run(self) -> None:
        self.loop.run_until_complete(pass_turns())

    @rule(owner=st.sampled_from(OWNERS))
    def take(self, owner: Owner) -> None:
        had_room = self.room(owner)
        task = self.loop.create_task(self.slots.take(owner))
        self.run()
        assert task.done() == had_room
        if had_room:
            self.held.append(owner)
        else:
            if owner not in {waiting for waiting, _ in self.queue}:
                self.since[owner] = next(self.stamps)
            self.queue.append((owner, task))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.held))
        self.held.remove(owner)
        self.slots.give_back(owner)
        expected = []
        while able := [waiting for waiting, _ in self.queue if self.room(waiting)]:
            chosen = min(able, key=lambda one: (self.held.count(one) / self.weights[one], self.since[one]))
            entry = next(entry for entry in self.queue if entry[0] == chosen)
            self.queue.remove(entry)
            self.held.append(chosen)
            self.since[chosen] = next(self.stamps)
            expected.append(entry[1])
        self.run()
        assert all(task.done() for task in expected), "who is next is served"

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.queue))
        self.queue.remove(entry)
        entry[1].cancel()
        self.run()
        assert entry[1].cancelled()

    @precondition(lambda self: self.queue and self.held)
    @rule(data=st.data())
    def cancel_in_the_moment_of_being_served(self, data: st.DataObject) -> None:
        """Whichever comes first, the slot is not lost."""
        freed = data.draw(st.sampled_from(self.held))
        entry = data.draw(st.sampled_from(self.queue))
        self.slots.give_back(freed)
        entry[1].cancel()
        self.run()
        self.held.remove(freed)
        self.queue.remove(entry)
        served = [waiting for waiting in self.queue if waiting[1].done()]
        for owner, task in served:
            self.queue.remove((owner, task))
            self.held.append(owner)
        # The order of service is not followed through this: begin anew with what is so.
        self.since = {owner: next(self.stamps) for owner in self.slots._waiting}

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        assert not any(self.room(owner) and not task.done() for owner, task in self.queue)
        assert len(self.held) <= getattr(self, "most", 0)

    def teardown(self) -> None:
        for _, task in self.queue:
            task.cancel()
        self.run()
        assert not hasattr(self, "slots") or not self.slots._waiting
        self.loop.close()


@pytest.mark.requirement("R26", "R51", "R123")
def test_slots_go_to_whom_the_model_says_in_any_history() -> None:
    run_state_machine_as_test(SlotsMachine, settings=settings(max_examples=150, stateful_step_count=30, deadline=None))


@pytest.mark.requirement("R131")
@given(st.lists(st.tuples(st.sampled_from(["request", "aside", "back", "withdraw", "free"]), st.integers(0, 7))))
def test_a_request_that_is_set_aside_keeps_its_place(history: list[tuple[str, int]]) -> None:
    """Of one owner, the oldest that is not set aside is served, and a slot is never kept from it."""
    slots = FairQueue[str](1)
    served: list[int] = []
    slots.request("a", lambda: None)
    tickets = [slots.request("a", lambda number=number: served.append(number)) for number in range(8)]  # type: ignore[misc]
    waiting, aside, held = list(range(8)), set[int](), 1

    def expect() -> None:
        nonlocal held
        while held < 1 and (able := [one for one in waiting if one not in aside]):
            waiting.remove(able[0])
            held += 1
            expected.append(able[0])

    expected: list[int] = []
    for what, number in history:
        if what == "aside":
            assert slots.set_aside(tickets[number]) == (number in waiting)
            aside |= {number} & set(waiting)
        elif what == "back":
            aside.discard(number)
            expect()
            slots.put_back(tickets[number])
        elif what == "withdraw":
            assert slots.withdraw(tickets[number]) == (number in waiting)
            waiting = [one for one in waiting if one != number]
        elif what == "free" and held:
            held -= 1
            expect()
            slots.give_back("a")
        assert served == expected
        assert slots.free == 1 - held


@pytest.mark.requirement("R123")
@given(st.integers(1, 9), st.integers(1, 9))
def test_slots_that_both_want_are_held_by_weight(a: int, b: int) -> None:
    """Within one slot, whoever came first and with however many."""
    weights = {"a": float(a), "b": float(b)}
    slots, held = FairQueue[str](a + b, weight=weights.__getitem__), list[str]()
    for owner in [*"a" * 200, *"b" * 50]:
        slots.request(owner, lambda owner=owner: held.append(owner))  # type: ignore[misc]
    assert held == ["a"] * (a + b)
    for freed in list(held):  # each of the first ends
        slots.give_back(freed)
    assert abs(held[a + b :].count("a") - a) <= 1


@pytest.mark.requirement("R123")
def test_who_is_granted_later_runs_in_its_own_context() -> None:
    """Not in that of the request whose slot became free: its log lines and spans would be the other's."""
    request, seen = contextvars.ContextVar[str]("request"), list[str]()
    slots = FairQueue[str](1)
    for name in "ab":
        request.set(name)
        slots.request("x", lambda: seen.append(request.get()))
    request.set("c")
    slots.give_back("x")
    assert seen == ["a", "b"]


def test_a_ticket_withdraws_its_own_request_once() -> None:
    """And none whose slot was granted."""
    slots, granted = FairQueue[str](1), list[int]()
    tickets = [slots.request("x", lambda n=n: granted.append(n)) for n in range(3)]  # type: ignore[misc]
    assert [slots.withdraw(ticket) for ticket in (tickets[0], tickets[1], tickets[1])] == [False, True, False]
    slots.give_back("x")
    assert granted == [0, 2]
