"""No credential of a message is printed: fields are marked, `redacted` masks them, and no log or output shows one."""

from __future__ import annotations

import dataclasses
import importlib
import io
import pkgutil
import re
import sys
from collections.abc import Iterator
from typing import Any, Final

import orjson
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from pydantic import SecretStr
from tests.support import rpcs

from penstock.driver.v1 import rollout_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate
from penstock.values import redacted
from penstock.values.secrets import MASK, carries_secrets, is_secret
from penstock_chassis.telemetry import logging

pytestmark = pytest.mark.requirement("R115")

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
    },
    "ids of tokens of the model, or whether an engine takes them": {
        "token_ids", "stop_token_ids", "stop_token_id", "top_token_ids", "prompt_token_ids", "prompt_suffix_token_ids",
        "control_tokens",
    },
    "the id, the terms or the end of an agent key, not the key": {
        "RolloutToken.token_id", "RevokeTokensRequest.token_ids", "token_terms", "GateRollout.tokens",
        "RevokeTokensResponse.tokens", "token_expire_time",
    },
    "a name in a file, or of a snapshot's content": {"McpConfig.key", "Snapshot.key"},
    "names of headers": {"session_headers"},
    "an environment that is shown: secrets go into secret_env": {
        "AgentSpec.env", "AgentSpec.skip_permissions_env", "Task.env", "Stdio.env", "Command.env", "SandboxSpec.env",
    },
}  # fmt: skip
"""Why fields with such a name are no credentials; `Message.field`, or every field of the name."""

PACKAGES: Final = (
    "penstock.client", "penstock.cli", "penstock.local", "penstock.adapters", "penstock.dashboard", "penstock_chassis",
    "penstock_sandbox", "penstock_driver", "penstock_interception", "penstock_inference",
)  # fmt: skip


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
    return f"{field.containing_type.name}.{field.name}"


def _filled(field: FieldDescriptor, value: str) -> Message:
    message: Any = GetMessageClass(field.containing_type)()
    if field.is_repeated:
        getattr(message, field.name)["NAME"] = value
    else:
        setattr(message, field.name, value)
    return message  # type: ignore[no-any-return]


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
        logging.structlog.get_logger().info("a message", **facts)
    assert out.getvalue().count("a message") == 2 and "CANARY" not in out.getvalue()
    assert all(orjson.loads(line)["event"] == "a message" for line in out.getvalue().splitlines())


def test_secrets_of_messages_inside_and_unknown_fields_are_masked() -> None:
    """A field of a newer version may be a credential."""
    server = rollout_pb2.McpServer(name="s", stdio=rollout_pb2.McpServer.Stdio(secret_env={"A": "CANARY"}))
    spec = rollout_pb2.RolloutSpec(agent=rollout_pb2.AgentChoice(name="shell", mcp_servers=[server]))
    assert "CANARY" not in redacted(spec) and "shell" in redacted(spec)
    assert "CANARY" in str(spec)
    newer = gate.OpenRolloutResponse.FromString(b"\xba\x3e\x06CANARY")
    assert "CANARY" in str(newer.SerializeToString()) and "CANARY" not in redacted(newer)


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
        if isinstance(message, type) and issubclass(message, Message) and carries_secrets(message.DESCRIPTOR):
            return True
    return False
