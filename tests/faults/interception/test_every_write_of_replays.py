"""kill -9 of the gate at every write of its journal, while a branch replays its parent and goes on by itself.

The scenario: a rollout's answers are loaded into a branch of it, in two parts; two calls with one prompt, which the
parent was answered differently, are asked for at once; another call and a host tool's result are replayed; the call at
the branch point is held and let go, and its agent's connection breaks; then the branch goes on by itself, with host
tool calls of its own, of which one is refused. Every request is repeated. Agent, trainer and driver come back as their
SDKs do. The trajectory is that of the same scenario without a kill. `test_every_write` has the other writes.

The short form kills before the commit of each third write; the full one before and after the commit of each:

    pytest --full tests/faults/interception/test_every_write_of_replays.py
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import pytest
from tests.faults.interception.test_every_write import TOKEN, Scenario, captured, gate_in, tokenizer, warm
from tests.support.services.dying import Mortal, Warm, insisting
from tests.support.waiting import eventually_async

from penstock.analysis import export, verify_chain
from penstock.client import connect
from penstock.client.intercept.session import InterceptSession
from penstock.client.types import chat
from penstock.client.wire import results
from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate
from penstock.interception.v1 import rollout_gate_service_pb2_grpc as gate_grpc
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.channel import connect as channel_to
from penstock_codec import Codec
from penstock_codec.tokenizer_files import TokenizerFiles

__all__ = ["tokenizer", "warm"]  # fixtures
pytestmark = pytest.mark.timeout(1200)  # a guard: a service is killed at each of its writes

HANGS_S: Final = 60.0
TWINS, SECOND, AT, LIVE = "list the files", "and the directories", "and the links", "and the sockets"
"""What the agent asks: twice at once, then what the parent was asked too, then at the branch point, and beyond."""
WRONG: Final = 7
"""An argument that the host tool does not take: the gate refuses it, and no host gets it."""
PARENT: Final = "p"


class Parent(Scenario):
    """The rollout that is branched. Its trainer answers each time differently: `name`, and how often it was asked."""

    name = "parent"
    version = 3
    parameters: ClassVar[Mapping[str, Any] | None] = {"type": "object", "properties": {"word": {"type": "string"}}}

    async def _answer(self, session: InterceptSession) -> None:
        async for call in session.calls():
            question = str(call.messages[-1].text)
            self.generated[question] += 1
            self._arrived.set()
            text = f"{self.name} {self.generated[question]} to {question}"
            ids = np.asarray([*self._codec.encode(text), self._codec.end_of_turn_id], np.int32)
            logprobs = -(np.arange(ids.size, dtype=np.float32) % 7 + 1) / 8
            await call.deliver(chat.Completion.of_tokens(ids, logprobs, policy_version=self.version))

    async def _agent(self, session: InterceptSession, token: str) -> None:
        twins = [await self._said(token, [], TWINS, f"twin-{index}") for index in range(2)]
        talk = self._on(twins)
        talk = await self._said(token, talk, SECOND, "second")
        self.tool_result = await self._use_tool(token)
        await self._said(token, talk, AT, "at")

    async def _said(self, token: str, talk: list[dict[str, Any]], question: str, key: str) -> list[dict[str, Any]]:
        """Asks, and returns the conversation with the answer."""
        asked = [*talk, {"role": "user", "content": question}]
        answer = await self._ask(token, {"model": "m", "messages": asked}, key=key)
        self.answers.append(answer)
        return [*asked, answer["message"]]

    @staticmethod
    def _on(twins: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """The conversation that goes on: with the parent's first answer, whichever call has it."""
        return min(twins, key=lambda talk: str(talk[-1]["content"]))


