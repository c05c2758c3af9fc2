"""The unmodified `openenv` client against our server: what worked there works here by changing an address."""

from __future__ import annotations

from typing import Any

import pytest
from tests.integration.openenv.conftest import COPY, STUCK, Server
from tests.support.waiting import eventually_async

from penstock.client import CallFinished, FailureCause, RolloutHandle

pytestmark = pytest.mark.asyncio(loop_scope="session")

RESULT = {
    *("task_id", "sandbox_id", "reward", "agent_exit_code", "wall_s", "mode", "setup_results", "verify_results"),
    *("proxy_turns", "files", "files_extra", "agent_log_tail", "proxy_log_tail", "error"),
}
TURN = {
    *("turn", "finish_reason", "completion_tokens", "completion_token_ids", "per_token_logps", "latency_s"),
    *("timestamp", "upstream_status", "upstream_error"),
}


def assert_result(result: dict[str, Any]) -> None:
    """The result of the copied word, with every field of the predecessor's."""
    assert result.keys() >= RESULT
    assert (result["task_id"], result["mode"], result["error"]) == ("copy/1", "transparent_proxy", None)
    assert (result["reward"], result["agent_exit_code"]) == (0.5, 0)
    assert result["sandbox_id"] and result["wall_s"] > 0
    (setup,) = result["setup_results"]
    assert (setup["cmd"], setup["exit_code"]) == ("echo word > note.txt", 0)
    assert [item["exit_code"] for item in result["verify_results"]] == [0, 1]
    assert result["verify_results"][1] | {"duration_s": 0} == {
        "cmd": "echo told; false",
        "exit_code": 1,
        "stdout": "told\n",
        "stderr": "",
        "duration_s": 0,
    }
    assert (result["files"]["note.txt"], result["files_extra"]) == ("word\n", [])
    assert [turn["turn"] for turn in result["proxy_turns"]] == [0, 1]
    for turn in result["proxy_turns"]:
        assert turn.keys() >= TURN
        assert len(turn["completion_token_ids"]) == len(turn["per_token_logps"]) > 0
        assert turn["timestamp"] > 0
    assert [turn["finish_reason"] for turn in result["proxy_turns"]] == ["tool_calls", "stop"]
    assert '"done"' in result["agent_log_tail"]


@pytest.mark.requirement("R57", "R63", "R65", "R82")
async def test_tool_client_runs_a_rollout_and_gets_its_mistakes(server: Server) -> None:
    """Reset, the tool's listing, the whole result, the state, and errors by name."""
    reset, tool, result, state, mode, unknown = await server.call("tools", COPY)
    assert reset["reset"]["status"] == "ready"
    assert (tool["tool"], tool["other"]) == ("run_rollout", "terminal")
    assert {"instruction", "endpoint", "base_url", "api_key", "model", "setup", "verify", "task_id", "mode"} <= set(
        tool["properties"]
    )
    assert_result(result["result"])
    assert state == {"episode_id": "episode-1", "step_count": 1}
    assert "mode 'magic' is unknown" in mode["error"]
    assert "Unknown tool" in unknown["error"]
    rollout = await server.ps.rollouts.get(result["result"]["rollout_id"])
    assert rollout.labels["openenv_episode"] == "episode-1"


@pytest.mark.requirement("R57", "R74")
async def test_the_generic_client_takes_the_same_as_steps(server: Server) -> None:
    """Over one WebSocket; the reward stands in the tool's result, and the step has none of its own."""
    tools, taken, state, refused = await server.call("steps", COPY)
    assert tools["tools"] == ["run_rollout", "terminal"]
    assert_result(taken["result"])
    assert (taken["done"], taken["reward"]) == (False, None)
    assert state["state"]["rollouts_completed"] == 1
    assert state["state"]["last_reward"] == 0.5
    assert state["state"]["last_task_id"] == "copy/1"
    assert state["state"]["last_sandbox_id"] == taken["result"]["sandbox_id"]
    assert refused["error"]["error_type"] == "invalid_args"
    assert "instruction" in refused["error"]["message"]


TYPED = {
    "setup": ["mkdir deep", "echo prepared"],
    "verify": ["grep -qx kiwi out.txt", "false"],
    "calls": [
        {"command": "cd deep && export WORD=kiwi", "final_answer": ""},
        {"command": "basename $PWD; echo $WORD > ../out.txt; ls / | grep -c verify"},
        {"command": "true", "final_answer": "both"},
        {"command": "echo 1 > $PENSTOCK_REWARD_FILE; echo reward=1.0", "final_answer": ""},
        {"final_answer": "The word is there."},
        {"command": "true"},
    ],
}


