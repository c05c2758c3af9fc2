"""kill -9 of engines of a gate's list under the calls of many rollouts: each call has one answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.inference.v1 import inference_service_pb2 as engine_pb
from penstock.inference.v1 import inference_service_pb2_grpc as engine_grpc
from penstock.interception.v1 import interception_pb2, rollout_gate_service_pb2_grpc
from penstock.interception.v1 import rollout_gate_service_pb2 as gate_pb
from penstock_chassis.channel import connect
from penstock_codec import tiny_tokenizer

TOKEN = "operator-token-of-this-test"
ROLLOUTS, CALLS = 24, 6


class Process:
    """A service as a process."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, Any]) -> None:
        self.address = str(ready["address"])
        self._process = process

    async def kill(self) -> None:
        """By SIGKILL; returns when it is dead."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


Launch = Callable[..., Any]


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    """Starts services that end with the test: `launch(service, name, setting=...)`."""
    async with AsyncExitStack() as stack:

        async def started(service: str, name: str, **settings: Any) -> Process:
            config = tmp_path / f"{name}.toml"
            values = {"port": 0, "name": name, "operator_token": TOKEN, "state_dir": str(tmp_path / name), **settings}
            lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
            tables = [
                f"[{service}.{key}]\n" + "\n".join(f"{item} = {json.dumps(text)}" for item, text in value.items())
                for key, value in values.items()
                if isinstance(value, dict)
            ]
            config.write_text("\n".join([f"[{service}]", *lines, *tables]))
            environment = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"penstock_{service}",
                env={**environment, "PENSTOCK_CONFIG": str(config)},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            assert process.stdout is not None
            running = Process(process, json.loads(await process.stdout.readline()))
            stack.push_async_callback(running.kill)
            return running

        yield started


@pytest.mark.requirement("R117", "R120")
async def test_no_call_fails_while_engines_die_and_one_lives(launch: Launch, tmp_path: Path) -> None:
    """Two of three engines die with calls in flight: every agent has all of its answers, from those that live."""
    tiny_tokenizer.build().write(tmp_path / "model")
    engines: dict[str, Process] = {}
    for name in ("e0", "e1", "e2"):
        script = tmp_path / f"{name}.json"
        script.write_text(json.dumps({"strict": False, "turns": [{"reply": name, "repeat": True}]}))
        engines[name] = await launch(
            "inference",
            name,
            model_dir=str(tmp_path / "model"),
            engine="scripted",
            engine_options={"script": str(script)},
        )
    gate = await launch(
        "interception",
        "g0",
        ingress_port=0,
        inference_token=TOKEN,
        inference_members="static:" + ",".join(f"{name}={engine.address}" for name, engine in engines.items()),
    )
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(connect(gate.address, TOKEN))
        stub: Any = rollout_gate_service_pb2_grpc.RolloutGateServiceStub(channel)
        stubs: dict[str, Any] = {}
        for name, engine in engines.items():
            stubs[name] = engine_grpc.InferenceServiceStub(
                await stack.enter_async_context(connect(engine.address, TOKEN))
            )

        async def opened(number: int) -> openai.AsyncOpenAI:
            request = gate_pb.OpenRolloutRequest(
                request_id=f"open-{number}", rollout_id=f"r{number}", mode=interception_pb2.MODE_TRANSPARENT_PROXY
            )
            answer = await stub.OpenRollout(request)
            url = f"http://{answer.ingress_address}{answer.endpoints[0].base_path}"
            client = openai.AsyncOpenAI(base_url=url, api_key=answer.token, max_retries=0)
            return await stack.enter_async_context(client)

        async def turns(agent: openai.AsyncOpenAI) -> list[str]:
            messages: list[Any] = [{"role": "user", "content": "work"}]
            answers = []
            for _ in range(CALLS):
                answer = await agent.chat.completions.create(model="m", messages=messages)
                answers.append(answer.choices[0].message.content or "")
                messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": "go on"}]
            return answers

        async def held_at(name: str) -> None:
            """Its calls wait, and some do."""
            async for stats in stubs[name].WatchStats(engine_pb.WatchStatsRequest()):
                if stats.waiting >= 2:
                    return

        agents = [await opened(number) for number in range(ROLLOUTS)]
        for name in engines:
            await stubs[name].Pause(engine_pb.PauseRequest(mode=engine_pb.PAUSE_MODE_KEEP))
        working = [asyncio.create_task(turns(agent)) for agent in agents]
        for name in engines:
            await held_at(name)
        await engines["e0"].kill()
        await engines["e1"].kill()
        await stubs["e2"].Resume(engine_pb.ResumeRequest())
        found = await asyncio.gather(*working)
        assert Counter(answer for answers in found for answer in answers) == {"e2": ROLLOUTS * CALLS}
        for number in range(ROLLOUTS):
            closed = (await stub.CloseRollout(gate_pb.CloseRolloutRequest(rollout_id=f"r{number}"))).rollout
            assert (closed.totals.delivered, closed.totals.failed, closed.totals.expired) == (CALLS, 0, 0)
