"""Bad input: a typed error that names the field and the reason, before anything is started."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio
from tests.support.endpoints.endpoint import gate_rollout, metadata
from tests.support.services.stack import Running, running

from penstock.client import (
    AgentChoice,
    Budgets,
    Command,
    FailedPrecondition,
    Inference,
    InvalidArgument,
    Limits,
    McpServer,
    Mode,
    NotFound,
    PenstockError,
    SandboxChoice,
    SeedFile,
    Task,
    Unavailable,
    Upstream,
    Verifier,
)
from penstock.driver.v1 import agent_pb2

OK = Task(task_id="t", instruction="x")


def verified(**changes: Any) -> Task:
    """A task whose verifier is at fault."""
    return Task(task_id="t", instruction="x", verifier=Verifier(commands=[Command(["true"])], **changes))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an option that the agent does not have": (
        {"agent": AgentChoice(name="shell", options={"tempersture": 1})},
        "spec.agent.options.tempersture",
    ),
    "an option of the wrong type": (
        {"agent": AgentChoice(name="shell", options={"max_turns": "many"})},
        "spec.agent.options.max_turns",
    ),
    "an option out of its range": (
        {"agent": AgentChoice(name="shell", options={"temperature": 3})},
        "spec.agent.options.temperature",
    ),
    "an option that is none of its choices": (
        {"agent": AgentChoice(name="pi", options={"thinking": "deeply"})},
        "spec.agent.options.thinking",
    ),
    "skipping prompts that the agent does not have": (
        {"agent": AgentChoice(name="shell", skip_permissions=True)},
        "spec.agent.skip_permissions",
    ),
    "an MCP server for an agent that has none": (
        {"agent": AgentChoice(name="shell", mcp_servers=[McpServer(name="m", args=["true"])])},
        "spec.agent.mcp_servers",
    ),
    "a task id without end": ({"task": Task(task_id="t" * 257, instruction="x")}, "spec.task.task_id"),
    "no instruction": ({"task": Task(task_id="t", instruction="")}, "spec.task.instruction"),
    "a file outside": (
        {"task": Task(task_id="t", instruction="x", files=[SeedFile("../../etc/passwd", b"")])},
        "spec.task.files[0].path",
    ),
    "a variable that is none": (
        {"task": Task(task_id="t", instruction="x", env={"A=B": "1"})},
        "spec.task.env.A=B",
    ),
    "a reward range upside down": ({"task": verified(range=(1.0, 0.0))}, "spec.task.verifier.range_max"),
    "a reward range without an end": ({"task": verified(range=(0.0, float("inf")))}, "spec.task.verifier.range_max"),
    "a verifier's file outside": (
        {"task": verified(files=[SeedFile("a/../../b", b"")])},
        "spec.task.verifier.files[0].path",
    ),
    "a limit of no time": ({"limits": Limits(agent=0)}, "spec.limits.agent"),
    "a negative budget": ({"budgets": Budgets(max_calls=-1)}, "spec.budgets.max_calls"),
    "a budget of no time": ({"budgets": Budgets(wall_time=0)}, "spec.budgets.wall_time"),
    "a label that is the service's own": ({"labels": {"penstock_driver": "me"}}, "spec.labels.penstock_driver"),
    "a label that is a path": ({"labels": {"../x": "1"}}, "spec.labels.../x"),
    "a run id with a space": ({"run_id": "a b"}, "spec.run_id"),
    "a black box without an endpoint": ({"mode": Mode.BLACK_BOX, "source": Inference()}, "spec.source"),
    "a rollout id that is a path": ({"rollout_id": "../../etc"}, "rollout_id"),
}


@pytest_asyncio.fixture(loop_scope="session")
async def nothing_starts(stack: Running) -> AsyncIterator[None]:
    """What is refused has started nothing: no sandbox, no rollout, no place at the gate."""

    async def living() -> set[str]:
        sandboxes = {sandbox_id async for sandbox_id, _ in stack.ps.sandboxes.list()}
        return sandboxes | {item.rollout_id async for item in stack.ps.rollouts.list()}

    before = await living()
    yield
    assert await living() - before == set()


@pytest.mark.requirement("R38", "R54", "R63", "R64")
@pytest.mark.parametrize("what", BAD)
@pytest.mark.usefixtures("nothing_starts")
async def test_a_rollout_is_refused_for(stack: Running, what: str) -> None:
    """INVALID_ARGUMENT with the path of the field and the reason in words."""
    given, field = BAD[what]
    arguments: dict[str, Any] = {"task": OK, "agent": "shell", **given}
    task, agent = arguments.pop("task"), arguments.pop("agent")
    with pytest.raises(InvalidArgument) as refused:
        await stack.ps.rollouts.create(task, agent, **arguments)
    named = [item.field for item in refused.value.violations]
    assert any(item == field or item.endswith("." + field) or item.startswith(field) for item in named), named
    assert all(item.description for item in refused.value.violations)


@pytest.mark.requirement("R63")
@pytest.mark.usefixtures("nothing_starts")
async def test_every_wrong_field_is_named_at_once(stack: Running) -> None:
    task = Task(task_id="t", instruction="x", files=[SeedFile("..", b"")], env={"1": ""})
    with pytest.raises(InvalidArgument) as refused:
        await stack.ps.rollouts.create(task, "shell", limits=Limits(agent=0), run_id="a b")
    named = {item.field for item in refused.value.violations}
    assert {"spec.task.files[0].path", "spec.task.env.1", "spec.limits.agent", "spec.run_id"} <= named


@pytest.mark.requirement("R27", "R66")
@pytest.mark.usefixtures("nothing_starts")
async def test_absent_things_are_refused_by_name(stack: Running) -> None:
    with pytest.raises(NotFound) as agent:
        await stack.ps.rollouts.create(OK, "no-such-agent")
    assert agent.value.reason == "AGENT_UNKNOWN"
    with pytest.raises(FailedPrecondition) as backend:
        await stack.ps.rollouts.create(OK, "shell", sandbox=SandboxChoice(backend="moon"))
    assert backend.value.reason == "BACKEND_UNKNOWN"


@pytest.mark.requirement("R27")
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (Upstream(name="nobody", model="m"), "UPSTREAM_UNKNOWN"),
        (Inference(name="nobody"), "INFERENCE_UNKNOWN"),
        (Upstream(base_url="http://127.0.0.1:1/v1", api_key="k", model="m"), "UPSTREAM_UNREACHABLE"),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
async def test_a_model_source_that_is_not_there_is_refused_by_name(stack: Running, source: Any, reason: str) -> None:
    """By the create call, never as a refused connection in an agent's log or a rollout that fails later."""
    with pytest.raises(PenstockError) as refused:
        await stack.ps.rollouts.create(OK, "shell", mode=Mode.TRANSPARENT_PROXY, source=source)
    assert refused.value.reason == reason


