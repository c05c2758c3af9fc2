"""No credential of a message is printed: fields are marked, `redacted` masks them, and no log or output shows one."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import io
import os
import pkgutil
import re
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final, cast

import grpc
import orjson
import pytest
import pytest_asyncio
import structlog
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from pydantic import SecretStr
from tests.support import rpcs
from tests.support.services.stack import Running, running

from penstock.client import AgentChoice, Command, McpServer, PenstockError, Task
from penstock.client.transport.endpoints import write_connection
from penstock.driver.v1 import agent_pb2, rollout_pb2
from penstock.driver.v1 import agent_service_pb2 as agents
from penstock.interception.v1 import interception_pb2 as common
from penstock.interception.v1 import rollout_gate_service_pb2 as gate
from penstock.sandbox.v1 import process_service_pb2 as processes
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values import redacted
from penstock.values.secrets import MASK, carries_secrets, is_secret
from penstock_chassis.channel import error_from_rpc
from penstock_chassis.telemetry import logging

_CREDENTIAL: Final = re.compile(
    r"(^|_)(token|tokens|secret|secrets|password|passphrase|key|keys|credential|credentials|auth|authorization|env|"
    r"header|headers|cookie|bearer)(_|$)"
)
"""What the name of a field that holds a credential would have."""

NO_CREDENTIALS: Final = {
    "a place in a list, of no use without a token": {"page_token", "next_page_token"},
    "a count of tokens of the model": {
        "max_tokens", "min_tokens", "thinking_budget_tokens", "prompt_tokens", "completion_tokens", "cached_tokens",
        "reasoning_tokens", "max_context_tokens", "cached_prompt_tokens", "sampled_tokens", "load_tokens",
        "max_completion_tokens", "max_total_tokens", "max_tokens_per_call", "max_prompt_tokens", "LogprobGap.tokens",
        "draft_tokens", "accepted_draft_tokens", "token_start", "token_count",
    },
    "ids of tokens of the model, or whether an engine takes them": {
        "token_ids", "stop_token_ids", "stop_token_id", "top_token_ids", "prompt_token_ids", "prompt_suffix_token_ids",
        "placeholder_token_id",
        "control_tokens",
    },
    "numbers for tokens of the model": {"token_tensors", "token_rewards", "token_values"},
    "the id, the terms or the end of an agent key, not the key": {
        "RolloutToken.token_id", "RevokeTokensRequest.token_ids", "token_terms", "GateRollout.tokens",
        "RevokeTokensResponse.tokens", "token_expire_time",
    },
    "a name in a file, or of a snapshot's content": {
        "McpConfig.key", "Snapshot.key", "GetNodeStatusResponse.snapshot_keys",
    },
    "names of headers": {"session_headers", "Route.header"},
    "an environment that is shown: secrets go into secret_env": {
        "AgentSpec.env", "AgentSpec.skip_permissions_env", "Task.env", "Stdio.env", "Command.env", "SandboxSpec.env",
        "Companion.env",
    },
}  # fmt: skip
"""Why fields with such a name are no credentials; `Message.field`, or every field of the name."""

PACKAGES: Final = (
    "penstock.client", "penstock.cli", "penstock.local", "penstock.adapters", "penstock.dashboard", "penstock_chassis",
    "penstock_sandbox", "penstock_driver", "penstock_interception", "penstock_inference",
)  # fmt: skip


QUIET: Final = agent_pb2.AgentSpec(
    name="quiet",
    version="1",
    argv=["/bin/sh", "-c", "cat > /dev/null"],
    instruction=agent_pb2.InstructionDelivery(method=agent_pb2.InstructionDelivery.METHOD_STDIN),
    dialects=[trajectory_pb2.DIALECT_CHAT_COMPLETIONS],
    mcp=agent_pb2.McpConfig(path="mcp.json", key="servers", entry="{command: command, args: args, env: env}"),
)
"""An agent that can have tool servers, and does nothing."""


def _messages() -> Iterator[Descriptor]:
    def inside(message: Descriptor) -> Iterator[Descriptor]:
        if not message.GetOptions().map_entry:
            yield message
            for nested in message.nested_types:
                yield from inside(nested)

    for module in rpcs.modules():
        for message in module.DESCRIPTOR.message_types_by_name.values():
            yield from inside(message)


MARKED: Final = [field for message in _messages() for field in message.fields if is_secret(field)]


def _name(field: FieldDescriptor) -> str:
    return ".".join(field.full_name.rsplit(".", 2)[1:])


def _filled(field: FieldDescriptor, value: str) -> Message:
    message: Any = GetMessageClass(cast("Descriptor", field.containing_type))()
    if field.is_repeated:
        getattr(message, field.name)["NAME"] = value
    else:
        setattr(message, field.name, value.encode() if field.type == FieldDescriptor.TYPE_BYTES else value)
    return message  # type: ignore[no-any-return]


@pytest.mark.requirement("R115")
def test_every_field_with_a_credential_s_name_is_marked_or_explained() -> None:
    """A new field must be sorted: `[(penstock.options.v1.secret) = true]`, or the list above."""
    explained = {name for names in NO_CREDENTIALS.values() for name in names}
    used, unsorted = set[str](), []
    for message in _messages():
        for field in message.fields:
            known = explained & {field.name, _name(field)}
            used |= known
            if _CREDENTIAL.search(field.name) and not known and not is_secret(field):
                unsorted.append(_name(field))
            assert not (known and is_secret(field)), _name(field)
    assert (unsorted, explained - used) == ([], set())
    assert len(MARKED) >= 6


@pytest.mark.requirement("R115")
@pytest.mark.parametrize("field", MARKED, ids=_name)
def test_a_marked_field_is_masked_in_text_and_in_logs(field: FieldDescriptor) -> None:
    """Names of a secret environment stay: they say what was given."""
    message = _filled(field, "CANARY")
    assert "CANARY" in str(message)
    shown = redacted(message)
    assert "CANARY" not in shown and MASK in shown
    assert ("NAME" in shown) is field.is_repeated
    out = io.StringIO()
    logging.configure(stream=out)
    for facts in ({"message": message}, {"nested": {"messages": [message]}}):
        structlog.get_logger().info("a message", **facts)
    assert out.getvalue().count("a message") == 2 and "CANARY" not in out.getvalue()
    assert all(orjson.loads(line)["event"] == "a message" for line in out.getvalue().splitlines())


@pytest.mark.requirement("R115")
def test_secrets_of_messages_inside_and_unknown_fields_are_masked() -> None:
    """A field of a newer version may be a credential."""
    server = rollout_pb2.McpServer(name="s", stdio=rollout_pb2.McpServer.Stdio(secret_env={"A": "CANARY"}))
    spec = rollout_pb2.RolloutSpec(agent=rollout_pb2.AgentChoice(name="shell", mcp_servers=[server]))
    assert "CANARY" not in redacted(spec) and "shell" in redacted(spec)
    assert "CANARY" in str(spec)
    newer = gate.OpenRolloutResponse.FromString(b"\xba\x3e\x06CANARY")
    assert "CANARY" in str(newer.SerializeToString()) and "CANARY" not in redacted(newer)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def debugging(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """A stack that logs all it can."""
    settings = {service: {"log_level": "debug"} for service in rpcs.SERVICES}
    async with running(tmp_path_factory.mktemp("debugging"), settings, agents=False) as started:
        yield started


@pytest.mark.requirement("R115")
@pytest.mark.asyncio(loop_scope="session")
async def test_no_log_and_no_output_shows_a_secret_of_a_real_request(debugging: Running, tmp_path: Path) -> None:
    """Through requests that succeed, that are refused, and that fail in a sandbox; by RPC, client and command line."""
    secrets = {
        name: f"canary-{uuid.uuid4().hex}"
        for name in ("CallerEndpoint.api_key", "Command.secret_env", "InitialFile.content", "Stdio.secret_env")
    }
    shown: list[str] = []

    async def call(server: Any, name: str, request: Message) -> list[Any]:
        try:
            answers = await rpcs.call(debugging.stack.address(server), debugging.stack.operator_token, name, request)
        except grpc.aio.AioRpcError as error:
            shown.append(repr(error) + str(error_from_rpc(error).violations))
            return []
        shown.extend(redacted(answer) for answer in answers)
        return answers

    # Keys: one of an upstream that is not there, and those that the gate issues.
    at_gate, rollout_id = "penstock.interception.v1.RolloutGateService", uuid.uuid4().hex
    opening = gate.OpenRolloutRequest(request_id=rollout_id, rollout_id=rollout_id, mode=common.MODE_TRANSPARENT_PROXY)
    opening.source.upstream.caller.base_url = "http://127.0.0.1:9/v1"
    opening.source.upstream.caller.api_key = secrets["CallerEndpoint.api_key"]
    assert await call("interception", f"{at_gate}/OpenRollout", opening) == []
    opening.source.upstream.caller.base_url = "nonsense"
    assert await call("interception", f"{at_gate}/OpenRollout", opening) == []
    opening.ClearField("source")
    (opened,) = await call("interception", f"{at_gate}/OpenRollout", opening)
    issuing = gate.IssueTokenRequest(request_id="i", rollout_id=rollout_id)
    (issued,) = await call("interception", f"{at_gate}/IssueToken", issuing)
    secrets |= {"OpenRolloutResponse.token": opened.token, "IssueTokenResponse.token": issued.token}

    # Environments: of commands in a sandbox, in a task, and of an agent's tool server.
    command = Command(shell='test -n "$KEY" && exit 3', secret_env={"KEY": secrets["Command.secret_env"]})
    sandbox = await debugging.ps.sandboxes.create()
    assert (await sandbox.run(command)).exit.code == 3
    with pytest.raises(PenstockError) as refused:
        await sandbox.run(dataclasses.replace(command, timeout=-1))
    shown.append(f"{refused.value!r}{refused.value.violations}")
    initial = processes.InitialFile(path="kept", content=secrets["InitialFile.content"].encode())
    for path in ("kept", "/proc/kept"):
        initial.path = path
        running_it = processes.RunRequest(sandbox_id=sandbox.sandbox_id, process_id=uuid.uuid4().hex, files=[initial])
        running_it.command.argv.args.append("true")
        assert bool(await call("sandbox", "penstock.sandbox.v1.ProcessService/Run", running_it)) is (path == "kept")
    await sandbox.delete()
    await call("driver", "penstock.driver.v1.AgentService/RegisterAgent", agents.RegisterAgentRequest(spec=QUIET))
    servers = [McpServer(name="tools", args=["true"], secret_env={"KEY": secrets["Stdio.secret_env"]})]
    task = Task(
        task_id="quiet", instruction="Do nothing.", setup=[dataclasses.replace(command, shell='test -n "$KEY"')]
    )
    for name in ("quiet", "shell"):  # the latter has no tool servers, and is refused
        try:
            rollout = await debugging.ps.rollouts.create(
                task, AgentChoice(name=name, mcp_servers=servers), rollout_id=name
            )
        except PenstockError as error:
            shown.append(f"{error!r}{error.violations}")
            continue
        result = await rollout.result()
        assert result.outcome.failure is None
        shown.append(repr(result))
        shown.extend([repr(event) async for event in rollout.events()])

    # The command line, whose task has no secret_env, but whose upstream has a key.
    file, connection = tmp_path / "task.yaml", tmp_path / "connection.json"
    file.write_text("{task_id: quiet, instruction: Do nothing.}")
    write_connection(connection, debugging.stack.endpoints, pid=os.getpid())
    upstream = ("--upstream", "http://127.0.0.1:9/v1", "--model", "m", "--api-key-env", "KEY")
    for argv in (
        ("rollout", "--agent", "quiet", "--task", str(file), "--save", str(tmp_path / "saved")),
        ("rollout", "--agent", "quiet", "--task", str(file), "--json", "--save", str(tmp_path / "saved")),
        ("rollout", "--agent", "quiet", "--task", str(file), *upstream, "--save", str(tmp_path / "saved")),
        ("watch", "--once", "--json"),
        ("agents", "--json"),
    ):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli.main", *argv),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PENSTOCK_CONNECTION": str(connection), "KEY": secrets["CallerEndpoint.api_key"]},
        )
        output = (await process.communicate())[0].decode()
        assert output
        shown.append(output)
    shown.extend(path.read_text(errors="replace") for path in (tmp_path / "saved").rglob("*") if path.is_file())

    printed = debugging.logs + "".join(shown)
    assert len(debugging.logs) > 1000
    secrets["operator"] = debugging.stack.operator_token
    assert [name for name, value in secrets.items() if value in printed] == []
    # No service of ours sets a data plane's token.
    assert secrets.keys() - {"operator"} | {"DataPlane.token"} == {_name(field) for field in MARKED}


@pytest.mark.requirement("R115")
def test_no_value_of_ours_shows_a_credential_in_its_repr() -> None:
    """Dataclasses are printed in tracebacks of tests, in debuggers and by hand: their secrets have `repr=False`."""
    secret = re.compile(r"^(\w+_)?(token|api_key|secret_env|password|passphrase|secret)$")
    shown = []
    for kind in _dataclasses():
        for field in dataclasses.fields(kind):
            text = field.type if isinstance(field.type, str) else str(field.type)
            if not field.repr or "SecretStr" in text or "bool" in text:
                continue
            if secret.search(field.name) or _carries(kind, text):
                shown.append(f"{kind.__module__}.{kind.__name__}.{field.name}")
    assert shown == []
    assert "x" not in repr(SecretStr("x"))


def _dataclasses() -> Iterator[type[Any]]:
    for package in PACKAGES:
        root = importlib.import_module(package)
        for found in pkgutil.walk_packages(root.__path__, f"{package}."):
            if found.name.endswith("__main__") or ".programs." in found.name:
                continue
            try:
                module = importlib.import_module(found.name)
            except ImportError:
                continue  # of an extra that is not installed here
            for value in vars(module).values():
                if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module.__name__:
                    yield value


def _carries(kind: type[Any], annotation: str) -> bool:
    """Whether the annotation names one of our messages with a credential inside."""
    module = sys.modules[kind.__module__]
    for name, attribute in re.findall(r"\b(\w+_pb2|pb)\.(\w+)", annotation):
        message = getattr(getattr(module, name, None), attribute, None)
        if (
            isinstance(message, type)
            and issubclass(message, Message)
            and carries_secrets(cast("Descriptor", message.DESCRIPTOR))
        ):
            return True
    return False
