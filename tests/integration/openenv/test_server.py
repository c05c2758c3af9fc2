"""The server's own promises: who may call, what is refused by name before anything starts, and its command."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tests.integration.openenv.conftest import COPY, STUCK, TOKEN, Server
from tests.support.endpoints.upstream import vendor
from tests.support.waiting import eventually_async

from penstock.adapters.openenv.rollout_arguments import Defaults, parse
from penstock.adapters.openenv.rollouts import run_rollout
from penstock.adapters.openenv.serving import Listen, serving
from penstock.client import ConfigurationError, FailureCause, InvalidArgument, connect
from penstock.client.transport.endpoints import write_connection
from penstock.local.stack import LocalStack

pytestmark = pytest.mark.asyncio(loop_scope="session")

BEARER = {"authorization": f"Bearer {TOKEN}"}


@pytest_asyncio.fixture(loop_scope="session")
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A plain client."""
    async with aiohttp.ClientSession() as session:
        yield session


async def rpc(
    http: aiohttp.ClientSession, server: Server, method: str, params: dict[str, Any] | None = None
) -> dict[str, Any]:
    """An answer over `POST /mcp`."""
    body = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params or {}}
    async with http.post(f"{server.bare}/mcp", json=body, headers=BEARER) as answer:
        assert answer.status == 200
        told: dict[str, Any] = await answer.json()
    assert told["id"] == 7
    return told


@pytest.mark.requirement("R5", "R6", "R7")
@pytest.mark.parametrize("path", ["/metadata", "/schema", "/state", "/reset", "/step", "/mcp", "/ws", "/nowhere"])
async def test_only_health_answers_without_the_token(server: Server, http: aiohttp.ClientSession, path: str) -> None:
    """Whether there is such a route is not told either."""
    wrong: tuple[dict[str, str], ...] = (
        {},
        {"authorization": "Bearer "},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": "Basic !"},
        {"authorization": "Basic " + base64.b64encode(b"user:no").decode()},
        {"authorization": TOKEN},
    )
    for headers in wrong:
        for method in ("GET", "POST"):
            async with http.request(method, server.bare + path, headers=headers) as answer:
                assert answer.status == 401, (method, headers)
    async with http.get(f"{server.bare}/health") as answer:
        assert (answer.status, await answer.json()) == (200, {"status": "healthy"})


@pytest.mark.requirement("R14")
async def test_a_page_of_another_origin_is_refused(server: Server, http: aiohttp.ClientSession) -> None:
    """A browser that was given the token, or an open server, is no way in for other pages."""
    async with http.get(f"{server.bare}/state", headers={**BEARER, "origin": "https://evil.example"}) as answer:
        assert answer.status == 403
    async with serving(server.ps, Listen(port=0), Defaults()) as open_address:
        for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}):
            async with http.get(f"{open_address}/state", headers=headers) as answer:
                assert answer.status == 403
        async with http.get(f"{open_address}/state") as answer:
            assert answer.status == 200


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "instruction"),
    "an unknown argument": ({**COPY, "sedd": 1}, "sedd"),
    "a mode that does not exist": ({**COPY, "mode": "white_box"}, "mode"),
    "nobody who answers": ({"instruction": "x"}, "endpoint"),
    "an address without a key": ({"instruction": "x", "base_url": "http://127.0.0.1:1/v1", "model": "m"}, "api_key"),
    "an operator's endpoint with another's address": ({**COPY, "base_url": "http://127.0.0.1:1/v1"}, "base_url"),
    "an agent that nobody knows": ({**COPY, "agent": "nobody"}, "agent"),
    "an upstream that nobody knows": ({**COPY, "endpoint": "nobody"}, "UPSTREAM_UNKNOWN"),
    "an option that the agent does not have": ({**COPY, "options": {"thinkin": 1}}, "spec.agent.options.thinkin"),
    "a backend that there is not": ({**COPY, "backend": "moon"}, "BACKEND_UNKNOWN"),
    "the reward file of old": (
        {**COPY, "verify": ["echo 1 > /home/user/logs/verifier/reward.txt"]},
        "PENSTOCK_REWARD_FILE",
    ),
    "a removed argument": ({**COPY, "system_prompt": "Be kind."}, "options"),
    "a time that is none": ({**COPY, "agent_timeout_s": 0}, "agent_timeout_s"),
    "an empty command": ({**COPY, "setup": [" "]}, "setup[0]"),
    "a reward without verify": ({**COPY, "verify": [], "reward": "file"}, "verify"),
    "a range upside down": ({**COPY, "reward_range": [1, 0]}, "range"),
}


