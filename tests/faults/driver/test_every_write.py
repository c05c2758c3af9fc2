"""kill -9 of the driver at every write of its journal, under one fixed scenario: nothing is forgotten, nothing leaks.

The scenario: an agent is registered; a rollout with setup, verifier and an artifact is created, watched, awaited,
annotated and graded again; it is deleted. The client comes back as its library does. Sandbox service and gate are the
real ones and stay. Each write is the last one before its commit, when the driver has gone on meanwhile, and those that
a client waits for also after it, before its answer to the client. The enumeration ends by itself, with the first write
that is not reached. The suite kills at each third write. Each of them is

    pytest --full tests/faults/driver/test_every_write.py
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.integration.driver.stack import TOKEN, Process
from tests.support.services.dying import Mortal, Warm, insisting

from penstock.driver.v1 import agent_pb2, agent_service_pb2, agent_service_pb2_grpc, rollout_pb2
from penstock.driver.v1 import rollout_service_pb2 as pb
from penstock.driver.v1 import rollout_service_pb2_grpc as pb_grpc
from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate_pb
from penstock.interception.v1 import rollout_gate_service_pb2_grpc as gate_grpc
from penstock.sandbox.v1 import process_service_pb2
from penstock.sandbox.v1 import sandbox_service_pb2 as sandbox_pb
from penstock.sandbox.v1 import sandbox_service_pb2_grpc as sandbox_grpc
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.channel import connect
from penstock_codec import tiny_tokenizer

pytestmark = pytest.mark.timeout(1200)  # a guard: a service is killed at each of its writes

HANGS_S = 120.0
AWAITED = (
    *("INSERT INTO requests", "INSERT INTO agent_specs", "UPDATE rollouts SET phase = ?, end_time", "DELETE"),
    *("INSERT OR REPLACE INTO end_states", "UPDATE rollouts SET grades", "INSERT INTO annotations"),
)
"""How the writes begin that a client waits for."""
SETUP, VERIFY = "echo kiwi > note.txt", 'cmp note.txt out.txt && echo 1 > "$PENSTOCK_REWARD_FILE"'

AGENT_LINES = 5
AGENT = agent_pb2.AgentSpec(
    name="copier",
    version="1",
    argv=["/bin/sh", "-c", f"cat > order.txt; cp note.txt out.txt; seq {AGENT_LINES}; test $(cat order.txt) = copy"],
    events=agent_pb2.EventMapping(source=agent_pb2.EventMapping.SOURCE_STDOUT_LINES),
    instruction=agent_pb2.InstructionDelivery(method=agent_pb2.InstructionDelivery.METHOD_STDIN),
    files=[agent_pb2.ConfigFile(path="endpoint", text="{{base_url}} {{api_key}}")],
    dialects=[trajectory_pb2.DIALECT_CHAT_COMPLETIONS],
    artifacts=[agent_pb2.ArtifactSpec(name="out", path="{{workdir}}/out.txt", required=True)],
)
SPEC = rollout_pb2.RolloutSpec(
    task=rollout_pb2.Task(
        task_id="copy",
        instruction="copy",
        setup=[process_service_pb2.Command(shell=SETUP)],
        verifier=rollout_pb2.Verifier(
            commands=[process_service_pb2.Command(shell=VERIFY)], reward_file=rollout_pb2.RewardFile()
        ),
    ),
    agent=rollout_pb2.AgentChoice(name="copier"),
    mode=interception_pb2.MODE_INTERCEPTION_GATE,
    source=interception_pb2.ModelSource(tokenizer=interception_pb2.ModelSource.Tokenizer(name="tiny")),
)

IN_PLACE = rollout_pb2.RolloutSpec()
"""The same, graded in the agent's own sandbox, where a verifier that was cut off costs the attempt."""
IN_PLACE.CopyFrom(SPEC)
IN_PLACE.task.keep_diff = True
IN_PLACE.task.verifier.fresh_fork = False
IN_PLACE.task.verifier.restore.append("note.txt")
IN_PLACE.max_attempts = 2
IN_PLACE.keep_end_state = True


def driver_of(warm: Warm, directory: Path, services: tuple[Process, Process], **more: str) -> Mortal:
    """A driver between the two, with `more` settings."""
    sandbox, interception = services
    return Mortal(
        warm,
        "driver",
        directory,
        TOKEN,
        sandbox_address=sandbox.address,
        sandbox_token=TOKEN,
        interception_address=interception.address,
        interception_token=TOKEN,
        **more,
    )


