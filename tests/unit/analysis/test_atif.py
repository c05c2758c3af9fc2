"""ATIF documents, checked by the models of a package that implements the format."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import atif
import numpy as np
import orjson
import pytest
from tests.unit.analysis.test_chat_rows import call
from tests.unit.analysis.test_chat_rows import trajectory as branched

from penstock.analysis.interchange.atif import document, write
from penstock.chat.v1 import chat_pb2
from penstock.client import InvalidArgument, Trajectory
from penstock.client.wire.results import trajectory as from_proto
from penstock.trajectory.v1 import trajectory_pb2 as pb


def checked(trajectory: Trajectory) -> atif.Trajectory:
    made = document(trajectory)
    assert made is not None
    assert made["steps"]  # Harbor's own models want one; this package's do not
    return atif.Trajectory.model_validate_json(orjson.dumps(made))


def asking(name: str, arguments: str) -> pb.Call:
    """A call whose answer asks for a tool."""
    made = call(name, [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "I look.")
    asked = chat_pb2.ToolCall(id="t1", name="bash", arguments_json=arguments)
    made.completion.message.parts.append(chat_pb2.Part(tool_call=asked))
    made.prompt_count = 7
    span = made.completion.span
    span.token_ids, span.count = np.array([5, 6], "<i4").tobytes(), 2
    span.logprobs = np.array([-0.5, -0.25], "<f4").tobytes()
    span.versions.add(policy_version=3, start=0, end=2)
    made.end_time.FromSeconds(1_700_000_000)
    return made


def with_tools(result_of: str = "t1", arguments: str = '{"command":"ls"}') -> Trajectory:
    first = asking("c0", arguments)
    said: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "content": "I look. ",
            "tool_calls": [{"id": "t1", "function": {"name": "bash", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": result_of, "content": "a.txt"},
    ]
    second = call("c1", said, "There is a.txt.", parent="c0")
    second.completion.usage.MergeFrom(chat_pb2.Usage(prompt_tokens=20, completion_tokens=4, cached_tokens=9))
    message = pb.Trajectory(
        rollout_id="r", run_id="run", task_id="task", agent="shell", agent_spec_sha256="ab", calls=[first, second]
    )
    message.reward.value = 1.0
    message.branches.add(branch_id="b", branch_class=pb.CALL_CLASS_MAIN, call_ids=["c0", "c1"])
    return from_proto(message)


def test_a_rollout_is_a_document_with_its_tool_calls_results_and_tokens() -> None:
    made = checked(with_tools())
    assert [step.source for step in made.steps] == ["system", "user", "agent", "agent"]
    acted, ended = made.steps[2:]
    assert acted.tool_calls is not None and acted.observation is not None and acted.metrics is not None
    assert (acted.tool_calls[0].function_name, acted.tool_calls[0].arguments) == ("bash", {"command": "ls"})
    assert [(one.source_call_id, one.content) for one in acted.observation.results] == [("t1", "a.txt")]
    metrics = acted.metrics
    assert (metrics.prompt_tokens, metrics.completion_tokens, metrics.completion_token_ids) == (7, 2, [5, 6])
    assert metrics.logprobs == [-0.5, -0.25] and acted.llm_call_count == 1
    assert acted.extra == {"call_id": "c0", "finish_reason": "stop", "policy_versions": [3]}
    assert ended.message == "There is a.txt." and ended.model_name == "m"
    assert made.final_metrics is not None
    totals = made.final_metrics
    assert (totals.total_prompt_tokens, totals.total_completion_tokens, totals.total_cached_tokens) == (27, 6, 9)
    assert (made.session_id, made.trajectory_id, made.agent.name, made.agent.version) == ("r", "r-c1", "shell", "ab")
    assert made.extra is not None and (made.extra["reward"], made.extra["task_id"]) == (1.0, "task")


def test_other_conversations_of_a_rollout_are_embedded_and_what_they_repeat_is_marked() -> None:
    """A reader that trains on all steps would count the beginning twice."""
    made = checked(from_proto(branched()))
    assert made.subagent_trajectories is not None
    (other,) = made.subagent_trajectories
    assert [step.message for step in made.steps] == ["u", "a", "v", "b"]
    assert [(step.message, step.is_copied_context) for step in other.steps] == [
        *(("u", True), ("a", True), ("w", None), ("c", None))
    ]
    assert other.extra is not None and other.extra["role"] == "sub_agent"
    assert other.steps[3].extra is not None and other.steps[3].extra["injected"] is True
    assert made.agent.tool_definitions is not None and made.agent.tool_definitions[0]["function"]["name"] == "f"


def test_what_the_format_does_not_take_is_kept_beside() -> None:
    """Results of calls that the agent dropped, and arguments that are no object."""
    acted = checked(with_tools(result_of="other", arguments="{cut")).steps[2]
    assert acted.observation is not None and acted.tool_calls is not None
    (result,) = acted.observation.results
    assert (result.source_call_id, result.content, result.extra) == (None, "a.txt", {"tool_call_id": "other"})
    assert (acted.tool_calls[0].arguments, acted.tool_calls[0].extra) == ({}, {"arguments_text": "{cut"})


def test_messages_of_an_assistant_that_nobody_sampled_have_no_metrics() -> None:
    """An agent may begin with an example."""
    said = [{"role": "assistant", "content": "example"}, {"role": "user", "content": "u"}]
    message = pb.Trajectory(rollout_id="r", calls=[call("c0", said, "a")])
    message.branches.add(branch_class=pb.CALL_CLASS_MAIN, call_ids=["c0"])
    steps = checked(from_proto(message)).steps
    assert [(step.message, step.metrics is None) for step in steps] == [("example", True), ("u", True), ("a", False)]


def test_the_step_of_a_written_answer_is_its_calls() -> None:
    """The call that goes on after it has the call before it as parent."""
    asked = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]
    after = [*asked, {"role": "assistant", "content": "w"}, {"role": "user", "content": "x"}]
    calls = [
        call("c1", asked[:1], "a"),
        call("c2", asked, "w", parent="c1", injected=True),
        call("c3", after, "b", parent="c1"),
    ]
    message = pb.Trajectory(rollout_id="r", calls=calls)
    message.branches.add(branch_class=pb.CALL_CLASS_MAIN, call_ids=["c1", "c3"])
    extras = [step.extra for step in checked(from_proto(message)).steps if step.source == "agent"]
    assert [(extra["call_id"], extra.get("injected")) for extra in extras if extra is not None] == [
        *(("c1", None), ("c2", True), ("c3", None))
    ]


async def test_each_rollout_with_an_answer_is_a_file(tmp_path: Path) -> None:
    silent = from_proto(pb.Trajectory(rollout_id="silent"))

    async def found() -> AsyncIterator[Trajectory]:
        for one in (with_tools(), silent, replace(with_tools(), rollout_id="r2")):
            yield one

    assert await write(found(), tmp_path / "new") == 2
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["r.json", "r2.json"]
    kept = atif.Trajectory.model_validate_json((tmp_path / "new" / "r2.json").read_bytes())
    assert kept.session_id == "r2"


def test_a_trajectory_without_bodies_makes_no_document() -> None:
    message = branched()
    message.calls[1].request_body = b""
    with pytest.raises(InvalidArgument, match="bodies=True") as caught:
        document(from_proto(message))
    assert caught.value.reason == "BODIES_MISSING"