@pytest.mark.requirement("R11", "R63", "R65")
@pytest.mark.parametrize("what", BAD)
async def test_a_mistake_is_refused_by_name_and_nothing_starts(
    server: Server, http: aiohttp.ClientSession, what: str
) -> None:
    """Over JSON-RPC, as the `openenv` client asks."""
    arguments, named = BAD[what]
    before = [rollout.rollout_id async for rollout in server.ps.rollouts.list()]
    told = await rpc(http, server, "tools/call", {"name": "run_rollout", "arguments": arguments})
    assert told["error"]["code"] in (-32602, -32603)
    assert named in told["error"]["message"], told
    assert [rollout.rollout_id async for rollout in server.ps.rollouts.list()] == before


@pytest.mark.requirement("R8", "R33")
async def test_json_rpc_is_answered_as_its_specification_says(server: Server, http: aiohttp.ClientSession) -> None:
    """What is no request is an error of the protocol, never an exception of ours."""

    async def code(body: bytes) -> int:
        async with http.post(f"{server.bare}/mcp", data=body, headers=BEARER) as answer:
            assert answer.status == 200
            return int((await answer.json())["error"]["code"])

    assert await code(b"{") == -32700
    assert await code(b"[]") == -32600
    assert await code(b'{"jsonrpc": "1.0", "method": "tools/list"}') == -32600
    assert await code(b'{"jsonrpc": "2.0", "method": "tools/list", "params": 3}') == -32600
    assert await code(b"[" * 3000 + b"]" * 3000) in (-32700, -32600)
    assert (await rpc(http, server, "reset"))["error"]["code"] == -32601
    assert (await rpc(http, server, "tools/call", {"arguments": {}}))["error"]["code"] == -32602
    assert (await rpc(http, server, "tools/list", {"session_id": "0" * 32}))["error"]["code"] == -32602
    tools = (await rpc(http, server, "tools/list"))["result"]["tools"]
    assert tools[0]["inputSchema"]["required"] == ["instruction"]


@pytest.mark.requirement("R26", "R70")
async def test_sessions_over_http_are_bounded_and_close_with_what_they_run(
    server: Server, http: aiohttp.ClientSession
) -> None:
    """A session that is closed in the middle of a call ends the rollout, and its caller is told."""
    first = (await rpc(http, server, "openenv/session/create"))["result"]["session_id"]
    await rpc(http, server, "openenv/session/create")
    full = await rpc(http, server, "openenv/session/create")
    assert full["error"]["code"] == -32000
    assert full["error"]["data"] == {"reason": "OPENENV_CAPACITY", "active_sessions": 2, "max_sessions": 2}

    calling = asyncio.create_task(
        rpc(http, server, "tools/call", {"name": "run_rollout", "arguments": STUCK, "session_id": first})
    )
    labels = {"openenv_session": first[:16]}
    found: list[str] = []

    async def begun() -> bool:
        found.extend([item.rollout_id async for item in server.ps.rollouts.list(labels=labels)])
        return bool(found)

    await eventually_async(begun, "the rollout of the call")
    closed = await rpc(http, server, "openenv/session/close", {"session_id": first})
    assert closed["result"] == {"session_id": first, "closed": True}
    assert "closed" in (await calling)["error"]["message"]
    ended = await (await server.ps.rollouts.attach(found[0])).result()
    assert ended.failure is not None and ended.failure.cause is FailureCause.CANCELLED
    again = await rpc(http, server, "openenv/session/close", {"session_id": first})
    assert again["error"]["code"] == -32602
    assert "result" in await rpc(http, server, "openenv/session/create")


