"""kill -9 of the gate at every write of its journal, before and after its commit, under one fixed scenario (R34).

The scenario: tools are offered, a rollout is opened; a streamed call is answered; calls are paused and resumed; a call
whose agent's connection breaks is asked for again and answered; a host tool is called; the rollout is closed. Agent,
trainer and driver come back as their SDKs do. The enumeration ends by itself, with the first write that is not reached.
The suite kills at each second write, before and after its commit in turn. All of it is

    pytest --full tests/faults/interception/test_every_write.py
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import numpy as np
import pytest
from tests.support.endpoints.loopback import unused_port
from tests.support.endpoints.mcp_agent import post, tool_call
from tests.support.services.dying import BACK_OFF_S, Mortal, Warm, insisting

from penstock.analysis import export, verify_chain
from penstock.client import HostTool, HostToolCall, connect
from penstock.client.errors import PenstockError
from penstock.client.intercept.session import InterceptSession
from penstock.client.types import chat
from penstock.client.wire import results
from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate
from penstock.interception.v1 import rollout_gate_service_pb2_grpc as gate_grpc
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.channel import connect as channel_to
from penstock_codec import Codec, tiny_tokenizer
from penstock_codec.tokenizer_files import TokenizerFiles

TOKEN = "operator-token-of-this-test"
QUESTIONS = ("list the files", "and the directories")
pytestmark = pytest.mark.timeout(1200)  # a guard: a service is killed at each of its writes

HANGS_S = 60.0


def gate_in(warm: Warm, directory: Path, tokenizer: Path) -> Mortal:
    """A gate with an ingress, and without an engine."""
    tokenizers = json.dumps({"tiny": str(tokenizer)})
    return Mortal(
        warm,
        "interception",
        directory,
        TOKEN,
        ingress_port=str(unused_port()),
        tokenizers=tokenizers,
        inference_address="",
    )


class Scenario:
    """What happens to a gate, and what each party saw of it."""

    parameters: ClassVar[Mapping[str, Any] | None] = None
    """JSON Schema of the host tool's arguments."""

    def __init__(self, gate: Mortal, codec: Codec) -> None:
        self.gate = gate
        self._codec = codec
        self.generated: Counter[str] = Counter()
        self.acknowledged: dict[str, str] = {}
        self.answers: list[dict[str, Any]] = []
        self.tool_runs = 0
        self.tool_result = ""
        self._arrived = asyncio.Event()

    async def play(self) -> trajectory_pb2.Trajectory:
        """From the first offer to the capture of the closed rollout."""
        address = self.gate.address
        async with (
            connect({"interception": address}, TOKEN) as ps,
            ps.intercept(rollout_ids=["r1"], messages=True) as session,
            channel_to(address, TOKEN) as channel,
        ):
            stub = gate_grpc.RolloutGateServiceStub(channel)
            await self._offer(session)
            token = (await insisting(lambda: stub.OpenRollout(_OPENING, wait_for_ready=True))).token
            answering = asyncio.create_task(self._answer(session))
            try:
                await self._agent(session, token)
            finally:
                answering.cancel()
                with suppress(asyncio.CancelledError):
                    await answering
            await insisting(lambda: stub.CloseRollout(gate.CloseRolloutRequest(rollout_id="r1"), wait_for_ready=True))
            return await insisting(lambda: captured(stub))

    async def _offer(self, session: InterceptSession) -> None:
        async def work(call: HostToolCall[Any]) -> str:
            self.tool_runs += 1
            return f"worked on {call.arguments['word']}"

        while True:
            try:
                return await session.offer_tools([HostTool(name="work", function=work, parameters=self.parameters)])
            except PenstockError as error:
                if error.reason not in ("UNREACHABLE", "SESSION_UNKNOWN", "TRANSPORT_UNAVAILABLE"):
                    raise
                await asyncio.sleep(BACK_OFF_S)

    async def _answer(self, session: InterceptSession) -> None:
        """The trainer: generates once for each call that it is given."""
        async for call in session.calls():
            question = str(call.messages[-1].text)
            self.generated[question] += 1
            self._arrived.set()
            ids = np.asarray([*self._codec.encode(f"answer to {question}"), self._codec.end_of_turn_id], np.int32)
            logprobs = np.full(ids.size, -0.5, np.float32)
            await call.deliver(chat.Completion.of_tokens(ids, logprobs, policy_version=3))
            self.acknowledged[call.call_id] = f"answer to {question}"

    async def _agent(self, session: InterceptSession, token: str) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTIONS[0]}]
        self.answers.append(await self._ask(token, {"model": "m", "stream": True, "messages": messages}))
        messages += [self.answers[0]["message"], {"role": "user", "content": QUESTIONS[1]}]
        await session.pause()
        body = {"model": "m", "messages": messages}
        first = asyncio.create_task(self._ask(token, body))
        await session.resume()
        await self._arrived_again()
        first.cancel()  # the agent's connection breaks, and its SDK asks again
        with suppress(asyncio.CancelledError):
            await first
        self.answers.append(await self._ask(token, body, attempt=1))
        self.answers.append(await self._ask(token, body, attempt=2))
        self.tool_result = await self._use_tool(token)

    async def _arrived_again(self) -> None:
        while self.generated.total() < len(QUESTIONS):
            self._arrived.clear()
            await self._arrived.wait()

    async def _ask(self, token: str, body: dict[str, Any], attempt: int = 0, key: str = "") -> dict[str, Any]:
        """Asks until there is a whole answer; a stream is one answer. Calls with equal bodies differ by `key`."""
        url = f"http://{self.gate.endpoints['ingress']}/rollout/r1/v1/chat/completions"
        async with aiohttp.ClientSession() as http:
            while True:
                headers = {"authorization": f"Bearer {token}", "x-stainless-retry-count": str(attempt)}
                headers |= {"idempotency-key": key} if key else {}
                try:
                    async with http.post(url, json=body, headers=headers) as answer:
                        if answer.status == 200 and not body.get("stream"):
                            whole: dict[str, Any] = await answer.json()
                            return {"id": whole["id"], "message": whole["choices"][0]["message"]}
                        if answer.status == 200:
                            streamed = _put_together(await answer.read())
                            if streamed is not None:
                                return streamed
                except (aiohttp.ClientError, ConnectionError):
                    pass
                attempt += 1
                await asyncio.sleep(BACK_OFF_S)

    async def _use_tool(self, token: str, word: Any = "a", number: int = 1) -> str:
        url = f"http://{self.gate.endpoints['ingress']}/rollout/r1/mcp"
        while True:
            status, answer, _ = await insisting(
                lambda: post(url, token, tool_call("work", {"word": word}, number), headers={"mcp-session-id": "s"})
            )
            if status == 200:
                text: str = answer["result"]["content"][0]["text"]
                return text
            await asyncio.sleep(BACK_OFF_S)