@pytest.mark.requirement("R27")
async def test_a_group_of_a_model_that_cannot_be_reached_is_refused(stack: Running) -> None:
    """For groups alike, and in black box mode, where the gate itself never asks for a completion."""
    source = Upstream(base_url="http://127.0.0.1:1/v1", api_key="k", model="m")
    with pytest.raises(Unavailable) as refused:
        await stack.ps.groups.create(OK, "shell", 2, mode=Mode.BLACK_BOX, source=source)
    assert refused.value.reason == "UPSTREAM_UNREACHABLE"
    assert "127.0.0.1:1" in str(refused.value)


@pytest.mark.requirement("R11", "R54")
async def test_a_callers_endpoint_is_refused_where_the_operator_forbids_it(tmp_path: Path) -> None:
    forbidding = {"interception": {"caller_endpoints": False}}
    async with running(tmp_path, forbidding) as own:
        source = Upstream(base_url="http://127.0.0.1:9/v1", api_key="k", model="m")
        with pytest.raises(FailedPrecondition) as refused:
            await own.ps.rollouts.create(OK, "shell", mode=Mode.BLACK_BOX, source=source)
        assert refused.value.reason == "UPSTREAM_NOT_ALLOWED"
        assert [sandbox async for sandbox in own.ps.sandboxes.list()] == []