@pytest.mark.requirement("R70", "R77", "R78", "R80")
async def test_a_terminal_keeps_its_shell_and_its_reward_is_the_observations_own(server: Server) -> None:
    """Setup before the first command, one end, no command after it, and no sandbox is left."""
    ready, first, second, mistaken, _, end, late, state = await server.call("terminal", TYPED)
    assert (ready["metadata"]["status"], ready["done"]) == ("ready", False)
    assert [item["exit_code"] for item in ready["metadata"]["setup_results"]] == [0, 0]
    assert ready["metadata"]["setup_results"][1]["stdout"] == "prepared\n"
    assert (first["said"], first["reward"], first["done"]) == ("[no output]", None, False)
    assert second["said"].startswith("deep\n0")
    assert mistaken["error"]["error_type"] == "invalid_args"
    assert (end["reward"], end["done"], end["error"]) == (0.5, True, None)
    assert "EPISODE_ENDED" in late["error"]["message"]
    assert (state["state"]["last_reward"], state["state"]["last_sandbox_id"]) == (0.5, ready["metadata"]["sandbox_id"])
    assert ready["metadata"]["sandbox_id"] not in [sandbox_id async for sandbox_id, _ in server.ps.sandboxes.list()]


@pytest.mark.requirement("R57", "R58", "R65")
async def test_terminal_needs_no_task_and_a_failed_setup_ends_it(server: Server) -> None:
    """The first command opens one; what cannot be opened is told as the episode's end."""
    (typed,) = await server.call("typed")
    assert typed["said"] == ["[no output]", "/tmp"]
    failed, refused, _ = await server.call("terminal", {"setup": ["exit 3"], "calls": [{"command": ""}]})
    assert (failed["metadata"]["status"], failed["done"]) == ("error", True)
    assert "SETUP_FAILED" in failed["metadata"]["error"]
    assert refused["error"]["error_type"] == "invalid_args"


@pytest.mark.requirement("R57", "R58", "R74")
async def test_failed_setup_returns_its_exit_code_and_no_reward(server: Server) -> None:
    _, taken, *_ = await server.call("steps", {**COPY, "setup": ["true", "echo why >&2; exit 3"]})
    result = taken["result"]
    assert [item["exit_code"] for item in result["setup_results"]] == [0, 3]
    assert result["setup_results"][1]["stderr"] == "why\n"
    assert (result["reward"], result["verify_results"], result["agent_exit_code"]) == (None, [], None)
    assert result["error"].startswith("task/SETUP_FAILED")


@pytest.mark.requirement("R26")
async def test_full_server_refuses_and_accepts_after_one_has_left(server: Server) -> None:
    """Bounded, and told by name."""
    held = await server.start("wait", STUCK)
    await running(server, "waiting")
    refused, third = await server.call("crowd")
    assert "CAPACITY_REACHED" in refused["refused"]
    assert third == {"third": "in"}
    held.kill()
    await held.wait()


@pytest.mark.requirement("R50", "R70")
async def test_a_client_that_dies_ends_its_rollout_and_its_sandbox(server: Server) -> None:
    """Killed while it waits for an answer over HTTP; nothing of it stays."""
    caller = await server.start("wait", STUCK)
    handle = await running(server, "waiting")
    caller.kill()
    await assert_ended(server, handle)
    await caller.wait()


@pytest.mark.requirement("R70")
async def test_closing_the_connection_in_the_middle_of_a_step_ends_the_rollout(server: Server) -> None:
    """The client leaves in order, by its own close."""
    caller = await server.start("leave", STUCK)
    handle = await running(server, "leaving")
    out, _ = await caller.communicate(b"now\n")
    assert caller.returncode == 0
    assert b"left" in out
    await assert_ended(server, handle)


async def running(server: Server, episode: str) -> RolloutHandle:
    """The rollout of an episode, once its agent has got an answer."""
    found: list[str] = []

    async def begun() -> bool:
        listed = server.ps.rollouts.list(labels={"openenv_episode": episode}, ended=False)
        found.extend([rollout.rollout_id async for rollout in listed])
        return bool(found)

    await eventually_async(begun, f"a rollout of the episode {episode}", within=240)
    handle = await server.ps.rollouts.attach(found[0])
    async for event in handle.events():
        if isinstance(event.payload, CallFinished):
            return handle
    raise AssertionError("the rollout ended without a call")


async def assert_ended(server: Server, handle: RolloutHandle) -> None:
    """It was cancelled, and its sandbox is gone."""
    ended = await handle.result()
    assert ended.failure is not None
    assert ended.failure.cause is FailureCause.CANCELLED
    assert [item async for item in server.ps.sandboxes.list(labels={"penstock_rollout": handle.rollout_id})] == []
