"""kill -9 of others at the writes of a driver's journal: sandbox service, spawner, gate, engine, trainer.

The scenario is that of `test_every_write`, with an agent that asks a model: a rollout with setup, verifier and an
artifact is created, watched, awaited, graded again and deleted. The driver lives, and kills its victim just before the
n-th write is committed. The victims are started again as soon as they are dead, as their operator would; a spawner is
started by its service. The short form kills at each twelfth write. All of them takes some minutes:

    pytest --full tests/faults/driver/test_every_write_and_others.py
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from tests.faults.driver.test_every_write import driver_of, warm
from tests.hosts import engine
from tests.integration.driver.stack import TOKEN, Process
from tests.support.endpoints.loopback import unused_port
from tests.support.policy import FILES, bash
from tests.support.services import trainer
from tests.support.services.dying import Warm
from tests.support.services.restarting import insisting, spawner_if_any

from penstock.client import (
    Command,
    Inference,
    Mode,
    Penstock,
    RewardFrom,
    RolloutEvent,
    RolloutResult,
    Task,
    Tokenizer,
    Trajectory,
    Verifier,
    connect,
)
from penstock.client.types.results import ArtifactCollected, AttemptFailed, Ended, Grade
from penstock.driver.v1 import agent_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate_pb
from penstock.interception.v1 import rollout_gate_service_pb2_grpc as gate_grpc
from penstock_chassis.channel import connect as channel_to

__all__ = ["warm"]  # a fixture
pytestmark = pytest.mark.timeout(3600)  # a guard: something is killed at each write

HANGS_S: Final = 120.0
LABEL: Final = "victims"
MODEL: Final = "model"
TASK: Final = Task(
    task_id="copy",
    instruction="Copy the note.",
    setup=[Command(shell=f"echo {trainer.WORD} > note.txt")],
    verifier=Verifier(
        commands=[Command(shell='cmp note.txt out.txt && echo 1 > "$PENSTOCK_REWARD_FILE"')], reward=RewardFrom.FILE
    ),
)
SCRIPT: Final = {
    "strict": False,
    "turns": [
        {"when": {"has_tool_result": False}, "repeat": True, "reply": bash("echo one")},
        {"when": {"prompt_lacks": "cp note.txt"}, "repeat": True, "reply": bash("cp note.txt out.txt")},
        {"repeat": True, "reply": "Done."},
    ],
}
"""The engine's answers to the same three calls."""
SPAWNER, ENGINE, TRAINER, SANDBOX, GATE = VICTIMS = ("spawner", "engine", "trainer", "sandbox", "gate")
LOSSES: Final = {SPAWNER: (["SANDBOX_LOST"],), SANDBOX: (["SANDBOX_LOST"], ["TRANSPORT_UNAVAILABLE"])}
"""The attempts that a kill may cost: one, of a sandbox that is gone, or of a request to its service that broke."""


@dataclass(frozen=True)
class World:
    """The services that stay for all kills, but for the engine, which is there only as a victim."""

    folder: Path
    sandbox: Process
    interception: Process
    inference: Process | None

    @property
    def answers(self) -> Path:
        """The engine's log of one scenario."""
        return self.folder / "answers"


@contextmanager
def running(folder: Path, *, with_engine: bool) -> Iterator[World]:
    """Starts them."""
    FILES.write(folder / MODEL)
    settings = {"inference_address": "", "tokenizers": json.dumps({"tiny": str(folder / MODEL)})}
    inference = None
    if with_engine:
        (folder / "script.json").write_text(json.dumps(SCRIPT))
        engine.register(folder / "plugins")
        options = {"script": str(folder / "script.json"), "answers": str(folder / "answers")}
        of_engine = {"engine": engine.NAME, "engine_options": json.dumps(options), "model_dir": str(folder / MODEL)}
        inference = Process("inference", folder, of_engine)
        inference.path = os.pathsep.join([str(folder / "plugins"), os.environ.get("PYTHONPATH", "")])
        inference.start()
        settings |= {"inference_address": inference.address, "inference_token": TOKEN}
    interception = Process("interception", folder, settings)
    interception.start()
    upstreams = json.dumps([interception.endpoints["ingress"]])
    sandbox = Process("sandbox", folder, {"allowed_upstreams": upstreams})
    sandbox.start()
    yield World(folder, sandbox, interception, inference)
    for process in (sandbox, interception, inference):
        if process is not None:
            process.stop()


