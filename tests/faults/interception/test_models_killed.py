"""kill -9 of the gate during random takeovers: each token's policy and version are those of the engine that sampled it.

pytest --full tests/faults/interception/test_models_killed.py
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from tests.faults.interception.test_kill import TOKEN, Victim, agent, captured
from tests.integration.interception.conftest import tiny_source, tokens_completion
from tests.integration.interception.models.test_models import (
    CALLS,
    Answer,
    Log,
    check_calls,
    check_samples,
    shown,
    takeovers,
    teacher_at,
)
from tests.support.services.engines import RunningEngine

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import intercept_service_pb2_grpc as pb_grpc
from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate
from penstock.interception.v1 import rollout_gate_service_pb2_grpc as gate_grpc
from penstock_chassis.channel import connect
from penstock_codec import Codec, tiny_tokenizer
from penstock_codec.tokenizer_files import TokenizerFiles

KILLS = 6


class Fate:
    """Kills the gate now and then, and starts it again."""

    def __init__(self, victim: Victim, random: Random) -> None:
        self.kills = 0
        self._victim = victim
        self._random = random

    def strikes(self) -> bool:
        return self.kills < KILLS and self._random.random() < 0.4

    async def kill(self) -> None:
        self.kills += 1
        await self._victim.kill()
        await self._victim.start()


async def answer(victim: Victim, codec: Codec, policy: str, log: Log, fate: Fate) -> None:
    """A trainer of one policy answers its next call; the gate may die before it has the answer, or as it gets it."""
    leased = await leasing(victim, policy)
    assert leased.policy_id == policy
    version = log.versions[policy]
    ids = [*codec.encode(f"{policy} answers {leased.index} with {version}"), codec.end_of_turn_id]
    log.by_call[leased.call_id] = Answer(policy, version, ids)
    completion = tokens_completion(ids, version=version, logprobs=[-0.25 - leased.index] * len(ids))
    result = pb.CallResult(call_id=leased.call_id, lease_id=leased.lease_id, completion=completion)
    if fate.strikes():
        await fate.kill()
    request = pb.CompleteCallsRequest(results=[result])
    if fate.strikes():
        async with connect(victim.address, TOKEN) as channel:
            given = pb_grpc.InterceptServiceStub(channel).CompleteCalls(request)
            await fate.kill()
            await asyncio.gather(given, return_exceptions=True)
    async with connect(victim.address, TOKEN) as channel:
        stub = pb_grpc.InterceptServiceStub(channel)
        acknowledged = (await stub.CompleteCalls(request, wait_for_ready=True)).acknowledged
    assert list(acknowledged.accepted_call_ids) == [leased.call_id], acknowledged


async def leasing(victim: Victim, policy: str) -> pb.ModelCall:
    request = pb.LeaseCallsRequest(selector=pb.CallSelector(policy_ids=[policy]), wait=Duration(seconds=20))
    async with connect(victim.address, TOKEN) as channel:
        stub = pb_grpc.InterceptServiceStub(channel)
        (call,) = (await stub.LeaseCalls(request, wait_for_ready=True)).calls
    return call


async def killed_meanwhile(engine: RunningEngine, fate: Fate) -> None:
    """The gate dies while it waits for the paused teacher; it then asks again."""
    await engine.waiting(1)
    await fate.kill()
    await engine.resume()


async def nothing() -> None:
    """The teacher answers undisturbed."""


@pytest.mark.requirement("R133", "R34")
@pytest.mark.on_demand("restarts in the middle of the same takeovers show it as well, without a kill")
@pytest.mark.parametrize("seed", range(4))
async def test_each_tokens_policy_and_version_survive_kills_of_the_gate(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    log, known, expected = Log(random, takeovers(random)), [list[str]()], list[str]()
    tokenizer = tmp_path / "tiny"
    tiny_tokenizer.build(["list the files"]).write(tokenizer)
    codec = Codec.load(TokenizerFiles.from_directory(tokenizer))
    async with teacher_at(tokenizer, tmp_path / "teacher") as engine:
        victim = Victim(tmp_path, tokenizer)
        victim.environment["PENSTOCK_INTERCEPTION_INFERENCE"] = json.dumps({"teacher": {"address": engine.address}})
        await victim.start()
        fate = Fate(victim, random)
        async with connect(victim.address, TOKEN) as channel:
            opened = await gate_grpc.RolloutGateServiceStub(channel).OpenRollout(
                gate.OpenRolloutRequest(
                    request_id="open-1",
                    rollout_id="r1",
                    mode=interception_pb2.MODE_INTERCEPTION_GATE,
                    source=tiny_source(),
                    models=log.rules,
                )
            )
        for number in range(CALLS):
            texts, turn = shown(random, known, number)
            policy = log.policy_of(number, turn)
            expected.append(policy)
            if random.random() < 0.3:
                log.versions[policy] += random.randint(1, 3)
                if policy == "teacher":
                    await engine.push(log.versions["teacher"])
            if policy != "teacher":
                given = answer(victim, codec, policy, log, fate)
            elif fate.strikes():
                await engine.pause()
                given = killed_meanwhile(engine, fate)
            else:
                given = nothing()
            said, _ = await asyncio.gather(agent(victim, opened.token, body(texts)), given)
            text = said["choices"][0]["message"]["content"]
            if policy == "teacher":
                assert re.fullmatch(r"the teacher's answer \d+", text)
                call = (await captured(victim)).calls[number]
                ids = [*codec.encode(text), codec.end_of_turn_id]
                log.by_call[call.call_id] = Answer(policy, log.versions[policy], ids)
            known.append([*texts, text])
        trajectory = await captured(victim)
        await victim.kill()
    assert fate.kills == KILLS
    assert [call.policy_id for call in trajectory.calls] == expected
    check_calls(trajectory, log)
    check_samples(trajectory, log)


def body(texts: list[str]) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"model": "m", "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}