_OPENING = gate.OpenRolloutRequest(
    request_id="open-1",
    rollout_id="r1",
    mode=interception_pb2.MODE_INTERCEPTION_GATE,
    source=interception_pb2.ModelSource(tokenizer=interception_pb2.ModelSource.Tokenizer(name="tiny")),
)


async def captured(stub: Any) -> trajectory_pb2.Trajectory:
    """All that the gate has recorded."""
    whole = trajectory_pb2.Trajectory()
    request = gate.GetCaptureRequest(rollout_id="r1", include_bodies=True)
    async for fragment in stub.GetCapture(request, wait_for_ready=True):
        whole.MergeFrom(fragment.trajectory)
    return whole


def _put_together(stream: bytes) -> dict[str, Any] | None:
    """A streamed answer; None when its end is missing."""
    lines = [line[6:] for line in stream.splitlines() if line.startswith(b"data: ")]
    if not lines or lines[-1] != b"[DONE]":
        return None
    chunks = [json.loads(line) for line in lines[:-1]]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    return {"id": chunks[0]["id"], "message": {"role": "assistant", "content": text}}


def problems(scenario: Scenario, whole: trajectory_pb2.Trajectory) -> list[str]:
    """What of the promises does not hold."""
    found = []
    if scenario.generated != Counter(QUESTIONS):
        found.append(f"generated {dict(scenario.generated)}")
    said = [answer["message"]["content"] for answer in scenario.answers]
    if said != [f"answer to {QUESTIONS[index]}" for index in (0, 1, 1)] or scenario.answers[1] != scenario.answers[2]:
        found.append(f"the agent got {scenario.answers}")
    if (scenario.tool_runs, scenario.tool_result) != (1, "worked on a"):
        found.append(f"the tool ran {scenario.tool_runs} times and returned {scenario.tool_result!r}")
    delivered = {call.call_id for call in whole.calls if call.state == trajectory_pb2.CALL_STATE_DELIVERED}
    if set(scenario.acknowledged) - delivered or len(delivered) != len(QUESTIONS):
        found.append(f"acknowledged {set(scenario.acknowledged)}, delivered {delivered}")
    others = [call for call in whole.calls if call.call_id not in delivered]
    if any(call.state != trajectory_pb2.CALL_STATE_CANCELLED for call in others):
        found.append(f"calls without an answer: {others}")
    if [call.state for call in whole.host_tool_calls] != [trajectory_pb2.CALL_STATE_DELIVERED]:
        found.append(f"host tool calls {whole.host_tool_calls}")
    if len(whole.branches) != 1 or [len(sample.turns) for sample in whole.samples] != [len(QUESTIONS)]:
        found.append(f"{len(whole.branches)} branches, samples {whole.samples}")
    trajectory = results.trajectory(whole)
    checked = verify_chain.verify(export.turns(trajectory), export.sequences(trajectory))
    if checked.problems or checked.calls != len(QUESTIONS):
        found.append(f"the chain: {checked}")
    return found


