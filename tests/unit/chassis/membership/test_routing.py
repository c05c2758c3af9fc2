"""Which engine of several gets a request, decided without a clock and without chance."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_chassis.membership.routing import (
    BLOCK_TOKENS,
    SKEW,
    SLACK_TOKENS,
    Route,
    Router,
    prefix_blocks,
)

NAMES = ("r0", "r1", "r2", "r3")


def prompt(*parts: int, length: int = 4 * BLOCK_TOKENS) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Stretches of one token each."""
    return np.repeat(np.array(parts, np.int32), length)


def route(
    router: Router, tokens: np.ndarray[tuple[int], np.dtype[np.int32]], session: str = "", most: int = 10
) -> Route:
    """A request's route."""
    chosen = router.route(prefix_blocks(tokens.tobytes()), tokens.size, most, session)
    assert chosen is not None
    return chosen


def router(count: int = 3) -> Router:
    """With so many replicas."""
    made = Router()
    for name in NAMES[:count]:
        made.join(name)
    return made


@pytest.mark.requirement("R43")
def test_a_session_stays_with_its_replica_while_that_lives() -> None:
    """A conversation's cache is on one replica; when it dies, the session moves and stays where it went."""
    chosen = router()
    first = route(chosen, prompt(1), "s").member
    for turn in range(2, 6):
        route(chosen, prompt(50 + turn))
        assert route(chosen, prompt(*range(1, turn + 1)), "s").member == first
    chosen.leave(first)
    second = route(chosen, prompt(1, 2), "s").member
    assert second != first
    chosen.join(first)
    assert route(chosen, prompt(1, 2, 3), "s").member == second


@pytest.mark.requirement("R43")
def test_a_prompt_without_a_session_goes_where_most_of_it_was_computed() -> None:
    """The longest known prefix wins over an idle replica, and counts as so much less load."""
    chosen = router()
    short = route(chosen, prompt(1))
    other = route(chosen, prompt(9))
    assert other.member != short.member
    found = route(chosen, prompt(1, 2))
    assert (found.member, found.cached_blocks) == (short.member, 4)
    assert found.cost == 4 * BLOCK_TOKENS + 10


@pytest.mark.requirement("R43")
def test_a_hot_prefix_does_not_pile_everything_on_one_replica() -> None:
    """When a replica is loaded beyond the bound, the next request of the same prefix goes to another."""
    chosen = router()
    counts = Counter(route(chosen, prompt(1), f"s{n}", 2000).member for n in range(60))
    assert set(counts) == set(NAMES[:3])
    assert max(counts.values()) < 2 * min(counts.values())


@pytest.mark.requirement("R43")
def test_another_policy_or_adapter_shares_no_prefix() -> None:
    """What other weights computed is of no use."""
    chosen = router()
    route(chosen, prompt(1))
    chosen.forget_prefixes()
    assert route(chosen, prompt(1)).cached_blocks == 0
    assert not set(prefix_blocks(prompt(1).tobytes(), "a")) & set(prefix_blocks(prompt(1).tobytes()))


@pytest.mark.requirement("R43")
def test_restarted_replica_owes_nothing_for_earlier_requests() -> None:
    """And has computed nothing yet."""
    chosen = router(1)
    old = route(chosen, prompt(1))
    chosen.leave("r0")
    assert chosen.route((), 1, 1) is None
    chosen.join("r0")
    new = route(chosen, prompt(1))
    assert new.cached_blocks == 0
    chosen.ended(old)
    assert chosen.load("r0") == new.cost
    chosen.ended(new)
    assert chosen.load("r0") == 0


@dataclass(frozen=True)
class Step:
    """Something that happens to a router."""

    kind: str
    which: int
    size: int
    session: int


STEPS = st.builds(
    Step,
    st.sampled_from(["route", "route", "route", "end", "leave", "join"]),
    st.integers(0, 3),
    st.integers(1, 3000),
    st.integers(0, 5),
)


@pytest.mark.requirement("R22", "R43")
@given(st.lists(STEPS, max_size=80))
def test_requests_go_to_live_replicas_within_the_bound_and_deterministically(
    steps: list[Step],
) -> None:
    """No request on a dead replica, none on one loaded beyond the bound, a session that may stay stays."""

    def play() -> list[str]:
        chosen = Router(max_sessions=4, max_blocks=32)
        live: dict[str, int] = {}
        flights: list[Route] = []
        sessions: dict[str, str] = {}
        lives: Counter[str] = Counter()
        begun: dict[int, int] = {}
        told = []
        for step in steps:
            name = NAMES[step.which]
            if step.kind == "join" and name not in live:
                chosen.join(name)
                live[name] = 0
                lives[name] += 1
            elif step.kind == "leave":
                chosen.leave(name)
                live.pop(name, None)
            elif step.kind == "end" and flights:
                done = flights.pop(step.size % len(flights))
                chosen.ended(done)
                if begun.pop(id(done)) == lives[done.member] and done.member in live:
                    live[done.member] -= done.cost
            elif step.kind == "route":
                session = f"s{step.session}" if step.session else ""
                tokens = prompt(step.which, step.session, length=1 + step.size // 8)
                got = chosen.route(prefix_blocks(tokens.tobytes()), tokens.size, step.size, session)
                if not live:
                    assert got is None
                    continue
                assert got is not None and got.member in live
                bound = SKEW * sum(live.values()) / len(live) + SLACK_TOKENS
                assert live[got.member] <= bound
                before = sessions.pop(session, None)
                if session and before in live and live[before] <= bound:
                    assert got.member == before
                if session:
                    sessions[session] = got.member
                    while len(sessions) > 4:
                        sessions.pop(next(iter(sessions)))
                live[got.member] += got.cost
                flights.append(got)
                begun[id(got)] = lives[got.member]
                told.append(got.member)
            assert {each: chosen.load(each) for each in chosen.members} == live
        return told

    assert play() == play()


@pytest.mark.requirement("R117")
def test_only_the_named_members_are_chosen_from() -> None:
    """A session that may not stay where it was moves to one of them, and the mean is theirs alone."""
    chosen = router()
    first = route(chosen, prompt(1), "s").member
    others = [name for name in NAMES[:3] if name != first]
    moved = chosen.route((), 1, 1, "s", others)
    assert moved is not None and moved.member in others
    back = chosen.route((), 1, 1, "s", [first])
    assert back is not None and back.member == first
    assert chosen.route((), 1, 1, "s", []) is None
    assert chosen.knows("s") and not chosen.knows("t")