class Branch(Parent):
    """A rollout that replays its parent's answers up to the branch point, and is sampled from there on."""

    name = "branch"
    version = 4

    def __init__(self, place: Mortal, codec: Codec, parts: list[gate.LoadRecordingRequest]) -> None:
        super().__init__(place, codec)
        self._parts = parts
        self._stub: Any = None
        self.loaded: list[int] = []
        self.tool_results: list[str] = []

    async def play(self) -> trajectory_pb2.Trajectory:
        """From the first offer to the capture of the closed rollout."""
        address = self.gate.address
        async with (
            connect({"interception": address}, TOKEN) as ps,
            ps.intercept(rollout_ids=["r1"], messages=True) as session,
            channel_to(address, TOKEN) as channel,
        ):
            self._stub = stub = gate_grpc.RolloutGateServiceStub(channel)
            await self._offer(session)
            opening = _opening(self._parts[-1].calls[-1])
            token = (await insisting(lambda: stub.OpenRollout(opening, wait_for_ready=True))).token
            for part in self._parts:
                for _ in range(2):
                    answer = await insisting(lambda part=part: stub.LoadRecording(part, wait_for_ready=True))  # type: ignore[misc]
                    self.loaded.append(answer.calls)
            answering = asyncio.create_task(self._answer(session))
            try:
                await self._agent(session, token)
            finally:
                answering.cancel()
                with suppress(asyncio.CancelledError):
                    await answering
            await insisting(lambda: stub.CloseRollout(gate.CloseRolloutRequest(rollout_id="r1"), wait_for_ready=True))
            return await insisting(lambda: captured(stub))

    async def _agent(self, session: InterceptSession, token: str) -> None:
        twins = await asyncio.gather(*(self._said(token, [], TWINS, f"twin-{index}") for index in range(2)))
        talk = await self._said(token, self._on(twins), SECOND, "second")
        self.tool_results.append(await self._use_tool(token))
        await self._hold(held=True)
        body = {"model": "m", "messages": [*talk, {"role": "user", "content": AT}]}
        asked = asyncio.create_task(self._ask(token, body, key="at"))
        await eventually_async(self._waits, "the call at the branch point waits")
        await self._hold(held=False)
        while not self.generated[AT]:
            self._arrived.clear()
            await self._arrived.wait()
        asked.cancel()  # the agent's connection breaks, and its SDK asks again
        with suppress(asyncio.CancelledError):
            await asked
        await self._said(token, talk, AT, "at")
        talk = await self._said(token, talk, AT, "at")
        for number, word in enumerate(("b", WRONG), start=2):
            self.tool_results.append(await self._use_tool(token, word, number))
        await self._said(token, talk, LIVE, "live")

    async def _hold(self, *, held: bool) -> None:
        request = gate.HoldCallsRequest(rollout_id="r1", held=held)
        for _ in range(2):
            await insisting(lambda: self._stub.HoldCalls(request, wait_for_ready=True))

    async def _waits(self) -> bool:
        request = gate.GetRolloutRequest(rollout_id="r1")
        rollout = (await insisting(lambda: self._stub.GetRollout(request, wait_for_ready=True))).rollout
        return bool(rollout.totals.open) and rollout.held


def _opening(point: trajectory_pb2.Call) -> gate.OpenRolloutRequest:
    return gate.OpenRolloutRequest(
        request_id="open-1",
        rollout_id="r1",
        mode=interception_pb2.MODE_INTERCEPTION_GATE,
        source=interception_pb2.ModelSource(tokenizer=interception_pb2.ModelSource.Tokenizer(name="tiny")),
        branched_from=trajectory_pb2.BranchPoint(
            parent_rollout_id=PARENT, call_id=point.call_id, call_index=point.index
        ),
    )


def parts_of(parent: trajectory_pb2.Trajectory) -> list[gate.LoadRecordingRequest]:
    """What the driver loads for a branch at the parent's last call, in two parts."""
    *before, at = parent.calls
    point = trajectory_pb2.Call()
    point.CopyFrom(at)
    point.ClearField("completion")
    point.branch_point = True
    head = {"rollout_id": "r1", "recorded_rollout_id": PARENT, "recorded_attempt": 1}
    return [
        gate.LoadRecordingRequest(calls=before[:1], **head),  # type: ignore[arg-type]
        gate.LoadRecordingRequest(calls=[*before[1:], point], host_tool_calls=parent.host_tool_calls, **head),  # type: ignore[arg-type]
    ]


def content(whole: trajectory_pb2.Trajectory) -> dict[str, Any]:
    """What of a trajectory is the same whenever its gate was killed: all but ids, times and the order of arrival."""
    trajectory = results.trajectory(whole)
    calls = []
    for call in trajectory.calls:
        if (done := call.completion) is None:
            continue
        assert done.token_ids is not None and done.logprobs is not None
        origin = call.replayed_from
        calls.append(
            (
                trajectory.prompt_of(call.call_id).tolist(),
                done.token_ids.tolist(),
                done.logprobs.tolist(),
                str(done.versions),
                () if origin is None else (origin.rollout_id, origin.attempt, origin.call_id),
                call.branch_point,
            )
        )
    samples = [
        (
            sample.input_ids.tolist(),
            sample.loss_mask.tolist(),
            [] if sample.logprobs is None else sample.logprobs.tolist(),
            str(sample.versions),
            [turn.untrained_reason for turn in sample.turns],
        )
        for sample in trajectory.samples
    ]
    tools = [
        (one.state, one.arguments_json, one.result_json, one.is_error, one.end_reason, one.replayed_from is not None)
        for one in trajectory.host_tool_calls
    ]
    findings = [(one.reason, one.message) for one in trajectory.findings]
    return {"calls": sorted(calls), "samples": sorted(samples), "tools": tools, "findings": sorted(findings)}


