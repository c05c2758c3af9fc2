"""Replay at the gate: answers of an earlier attempt answer the same prompts again, token for token."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.services.inner_gate import completion, inner_gate
from tests.support.waiting import eventually

from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from penstock_codec.chat import Sampling
from penstock_interception.domain import recordings
from penstock_interception.domain.budgets import Budgets, RunBudgets
from penstock_interception.domain.calls import Answerer, CallState, PolicyBounds
from penstock_interception.domain.completions import Failure
from penstock_interception.domain.host_tools import CallKey, HostTool
from penstock_interception.domain.results import Accepted
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.ingress import errors
from penstock_interception.interceptor import INLINE_BYTES
from penstock_interception.rollouts.trajectory import capture
from penstock_interception.rpc import trajectory
from penstock_interception.testing import OpenGate

Turn = Sequence[str]
"""A conversation that an agent sends: user and assistant in turn."""


async def answered(gate: OpenGate, rollout: Rollout, turn: Turn, text: str, **options: Any) -> Call:
    """An agent's call, and a trainer's answer to it."""
    session = gate.join()
    call = await gate.ask(rollout, *turn)
    await eventually(lambda: call.state is CallState.LEASED, "a recorded answer, if any, was refused")
    verdict = await gate.interceptor.deliver(call.id, "", completion(text, **options), session=session)
    assert isinstance(verdict, Accepted), verdict
    await call.ended
    gate.interceptor.leave(session)
    return call


async def recorded(gate: OpenGate, rollout: Rollout) -> list[trajectory_pb2.Call]:
    """The calls of a rollout, as GetCapture returns them."""
    conversation = await gate.interceptor.conversations.of(rollout)
    whole = trajectory_pb2.Trajectory()
    async for part in trajectory.fragments(
        capture(rollout, conversation, include_top=True), conversation, None, include_top=True
    ):
        whole.MergeFrom(part)
    return list(whole.calls)


async def findings(gate: OpenGate, rollout: Rollout) -> dict[str, str]:
    conversation = await gate.interceptor.conversations.of(rollout)
    return {one.reason: one.message for one in capture(rollout, conversation).findings}


async def again(gate: OpenGate, rollout: Rollout, *, exact: bool = False, **changed: Any) -> Rollout:
    """The next attempt, with the recording of this one, which is deleted."""
    calls = await recorded(gate, rollout)
    await gate.interceptor.rollouts.delete(rollout.id)
    attempt = rollout.spec.attempt
    new = await gate.open(rollout.spec, request_id=f"open-{attempt + 1}", attempt=attempt + 1, **changed)
    await gate.interceptor.replays.load(new, calls, (rollout.id, attempt), exact=exact)
    return new


def said(call: Call) -> str:
    assert call.message is not None
    return call.message.text


@pytest.mark.requirement("R128", "R130")
async def test_the_same_prompts_get_the_same_tokens_without_a_trainer(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        one = await answered(gate, first, ["list the files"], "Run", version=3)
        two = await answered(gate, first, ["list the files", "Run", "and now"], "More", version=4)
        new = await again(gate, first)
        replayed = []
        for turn, before in ((["list the files"], one), (["list the files", "Run", "and now"], two)):
            call = await gate.ask(new, *turn)
            await call.ended
            assert call.state is CallState.DELIVERED and call.answerer is Answerer.TRAINER
            assert call.completion is not None and before.completion is not None
            assert call.completion.tokens is not None and before.completion.tokens is not None
            assert np.array_equal(call.completion.tokens.ids, before.completion.tokens.ids)
            assert call.completion.tokens.logprobs is not None and before.completion.tokens.logprobs is not None
            assert np.array_equal(call.completion.tokens.logprobs, before.completion.tokens.logprobs)
            assert call.completion.tokens.versions == before.completion.tokens.versions
            assert call.completion.origin == recordings.Origin("r1", 1, before.id, before.id)
            assert said(call) == said(before) and not call.injected
            replayed.append(call)
        live = await answered(gate, new, ["list the files", "Run", "and now", "More", "go on"], "Done", version=9)
        assert live.completion is not None and live.completion.origin is None
        given = await recorded(gate, new)
        assert [call.replayed_from.call_id for call in given] == [one.id, two.id, ""]
        assert (await findings(gate, new))["REPLAYED"] == "Replayed, and not sampled again: 2 of 2 recorded calls."
        assert "REPLAY_DIVERGED" not in await findings(gate, new)


async def test_samples_of_a_replay_equal_those_of_the_original(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        await answered(gate, first, ["list the files"], "Run", version=3)
        await answered(gate, first, ["list the files", "Run", "and now"], "More", version=4)
        before = gate.interceptor.conversations["r1"].graph.samples()
        new = await again(gate, first)
        for turn in (["list the files"], ["list the files", "Run", "and now"]):
            await (await gate.ask(new, *turn)).ended
        after = gate.interceptor.conversations["r1"].graph.samples()
    assert len(before) == len(after) == 1
    for name in ("input_ids", "loss_mask", "logprobs"):
        assert np.array_equal(getattr(before[0], name), getattr(after[0], name))
    assert (before[0].versions, before[0].logprobs_mode) == (after[0].versions, after[0].logprobs_mode)


@pytest.mark.requirement("R63", "R128")
@pytest.mark.parametrize("thinking", [False, True])
async def test_a_replay_compares_prompts_with_the_rollouts_thinking(tmp_path: Path, thinking: bool) -> None:
    """The same wish makes the same prompt; another one makes another, which the recording does not answer."""
    async with inner_gate(tmp_path) as gate:
        first = await gate.open(sampling_override=Sampling(thinking=False))
        await answered(gate, first, ["list the files"], "Run")
        new = await again(gate, first, sampling_override=Sampling(thinking=thinking))
        gate.join()
        call = await gate.ask(new, "list the files")
        await eventually(lambda: call.state in (CallState.DELIVERED, CallState.LEASED), "it was replayed, or not")
        assert (call.state is CallState.DELIVERED) is not thinking


async def test_branches_may_ask_in_another_order(tmp_path: Path) -> None:
    turns = {"A": ["task a"], "B": ["task b"], "C": ["task a", "A", "more"]}
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        for text, turn in turns.items():
            await answered(gate, first, turn, text)
        new = await again(gate, first)
        for text in ("B", "A", "C"):
            call = await gate.ask(new, *turns[text])
            await call.ended
            assert said(call) == text


async def test_equal_prompts_get_the_recorded_answers_in_order(tmp_path: Path) -> None:
    """An agent that asks the same again was given another answer; and so it is again."""
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        for text in ("A", "B"):
            await answered(gate, first, ["task"], text)
        new = await again(gate, first)
        texts = []
        for _ in range(2):
            call = await gate.ask(new, "task")
            await call.ended
            texts.append(said(call))
        assert texts == ["A", "B"]
        third = await answered(gate, new, ["task"], "C")
        assert third.completion is not None and third.completion.origin is None


async def test_a_prompt_that_differs_is_sampled_and_its_first_token_named(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        one = await answered(gate, first, ["list the files"], "Run")
        two = await answered(gate, first, ["list the files", "Run", "it is monday"], "More")
        old = gate.interceptor.conversations["r1"].graph.path(two.id)[: two.prompt.count if two.prompt else 0]
        new = await again(gate, first)
        await (await gate.ask(new, "list the files")).ended
        call = await answered(gate, new, ["list the files", "Run", "it is friday"], "Else")
        assert call.completion is not None and call.completion.origin is None
        recording = new.recording
        assert recording is not None
        await eventually(lambda: bool(recording.divergences), "the divergence is noted")
        (parted,) = recording.divergences
        now = gate.interceptor.conversations["r1"].graph.path(call.id)
        assert (parted.call_id, parted.recorded_call_id) == (call.id, two.id)
        assert np.array_equal(old[: parted.index], now[: parted.index]) and old[parted.index] != now[parted.index]
        assert "monday" in parted.recorded and "friday" in parted.text
        text = (await findings(gate, new))["REPLAY_DIVERGED"]
        assert f"token {parted.index} " in text and one.id not in text
        await gate.interceptor.rollouts.close("r1", "DONE")
        began = gate.now[0]
    async with inner_gate(tmp_path, began=began) as gate:
        assert (await findings(gate, gate.interceptor.registry.rollout("r1")))["REPLAY_DIVERGED"] == text


async def test_an_exact_replay_fails_where_it_diverges(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        await answered(gate, first, ["list the files"], "Run")
        new = await again(gate, first, exact=True)
        call = await gate.ask(new, "list the dirs")
        await call.ended
        assert call.failure is not None
        assert (call.state, call.failure.reason, call.failure.retriable) == (
            CallState.FAILED,
            "REPLAY_DIVERGED",
            False,
        )
        same = await gate.ask(new, "list the files")
        await same.ended
        assert said(same) == "Run"
        beyond = await answered(gate, new, ["list the files", "Run", "on"], "More")
        assert beyond.state is CallState.DELIVERED, "nothing was recorded there"


@pytest.mark.parametrize("kind", ["minimum", "staleness"])
async def test_an_answer_that_is_too_old_by_now_is_sampled_again(tmp_path: Path, kind: str) -> None:
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        await answered(gate, first, ["list the files"], "Run", version=3)
        bounds = PolicyBounds(min_version=4) if kind == "minimum" else PolicyBounds(max_staleness=1)
        new = await again(gate, first, policy=bounds)
        if kind == "staleness":
            session = gate.join()
            gate.interceptor.sessions.announce(session, 6)
            gate.interceptor.leave(session)
        call = await answered(gate, new, ["list the files"], "New", version=6)
        assert said(call) == "New" and call.completion is not None and call.completion.origin is None


async def test_a_replayed_rollout_is_replayed_again_from_its_first_origin(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        one = await answered(gate, first, ["list the files"], "Run")
        second = await again(gate, first)
        call = await gate.ask(second, "list the files")
        await call.ended
        third = await again(gate, second)
        last = await gate.ask(third, "list the files")
        await last.ended
        assert last.completion is not None
        assert last.completion.origin == recordings.Origin("r1", 1, one.id, call.id)


async def test_a_run_pays_once_for_what_is_replayed(tmp_path: Path) -> None:
    run = RunBudgets(max_calls=3)
    async with inner_gate(tmp_path) as gate:
        first = await gate.open(run_id="run", run_budgets=run)
        await answered(gate, first, ["list the files"], "Run")
        await answered(gate, first, ["list the files", "Run", "on"], "More")
        second = await again(gate, first)
        for turn in (["list the files"], ["list the files", "Run", "on"]):
            await (await gate.ask(second, *turn)).ended
        assert (second.totals.calls, second.totals.replayed.calls) == (2, 2)
        await answered(gate, second, ["list the files", "Run", "on", "More", "on"], "Last")
        with pytest.raises(ResourceExhausted, match=r"run's budget max_calls"):
            await gate.ask(second, "another")
        began = gate.now[0]
    async with inner_gate(tmp_path, began=began) as gate:
        with pytest.raises(ResourceExhausted, match=r"run's budget max_calls"):
            await gate.ask(await gate.open(request_id="q3", rollout_id="r3", run_id="run"), "another")


async def test_a_rollout_pays_for_its_replayed_calls(tmp_path: Path) -> None:
    """Its budgets are those of the whole rollout, whichever attempt sampled."""
    async with inner_gate(tmp_path) as gate:
        first = await gate.open(budgets=Budgets(max_calls=1))
        await answered(gate, first, ["list the files"], "Run")
        second = await again(gate, first)
        await (await gate.ask(second, "list the files")).ended
        with pytest.raises(ResourceExhausted, match=r"rollout's budget max_calls"):
            await gate.ask(second, "another")


@pytest.mark.parametrize("replayed", [0, 1, 2])
async def test_a_gate_that_is_restarted_goes_on_with_the_replay(tmp_path: Path, replayed: int) -> None:
    turns = (["list the files"], ["list the files", "Run", "on"], ["list the files", "Run", "on", "More", "on"])
    texts = ("Run", "More", "Last")
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        for turn, text in zip(turns, texts, strict=True):
            await answered(gate, first, turn, text)
        new = await again(gate, first)
        for turn in turns[:replayed]:
            await (await gate.ask(new, *turn)).ended
        began = gate.now[0]
    async with inner_gate(tmp_path, began=began) as gate:
        gate.asked = replayed
        new = gate.interceptor.registry.rollout("r1")
        assert new.recording is not None and (new.recording.count, new.recording.used) == (3, replayed)
        for turn, text in list(zip(turns, texts, strict=True))[replayed:]:
            call = await gate.ask(new, *turn)
            await call.ended
            assert said(call) == text
        assert new.totals.replayed.calls == 3


async def test_a_recording_is_loaded_once_and_before_the_first_call(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        await answered(gate, first, ["list the files"], "Run")
        await answered(gate, first, ["list the files", "Run", "on"], "More")
        calls = await recorded(gate, first)
        await gate.interceptor.rollouts.delete("r1")
        new = await gate.open(request_id="open-2")
        load = gate.interceptor.replays.load
        assert await load(new, calls[:1], ("r1", 1), exact=False) == 1
        assert await load(new, calls, ("r1", 1), exact=False) == 2, "a parent may have come before"
        assert await load(new, calls, ("r1", 1), exact=False) == 2
        with pytest.raises(InvalidArgument):
            await load(new, calls, ("r1", 1), exact=True)
        await (await gate.ask(new, "list the files")).ended
        assert await load(new, calls, ("r1", 1), exact=False) == 2, "a repeat adds nothing"
        other = await gate.open(request_id="open-3", rollout_id="r3")
        await answered(gate, other, ["list the files"], "Run")
        with pytest.raises(FailedPrecondition) as late:
            await load(other, calls, ("r1", 1), exact=False)
        assert late.value.reason == "RECORDING_LATE"
        await gate.interceptor.rollouts.close("r3", "DONE")
        with pytest.raises(FailedPrecondition) as closed:
            await load(other, calls, ("r1", 1), exact=False)
        assert closed.value.reason == "ROLLOUT_CLOSED"


async def test_a_recording_beyond_its_bounds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        await answered(gate, first, ["list the files"], "Run")
        calls = await recorded(gate, first)
        new = await gate.open(request_id="q2", rollout_id="r2")
        monkeypatch.setattr(gate.interceptor.replays, "_max_bytes", 10)
        with pytest.raises(ResourceExhausted, match="10 bytes"):
            await gate.interceptor.replays.load(new, calls, ("r1", 1), exact=False)
        monkeypatch.setattr("penstock_interception.rollouts.replay.MAX_RECORDED_CALLS", 0)
        with pytest.raises(ResourceExhausted, match="0 calls"):
            await gate.interceptor.replays.load(new, calls, ("r1", 1), exact=False)
        assert new.recording is None


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        ({"call_id": ""}, "calls[1].call_id"),
        ({"parent_call_id": "none"}, "calls[1].parent_call_id"),
        ({"prompt_shared_count": 9999}, "calls[1].prompt_shared_count"),
        ({"prompt_suffix_token_ids": b"abc"}, "calls[1].prompt_suffix_token_ids"),
    ],
)
async def test_a_damaged_recording_is_refused_by_field(tmp_path: Path, damage: dict[str, Any], field: str) -> None:
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        await answered(gate, first, ["list the files"], "Run")
        await answered(gate, first, ["list the files", "Run", "on"], "More")
        calls = await recorded(gate, first)
        for name, value in damage.items():
            setattr(calls[1], name, value)
        new = await gate.open(request_id="q2", rollout_id="r2")
        with pytest.raises(InvalidArgument) as refused:
            await gate.interceptor.replays.load(new, calls, ("r1", 1), exact=False)
        assert [one.field for one in refused.value.violations] == [field]
        assert new.recording is None


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(st.sampled_from(["a", "bb", "c"]), min_size=1, max_size=4),
    others=st.lists(st.sampled_from(["a", "bb", "c"]), min_size=1, max_size=4),
)
async def test_a_replay_follows_the_recording_to_the_first_difference(
    words: list[str], others: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any two agents: what both say in the same order is replayed, the rest is sampled."""

    def turns(said: Sequence[str]) -> list[list[str]]:
        return [["go", *(item for word in said[:count] for item in (f"re {word}", word))] for count in range(len(said))]

    async with inner_gate(tmp_path_factory.mktemp("gate")) as gate:
        first = await gate.open()
        for turn, word in zip(turns(words), words, strict=True):
            await answered(gate, first, turn, f"re {word}")
        new = await again(gate, first)
        # The prompt of turn n has the words before it.
        same = next((n for n in range(min(len(words), len(others)) + 1) if words[:n] != others[:n]), None)
        most = min(len(words), len(others)) if same is None else same
        for number, turn in enumerate(turns(others)):
            session = gate.join()
            call = await gate.ask(new, *turn)
            if call.state is CallState.LEASED:
                answer = completion(f"re {others[number]}")
                assert isinstance(await gate.interceptor.deliver(call.id, "", answer, session=session), Accepted)
            await call.ended
            gate.interceptor.leave(session)
            origin = call.completion.origin if call.completion is not None else None
            assert (origin is not None) == (number < most), (words, others, number)
        assert new.recording is not None and new.recording.used == min(most, len(others))