SPECS: dict[str, tuple[Callable[[agent_pb2.AgentSpec], None], str]] = {
    "a name with a path": (lambda spec: setattr(spec, "name", "../x"), "name"),
    "no argv": (lambda spec: spec.ClearField("argv"), "argv"),
    "an unknown placeholder": (lambda spec: spec.argv.append("{{nothing}}"), "argv"),
    "the key in an argument": (lambda spec: spec.argv.append("{{api_key}}"), "argv"),
    "an option without effect": (
        lambda spec: spec.options.append(agent_pb2.AgentOption(name="idle", type=agent_pb2.AgentOption.TYPE_STRING)),
        "options",
    ),
    "an event rule that is no expression": (
        lambda spec: spec.events.rules.append(
            agent_pb2.EventRule(when="type ==", kind=agent_pb2.AGENT_EVENT_KIND_DONE)
        ),
        "events",
    ),
    "a package without a version": (lambda spec: spec.toolbox.npm_packages.append("left-pad"), "toolbox"),
    "a built-in agent's name": (lambda _spec: None, ""),
}


@pytest.mark.requirement("R1", "R63", "R68")
@pytest.mark.parametrize("what", SPECS)
@pytest.mark.usefixtures("nothing_starts")
async def test_an_agent_spec_is_refused_for(stack: Running, what: str) -> None:
    """The field is named, and the registry stays as it was."""
    change, field = SPECS[what]
    spec = agent_pb2.AgentSpec()
    spec.CopyFrom((await stack.ps.agents.get("shell")).spec)
    if field:
        spec.name = "of-a-caller"
    change(spec)
    before = {item.name async for item in stack.ps.agents.list()}
    with pytest.raises(PenstockError) as refused:
        await stack.ps.agents.register(spec)
    if field:
        assert isinstance(refused.value, InvalidArgument)
        assert field in str([item.field for item in refused.value.violations]) + str(refused.value)
    else:
        assert refused.value.reason == "AGENT_BUILT_IN"
    assert {item.name async for item in stack.ps.agents.list()} == before


@pytest.mark.requirement("R8")
@pytest.mark.parametrize("service", ["sandbox", "driver", "interception", "inference"])
async def test_bytes_that_are_no_proto_are_refused_by_every_service(stack: Running, service: Any) -> None:
    """Typed, without the parser's own words."""
    methods = {
        "sandbox": "penstock.sandbox.v1.SandboxService/CreateSandbox",
        "driver": "penstock.driver.v1.RolloutService/CreateRollout",
        "interception": "penstock.interception.v1.RolloutGateService/OpenRollout",
        "inference": "penstock.inference.v1.InferenceService/Score",
    }
    async with grpc.aio.insecure_channel(stack.stack.address(service)) as channel:
        call: Any = channel.unary_unary(f"/{methods[service]}")
        for body in (b"\xff\xff\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0b" * 9, b"\x0a\x05abc"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(body, metadata=metadata(stack.stack.operator_token), timeout=60)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "REQUEST_MALFORMED" in str(refused.value.trailing_metadata())
            assert "Decode" not in (refused.value.details() or "")


BODIES: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{", ""),
    "no object": (b"[]", ""),
    "nothing": (b"", ""),
    "no Unicode": (b'{"messages": "\xff"}', ""),
    "no messages": (b'{"model": "m"}', "messages"),
    "messages that are none": (b'{"model": "m", "messages": 3}', "messages"),
    "a role that is none": (b'{"model": "m", "messages": [{"role": "boss", "content": "x"}]}', "messages"),
    "a temperature that is none": (
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
        "temperature",
    ),
    "two answers": (b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 2}', "n"),
    "a tool without a name": (
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}',
        "tools",
    ),
    "3,000 nested lists": (b'{"messages": ' + b"[" * 3000 + b"]" * 3000 + b"}", ""),
}


@pytest.mark.requirement("R33", "R80")
@pytest.mark.parametrize("what", BODIES)
async def test_a_model_call_is_refused_in_its_dialect_for(stack: Running, what: str) -> None:
    """A 400 that names the parameter, in the shape that SDKs read; the rollout goes on."""
    body, param = BODIES[what]
    async with gate_rollout(stack) as rollout, aiohttp.ClientSession() as http:
        headers = {"authorization": f"Bearer {rollout.api_key}", "content-type": "application/json"}
        url = f"{rollout.base_url}/chat/completions"
        async with http.post(url, data=body, headers=headers) as answer:
            told = json.loads(await answer.read())
        assert answer.status == 400, told
        assert told["error"]["type"] == "invalid_request_error"
        assert told["error"]["message"]
        if param:
            assert str(told["error"]["param"]).startswith(param), told
        good = {"model": "m", "messages": [{"role": "user", "content": "copy the word"}]}
        async with http.post(url, json=good, headers=headers) as answer:
            assert answer.status == 200
