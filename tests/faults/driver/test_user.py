"""kill -9 of the driver, and of the gate, in a conversation of an agent with a model that plays its user."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.integration.driver.stack import TOKEN, running
from tests.support.endpoints.upstream import Vendor, vendor

from penstock.client import Command, Task, Upstream, User, UserTurn, Verifier, connect
from penstock_codec import tiny_tokenizer

TASK = Task(
    task_id="talk",
    instruction="begin",
    verifier=Verifier(commands=[Command(shell="true")]),
)


class Talking:
    """The endpoint of both models: the agent says what it was given, and the user asks twice more.

    `held` are the requests, by the last message, that wait until `go_on`; each once.
    """

    def __init__(self, here: Vendor, *held: str) -> None:
        self.reached = {text: asyncio.Event() for text in held}
        self.asked: Counter[str] = Counter()
        self._here = here
        here.says = self._says
        here.hold = asyncio.Event()
        here.hold.set()
        here.during = self._count

    def _count(self) -> None:
        last = json.loads(self._here.completions[-1].body)["messages"][-1]["content"]
        self.asked[last] += 1
        if last in self.reached and not self.reached[last].is_set():
            assert self._here.hold is not None
            self._here.hold.clear()
            self.reached[last].set()

    @staticmethod
    def _says(body: bytes) -> str:
        request: dict[str, Any] = json.loads(body)
        last = request["messages"][-1]["content"]
        if "tools" in request:
            return f"did {last}"
        return {"did begin": "second", "did second": "third", "did third": "Thanks. [END]"}[last]

    def go_on(self) -> None:
        assert self._here.hold is not None
        self._here.hold.set()


@pytest.mark.requirement("R133", "R127", "R34")
@pytest.mark.on_demand("kill -9 of real services: each part is tested apart")
async def test_a_conversation_is_held_once_whatever_is_killed(tmp_path: Path) -> None:
    """The driver dies while the user is asked, and while the agent is at a further instruction; the gate, while the
    user is asked again. Each question is recorded once; what was on its way when the gate died is sent again.
    """
    tiny_tokenizer.build(["write"]).write(tmp_path / "tiny")
    async with vendor() as here:
        talk = Talking(here, "did begin", "second", "did second")
        with running(tmp_path, {"tiny": str(tmp_path / "tiny")}) as stack:
            stack.interception.stop()
            stack.interception.set("upstreams", json.dumps({"models": {"base_url": here.base_url}}))
            await asyncio.to_thread(stack.interception.start)
            async with connect(stack.addresses, TOKEN) as ps:
                models = Upstream(name="models", model="m")
                rollout = await ps.rollouts.create(
                    TASK,
                    "shell",
                    source=models,
                    mode="transparent_proxy",
                    user=User(prompt="You want it done.", source=models),
                )
                for text, service in (
                    ("did begin", stack.driver),
                    ("second", stack.driver),
                    ("did second", stack.interception),
                ):
                    async with asyncio.timeout(120):
                        await talk.reached[text].wait()
                    service.kill()
                    talk.go_on()
                    await asyncio.to_thread(service.start)
                result = await rollout.result()
                assert result.failure is None and result.reward is not None, result.outcome
                assert result.reward.value == 1.0 and result.rollout.attempts == 1
                trajectory = await rollout.trajectory()
                turns = [event.payload async for event in rollout.events() if isinstance(event.payload, UserTurn)]
    assert [(turn.index, turn.agent_message, turn.instruction, turn.end_reason) for turn in turns] == [
        (1, "did begin", "second", ""),
        (2, "did second", "third", ""),
        (3, "did third", "", "USER_ENDED"),
    ]
    once = dict.fromkeys(("begin", "did begin", "second", "third", "did third"), 1)
    assert talk.asked == {**once, "did second": 2}
    assert [call.call_class for call in trajectory.user_calls] == ["user"] * 3
    assert [call.state for call in (*trajectory.calls, *trajectory.user_calls)] == ["delivered"] * 6
    assert {call.call_class for call in trajectory.calls} == {"main"}