@asynccontextmanager
async def reborn(process: Process) -> AsyncIterator[None]:
    """Starts a process again whenever it is dead."""
    loop = asyncio.get_running_loop()

    async def watch() -> None:
        while True:
            dead, descriptor = asyncio.Event(), os.pidfd_open(process.pid)
            loop.add_reader(descriptor, dead.set)
            try:
                await dead.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
            process.kill()  # and waits for it
            process.start()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        if not watching.cancelled():
            watching.result()


async def spawner_of(world: World, ps: Penstock) -> int:
    """The one that makes sandboxes now; the service starts it with the first sandbox."""
    if spawner_if_any(world.sandbox.pid) is None:
        await (await ps.sandboxes.create()).delete()
    found = spawner_if_any(world.sandbox.pid)
    assert found is not None
    return found


@dataclass(frozen=True)
class Played:
    """What the scenario's client has seen."""

    result: RolloutResult
    events: list[RolloutEvent]
    trajectory: Trajectory
    grade: Grade


async def play(ps: Penstock, **options: Any) -> Played:
    """The scenario."""
    copier = agent_pb2.AgentSpec()
    copier.CopyFrom((await ps.agents.get("shell")).spec)
    copier.name = "copier"
    copier.files[0].json["max_retries"] = 9  # as long as an engine needs to start on a busy machine
    copier.artifacts.add(name="out", path="{{workdir}}/out.txt", required=True)
    await ps.agents.register(copier)
    labels = {"test": LABEL}
    handle = await insisting(
        lambda: ps.rollouts.create(TASK, "copier", rollout_id="r", labels=labels, max_attempts=4, **options),
        "the rollout is accepted",
    )
    events = [event async for event in handle.events()]
    result = await handle.result()
    trajectory = await handle.trajectory()
    grade = await insisting(lambda: handle.regrade(name="again"), "it is graded again")
    await handle.delete()
    return Played(result, events, trajectory, grade)


def _differences(played: Played, victim: str) -> Iterator[str]:
    """What the client should not have seen."""
    result, events, calls = played.result, played.events, played.trajectory.calls
    if result.failure is not None or result.reward is None or result.reward.value != 1.0:
        yield f"it ended as {result.outcome}"
    if played.grade.reward is None or result.reward is None or played.grade.reward.value != result.reward.value:
        yield f"it was graded again as {played.grade}"
    if [event.sequence for event in events] != list(range(1, len(events) + 1)):
        yield f"its events are {[event.sequence for event in events]}"
    kinds = Counter(type(event.payload) for event in events)
    if kinds[Ended] != 1 or not isinstance(events[-1].payload, Ended):
        yield "it has not one end, at the end"
    losses = [event.payload.failure.reason for event in events if isinstance(event.payload, AttemptFailed)]
    if losses and losses not in LOSSES.get(victim, ()):
        yield f"attempts were lost: {losses}"
    if result.rollout.attempts != 1 + len(losses):
        yield f"it took {result.rollout.attempts} attempts"
    if kinds[ArtifactCollected] != 1:
        yield f"{kinds[ArtifactCollected]} artifacts"
    # The agent asks again while no engine is there, each time by another call.
    states = [call.state for call in calls if victim != ENGINE or call.state != "failed"]
    if states != ["delivered"] * trainer.CALLS:
        yield f"its calls are {[(call.index, call.state) for call in calls]}"


def _sampled_by_trainer(played: Played, account: list[trainer.Asked]) -> Iterator[str]:
    """What the trainer was asked although there was an answer. No two of its answers are equal."""
    received = Counter(one.index for one in account if one.acknowledged)
    if max(received.values()) > 1:  # one whose acknowledgement died with the trainer is missing
        yield f"acknowledged answers to the calls {received}"
    last = {one.index: one.answer for one in account}
    for call in played.trajectory.calls:
        done = call.completion
        if done is None or done.token_ids is None or done.token_ids.tolist() != last.get(call.index):
            yield f"call {call.index} was asked again after its answer"
    prompts = [played.trajectory.prompt_of(call.call_id).tolist() for call in played.trajectory.calls]
    for one in account:
        if one.prompt not in prompts:
            yield f"call {one.index} was asked with answers that the trajectory has not"


