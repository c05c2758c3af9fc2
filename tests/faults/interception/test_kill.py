"""kill -9 of the service in the middle of calls: nothing acknowledged is lost, nothing is asked for twice (R34)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest
from aiohttp import web
from tests.support.endpoints.loopback import serving, unused_port

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import intercept_service_pb2_grpc as pb_grpc
from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate
from penstock.interception.v1 import rollout_gate_service_pb2_grpc as gate_grpc
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.channel import connect
from penstock_codec import Codec, tiny_tokenizer

TOKEN = "operator-token-of-this-test"
BODY = {"model": "m", "messages": [{"role": "user", "content": "list the files"}]}


class Victim:
    """The service as a process of its own, on the same ports and state each time."""

    def __init__(self, directory: Path, tokenizer: Path) -> None:
        self._directory = directory
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PENSTOCK_INTERCEPTION_OPERATOR_TOKEN": TOKEN,
            "PENSTOCK_INTERCEPTION_STATE_DIR": str(directory / "state"),
            "PENSTOCK_INTERCEPTION_TOKENIZERS": json.dumps({"tiny": str(tokenizer)}),
            "PENSTOCK_INTERCEPTION_INFERENCE_ADDRESS": "",
            "PENSTOCK_INTERCEPTION_PORT": str(unused_port()),
            "PENSTOCK_INTERCEPTION_INGRESS_PORT": str(unused_port()),
        }
        self._process: asyncio.subprocess.Process | None = None
        self.address = ""
        self.ingress = ""

    async def start(self) -> None:
        with (self._directory / "service.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "penstock_interception",
                env=self.environment,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.startswith(b'{"event":"ready"'):
                ready = json.loads(line)
                self.address, self.ingress = ready["address"], ready["endpoints"]["ingress"]
                return
        raise AssertionError((self._directory / "service.log").read_text())

    async def kill(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.send_signal(signal.SIGKILL)
            await process.communicate()


@pytest.fixture
async def victim(tmp_path: Path) -> AsyncIterator[Victim]:
    """A service that the test may kill."""
    tokenizer = tmp_path / "tiny"
    tiny_tokenizer.build(["list the files"]).write(tokenizer)
    service = Victim(tmp_path, tokenizer)
    await service.start()
    yield service
    await service.kill()


@pytest.fixture
def codec(victim: Victim, tmp_path: Path) -> Codec:
    """The tiny model's codec."""
    from penstock_codec.tokenizer_files import TokenizerFiles

    return Codec.load(TokenizerFiles.from_directory(tmp_path / "tiny"))


TINY = interception_pb2.ModelSource(tokenizer=interception_pb2.ModelSource.Tokenizer(name="tiny"))


async def opened(
    victim: Victim,
    mode: interception_pb2.Mode.ValueType = interception_pb2.MODE_INTERCEPTION_GATE,
    source: interception_pb2.ModelSource = TINY,
) -> gate.OpenRolloutResponse:
    """Opens the rollout, or finds it open: the request is the same each time."""
    async with connect(victim.address, TOKEN) as channel:
        answer: gate.OpenRolloutResponse = await gate_grpc.RolloutGateServiceStub(channel).OpenRollout(
            gate.OpenRolloutRequest(request_id="open-1", rollout_id="r1", mode=mode, source=source),
            wait_for_ready=True,
        )
    return answer


async def agent(victim: Victim, token: str, body: dict[str, Any] = BODY) -> dict[str, Any]:
    """Asks until there is an answer, as an SDK that never gives up."""
    url = f"http://{victim.ingress}/rollout/r1/v1/chat/completions"
    attempt = 0
    async with aiohttp.ClientSession() as http:
        while True:
            headers = {"authorization": f"Bearer {token}", "x-stainless-retry-count": str(attempt)}
            try:
                async with http.post(url, json=body, headers=headers) as answer:
                    if answer.status == 200:
                        value: dict[str, Any] = await answer.json()
                        return value
            except aiohttp.ClientError:
                pass
            attempt += 1
            await asyncio.sleep(0.02)  # the back-off of a client whose server is away


