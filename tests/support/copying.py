"""The task that every agent can do: run `work.sh`, which copies a word and looks for a way out of the sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.network import AGENT_PORT, probe_script, said, targets
from tests.support.policy import Reply, Trainer, in_shell, once_done
from tests.support.services.stack import Running

from penstock.client import (
    Command,
    CommandFinished,
    Phase,
    RewardFrom,
    RolloutEvent,
    RolloutHandle,
    RolloutResult,
    SeedFile,
    Task,
    Verifier,
)

WORD = "kiwi"
INSTRUCTION = "Run work.sh with bash: it copies the word in note.txt to out.txt."
REPLY: Reply = once_done(in_shell("bash work.sh", description="Does the work"), "The word is copied.")


def copy_task(running: Running, **changes: Any) -> Task:
    """Reward 1 when out.txt holds the word; the verifier's second command tells what the agent's script saw."""
    ports = {AGENT_PORT, *running.ports.values()}
    given: dict[str, Any] = {
        "task_id": "copy",
        "instruction": INSTRUCTION,
        "files": [
            SeedFile("work.sh", b"cat note.txt > out.txt\nbash probe.sh > probe.txt 2>&1\necho copied\n"),
            SeedFile("probe.sh", probe_script(targets(ports)).encode()),
        ],
        "setup": [Command(shell=f"echo {WORD} > note.txt")],
        "verifier": Verifier(
            commands=[
                Command(shell=f'[ "$(cat out.txt)" = {WORD} ] && echo 1 > "$PENSTOCK_REWARD_FILE"'),
                Command(["cat", "probe.txt"]),
            ],
            reward=RewardFrom.FILE,
        ),
    }
    return Task(**(given | changes))


@dataclass(frozen=True)
class Finished:
    """An ended rollout with all that it said."""

    handle: RolloutHandle
    result: RolloutResult
    events: list[RolloutEvent]

    @property
    def reward(self) -> float | None:
        """None = not graded."""
        return None if self.result.reward is None else self.result.reward.value

    def commands(self, phase: Phase) -> list[CommandFinished]:
        """The commands of a phase, in order."""
        payloads = [event.payload for event in self.events]
        return [item for item in payloads if isinstance(item, CommandFinished) and item.phase is phase]

    def agent_said(self) -> str:
        """Everything that helps to understand a failure."""
        lines = "\n".join(str(event.payload)[:600] for event in self.events)
        return f"{self.result.outcome}\n{self.result.outcome.agent_stderr.decode(errors='replace')}\n{lines}"


async def finish(handle: RolloutHandle) -> Finished:
    """Watch a rollout to its end."""
    events = [event async for event in handle.events()]
    return Finished(handle, await handle.result(), events)


@asynccontextmanager
async def training(running: Running, label: str, reply: Reply = REPLY) -> AsyncIterator[Trainer]:
    """A trainer for the rollouts that carry the label `test`."""
    async with running.ps.intercept(labels={"test": label}, messages=True, bodies=True) as session:
        trainer = Trainer(session, reply)
        work = asyncio.create_task(trainer.run())
        try:
            yield trainer
            if work.done():
                work.result()
        finally:
            work.cancel()
            await asyncio.wait([work])


def assert_only_the_endpoint_was_reachable(finished: Finished) -> None:
    """By the report of the task's probe: one listener, one interface, no address of this host (R14)."""
    report = finished.commands(Phase.VERIFYING)[1].stdout_tail.decode()
    assert said(report, "open") == [f"127.0.0.1 {AGENT_PORT}"], report
    assert said(report, "listens") == [str(AGENT_PORT)], report
    assert said(report, "interface") == ["lo"], report
    assert said(report, "closed"), "the probe tried nothing"
