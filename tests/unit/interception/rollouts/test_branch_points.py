"""Branches at the gate: the parent's answers as context, the branch point, and what follows as the branch's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.services.inner_gate import inner_gate
from tests.support.waiting import eventually
from tests.unit.interception.rollouts.test_replay import answered, findings, recorded, said

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_interception.domain.budgets import RunBudgets
from penstock_interception.domain.calls import BranchPoint, CallState, PolicyBounds
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.rollouts.trajectory import CaptureLevel, Grade, capture
from penstock_interception.testing import OpenGate

TURNS = (["task"], ["task", "A", "one"], ["task", "A", "one", "B", "two"])
"""What an agent asks that is answered A, B and C."""


def given_answer(text: str) -> completion_pb2.Completion:
    return completion_pb2.Completion(
        message=chat_pb2.Message(role=chat_pb2.ROLE_ASSISTANT, parts=[chat_pb2.Part(text=chat_pb2.Text(text=text))]),
        finish_reason=chat_pb2.FINISH_REASON_STOP,
    )


async def branch(
    gate: OpenGate,
    parent: Rollout,
    calls: Sequence[trajectory_pb2.Call],
    at: int,
    *,
    answer: str | None = None,
    exact: bool = True,
    train_prefix: bool = False,
    name: str = "",
    **changed: Any,
) -> Rollout:
    """A branch of `parent` at one of its calls, loaded as the driver does it."""
    point = BranchPoint(parent.id, calls[at].call_id, at, answer is not None, train_prefix)
    new = await gate.open(
        parent.spec, rollout_id=name or f"{parent.id}-b", request_id=f"b-{parent.id}", branched_from=point, **changed
    )
    marked = trajectory_pb2.Call()
    marked.CopyFrom(calls[at])
    marked.ClearField("completion")
    marked.ClearField("replayed_from")
    marked.ClearField("injected")
    marked.branch_point = True
    if answer is not None:
        marked.completion.CopyFrom(given_answer(answer))
        marked.injected, marked.given, marked.answerer = True, True, trajectory_pb2.ANSWERER_TRAINER
    before = [trajectory_pb2.Call.FromString(call.SerializeToString()) for call in calls[:at]]
    for call in before:
        call.ClearField("branch_point")
    await gate.interceptor.replays.load(new, [*before, marked], (parent.id, 1), exact=exact)
    return new


async def played(gate: OpenGate, **changed: Any) -> tuple[Rollout, list[trajectory_pb2.Call]]:
    parent = await gate.open(**changed)
    for turn, text in zip(TURNS, "ABC", strict=True):
        await answered(gate, parent, turn, text, version=3)
    return parent, await recorded(gate, parent)


async def samples_of(gate: OpenGate, rollout: Rollout) -> Any:
    return capture(rollout, await gate.interceptor.conversations.of(rollout)).samples


async def replay(gate: OpenGate, rollout: Rollout, turn: Sequence[str]) -> Call:
    """A call that needs no trainer."""
    call = await gate.ask(rollout, *turn)
    await call.ended
    assert call.state is CallState.DELIVERED, call.end_reason
    return call


@pytest.mark.requirement("R129", "R130")
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_before_the_point_a_branch_equals_its_parent(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ids, logprobs, versions and mask: those of the parent, up to any call, with any answers."""
    texts = data.draw(st.lists(st.text("abc xyz", min_size=1, max_size=8), min_size=2, max_size=5))
    at = data.draw(st.integers(0, len(texts) - 1))
    train = data.draw(st.booleans())
    async with inner_gate(tmp_path_factory.mktemp("gate")) as gate:
        parent, turn = await gate.open(), ["task"]
        turns: list[list[str]] = []
        for number, text in enumerate(texts):
            turns.append(list(turn))
            call = await answered(gate, parent, turn, text, version=number)
            turn = [*turn, said(call), f"result {number}"]
        calls = await recorded(gate, parent)
        (before,) = await samples_of(gate, parent)
        new = await branch(gate, parent, calls, at, train_prefix=train)
        for one in turns[:at]:
            await replay(gate, new, one)
        await answered(gate, new, turns[at], "another way", version=99)
        (after,) = await samples_of(gate, new)
    shared = before.turns[at].start
    assert np.array_equal(after.input_ids[:shared], before.input_ids[:shared])
    assert [(v.policy_version, v.start, v.end) for v in after.versions if v.end <= shared] == [
        (v.policy_version, v.start, v.end) for v in before.versions if v.end <= shared
    ]
    if train:
        assert np.array_equal(after.loss_mask[:shared], before.loss_mask[:shared])
        assert np.array_equal(after.logprobs[:shared], before.logprobs[:shared])
    else:
        assert not after.loss_mask[:shared].any() and not after.logprobs[:shared].any()
    assert [turn.untrained for turn in after.turns] == ["" if train else "PARENT"] * at + [""]
    assert after.loss_mask[after.turns[at].start :].all()


