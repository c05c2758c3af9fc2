"""kill -9 of the gate while a trainer holds calls: the session goes on, and no answer is lost or asked for twice."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from tests.support.endpoints.loopback import unused_port

from penstock.client import Completion, ModelCall, UnknownCall, connect
from penstock.interception.v1 import interception_pb2, rollout_gate_service_pb2_grpc
from penstock.interception.v1 import rollout_gate_service_pb2 as gate_pb
from penstock_codec import Codec, TokenizerFiles, tiny_tokenizer

TOKEN = "operator-token-of-this-test"


class Gate:
    """The interception service as a process, on the same ports and state each time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = [unused_port(), unused_port()]
        self._process: asyncio.subprocess.Process | None = None
        self.address = ""
        self.ingress = ""

    async def start(self) -> None:
        config = self._folder / "interception.toml"
        config.write_text(
            f'[interception]\nport = {self._ports[0]}\ningress_port = {self._ports[1]}\noperator_token = "{TOKEN}"\n'
            f'state_dir = "{self._folder / "state"}"\ninference_address = ""\n'
            f'tokenizers = {{tiny = "{self._folder / "tokenizer"}"}}\n'
        )
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock_interception",
            env={**environment, "PENSTOCK_CONFIG": str(config)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        ready = json.loads(await self._process.stdout.readline())
        self.address, self.ingress = ready["address"], ready["endpoints"]["ingress"]

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.communicate()


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Gate]:
    tiny_tokenizer.build().write(tmp_path / "tokenizer")
    made = Gate(tmp_path)
    await made.start()
    yield made
    await made.kill()


@pytest.mark.requirement("R34")
async def test_session_survives_a_killed_gate_and_its_answer_arrives(gate: Gate, tmp_path: Path) -> None:
    """After a kill -9 the agent's retry gets its answer, once, and the trainer did nothing to that end."""
    codec = Codec.load(TokenizerFiles.from_directory(tmp_path / "tokenizer"))
    answer = [*codec.encode("hello"), *codec.files.stop_token_ids]
    async with connect({"interception": gate.address}, TOKEN) as ps, aiohttp.ClientSession() as http:
        opened = await open_rollout(gate.address)
        async with ps.intercept(rollout_ids=["r1"], policy_version=1) as session:
            asking = asyncio.create_task(ask(http, gate, opened))
            held = await next_call(session)
            await gate.kill()
            assert await asking is None  # the agent saw its connection break

            await gate.start()
            again = asyncio.create_task(ask(http, gate, opened))  # and tries again, as SDKs do
            completion = Completion.of_tokens(answer, [-0.5] * len(answer), policy_version=1)
            try:
                await held.deliver(completion)
            except UnknownCall:
                # The gate died before the call itself was on disk: the agent's retry is a new call.
                await (await next_call(session)).deliver(completion)
            body = await again
            assert body is not None and body["choices"][0]["message"]["content"] == "hello"
            assert held.ended

            # The same question once more is answered from what is on disk, not asked for again.
            replayed = await ask(http, gate, opened)
            assert replayed is not None and replayed["choices"] == body["choices"]
            session.finish()
            assert [call async for call in session.calls()] == []


async def open_rollout(address: str) -> gate_pb.OpenRolloutResponse:
    """What the driver does for an agent."""
    request = gate_pb.OpenRolloutRequest(
        request_id="q1",
        rollout_id="r1",
        mode=interception_pb2.MODE_INTERCEPTION_GATE,
        source=interception_pb2.ModelSource(tokenizer=interception_pb2.ModelSource.Tokenizer(name="tiny")),
    )
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rollout_gate_service_pb2_grpc.RolloutGateServiceStub(channel)
        return await stub.OpenRollout(request, metadata=(("authorization", f"Bearer {TOKEN}"),))


async def ask(http: aiohttp.ClientSession, gate: Gate, opened: gate_pb.OpenRolloutResponse) -> Any:
    """An agent's call; None when the connection broke."""
    url = f"http://{gate.ingress}{opened.endpoints[0].base_path}/chat/completions"
    headers = {"Authorization": f"Bearer {opened.token}", "Idempotency-Key": "k1"}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    try:
        async with http.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()
    except aiohttp.ClientError:
        return None


async def next_call(session: Any) -> ModelCall:
    """The next call of a session."""
    async for call in session.calls():
        assert isinstance(call, ModelCall)
        return call
    raise AssertionError("the session ended")
