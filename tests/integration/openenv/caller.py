"""A user of the `openenv` package from PyPI, unmodified, who has changed nothing but the address.

Run by the interpreter of `.venv-openenv`: `caller.py SCENARIO ADDRESS [ARGUMENTS]`. Prints one JSON line for each thing
that a test wants to see, and knows nothing of Penstock. Without arguments it takes one scenario after another as lines
of JSON, as the package alone takes seconds to import, and says when each is over.
"""

import asyncio
import json
import sys
import traceback
from typing import Any

from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient


def tell(**facts: Any) -> None:
    """A line for the test."""
    print(json.dumps(facts, default=str), flush=True)


def tools(address: str, arguments: dict[str, Any]) -> None:
    """The tool client: the session is made over HTTP, and joined by a WebSocket."""
    with MCPToolClient(base_url=address, message_timeout_s=280).sync() as env:
        tell(reset=env.reset(seed=3, episode_id="episode-1").observation.metadata)
        tool, other = env.list_tools()
        tell(tool=tool.name, properties=sorted(tool.input_schema["properties"]), other=other.name)
        tell(result=json.loads(env.call_tool("run_rollout", **arguments)))
        state = env.state()
        tell(episode_id=state.episode_id, step_count=state.step_count)
        for name, given in (("run_rollout", {**arguments, "mode": "magic"}), ("other", {})):
            try:
                env.call_tool(name, **given)
            except RuntimeError as error:
                tell(error=str(error))


def steps(address: str, arguments: dict[str, Any]) -> None:
    """The generic client: everything is a step on one WebSocket."""
    with GenericEnvClient(base_url=address, message_timeout_s=280) as env:
        env.reset()
        tell(tools=[tool["name"] for tool in env.step({"type": "list_tools"}).observation["tools"]])
        taken = env.step({"type": "call_tool", "tool_name": "run_rollout", "arguments": arguments})
        tell(result=json.loads(taken.observation["result"]["data"]), done=taken.done, reward=taken.reward)
        tell(state=env.state())
        refused = env.step({"type": "call_tool", "tool_name": "run_rollout", "arguments": {"instruction": " "}})
        tell(error=refused.observation["error"])


def terminal(address: str, arguments: dict[str, Any]) -> None:
    """The generic client types: `calls` of the arguments, one after another; the others are the reset's."""
    calls = arguments.pop("calls")
    with GenericEnvClient(base_url=address, message_timeout_s=280) as env:
        ready = env.reset(**arguments)
        tell(metadata=ready.observation["metadata"], done=ready.done)
        for given in calls:
            taken = env.step({"type": "call_tool", "tool_name": "terminal", "arguments": given})
            result, error = taken.observation["result"], taken.observation["error"]
            tell(said=result and result["data"], error=error, reward=taken.reward, done=taken.done)
        tell(state=env.state())


def typed(address: str, _: dict[str, Any]) -> None:
    """The tool client types after a reset that says nothing."""
    with MCPToolClient(base_url=address, message_timeout_s=280).sync() as env:
        env.reset()
        tell(said=[env.call_tool("terminal", command=command) for command in ("cd /tmp", "pwd")])


def crowd(address: str, _: dict[str, Any]) -> None:
    """More clients than there are places: one too many is told so, and gets in when another has left."""

    async def work() -> None:
        first = GenericEnvClient(base_url=address)
        second = GenericEnvClient(base_url=address)
        await first.connect()
        await first.reset()
        await second.connect()
        try:
            await second.reset()
        except RuntimeError as error:
            tell(refused=str(error))
        await second.close()
        await first.close()
        third = GenericEnvClient(base_url=address)
        async with third:
            await third.reset()
            tell(third="in")

    asyncio.run(work())


def wait(address: str, arguments: dict[str, Any]) -> None:
    """Calls over HTTP and waits for as long as it lives."""
    with MCPToolClient(base_url=address, message_timeout_s=280).sync() as env:
        env.reset(episode_id="waiting")
        env.call_tool("run_rollout", **arguments)


def leave(address: str, arguments: dict[str, Any]) -> None:
    """Begins a step, and closes the connection when it is told to."""

    async def work() -> None:
        async with GenericEnvClient(base_url=address, message_timeout_s=280) as env:
            await env.reset(episode_id="leaving")
            step = {"type": "call_tool", "tool_name": "run_rollout", "arguments": arguments}
            stepping = asyncio.create_task(env.step(step))
            await asyncio.to_thread(sys.stdin.readline)
            stepping.cancel()
        tell(left=True)

    asyncio.run(work())


SCENARIOS = {one.__name__: one for one in (tools, steps, terminal, typed, crowd, wait, leave)}


def take_orders() -> None:
    """Scenario after scenario; one that breaks is told with its end."""
    for line in sys.stdin:
        order = json.loads(line)
        try:
            SCENARIOS[order["scenario"]](order["address"], order["arguments"])
        except Exception:  # noqa: BLE001 - whatever it is, the test is to say it
            tell(over=True, broke=traceback.format_exc())
        else:
            tell(over=True, broke=None)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        take_orders()
    else:
        scenario, where, *more = sys.argv[1:]
        SCENARIOS[scenario](where, json.loads(more[0]) if more else {})
