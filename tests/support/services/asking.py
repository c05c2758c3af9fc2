"""Agents that ask: one as a coroutine of the test, one as a program in a sandbox."""

from __future__ import annotations

from typing import Final

import aiohttp
from google.protobuf.struct_pb2 import Struct
from tests.support.waiting import GUARD_S, eventually_async

from penstock.client import GateRolloutHandle
from penstock.driver.v1 import agent_pb2
from penstock.trajectory.v1 import trajectory_pb2

_SETTINGS: Final = "asking.json"
_PROGRAM: Final = """
import json, os, sys, urllib.error, urllib.request
with open(os.environ["HOME"] + "/asking.json") as file:
    settings = json.load(file)
most, number = int(sys.argv[1]), 0
while not most or number < most:
    number += 1
    body = {"model": "any", "messages": [{"role": "user", "content": str(number)}]}
    request = urllib.request.Request(settings["url"] + "/chat/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    request.add_header("authorization", "Bearer " + settings["key"])
    try:
        urllib.request.urlopen(request).read()
    except urllib.error.HTTPError as refused:
        print(refused.read().decode(), flush=True)
        break
"""


def asking_agent(name: str, calls: int = 0) -> agent_pb2.AgentSpec:
    """An agent that makes so many calls, 0 = without end, and stops at the first that is refused."""
    settings = Struct()
    settings.update({"url": "{{base_url}}", "key": "{{api_key}}"})
    return agent_pb2.AgentSpec(
        name=name,
        version="1",
        argv=["python3", "-c", _PROGRAM, str(calls)],
        instruction=agent_pb2.InstructionDelivery(method=agent_pb2.InstructionDelivery.METHOD_STDIN),
        files=[agent_pb2.ConfigFile(path=_SETTINGS, json=settings)],
        dialects=[trajectory_pb2.DIALECT_CHAT_COMPLETIONS],
    )


async def ask(http: aiohttp.ClientSession, rollout: GateRolloutHandle, text: str, *, within: float = GUARD_S) -> str:
    """A call, which is repeated while the gate is away; returns the text of its answer."""
    body = {"model": "any", "messages": [{"role": "user", "content": text}]}
    headers = {"authorization": f"Bearer {rollout.token}", "x-stainless-retry-count": "0", "idempotency-key": text}
    answers: list[str] = []

    async def answered() -> bool:
        try:
            async with http.post(f"{rollout.base_url()}/chat/completions", json=body, headers=headers) as answer:
                found = await answer.json(content_type=None)
                if answer.status == 200:
                    answers.append(found["choices"][0]["message"]["content"])
        except (aiohttp.ClientError, ValueError):  # it broke off
            return False
        return bool(answers)

    await eventually_async(answered, f"the answer to {text}", within=within)
    return answers[0]