async def test_a_write_that_fails_leaves_no_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        await answered(gate, first, ["list the files"], "Run")
        calls = await recorded(gate, first)
        new = await gate.open(request_id="q2", rollout_id="r2")
        failing: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        failing.set_exception(sqlite3.OperationalError("disk I/O error"))
        with monkeypatch.context() as patched:
            patched.setattr(gate.store.recordings, "put_calls", lambda *_: failing)
            with pytest.raises(Unavailable) as refused:
                await gate.interceptor.replays.load(new, calls, ("r1", 1), exact=False)
        assert refused.value.reason == "JOURNAL_FAILED" and new.recording is None
        assert await gate.interceptor.replays.load(new, calls, ("r1", 1), exact=False) == 1


async def test_a_load_whose_caller_gives_up_can_be_repeated(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        await answered(gate, first, ["list the files"], "Run")
        calls = await recorded(gate, first)
        new = await gate.open(request_id="q2", rollout_id="r2")
        load = asyncio.create_task(gate.interceptor.replays.load(new, calls, ("r1", 1), exact=False))
        begun = asyncio.Event()
        put = gate.store.recordings.put_calls

        def put_calls(*given: Any) -> asyncio.Future[list[int]]:
            begun.set()
            return put(*given)

        gate.store.recordings.put_calls = put_calls  # type: ignore[method-assign,assignment]
        await begun.wait()
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert await gate.interceptor.replays.load(new, calls, ("r1", 1), exact=False) == 1
        call = await gate.ask(new, "list the files")
        await call.ended
        assert said(call) == "Run"


async def test_replays_at_once_do_not_use_up_their_runs_budget(tmp_path: Path) -> None:
    """The run has paid for them: even one that the lost attempt used up exactly lets them be replayed."""
    async with inner_gate(tmp_path) as gate:
        first = await gate.open(run_id="run", run_budgets=RunBudgets(max_calls=2))
        for text in ("A", "B"):
            await answered(gate, first, [f"task {text}"], text)
        new = await again(gate, first)
        both = [await gate.ask(new, f"task {text}") for text in ("A", "B")]
        for call, text in zip(both, ("A", "B"), strict=True):
            await call.ended
            assert said(call) == text
        with pytest.raises(ResourceExhausted, match=r"run's budget max_calls"):
            await gate.ask(new, "another")


@pytest.mark.requirement("R88")
async def test_a_call_that_no_recording_answers_needs_a_budget(tmp_path: Path) -> None:
    """Its agent reads what it reads of any budget that is used up."""
    async with inner_gate(tmp_path) as gate:
        first = await gate.open(run_id="run", run_budgets=RunBudgets(max_calls=1))
        await answered(gate, first, ["task"], "A")
        new = await again(gate, first)
        call = await gate.ask(new, "another")
        await call.ended
        assert call.failure is not None and call.failure.reason == "BUDGET_EXHAUSTED"
        with pytest.raises(ResourceExhausted) as refused:
            await gate.open(request_id="q3", rollout_id="r3", run_id="run")
        problem = errors.of_ended(call)
        assert problem is not None and problem == errors.of_refusal(refused.value)
        assert (problem.status, problem.code, problem.retry) == (403, "budget_exhausted", False)


@pytest.mark.requirement("R8", "R88")
async def test_a_trainers_reason_is_no_budget_of_the_gate(tmp_path: Path) -> None:
    """A trainer that fails a call may have a reason of any name."""
    async with inner_gate(tmp_path) as gate:
        rollout, session = await gate.open(), gate.join()
        call = await gate.ask(rollout, "task")
        failure = Failure("BUDGET_EXHAUSTED", retriable=False)
        verdict = await gate.interceptor.deliver(call.id, call.lease_id, failure, session=session)
        assert isinstance(verdict, Accepted), verdict
        await call.ended
        problem = errors.of_ended(call)
        assert problem is not None and problem.code == "model_refused"


async def test_a_call_that_ends_before_its_prompt_is_made_costs_its_run_one_call(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        first = await gate.open(run_id="run", run_budgets=RunBudgets(max_calls=3))
        await answered(gate, first, ["task"], "A")
        new = await again(gate, first)
        gone, other = [await gate.ask(new, f"{text * INLINE_BYTES} in a thread") for text in "xy"]
        gate.interceptor.gate.cancel(gone, "AGENT_GONE")
        await eventually(lambda: other.plan is not None or other.state.terminal, "the last prompt is made")
        assert (gone.plan, other.failure, other.state) == (None, None, CallState.QUEUED)
        with pytest.raises(ResourceExhausted, match=r"run's budget max_calls"):
            await gate.ask(await gate.open(request_id="q3", rollout_id="r3", run_id="run"), "another")


async def test_a_call_that_ends_before_its_recorded_answer_gives_it_back(tmp_path: Path) -> None:
    """The agent asks again, and an exact replay goes on."""
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        await answered(gate, first, ["list the files"], "Run")
        new = await again(gate, first, exact=True)
        broken = await gate.ask(new, "list the files")
        gate.interceptor.gate.cancel(broken, "AGENT_GONE")
        await broken.ended
        await eventually(lambda: new.recording is not None and new.recording.has_left, "it is given back")
        call = await gate.ask(new, "list the files")
        await call.ended
        assert said(call) == "Run"


async def test_an_answer_that_is_longer_than_a_request_allows_is_not_replayed(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        await answered(gate, first, ["list the files"], "a long answer")
        new = await again(gate, first)
        session = gate.join()
        short = await gate.ask(new, "list the files", sampling=Sampling(max_tokens=2))
        await eventually(lambda: short.state is CallState.LEASED, "it is sampled")
        gate.interceptor.leave(session)
        call = await gate.ask(new, "list the files")
        await call.ended
        assert said(call) == "a long answer"


async def test_what_a_trainer_gave_beyond_the_limit_is_replayed_to_the_same_request(tmp_path: Path) -> None:
    """A gate takes what a trainer gives; a repetition of the same request gets the same, and a smaller one does not."""
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        session = gate.join()
        asked = await gate.ask(first, "list the files", sampling=Sampling(max_tokens=4))
        await eventually(lambda: asked.state is CallState.LEASED, "it is sampled")
        await gate.interceptor.deliver(asked.id, "", completion("a long answer"), session=session)
        await asked.ended
        new = await again(gate, first)
        short = await gate.ask(new, "list the files", sampling=Sampling(max_tokens=3))
        while short.state is not CallState.LEASED:  # noqa: ASYNC110 - no event says so within that turn
            await asyncio.sleep(0)  # the next call comes in the same turn of the loop
        gate.interceptor.leave(session)
        call = await gate.ask(new, "list the files", sampling=Sampling(max_tokens=4))
        await call.ended
        assert said(call) == "a long answer"


async def test_a_closed_rollout_keeps_no_recorded_calls(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        await answered(gate, first, ["list the files"], "Run")
        new = await again(gate, first)
        await (await gate.ask(new, "list the files")).ended
        await gate.interceptor.rollouts.close("r1", "DONE")
        await gate.store.settled()
        assert await gate.store._journal.query("SELECT * FROM recorded_calls") == []
        assert (await findings(gate, new))["REPLAYED"] == "Replayed, and not sampled again: 1 of 1 recorded call."


def tool_call(call_id: str, word: str, result: str, **changed: Any) -> trajectory_pb2.HostToolCall:
    """A host tool call with its result, as GetCapture returns it."""
    arguments, text = json.dumps({"word": word, "of": 1}), json.dumps({"text": result})
    values: dict[str, Any] = {"tool_call_id": call_id, "name": "work", "arguments_json": arguments, "result_json": text}
    return trajectory_pb2.HostToolCall(**(values | changed))


async def result_of(gate: OpenGate, rollout: Rollout, word: str) -> str | None:
    """What the recording answers to a host tool call; None = a host is asked."""
    replayed = await gate.interceptor.replays.take_tool(rollout, "work", {"of": 1, "word": word})
    if replayed is None:
        return None
    tool = HostTool("work", "", "{}")
    key = CallKey("s", replayed.recorded.call_id, b"")
    given = json.dumps({"of": 1, "word": word}).encode()
    call = gate.interceptor.tools.replay(rollout.id, tool, given, key, replayed)
    await call.ended
    text: str = json.loads(replayed.result.content)["text"]
    return text


async def with_tools(gate: OpenGate, *, exact: bool = False) -> Rollout:
    """A further attempt, of whose first call and host tools there is a recording."""
    first = await gate.open()
    await answered(gate, first, ["list the files"], "Run")
    new = await again(gate, first, exact=exact)
    tools = [
        tool_call("t1", "a", "first"),
        tool_call("t2", "b", "other"),
        tool_call("t3", "a", "second"),
        tool_call("t4", "a", "refused by the gate", end_reason="ARGUMENTS_INVALID"),
        tool_call("t5", "c", "", result_json=""),
    ]
    for _ in range(2):  # a repeat adds nothing
        await gate.interceptor.replays.load(new, [], (new.id, 1), exact=exact, tools=tools)
    return new


@pytest.mark.requirement("R128")
async def test_each_recorded_result_of_a_host_tool_answers_once(tmp_path: Path) -> None:
    """In the order in which they came, and after a restart of the gate those that are left."""
    async with inner_gate(tmp_path) as gate:
        new = await with_tools(gate)
        assert await result_of(gate, new, "a") == "first"
        assert await result_of(gate, new, "c") is None
        (record,) = await gate.interceptor.store.tools.calls_of(new.id)
        origin = trajectory_pb2.ReplayOrigin.FromString(record.origin)
        assert (origin.rollout_id, origin.attempt, origin.call_id) == (new.id, 1, "t1")
        began = gate.now[0]
    async with inner_gate(tmp_path, began=began) as gate:
        new = gate.interceptor.registry.rollout("r1")
        assert [await result_of(gate, new, word) for word in ("a", "a", "b")] == ["second", None, "other"]
        assert not gate.interceptor.replays.refuses_tools(new)


async def test_a_result_that_was_not_used_is_given_back(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        new = await with_tools(gate)
        replayed = await gate.interceptor.replays.take_tool(new, "work", {"word": "a", "of": 1})
        assert replayed is not None
        gate.interceptor.replays.give_tool_back(new, replayed)
        assert await result_of(gate, new, "a") == "first"


async def test_after_a_divergence_hosts_are_asked(tmp_path: Path) -> None:
    """The same question may have another answer where the agent went another way."""
    async with inner_gate(tmp_path) as gate:
        new = await with_tools(gate)
        await answered(gate, new, ["list the dirs"], "Run")
        assert await result_of(gate, new, "a") is None


async def test_an_exact_replay_refuses_a_host_tool_that_is_not_recorded(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        new = await with_tools(gate, exact=True)
        assert await result_of(gate, new, "x") is None and gate.interceptor.replays.refuses_tools(new)
        for word in ("a", "b", "a"):
            assert await result_of(gate, new, word)
        assert not gate.interceptor.replays.refuses_tools(new), "nothing is left: a host may be asked"


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"tool_call_id": ""}, "tool_call_id"),
        ({"arguments_json": "[]"}, "arguments_json"),
        ({"result_json": "{"}, "result_json"),
        ({"replayed_from": trajectory_pb2.ReplayOrigin(attempt=1, call_id="c")}, "replayed_from.rollout_id"),
        ({"replayed_from": trajectory_pb2.ReplayOrigin(rollout_id="r", call_id="c")}, "replayed_from.attempt"),
    ],
)
async def test_a_damaged_result_is_refused_by_field(tmp_path: Path, changed: dict[str, Any], field: str) -> None:
    async with inner_gate(tmp_path) as gate:
        new = await gate.open()
        tools = [tool_call("t1", "a", "first"), tool_call("t2", "a", "second", **changed)]
        with pytest.raises(InvalidArgument) as refused:
            await gate.interceptor.replays.load(new, [], ("r1", 1), exact=False, tools=tools)
        assert [one.field for one in refused.value.violations] == [f"host_tool_calls[1].{field}"]
        assert new.recording is None


async def test_where_a_recorded_call_is_from_is_checked(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        await answered(gate, first, ["list the files"], "Run")
        calls = await recorded(gate, first)
        calls[0].replayed_from.attempt = 1
        new = await gate.open(request_id="q2", rollout_id="r2")
        with pytest.raises(InvalidArgument) as refused:
            await gate.interceptor.replays.load(new, calls, ("r1", 1), exact=False)
        assert [one.field for one in refused.value.violations] == ["calls[0].replayed_from.rollout_id"]


async def test_a_refused_answer_is_not_waited_for_after_a_restart(tmp_path: Path) -> None:
    """An exact replay: what was too old was sampled again, and what follows diverges from nothing."""
    async with inner_gate(tmp_path) as gate:
        first = await gate.open()
        await answered(gate, first, ["list the files"], "Run", version=3)
        new = await again(gate, first, exact=True, policy=PolicyBounds(min_version=4))
        await answered(gate, new, ["list the files"], "New", version=6)
        began = gate.now[0]
    async with inner_gate(tmp_path, began=began) as gate:
        gate.asked = 1
        new = gate.interceptor.registry.rollout("r1")
        assert new.recording is not None and not new.recording.has_left
        other = await answered(gate, new, ["list the dirs"], "Dirs", version=6)
        assert other.state is CallState.DELIVERED