@pytest.mark.requirement("R50", "R70")
async def test_a_server_that_stops_ends_what_it_runs(server: Server, http: aiohttp.ClientSession) -> None:
    """Sessions, calls and rollouts end with it."""
    listen = Listen(port=0, token=TOKEN)
    found: list[str] = []

    async def begun() -> bool:
        listed = server.ps.rollouts.list(labels={"openenv_episode": "stopping"}, ended=False)
        found.extend([item.rollout_id async for item in listed])
        return bool(found)

    async with serving(server.ps, listen, Defaults(agent="shell")) as address:
        socket = await http.ws_connect(f"{address}/ws", headers=BEARER)
        await socket.send_json({"type": "reset", "data": {"episode_id": "stopping"}})
        await socket.receive_json()
        step = {"type": "call_tool", "tool_name": "run_rollout", "arguments": STUCK}
        await socket.send_json({"type": "step", "data": step})
        await eventually_async(begun, "the rollout of the step")
        ended = asyncio.create_task(socket.receive())
    assert (await ended).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.TEXT)
    await socket.close()
    outcome = (await (await server.ps.rollouts.attach(found[0])).result()).outcome
    assert outcome.failure is not None and outcome.failure.cause is FailureCause.CANCELLED


@pytest.mark.requirement("R57")
async def test_a_request_alone_has_an_environment_of_its_own(server: Server, http: aiohttp.ClientSession) -> None:
    """The HTTP forms of reset, step and state."""
    async with http.post(f"{server.bare}/reset", json={"seed": 1}, headers=BEARER) as answer:
        assert (await answer.json())["observation"]["metadata"]["status"] == "ready"
    async with http.post(f"{server.bare}/reset", json={"sed": 1}, headers=BEARER) as answer:
        assert (answer.status, (await answer.json())["reason"]) == (422, "OPENENV_ARGUMENTS")
    action = {"type": "call_tool", "tool_name": "run_rollout", "arguments": COPY}
    async with http.post(f"{server.bare}/step", json={"action": action}, headers=BEARER) as answer:
        taken = await answer.json()
    assert json.loads(taken["observation"]["result"]["data"])["reward"] == 0.5
    async with http.get(f"{server.bare}/state", headers=BEARER) as answer:
        assert (await answer.json())["rollouts_completed"] == 0


@pytest.mark.requirement("R11", "R63")
async def test_an_endpoint_of_the_callers_is_asked_as_the_arguments_say(
    server: Server, http: aiohttp.ClientSession
) -> None:
    """Its own key, the cap and the wish not to think arrive there; without tokens none are made up."""
    async with vendor() as there:
        arguments = {
            **{key: value for key, value in COPY.items() if key != "endpoint"},
            "base_url": there.base_url,
            "api_key": "the-callers-key",
            "model": "m",
            "disable_thinking": True,
            "max_tokens_cap": 17,
        }
        told = await rpc(http, server, "tools/call", {"name": "run_rollout", "arguments": arguments})
    result = json.loads(told["result"]["data"])
    (asked,) = there.completions
    body = json.loads(asked.body)
    assert asked.authorization == "Bearer the-callers-key"
    assert (body["model"], body["max_tokens"], body["chat_template_kwargs"]) == ("m", 17, {"enable_thinking": False})
    assert (result["error"], result["reward"]) == (None, 0.0)
    assert [(turn["completion_token_ids"], turn["per_token_logps"]) for turn in result["proxy_turns"]] == [([], [])]


