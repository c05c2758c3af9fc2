"""kill -9 of the driver and of the gate while a verifier asks its judge: each question is recorded and counted once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from tests.integration.driver.stack import TOKEN, running
from tests.integration.driver.test_service import echo_agent
from tests.support.endpoints.upstream import Vendor, vendor

from penstock.client import (
    Budgets,
    Command,
    Judge,
    Penstock,
    RewardFrom,
    RolloutHandle,
    SeedFile,
    Task,
    Tokenizer,
    Upstream,
    Verifier,
    connect,
)
from penstock_codec import tiny_tokenizer

RULES = ("is short", "is polite", "is true")
EXAMPLE = Path(__file__).parents[3] / "examples" / "judge" / "judge.py"
TASK = Task(
    task_id="letter",
    instruction="write",
    verifier=Verifier(
        files=[SeedFile("judge.py", EXAMPLE.read_bytes()), SeedFile("rubric.txt", "\n".join(RULES).encode())],
        commands=[Command(shell='test -z "$PENSTOCK_JUDGE_KEY"'), Command(argv=["python3", "judge.py"])],
        reward=RewardFrom.FILE,
        judge=Judge(source=Upstream(name="judge", model="m"), budgets=Budgets(max_calls=len(RULES))),
    ),
)


class Judging:
    """The judge's endpoint: it says yes to all but `is polite`, and holds the first answer to some rules."""

    def __init__(self, here: Vendor, held: tuple[str, ...]) -> None:
        self.reached = {rule: asyncio.Event() for rule in held}
        self.asked: Counter[str] = Counter()
        self._here = here
        here.says = lambda body: "No." if b"is polite" in body else "Yes, it is."
        here.hold = asyncio.Event()
        here.hold.set()
        here.during = self._count

    def _count(self) -> None:
        text = json.loads(self._here.completions[-1].body)["messages"][0]["content"]
        (rule,) = [rule for rule in RULES if rule in text]
        self.asked[rule] += 1
        if rule in self.reached and not self.reached[rule].is_set():
            assert self._here.hold is not None
            self._here.hold.clear()
            self.reached[rule].set()

    def go_on(self) -> None:
        assert self._here.hold is not None
        self._here.hold.set()


async def created(ps: Penstock) -> RolloutHandle:
    await ps.agents.register(echo_agent(name="writes", argv=["/bin/sh", "-c", "echo Dear all > out.txt"]))
    return await ps.rollouts.create(TASK, "writes", source=Tokenizer("tiny"))


@pytest.mark.requirement("R134", "R127", "R34")
@pytest.mark.on_demand("kill -9 while a judge is asked: the gate's and the driver's parts are tested apart")
async def test_a_judge_is_asked_each_question_once_whatever_is_killed(tmp_path: Path) -> None:
    """The grade is as undisturbed, in one attempt; the answer on its way when the gate died is asked for again."""
    tiny_tokenizer.build(["write"]).write(tmp_path / "tiny")
    async with vendor() as here:
        judging = Judging(here, ("is polite", "is true"))
        with running(tmp_path, {"tiny": str(tmp_path / "tiny")}) as stack:
            stack.interception.stop()
            stack.interception.set("upstreams", json.dumps({"judge": {"base_url": here.base_url}}))
            await asyncio.to_thread(stack.interception.start)
            async with connect(stack.addresses, TOKEN) as ps:
                rollout = await created(ps)
                async with asyncio.timeout(60):
                    await judging.reached["is polite"].wait()
                stack.driver.kill()
                judging.go_on()
                await asyncio.to_thread(stack.driver.start)
                async with asyncio.timeout(60):
                    await judging.reached["is true"].wait()
                stack.interception.kill()
                judging.go_on()
                await asyncio.to_thread(stack.interception.start)
                result = await rollout.result()
                assert result.failure is None, result.outcome
                assert result.reward is not None and result.reward.value == pytest.approx(2 / 3)
                assert result.rollout.attempts == 1
                trajectory = await rollout.trajectory()
    assert judging.asked == {"is short": 1, "is polite": 1, "is true": 2}
    assert [call.state for call in trajectory.judge_calls] == ["delivered"] * len(RULES)
    assert {call.call_class for call in trajectory.judge_calls} == {"judge"}
    assert not trajectory.calls and not trajectory.samples