class Stream:
    """A trainer's stream, by hand."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._passed: list[pb.InterceptResponse] = []
        self.session_id = ""

    async def hello(self, **hello: Any) -> pb.Welcome:
        frame = pb.Hello(credits=pb.Credits(calls=8), identity="test", **hello)
        await self._stream.write(pb.InterceptRequest(hello=frame))
        welcome: pb.Welcome = (await self.until("welcome")).welcome
        self.session_id = welcome.session_id
        return welcome

    async def until(self, kind: str) -> pb.InterceptResponse:
        """The next frame of a kind; the others are kept for who asks for them, since calls may come before an answer
        is acknowledged.
        """
        for index, frame in enumerate(self._passed):
            if frame.WhichOneof("frame") == kind:
                return self._passed.pop(index)
        while True:
            came: pb.InterceptResponse = await self._stream.read()
            assert isinstance(came, pb.InterceptResponse), "the stream ended"
            if came.WhichOneof("frame") == kind:
                return came
            self._passed.append(came)

    async def deliver(self, result: pb.CallResult) -> pb.ResultsAcknowledged:
        await self._stream.write(pb.InterceptRequest(results=pb.Results(results=[result])))
        return (await self.until("acknowledged")).acknowledged


@asynccontextmanager
async def trainer(victim: Victim) -> AsyncIterator[Stream]:
    """A trainer's stream to the service as it is now."""
    async with connect(victim.address, TOKEN) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        yield Stream(pb_grpc.InterceptServiceStub(channel).Intercept())


def result(call: pb.ModelCall, codec: Codec, text: str, top: int = 0) -> pb.CallResult:
    ids = np.asarray([*codec.encode(text), codec.end_of_turn_id], "<i4")
    span = completion_pb2.TokenSpan(
        token_ids=ids.tobytes(),
        count=ids.size,
        logprobs=np.full(ids.size, -0.5, "<f4").tobytes(),
        logprobs_mode=completion_pb2.LOGPROBS_MODE_PROCESSED,
    )
    if top:
        span.top_count = top
        span.top_token_ids = np.tile(np.arange(3, 3 + top, dtype="<i4"), ids.size).tobytes()
        span.top_logprobs = np.tile(-np.arange(1, 1 + top).astype("<f4"), ids.size).tobytes()
    completion = completion_pb2.Completion(span=span, finish_reason=chat_pb2.FINISH_REASON_STOP)
    return pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, completion=completion)


async def captured(victim: Victim) -> trajectory_pb2.Trajectory:
    whole = trajectory_pb2.Trajectory()
    async with connect(victim.address, TOKEN) as channel:
        stub = gate_grpc.RolloutGateServiceStub(channel)
        request = gate.GetCaptureRequest(rollout_id="r1", include_top=True)
        async for fragment in stub.GetCapture(request, wait_for_ready=True):
            whole.MergeFrom(fragment.trajectory)
    return whole


@pytest.mark.requirement("R34")
async def test_leased_call_survives_and_its_answer_fits_the_old_lease(victim: Victim, codec: Codec) -> None:
    """R34, decision 7: the session resumes, the call is not sent again, a retry joins it."""
    token = (await opened(victim)).token
    asking = asyncio.create_task(agent(victim, token))
    async with trainer(victim) as stream:
        await stream.hello()
        call = (await stream.until("calls")).calls.calls[0]
        session = stream.session_id
        await victim.kill()
    await victim.start()
    assert (await opened(victim)).token == token
    async with trainer(victim) as stream:
        welcome = await stream.hello(resume_session_id=session)
        assert welcome.resumed and list(welcome.held_call_ids) == [call.call_id]
        acknowledged = await stream.deliver(result(call, codec, "hello"))
        assert list(acknowledged.accepted_call_ids) == [call.call_id]
        assert (await asking)["choices"][0]["message"]["content"] == "hello"
    assert [c.state for c in (await captured(victim)).calls] == [trajectory_pb2.CALL_STATE_DELIVERED]


@pytest.mark.requirement("R34")
async def test_an_acknowledged_answer_is_neither_lost_nor_asked_for_again(victim: Victim, codec: Codec) -> None:
    """R34, decision 7: killed at the moment of the acknowledgement, the answer is there for the agent's retry."""
    token = (await opened(victim)).token
    asking = asyncio.create_task(agent(victim, token))
    async with trainer(victim) as stream:
        await stream.hello()
        call = (await stream.until("calls")).calls.calls[0]
        acknowledged = await stream.deliver(result(call, codec, "hello"))
        await victim.kill()
    assert list(acknowledged.accepted_call_ids) == [call.call_id]
    await victim.start()
    answer = await asking
    assert answer["choices"][0]["message"]["content"] == "hello"
    whole = await captured(victim)
    assert [c.call_id for c in whole.calls] == [call.call_id]
    async with trainer(victim) as stream:
        assert (await stream.hello()).queued_calls == 0
        repeated = await stream.deliver(result(call, codec, "hello"))
        other = await stream.deliver(result(call, codec, "other"))
    assert list(repeated.accepted_call_ids) == [call.call_id]
    assert [r.reason for r in other.rejected] == [pb.ResultRejected.REASON_ALREADY_DELIVERED]