def _sampled_by_engine(played: Played, answers: dict[str, list[list[int]]]) -> Iterator[str]:
    """What the engine sampled more than once; an answer that died with the engine had reached nobody."""
    calls = [call for call in played.trajectory.calls if call.state == "delivered"]
    for call in calls:
        done, sampled = call.completion, answers.get(call.call_id, [[]])
        if done is None or done.token_ids is None or done.token_ids.tolist() != sampled[-1]:
            yield f"call {call.index} has another answer than the engine sampled last"
    if (again := sum(map(len, answers.values())) - len(calls)) > 1:
        yield f"{again} answers were sampled again"


async def leaked(ps: Penstock, interception: Process) -> list[str]:
    """What is left in the services of a rollout that was deleted."""
    found = [f"sandbox {one} {state}" async for one, state in ps.sandboxes.list() if state != "lost"]
    async with channel_to(interception.address, TOKEN) as channel:
        gate: Any = gate_grpc.RolloutGateServiceStub(channel)
        for item in (await gate.ListRollouts(gate_pb.ListRolloutsRequest())).rollouts:
            found.append(f"{item.rollout_id} at the gate, state {item.state}")
            await gate.DeleteRollout(gate_pb.DeleteRolloutRequest(rollout_id=item.rollout_id))
    return found


async def played_out(world: World, warm: Warm, folder: Path, victim: str, at: int) -> tuple[list[Any], list[str]]:
    """The scenario, in which the victim is killed at a write; the writes of the driver, and what does not hold."""
    port, account = str(unused_port()), folder.with_name(f"{folder.name}.account")
    driver = driver_of(warm, folder, (world.sandbox, world.interception), port=port)
    addresses = {one.name: one.address for one in (world.sandbox, world.interception)}
    addresses["driver"] = f"127.0.0.1:{port}"
    found = ["it hangs"]
    async with AsyncExitStack() as stack:
        ps = await stack.enter_async_context(connect(addresses, TOKEN))
        if world.inference is not None:
            world.answers.unlink(missing_ok=True)
            victims_pid = world.inference.pid
            await stack.enter_async_context(reborn(world.inference))
            options: dict[str, Any] = {"mode": Mode.TRANSPARENT_PROXY, "source": Inference()}
        else:
            settings = {"addresses": json.dumps(addresses), "label": LABEL, "account": str(account)}
            answering = Process("trainer", folder, settings)
            answering.module = trainer.__name__
            answering.start()
            stack.callback(answering.kill)
            await stack.enter_async_context(reborn(answering))
            if victim in (SANDBOX, GATE):
                killed = world.sandbox if victim == SANDBOX else world.interception
                victims_pid = killed.pid
                await stack.enter_async_context(reborn(killed))
            else:
                victims_pid = answering.pid if victim == TRAINER else await spawner_of(world, ps)
            options = {"source": Tokenizer("tiny")}
        await driver.start(at, victim=victims_pid)
        with suppress(TimeoutError):
            async with asyncio.timeout(HANGS_S):
                played = await play(ps, **options)
                found = [*_differences(played, victim), *await leaked(ps, world.interception)]
                found += _sampled(played, world, account)
        await driver.kill()
    return driver.writes(), found


def _sampled(played: Played, world: World, account: Path) -> Iterator[str]:
    if world.inference is None:
        yield from _sampled_by_trainer(played, trainer.read(account))
    else:
        yield from _sampled_by_engine(played, engine.read([world.answers]))


@pytest.mark.requirement("R127", "R128", "R140")
@pytest.mark.parametrize(
    "every", [12, pytest.param(1, marks=pytest.mark.on_demand("each twelfth write shows it as well"))]
)
@pytest.mark.parametrize("victim", VICTIMS)
async def test_kill_of_another_at_a_write_of_the_driver_costs_no_answer(
    warm: Warm, tmp_path: Path, victim: str, every: int
) -> None:
    """The rollout ends once, with its reward; no answer that its agent had received is sampled again."""
    failed: dict[str, list[str]] = {}
    with running(tmp_path, with_engine=victim == ENGINE) as world:
        writes, found = await played_out(world, warm, tmp_path / "0", victim, 0)
        assert not found
        for at in range(1, len(writes) + 1, every):
            writes, found = await played_out(world, warm, tmp_path / str(at), victim, at)
            if found:
                failed[f"write {at}: {next(iter(writes[at - 1 :]), [])}"] = found
    assert not failed
