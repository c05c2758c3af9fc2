"""What is not trained is told: in the grade of the capture and in what the command line sums up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.cli.views import outcomes
from penstock.client.wire import results
from penstock.trajectory.v1 import trajectory_pb2

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
TASK = {"role": "user", "content": "list the files"}


async def ask(rollout: Any, trainer: Any, messages: list[Any], text: str, **body: Any) -> Any:
    """One call and its answer."""
    asking = asyncio.create_task(rollout.client().chat.completions.create(model="m", messages=messages, **body))
    await trainer.answer(text)
    return (await asking).choices[0].message


@pytest.mark.requirement("R102")
async def test_untrained_title_is_a_finding_with_turns_and_tokens(service: Any) -> None:
    """In the grade and in the summary; a line that goes on under another system prompt is trained."""
    rollout, trainer = await service.open(), await service.trainer()
    for _ in range(2):
        await ask(rollout, trainer, [{"role": "system", "content": "Find a title."}, TASK], "Files")
    dated = [{"role": "system", "content": "Today is Monday."}, TASK]
    said = await ask(rollout, trainer, dated, "I see two.", tools=[TOOL])
    dated[0] = {"role": "system", "content": "Today is Tuesday."}
    history = [*dated, {"role": "assistant", "content": said.content}, {"role": "user", "content": "And then?"}]
    await ask(rollout, trainer, history, "Nothing more.", tools=[TOOL])
    open_one = await service.capture(rollout.rollout_id)
    assert not [item for item in open_one.findings if item.reason == "TURNS_UNTRAINED"]
    await service.close(rollout.rollout_id)
    captured = await service.capture(rollout.rollout_id)
    told = {item.message: item for item in captured.findings if item.reason == "TURNS_UNTRAINED"}
    tokens = [len(call.completion.span.token_ids) // 4 for call in captured.calls]
    assert set(told) == {
        f"1 turn with {tokens[0]} sampled tokens not trained: CLASS_RETRY.",
        f"1 turn with {tokens[1]} sampled tokens not trained: CLASS_TITLE.",
    }
    assert {item.severity for item in told.values()} == {trajectory_pb2.Finding.SEVERITY_INFO}
    assert captured.grade == trajectory_pb2.GRADE_EXACT
    trained = {turn.call_id for sample in captured.samples for turn in sample.turns if not turn.untrained_reason}
    assert trained == {call.call_id for call in captured.calls[2:]}
    summary = outcomes.totals(results.trajectory(captured))
    assert all(message in summary for message in told)