@pytest.mark.requirement("R33")
async def test_a_websocket_says_what_is_wrong_with_a_message_and_goes_on(
    server: Server, http: aiohttp.ClientSession
) -> None:
    """A bad message fails alone."""
    async with http.ws_connect(f"{server.bare}/ws", headers=BEARER) as socket:

        async def ask(text: str) -> dict[str, Any]:
            await socket.send_str(text)
            told: dict[str, Any] = json.loads(await socket.receive_str())
            return told

        assert (await ask("{"))["data"]["code"] == "INVALID_JSON"
        assert (await ask("[]"))["data"]["code"] == "VALIDATION_ERROR"
        assert (await ask('{"type": "dance"}'))["data"]["code"] == "UNKNOWN_TYPE"
        assert (await ask('{"type": "step", "data": {"type": "jump"}}'))["data"]["code"] == "VALIDATION_ERROR"
        assert (await ask('{"type": "reset", "data": {"seed": -1}}'))["data"]["code"] == "VALIDATION_ERROR"
        listed = await ask('{"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}}')
        assert listed["data"]["result"]["tools"][0]["name"] == "run_rollout"
        assert (await ask('{"type": "state"}'))["data"]["step_count"] == 0
        await socket.send_bytes(b"x")
        assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE


@pytest.mark.requirement("R3", "R9")
@pytest.mark.parametrize(
    "given",
    [
        {"host": "0.0.0.0"},
        {"host": "0.0.0.0", "token": TOKEN},
        {"host": "example.com", "token": TOKEN},
        {"token": " "},
        {"cert": Path("c.pem")},
        {"token": TOKEN, "cert": Path("nothing.pem"), "key": Path("nothing.pem"), "port": 0},
    ],
)
async def test_a_careless_listener_is_refused(server: Server, given: dict[str, Any]) -> None:
    """Wide without a token and TLS, a blank token, half a certificate or one that is not there."""
    with pytest.raises(ConfigurationError) as refused:
        async with serving(server.ps, Listen(**given), Defaults()):
            raise AssertionError("it serves")
    assert refused.value.reason == "OPENENV_LISTEN"


@pytest.mark.requirement("R63", "R68")
async def test_operator_may_allow_agents_without_prompts(stack: LocalStack) -> None:
    """--skip-permissions is about the agents that ask; a caller who asks for it by name is told."""
    defaults = Defaults(agent="shell", skip_permissions=True)
    async with connect(stack.endpoints) as ps:
        result = await run_rollout(ps, parse(COPY), defaults, seed=None, labels={})
        assert result.error is None and result.reward == 0.5
        with pytest.raises(InvalidArgument, match="no permission prompts"):
            await run_rollout(ps, parse({**COPY, "skip_permissions": True}), defaults, seed=None, labels={})


@pytest.mark.requirement("R1", "R6")
async def test_the_command_prints_an_address_that_works_and_stops_in_order(stack: LocalStack, tmp_path: Path) -> None:
    """The token it makes stands in the address that it prints, in no argv."""
    connection = tmp_path / "connection.json"
    write_connection(connection, stack.endpoints, pid=os.getpid())
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "penstock.cli.main", "openenv", "serve", "--port", "0", "--agent", "shell"),
        env={**os.environ, "PENSTOCK_CONNECTION": str(connection)},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        assert "@127.0.0.1:" in address
        async with aiohttp.ClientSession() as http, http.get(f"{address}/state") as answer:
            assert answer.status == 200
    finally:
        process.send_signal(signal.SIGTERM)
        await process.communicate()
    assert process.returncode == 0
    async with connect(stack.endpoints) as ps:

        async def nothing_is_left() -> bool:
            return [item async for item in ps.sandboxes.list()] == []

        # The tests before this one share the services, and the last of their rollouts may still be on its way out.
        await eventually_async(nothing_is_left, "every sandbox is gone")