async def test_the_point_is_sampled_and_what_follows_is_its_own(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        parent, calls = await played(gate)
        new = await branch(gate, parent, calls, 1)
        assert said(await replay(gate, new, TURNS[0])) == "A"
        own = await answered(gate, new, TURNS[1], "X")
        assert own.completion is not None and own.completion.origin is None
        await answered(gate, new, ["task", "A", "one", "X", "three"], "Y")
        mine = await recorded(gate, new)
        assert [call.branch_point for call in mine] == [False, True, False]
        told = await findings(gate, new)
        assert "BRANCHED" in told and "REPLAY_DIVERGED" not in told


async def test_a_given_answer_has_no_tokens_and_costs_its_run_nothing(tmp_path: Path) -> None:
    """A policy bound that no old answer keeps does not apply to what is not trained."""
    budgets = RunBudgets(max_calls=4)
    async with inner_gate(tmp_path) as gate:
        parent, calls = await played(gate, run_id="run", run_budgets=budgets)
        new = await branch(gate, parent, calls, 1, answer="given", policy=PolicyBounds(min_version=50))
        await replay(gate, new, TURNS[0])
        call = await replay(gate, new, TURNS[1])
        assert said(call) == "given" and call.injected
        assert call.completion is not None and call.completion.tokens is None
        last = await answered(gate, new, ["task", "A", "one", "given", "three"], "Y", version=60)
        (sample,) = await samples_of(gate, new)
        assert [(turn.call_id, turn.untrained) for turn in sample.turns] == [
            *((new.calls[0].id, "PARENT"), (last.id, ""))
        ]
        assert int(sample.loss_mask.sum()) == last.completion.count  # type: ignore[union-attr]
        assert not [call for call in await recorded(gate, new) if call.injected and call.HasField("replayed_from")]


@pytest.mark.requirement("R129")
@pytest.mark.parametrize("train", [False, True])
async def test_a_given_answer_stays_one_in_branches_of_the_branch(tmp_path: Path, train: bool) -> None:
    """No policy sampled it: it lowers no grade, no bound is for it, and none trains it."""
    bound = PolicyBounds(min_version=3)
    turns = [
        *TURNS[:2],
        ["task", "A", "one", "given", "three"],
        ["task", "A", "one", "given", "three", "Y", "four"],
    ]
    async with inner_gate(tmp_path) as gate:
        one, calls = await played(gate)
        for at, known in ((1, 2), (2, 2), (3, 3)):
            answer = "given" if at == 1 else None
            one = await branch(gate, one, calls, at, answer=answer, train_prefix=train, policy=bound)
            for turn in turns[:known]:
                await replay(gate, one, turn)
            for turn in turns[known:]:
                await answered(gate, one, turn, "Y", version=60)
            calls = await recorded(gate, one)
            assert [call.given for call in calls] == [False, True, False, False]
            assert calls[1].injected and not calls[1].HasField("replayed_from")
            await gate.interceptor.rollouts.close(one.id, "END")
            seen = capture(one, await gate.interceptor.conversations.of(one))
            assert (seen.level, seen.grade) == (CaptureLevel.TOKENS_AND_LOGPROBS, Grade.EXACT), seen.findings
            (sample,) = seen.samples
            index = {call.id: call.index for call in one.calls}
            assert [(index[turn.call_id], turn.untrained) for turn in sample.turns] == [
                (number, "PARENT" if number < known and not train else "") for number in (0, 2, 3)
            ]


@pytest.mark.requirement("R129", "R130")
@pytest.mark.parametrize(
    "generations", [30, pytest.param(1000, marks=pytest.mark.on_demand("thirty generations show it as well"))]
)
async def test_branches_of_branches_grow_with_no_generation(tmp_path: Path, generations: int) -> None:
    """What is recorded of a shared call is as large in the last one, and names the rollout that sampled it."""
    async with inner_gate(tmp_path) as gate:
        first, calls = await played(gate)
        one, sizes = first, list[int]()
        for number in range(generations):
            before, one = one, await branch(gate, one, calls, 1, name=f"b{number:04}")
            await replay(gate, one, TURNS[0])
            await answered(gate, one, TURNS[1], "B", version=3)
            calls = await recorded(gate, one)
            assert len(calls) == 2
            origin = calls[0].replayed_from
            assert (origin.rollout_id, origin.attempt, origin.call_id) == (first.id, 1, first.calls[0].id)
            sizes.append(calls[0].ByteSize())
            if before is not first:
                await gate.interceptor.rollouts.delete(before.id)
    assert max(sizes) - min(sizes) < 32, "but for times, whose lengths differ"


async def test_a_call_that_broke_off_at_the_point_leaves_it_to_the_next(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        parent, calls = await played(gate)
        new = await branch(gate, parent, calls, 1)
        await replay(gate, new, TURNS[0])
        session = gate.join()
        broken = await gate.ask(new, *TURNS[1])
        gate.interceptor.gate.cancel(broken, "AGENT_GONE")
        await broken.ended
        gate.interceptor.leave(session)
        await answered(gate, new, TURNS[1], "X")
        assert [call.branch_point for call in await recorded(gate, new)] == [False, False, True]


@pytest.mark.parametrize("answer", [None, "given"])
async def test_a_gate_that_is_restarted_knows_the_point(tmp_path: Path, answer: str | None) -> None:
    async with inner_gate(tmp_path) as gate:
        parent, calls = await played(gate)
        new = await branch(gate, parent, calls, 1, answer=answer)
        await replay(gate, new, TURNS[0])
        if answer is None:
            await answered(gate, new, TURNS[1], "X")
        else:
            await replay(gate, new, TURNS[1])
    async with inner_gate(tmp_path) as gate:
        again = gate.interceptor.registry.rollout(new.id)
        await gate.interceptor.conversations.of(again)
        assert [call.branch_point for call in await recorded(gate, again)] == [False, True]
        assert (await recorded(gate, again))[1].injected is (answer is not None)
        # The same once more is the branch's own.
        await answered(gate, again, TURNS[1], "Z")
        assert [call.branch_point for call in await recorded(gate, again)] == [False, True, False]


async def test_a_branch_that_never_comes_to_its_point_says_so(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        parent, calls = await played(gate)
        new = await branch(gate, parent, calls, 2)
        call = await gate.ask(new, "another task")
        await call.ended
        assert call.state is CallState.FAILED and call.end_reason == "REPLAY_DIVERGED"
        await eventually(lambda: new.recording is not None and len(new.recording.divergences) > 0, "it is noted")
        await gate.interceptor.rollouts.close(new.id, "END")
        told = await findings(gate, new)
        assert {"BRANCH_MISSED", "REPLAY_DIVERGED"} <= set(told)