def problems(
    branch: Branch, whole: trajectory_pb2.Trajectory, undisturbed: dict[str, Any] | None
) -> tuple[list[str], dict[str, Any]]:
    """What of the promises does not hold, and the trajectory's content."""
    found = []
    if branch.generated != Counter([AT, LIVE]):
        found.append(f"sampled were {dict(branch.generated)}")
    if branch.loaded != [1, 1, 4, 4]:
        found.append(f"recorded calls, part by part: {branch.loaded}")
    said = [answer["message"]["content"] for answer in branch.answers]
    wanted = [
        *sorted(f"parent {number} to {TWINS}" for number in (1, 2)),
        *(f"parent 1 to {SECOND}", f"branch 1 to {AT}", f"branch 1 to {AT}", f"branch 1 to {LIVE}"),
    ]
    if [*sorted(said[:2]), *said[2:]] != wanted:
        found.append(f"the agent got {said}")
    *tool_results, refused = branch.tool_results
    if (branch.tool_runs, tool_results) != (1, ["worked on a", "worked on b"]) or "worked" in refused:
        found.append(f"the tool ran {branch.tool_runs} times and returned {branch.tool_results}")
    given = Counter(call.replayed_from.call_id for call in whole.calls if call.HasField("replayed_from"))
    if sorted(given.values()) != [1, 1, 1]:
        found.append(f"recorded answers were given to {given}")
    others = [call for call in whole.calls if not call.HasField("completion")]
    if any(call.state != trajectory_pb2.CALL_STATE_CANCELLED for call in others):
        found.append(f"calls without an answer: {others}")
    trajectory = results.trajectory(whole)
    checked = verify_chain.verify(export.turns(trajectory), export.sequences(trajectory))
    if checked.problems:
        found.append(f"the chain: {checked}")
    now = content(whole)
    for name, before in (undisturbed or {}).items():
        if now[name] != before:
            found.append(f"{name} are {now[name]}, and were {before}")
    return found, now


@pytest.mark.requirement("R34", "R127", "R128", "R129", "R130")
@pytest.mark.parametrize(
    "full",
    [
        pytest.param(False, id="short"),
        pytest.param(True, id="full", marks=pytest.mark.on_demand("each third write shows it as well")),
    ],
)
async def test_kill_at_any_write_of_a_replay_samples_and_gives_nothing_twice(
    warm: Warm, tokenizer: Path, tmp_path: Path, full: bool
) -> None:
    """R128: recorded answers are given once each, and sampled never; the branch point and what follows it once."""
    codec = Codec.load(TokenizerFiles.from_directory(tokenizer))
    place = gate_in(warm, tmp_path / "parent", tokenizer)
    await place.start()
    parts = parts_of(await Parent(place, codec).play())
    await place.kill()
    failed: dict[str, list[str]] = {}
    seen: set[str] = set()

    async def once(at: int, undisturbed: dict[str, Any] | None, *, committed: bool) -> tuple[dict[str, Any], int]:
        place = gate_in(warm, tmp_path / f"{at}-{committed}", tokenizer)
        await place.start(at, committed=committed)
        branch = Branch(place, codec, parts)
        place.restart()
        found, now = ["it hangs"], dict[str, Any]()
        with suppress(TimeoutError):
            async with asyncio.timeout(HANGS_S):
                found, now = problems(branch, await branch.play(), undisturbed)
        writes = place.writes()
        seen.update(statement for write in writes for statement in write)
        if found:
            failed[f"{'after' if committed else 'before'} write {at}: {writes[at - 1 : at]}"] = found
        reached = place.died
        await place.kill()
        return now, len(writes) if reached else 0

    undisturbed, _ = await once(0, None, committed=False)
    assert not failed
    at, reached = 1, 1
    while reached:
        for committed in (False, True) if full else (False,):
            _, reached = await once(at, undisturbed, committed=committed)
        at += 1 if full else 3
    assert not failed
    assert at > 20
    for kind in ("INSERT INTO recordings", "UPDATE recordings SET point_call_id", "UPDATE rollouts SET held_since"):
        assert any(statement.startswith(kind) for statement in seen), (kind, seen)
    assert any("recorded_tools" in statement for statement in seen)
