"""What each policy promises, whatever the order in which rollouts end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client.pacing.policies import (
    DropStale,
    FirstCome,
    InOrder,
    Now,
    Oversample,
    Paced,
    Policy,
    Window,
)


@dataclass(slots=True, eq=False)
class Group:
    number: int
    version: int
    size: int
    running: int
    ready: int | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of a group: its staleness, its rollouts that still ran, older groups that it overtook."""

    number: int
    staleness: int
    left_out: int
    older: int
    is_dropped: bool = False


@dataclass(slots=True)
class Played:
    taken: list[Taken]
    batches: list[int]
    most: int


@dataclass(frozen=True, slots=True)
class Case:
    """How a policy is played; `starved` is how often the youngest rollout ends, so that older ones go on for long."""

    seed: int
    batch: int
    count: int
    size: int
    room: int
    starved: float


CASES: Final = st.builds(
    Case,
    seed=st.integers(0, 1 << 32),
    batch=st.integers(1, 5),
    count=st.integers(1, 60),
    size=st.integers(1, 3),
    room=st.integers(0, 20),
    starved=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)


def play(policy: Policy, case: Case, leave_out: float) -> Played:
    """Runs all groups to their end. Which rollout ends next, and when a training does, is drawn."""
    random = Random(case.seed)
    groups: list[Group] = []
    gone: list[Group] = []
    played = Played([], [], 0)
    version, is_taken, number, ready, left_out = 0, False, 0, 0, 0
    while number < case.count or groups:
        now = Now(groups, version, is_taken, number == case.count, number * case.size, left_out)
        running = [group for group in [*groups, *gone] if group.running]
        busy = sum(group.running for group in running)
        if number < case.count and busy <= case.room and policy.admits(now):
            groups.append(Group(number, version, case.size, case.size))
            number += 1
            played.most = max(played.most, len(groups))
            continue
        choice = policy.choose(now) if not is_taken else None
        if choice is not None and (choice.train or choice.drop):
            order = [group.number for group in groups]
            for group in (*choice.train, *choice.drop):
                dropped = group in choice.drop
                age = version - group.version
                played.taken.append(Taken(group.number, age, group.running, order.index(group.number), dropped))
                left_out += 0 if dropped else group.running
                assert left_out <= number * case.size * leave_out
            names = {group.number for group in (*choice.train, *choice.drop)}
            gone += [group for group in groups if group.number in names and group not in choice.drop]
            groups = [group for group in groups if group.number not in names]
            if choice.train:
                played.batches.append(len(choice.train))
                is_taken = True
            continue
        if is_taken and (not running or random.random() < 0.3):
            version, is_taken = version + 1, False
            continue
        assert running, f"the trainer waits for nothing: {now}"
        group = running[-1] if random.random() < case.starved else random.choice(running)
        group.running -= 1
        if not group.running:
            group.ready, ready = ready, ready + 1
    return played


def checked(policy: Policy, case: Case, leave_out: float = 0.0) -> Played:
    """Plays it, and checks what holds for each policy."""
    played = play(policy, case, leave_out)
    assert sorted(taken.number for taken in played.taken) == list(range(case.count)), "each has one fate"
    assert all(count == policy.batch for count in played.batches[:-1])
    assert all(count <= policy.batch for count in played.batches)
    return played


@pytest.mark.requirement("R136")
@settings(max_examples=100)
@given(CASES, st.integers(0, 5), st.sampled_from([0.0, 0.1, 0.3]))
def test_paced_trains_every_group_in_time_and_leaves_out_no_more_than_its_share(
    case: Case, max_staleness: int, leave_out: float
) -> None:
    """And it never waits for what cannot come, nor has more groups than credits."""
    policy = Paced(batch=case.batch, max_staleness=max_staleness, leave_out=leave_out)
    played = checked(policy, case, leave_out)
    assert not any(taken.is_dropped for taken in played.taken)
    assert max(taken.staleness for taken in played.taken) <= max_staleness
    assert all(taken.left_out < case.size for taken in played.taken), "no group is left out whole"
    assert played.most <= (max_staleness + 1) * case.batch


@settings(max_examples=50)
@given(CASES, st.integers(0, 10), st.integers(0, 8))
def test_policies_that_only_order_train_everything(case: Case, more: int, wide: int) -> None:
    """In order, within the window, and no more groups than the bound."""
    batch, most = case.batch, case.batch + more
    first = checked(FirstCome(batch=batch, most=most), case)
    in_order = checked(InOrder(batch=batch, most=most), case)
    window = checked(Window(batch=batch, most=most, window=wide), case)
    assert [taken.number for taken in in_order.taken] == list(range(case.count))
    assert all(taken.older < max(wide, batch) for taken in window.taken)
    for played in (first, in_order, window):
        assert played.most <= most
        assert not any(taken.left_out or taken.is_dropped for taken in played.taken)


@settings(max_examples=50)
@given(CASES, st.integers(0, 4), st.integers(0, 4))
def test_policies_that_drop_train_nothing_old(case: Case, max_staleness: int, extra: int) -> None:
    """What they drop is what a trainer never sees: the slow ones."""
    drop = checked(DropStale(batch=case.batch, most=4 * case.batch, max_staleness=max_staleness), case)
    over = checked(Oversample(batch=case.batch, extra=extra), case)
    assert all((taken.staleness > max_staleness) == taken.is_dropped for taken in drop.taken)
    assert all(taken.staleness == 0 for taken in over.taken if not taken.is_dropped)


def test_paced_waits_only_for_a_group_that_would_be_too_old() -> None:
    """A batch goes without a slow group while a later batch can still have it in time."""
    slow, quick = Group(0, 0, 2, 2), Group(1, 0, 2, 0, ready=0)
    policy = Paced(batch=1, max_staleness=1, leave_out=0.0)
    assert policy.choose(Now([slow, quick], 0)).train == (quick,)
    assert policy.choose(Now([slow, quick], 1)).train == ()
    slow.running, slow.ready = 0, 1
    assert policy.choose(Now([slow, quick], 1)).train == (slow,)


def test_a_trainer_that_makes_more_versions_than_batches_gets_the_oldest_first() -> None:
    """Groups that are too old already are not waited for again."""
    groups = [Group(number, 0, 1, 0, ready=2 - number) for number in range(3)]
    assert Paced(batch=1, max_staleness=1).choose(Now(groups, 9)).train == (groups[0],)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Paced(batch=0, max_staleness=1),
        lambda: Paced(batch=1, max_staleness=-1),
        lambda: Paced(batch=1, max_staleness=1, leave_out=1.0),
        lambda: FirstCome(batch=4, most=3),
    ],
)
def test_a_policy_that_could_never_give_a_batch_is_refused(make: Callable[[], Policy]) -> None:
    """When it is made, not when a trainer waits."""
    with pytest.raises(ValueError, match=r"at least|below"):
        make()