@pytest.fixture
async def warm() -> AsyncIterator[Warm]:
    """The process that forks gates."""
    process = await Warm.start()
    yield process
    await process.close()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """The tiny model's files."""
    directory = tmp_path / "tiny"
    tiny_tokenizer.build([*QUESTIONS, "answer to list the files"]).write(directory)
    return directory


@pytest.mark.requirement("R34", "R82")
@pytest.mark.parametrize(
    "full",
    [
        pytest.param(False, id="short"),
        pytest.param(True, id="full", marks=pytest.mark.on_demand("each second write, before or after, shows it")),
    ],
)
async def test_kill_at_any_write_loses_repeats_and_misplaces_nothing(
    warm: Warm, tokenizer: Path, tmp_path: Path, full: bool
) -> None:
    """R82, decision 7: each write of the journal is the last one once before and once after its commit."""
    codec = Codec.load(TokenizerFiles.from_directory(tokenizer))
    failed: dict[str, list[str]] = {}
    seen: set[str] = set()
    at, reached, turn = 1, True, cycle([False, True])
    while reached:
        for committed in (False, True) if full else (next(turn),):
            place = gate_in(warm, tmp_path / f"{at}-{committed}", tokenizer)
            await place.start(at, committed=committed)
            scenario = Scenario(place, codec)
            place.restart()
            found = ["it hangs"]
            with suppress(TimeoutError):
                async with asyncio.timeout(HANGS_S):
                    found = problems(scenario, await scenario.play())
            reached = place.died
            seen.update(statement for write in place.writes() for statement in write)
            if found:
                failed[f"{'after' if committed else 'before'} write {at}: {place.writes()[at - 1 : at]}"] = found
            await place.kill()
        at += 1 if full else 2
    assert not failed
    assert at > 10
    for kind in ("INSERT INTO rollouts", "INSERT INTO calls", "UPDATE calls SET state", "UPDATE calls SET told"):
        assert any(statement.startswith(kind) for statement in seen), (kind, seen)
    assert any("tool_calls" in statement for statement in seen) and any("tool_offers" in item for item in seen)
