"""A gate that comes back without its disk, or too late: nothing is replayed, the events say why, and the rollout is
rewarded once.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration.driver.stack import TOKEN, Process
from tests.integration.driver.test_rollouts import TASK
from tests.support.copying import Finished, copy_task, finish, training
from tests.support.policy import FILES, Reply, Trainer, in_shell, in_turn
from tests.support.services.restarting import restartable
from tests.support.services.stack import disjoint_uids
from tests.support.waiting import eventually_async

from penstock.client import Endpoints, ModelCall, Penstock, Progress, Tokenizer, Trajectory, Unavailable, connect
from penstock.client.types.results import AttemptFailed, Ended

TURNS: Reply = in_turn(in_shell("echo one"), in_shell("bash work.sh"), "The word is copied.")
"""Three calls; the second does the work."""
_COPY: Reply = in_turn(in_shell("echo one"), in_shell("cat note.txt > out.txt"), "The word is copied.")
_GATES = ("g0", "g1")


def failures(finished: Finished) -> list[tuple[int, str]]:
    """The attempts that failed, with the reason of each."""
    payloads = [event.payload for event in finished.events]
    return [(one.attempt, one.failure.reason) for one in payloads if isinstance(one, AttemptFailed)]


def not_replayed(finished: Finished) -> list[str]:
    """Why answers are not replayed, as the events say."""
    said = [event.payload.message for event in finished.events if isinstance(event.payload, Progress)]
    before = "the last attempt's answers cannot be read, to be replayed: "
    return [one.removeprefix(before) for one in said if one.startswith(before)]


def sampled_anew(trajectory: Trajectory) -> bool:
    """Whether the second attempt replayed none of its calls."""
    return trajectory.attempt == 2 and [call.replayed_from for call in trajectory.calls] == [None] * 3


@pytest.mark.requirement("R120", "R128")
async def test_a_gate_that_comes_back_without_its_disk_costs_the_attempt(tmp_path: Path) -> None:
    """The rollout begins from the start at the same gate, which knows nothing of it; the model is asked all again."""
    async with restartable(tmp_path) as (running, stack):
        label = secrets.token_hex(8)
        async with training(running, label, TURNS) as trainer:

            async def before(call: ModelCall) -> None:
                if call.index == 2 and stack.pid("interception") == first:
                    await stack.kill("interception")
                    shutil.rmtree(Path(stack.state_dir) / "interception")
                    await stack.start_again("interception")
                    await asyncio.Event().wait()  # the gate that asked is gone

            first = stack.pid("interception")
            trainer.before = before
            handle = await running.ps.rollouts.create(
                copy_task(running), "shell", labels={"test": label}, max_attempts=3
            )
            finished = await finish(handle)
            trajectory = await handle.trajectory()
            asked = [call.index for call in trainer.calls]
        assert finished.reward == 1.0, finished.agent_said()
        assert failures(finished) == [(1, "GATE_LOST")], finished.agent_said()
        (why,) = not_replayed(finished)
        assert why.startswith("ROLLOUT_UNKNOWN: its gate lost its disk")
        assert asked == [0, 1, 2, 0, 1, 2]
        assert sampled_anew(trajectory)
        assert sum(isinstance(event.payload, Ended) for event in finished.events) == 1


@dataclass(frozen=True, slots=True)
class Fleet:
    """A driver, which waits for no gate that is away, with a sandbox service and two gates."""

    driver: Process
    sandbox: Process
    gates: dict[str, Process]

    def at(self, gate: str = "g0", *, discover: bool = True) -> Penstock:
        """A client; without `discover` of this gate alone."""
        where = Endpoints(
            driver=self.driver.address,
            interception=self.gates[gate].address,
            sandbox=self.sandbox.address,
            inference="",
            token=TOKEN,
            discover=discover,
        )
        return connect(where)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    started: list[Process] = []

    def start(kind: str, name: str, **settings: str) -> Process:
        (tmp_path / name).mkdir()
        process = Process(kind, tmp_path / name, {"name": name, **settings})
        process.start()
        started.append(process)
        return process

    FILES.write(tmp_path / "tiny")
    tokenizers = json.dumps({"tiny": str(tmp_path / "tiny")})
    try:
        gates = {name: start("interception", name, inference_address="", tokenizers=tokenizers) for name in _GATES}
        upstreams = json.dumps([gate.endpoints["ingress"] for gate in gates.values()])
        sandbox = start("sandbox", "n0", allowed_upstreams=upstreams, first_uid=str(disjoint_uids()))
        driver = start(
            "driver",
            "d0",
            sandbox_members=f"static:n0={sandbox.address}",
            sandbox_token=TOKEN,
            interception_members="static:" + ",".join(f"{name}={gate.address}" for name, gate in gates.items()),
            interception_token=TOKEN,
            recording_wait_s="0",
        )
        yield Fleet(driver, sandbox, gates)
    finally:
        for process in reversed(started):
            process.stop()


@pytest.mark.requirement("R120", "R121", "R128")
async def test_a_gate_that_comes_back_too_late_is_not_waited_for(fleet: Fleet) -> None:
    """The other gate has the next attempt, which samples everything again; back, the first one has nothing open."""
    lost: list[str] = []
    async with fleet.at() as ps, ps.intercept(labels={"test": "late"}, messages=True) as session:

        async def before(call: ModelCall) -> None:
            if call.index == 2 and not lost:
                home = (await handle.refresh()).home
                assert home is not None
                lost.append(home.gate)
                await asyncio.to_thread(fleet.gates[home.gate].kill)
                await asyncio.Event().wait()

        trainer = Trainer(session, _COPY, before=before)
        work = asyncio.create_task(trainer.run())
        try:
            handle = await ps.rollouts.create(
                TASK, "shell", source=Tokenizer("tiny"), labels={"test": "late"}, max_attempts=2
            )
            finished = await finish(handle)
            trajectory = await handle.trajectory()
        finally:
            work.cancel()
            await asyncio.wait([work])
        assert finished.reward == 1.0, finished.agent_said()
        assert failures(finished) == [(1, "GATE_LOST")], finished.agent_said()
        (why,) = not_replayed(finished)
        assert why == f"GATE_LOST: gate {lost[0]}, which has the calls of {handle.rollout_id}, does not answer"
        assert [call.index for call in trainer.calls] == [0, 1, 2, 0, 1, 2]
        assert sampled_anew(trajectory)

        await asyncio.to_thread(fleet.gates[lost[0]].start)
        async with fleet.at(lost[0], discover=False) as alone:

            async def is_released() -> bool:
                try:
                    return (await alone.gate.get(handle.rollout_id)).close_reason == "ROLLOUT_ENDED"
                except Unavailable:
                    return False

            await eventually_async(is_released, "the late gate has closed what it had")
        again = await handle.result()
        assert again.reward == finished.result.reward and again.rollout.attempts == 2
        assert sampled_anew(await handle.trajectory())