async def play(driver: Mortal, spec: rollout_pb2.RolloutSpec) -> list[str]:
    """The scenario; what of the promises does not hold."""
    found: list[str] = []
    async with connect(driver.address, TOKEN) as channel:
        agents: Any = agent_service_pb2_grpc.AgentServiceStub(channel)
        rollouts: Any = pb_grpc.RolloutServiceStub(channel)
        register = agent_service_pb2.RegisterAgentRequest(spec=AGENT)
        await insisting(lambda: agents.RegisterAgent(register, wait_for_ready=True))
        create = pb.CreateRolloutRequest(request_id="once", spec=spec, rollout_id="r")
        await insisting(lambda: rollouts.CreateRollout(create, wait_for_ready=True))

        async def watch(after: int) -> list[rollout_pb2.RolloutEvent]:
            request = pb.WatchRolloutRequest(rollout_id="r", after_sequence=after)
            answers = rollouts.WatchRollout(request, wait_for_ready=True)
            return [answer.event async for answer in answers if answer.HasField("event")]

        wait = pb.WaitRolloutRequest(rollout_id="r")
        ended = None
        while ended is None or not ended.HasField("outcome"):
            ended = (await insisting(lambda: rollouts.WaitRollout(wait, timeout=60, wait_for_ready=True))).rollout
        events = await insisting(lambda: watch(0))
        said = trajectory_pb2.Annotation(name="helpful", author="judge", value=0.5)
        annotate = pb.AnnotateTrajectoryRequest(rollout_id="r", annotations=[said])
        await insisting(lambda: rollouts.AnnotateTrajectory(annotate, timeout=60, wait_for_ready=True))
        regrade = pb.RegradeRolloutRequest(rollout_id="r", name="again")
        grade = (await insisting(lambda: rollouts.RegradeRollout(regrade, timeout=60, wait_for_ready=True))).grade
        again = (await insisting(lambda: rollouts.CreateRollout(create, wait_for_ready=True))).rollout
        if list(again.grades) != [grade] or grade.reward != ended.outcome.reward or again.outcome != ended.outcome:
            found.append(f"it was graded again as {again.grades}")

        async def annotations() -> list[trajectory_pb2.Annotation]:
            answers = rollouts.GetTrajectory(pb.GetTrajectoryRequest(rollout_id="r"), wait_for_ready=True)
            return [one async for answer in answers for one in answer.trajectory.annotations]

        kept = await insisting(annotations)
        if [(one.name, one.author, one.value) for one in kept] != [("helpful", "judge", 0.5)]:
            found.append(f"it was annotated as {kept}")
        if again.rollout_id != "r":
            found.append(f"the same request made {again.rollout_id}")
        found += _told(ended, events)
        delete = pb.DeleteRolloutRequest(rollout_id="r")
        await insisting(lambda: rollouts.DeleteRollout(delete, wait_for_ready=True))
        every = await insisting(lambda: rollouts.ListRollouts(pb.ListRolloutsRequest(), wait_for_ready=True))
        found += [f"{item.rollout_id} was not forgotten" for item in every.rollouts]
    return found


def _told(ended: rollout_pb2.Rollout, events: list[rollout_pb2.RolloutEvent]) -> list[str]:
    found = []
    if [event.sequence for event in events] != list(range(1, ended.last_sequence + 1)):
        found.append(f"events {[event.sequence for event in events]} of {ended.last_sequence}")
    if [event.HasField("ended") for event in events].count(True) != 1 or not events[-1].HasField("ended"):
        found.append("not one end, at the end")
    outcome = ended.outcome
    if outcome.HasField("failure"):
        found.append(f"it failed by {outcome.failure}")
    if outcome.reward.value != 1.0:
        found.append(f"it completed with {outcome.reward}")
    losses = [event.attempt_failed.failure.reason for event in events if event.HasField("attempt_failed")]
    if set(losses) - ({"GRADING_INTERRUPTED"} if ended.spec.max_attempts > 1 else set()):
        found.append(f"attempts were lost: {losses}")
    if ended.attempts != 1 + len(losses):
        found.append(f"it took {ended.attempts} attempts")
    kinds = Counter(event.WhichOneof("event") for event in events)
    artifacts = 1 + ended.spec.task.keep_diff
    if ended.attempts == 1 and (kinds["agent_exited"], kinds["artifact"], kinds["agent_event"]) != (
        *(1, artifacts, AGENT_LINES),
    ):
        found.append(f"its events are {kinds}")
    return found