@pytest.mark.requirement("R34", "R106")
async def test_acknowledged_alternatives_survive_a_kill(victim: Victim, codec: Codec) -> None:
    """In the call and in the sample; the same answer is the same after the restart."""
    token = (await opened(victim)).token
    asking = asyncio.create_task(agent(victim, token))
    async with trainer(victim) as stream:
        await stream.hello()
        call = (await stream.until("calls")).calls.calls[0]
        given = result(call, codec, "hello", top=3)
        assert (await stream.deliver(given)).accepted_call_ids
        await victim.kill()
    await victim.start()
    await asking
    (kept,), (sample,) = (whole := await captured(victim)).calls, whole.samples
    sent = given.completion.span
    for message in (kept.completion.span, sample):
        assert (message.top_count, message.top_token_ids) == (3, sent.top_token_ids)
        assert message.top_logprobs == sent.top_logprobs
    async with trainer(victim) as stream:
        await stream.hello()
        assert (await stream.deliver(given)).accepted_call_ids
        others = await stream.deliver(result(call, codec, "hello", top=2))
    assert [r.reason for r in others.rejected] == [pb.ResultRejected.REASON_ALREADY_DELIVERED]


@pytest.mark.requirement("R34", "R82")
@pytest.mark.parametrize("delay_ms", [0, 4, 8, 12, 20, 60])
async def test_killed_at_any_moment_a_conversation_ends_with_one_turn_per_question(
    victim: Victim, codec: Codec, delay_ms: int
) -> None:
    """Whatever the moment of the kill, each of three questions is one call of one unbroken line."""
    token = (await opened(victim)).token
    told: list[str] = []

    async def converse() -> None:
        messages = list(BODY["messages"])
        for turn in range(3):
            answer = await agent(victim, token, {**BODY, "messages": messages})
            text = answer["choices"][0]["message"]["content"]
            told.append(text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"and {turn}?"}]

    async def answer_all() -> None:
        session = ""
        while True:
            try:
                async with trainer(victim) as stream:
                    # What it holds is told: the frame of a call may have been lost with the service.
                    known = {"resume_session_id": session, "held": pb.HeldCalls(call_ids=held)} if session else {}
                    welcome = await stream.hello(**known)
                    session = stream.session_id
                    for call_id in welcome.held_call_ids:
                        if call_id in held:
                            await stream.deliver(result(held[call_id], codec, f"answer {held[call_id].index}"))
                    while True:
                        for call in (await stream.until("calls")).calls.calls:
                            held[call.call_id] = call
                            await stream.deliver(result(call, codec, f"answer {call.index}"))
            except (grpc.aio.AioRpcError, AssertionError, TimeoutError, OSError):  # it was killed: come back
                await asyncio.sleep(0.02)

    held: dict[str, pb.ModelCall] = {}
    answering = asyncio.create_task(answer_all())
    conversing = asyncio.create_task(converse())
    try:
        await asyncio.sleep(delay_ms / 1000)
        await victim.kill()
        await victim.start()
        await conversing
    finally:
        answering.cancel()
        conversing.cancel()
        await asyncio.gather(answering, conversing, return_exceptions=True)
    assert told == ["answer 0", "answer 1", "answer 2"]
    whole = await captured(victim)
    assert [call.state for call in whole.calls] == [trajectory_pb2.CALL_STATE_DELIVERED] * 3
    assert len(whole.branches) == 1 and len(whole.samples) == 1 and len(whole.samples[0].turns) == 3


@pytest.mark.requirement("R18", "R34")
async def test_a_black_box_request_is_over_with_a_kill_and_its_retry_is_another(victim: Victim) -> None:
    """The service starts again though it has nothing of the request but its digest, and the rollout goes on."""
    asked: asyncio.Queue[None] = asyncio.Queue()
    may_answer = asyncio.Event()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def answer(_: web.Request) -> web.Response:
        asked.put_nowait(None)
        await may_answer.wait()
        return web.json_response({"said": "hello"})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", answer)
    async with serving(app, cancels=True) as url:
        endpoint = interception_pb2.Upstream.CallerEndpoint(base_url=f"{url}/v1")
        source = interception_pb2.ModelSource(upstream=interception_pb2.Upstream(caller=endpoint))
        token = (await opened(victim, interception_pb2.MODE_BLACK_BOX, source)).token
        asking = asyncio.create_task(agent(victim, token))
        await asked.get()
        await victim.kill()
        may_answer.set()
        await victim.start()
        assert await asking == {"said": "hello"}
    ended = [(call.state, call.end_reason) for call in (await captured(victim)).calls]
    assert ended == [
        (trajectory_pb2.CALL_STATE_CANCELLED, "AGENT_GONE"),
        (trajectory_pb2.CALL_STATE_DELIVERED, "PASSED_THROUGH"),
    ]