async def leaked(services: tuple[Process, Process]) -> list[str]:
    """What is left in the services of a rollout that was deleted."""
    sandbox, interception = services
    async with connect(sandbox.address, TOKEN) as channel:
        sandboxes: Any = sandbox_grpc.SandboxServiceStub(channel)
        there = (await sandboxes.ListSandboxes(sandbox_pb.ListSandboxesRequest())).sandboxes
    async with connect(interception.address, TOKEN) as channel:
        gate: Any = gate_grpc.RolloutGateServiceStub(channel)
        open_ones = (await gate.ListRollouts(gate_pb.ListRolloutsRequest())).rollouts
        for item in open_ones:  # so that the next scenario may use the same id
            await gate.DeleteRollout(gate_pb.DeleteRolloutRequest(rollout_id=item.rollout_id))
    return [f"sandbox {item.sandbox_id} {item.state}" for item in there] + [
        f"{item.rollout_id} at the gate, state {item.state}" for item in open_ones
    ]


@pytest.fixture
async def warm() -> AsyncIterator[Warm]:
    """The process that forks drivers."""
    process = await Warm.start("driver")
    yield process
    await process.close()


@pytest.fixture
def services(tmp_path: Path) -> Iterator[tuple[Process, Process]]:
    """A sandbox service and a gate, which no scenario harms."""
    tokenizer = tmp_path / "tiny"
    tiny_tokenizer.build(["copy"]).write(tokenizer)
    settings = {"inference_address": "", "tokenizers": json.dumps({"tiny": str(tokenizer)})}
    interception = Process("interception", tmp_path, settings)
    interception.start()
    sandbox = Process("sandbox", tmp_path, {"allowed_upstreams": json.dumps([interception.endpoints["ingress"]])})
    sandbox.start()
    yield sandbox, interception
    sandbox.stop()
    interception.stop()


@pytest.mark.requirement("R25", "R49", "R50", "R62", "R127", "R135", "R140")
@pytest.mark.parametrize(
    "every", [3, pytest.param(1, marks=pytest.mark.on_demand("each third write shows it as well"))]
)
@pytest.mark.parametrize(("spec", "first"), [(SPEC, 1), (IN_PLACE, 2)], ids=["graded in a fork", "graded in place"])
async def test_kill_at_any_write_neither_loses_leaks_nor_repeats_a_rollout(
    warm: Warm,
    services: tuple[Process, Process],
    tmp_path: Path,
    spec: rollout_pb2.RolloutSpec,
    first: int,
    every: int,
) -> None:
    """It completed in one attempt, with each event once; nothing of it is left anywhere."""
    failed: dict[str, list[str]] = {}
    seen: set[str] = set()
    at, reached = min(first, every), True
    while reached:
        committed = False
        while True:
            driver = driver_of(warm, tmp_path / f"{at}-{committed}", services)
            await driver.start(at, committed=committed)
            driver.restart()
            found = ["it hangs"]
            with suppress(TimeoutError):
                async with asyncio.timeout(HANGS_S):
                    found = await play(driver, spec)
            found += await leaked(services)
            reached, writes = driver.died, driver.writes()
            write = next(iter(writes[at - 1 :]), [])
            seen.update(statement for each in writes for statement in each)
            if found:
                failed[f"{'after' if committed else 'before'} write {at}: {write}"] = found
            await driver.kill()
            if committed or not reached or not any(line.startswith(AWAITED) for line in write):
                break
            committed = True
        at += every
    assert not failed
    assert at > 8
    for kind in (
        *("INSERT INTO requests", "INSERT INTO events", "UPDATE rollouts SET phase", "DELETE FROM rollouts"),
        *("INSERT OR REPLACE INTO end_states", "UPDATE end_states", "UPDATE rollouts SET grades"),
        "INSERT INTO annotations",
    ):
        assert any(statement.startswith(kind) for statement in seen), (kind, seen)
