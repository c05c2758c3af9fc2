"""Converts agent specs to and from protos. The spec model does the checks; errors name field and reason."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Value

from penstock.driver.v1 import agent_pb2, agent_service_pb2
from penstock.sandbox.v1 import toolbox_service_pb2
from penstock.values import numbers
from penstock_chassis import times
from penstock_chassis.validation import invalid_field
from penstock_driver.agents.output_events import EventKind
from penstock_driver.agents.registry import Agent
from penstock_driver.agents.specs import AgentSpec, EventSource, OptionType, PromptDelivery, parse_spec, whole_numbers
from penstock_driver.wire.converters import (
    DIALECTS,
    RUNTIMES,
    struct_to_dict,
    toolbox_to_proto,
)

EVENT_KINDS = numbers(EventKind, agent_pb2.AgentEventKind, unspecified=EventKind.IGNORED)
_METHODS = numbers(PromptDelivery, agent_pb2.InstructionDelivery.Method)
_TYPES = numbers(OptionType, agent_pb2.AgentOption.Type)
_SOURCES = numbers(EventSource, agent_pb2.EventMapping.Source)


def agent_to_proto(agent: Agent) -> agent_service_pb2.Agent:
    """A registered agent."""
    wire = agent_service_pb2.Agent(spec=spec_to_proto(agent.spec), spec_sha256=agent.sha256, built_in=agent.built_in)
    wire.namespace = agent.namespace
    if agent.register_time:
        wire.register_time.CopyFrom(times.timestamp(agent.register_time))
    return wire


def spec_from_proto(wire: agent_pb2.AgentSpec) -> AgentSpec:
    """A checked spec; InvalidArgument (FIELD_INVALID) with every wrong field."""
    for name in ("npm_lock", "python_target"):
        if getattr(wire.toolbox, name) != getattr(toolbox_service_pb2.ToolboxSpec(), name):
            raise invalid_field(f"spec.toolbox.{name}", "is for packages of a task: an agent has packages of its own")
    data: dict[str, Any] = {
        "name": wire.name,
        "description": wire.description,
        "version": wire.version,
        "toolbox": {
            "runtimes": [
                {
                    "kind": _known(RUNTIMES, item.kind, "toolbox.runtimes.kind"),
                    "min_version": item.min_version,
                    "below_version": item.below_version,
                }
                for item in wire.toolbox.runtimes
            ],
            "npm_packages": list(wire.toolbox.npm_packages),
            "files": [_toolbox_file(file) for file in wire.toolbox.files],
            "path_directories": list(wire.toolbox.path_directories),
            "python_packages": list(wire.toolbox.python_packages),
        },
        "needs_root": wire.needs_root,
        "argv": list(wire.argv),
        "instruction": {
            "method": _known(_METHODS, wire.instruction.method, "instruction.method"),
            "path": wire.instruction.path or None,
        },
        "files": [_config_file(file) for file in wire.files],
        "env": dict(wire.env),
        "dialects": [_known(DIALECTS, dialect, "dialects") for dialect in wire.dialects],
        "mcp": {"path": wire.mcp.path, "key": wire.mcp.key, "entry": wire.mcp.entry} if wire.HasField("mcp") else None,
        "options": [_option(option) for option in wire.options],
        "events": {
            "source": _known(_SOURCES, wire.events.source, "events.source") if wire.events.source else EventSource.NONE,
            "rules": [
                {
                    "when": rule.when,
                    "kind": _known(EVENT_KINDS, rule.kind, "events.rules.kind"),
                    "fields": dict(rule.fields),
                }
                for rule in wire.events.rules
            ],
        },
        "artifacts": [
            {"name": item.name, "path": item.path, "required": item.required}
            | ({"max_bytes": item.max_bytes} if item.HasField("max_bytes") else {})
            for item in wire.artifacts
        ],
        "skip_permissions_argv": list(wire.skip_permissions_argv),
        "skip_permissions_env": dict(wire.skip_permissions_env),
        "auxiliary_calls": {
            "title_system_prompts": list(wire.auxiliary_calls.title_system_prompts),
            "compaction_system_prompts": list(wire.auxiliary_calls.compaction_system_prompts),
            "session_headers": list(wire.auxiliary_calls.session_headers),
            "volatile_line_patterns": list(wire.auxiliary_calls.volatile_line_patterns),
        },
        "check_argv": list(wire.check_argv),
        "success_exit_codes": list(wire.success_exit_codes) or [0],
    }
    if wire.HasField("trial"):
        data["trial"] = {"work": wire.trial.work, "end": wire.trial.end, "end_command": wire.trial.end_command}
    if wire.HasField("resume"):
        data["resume"] = {"argv": list(wire.resume.argv), "first_argv": list(wire.resume.first_argv)}
    if wire.HasField("default_timeout"):
        data["default_timeout_s"] = times.seconds(wire.default_timeout)
    return parse_spec(data)


def spec_to_proto(spec: AgentSpec) -> agent_pb2.AgentSpec:
    """The complete spec, for a client."""
    return agent_pb2.AgentSpec(
        name=spec.name,
        description=spec.description,
        version=spec.version,
        toolbox=toolbox_to_proto(spec.name, spec.toolbox),
        needs_root=spec.needs_root,
        argv=spec.argv,
        instruction=agent_pb2.InstructionDelivery(
            method=_METHODS[spec.instruction.method], path=spec.instruction.path or ""
        ),
        files=[
            agent_pb2.ConfigFile(
                path=file.path,
                json=file.json_,  # type: ignore[arg-type]
                json_list=file.json_list,  # type: ignore[arg-type]
                toml=file.toml,  # type: ignore[arg-type]
                text=file.text,  # type: ignore[arg-type]
                mode=file.mode,
            )
            for file in spec.files
        ],
        env=spec.env,
        dialects=[DIALECTS[dialect] for dialect in spec.dialects],
        mcp=agent_pb2.McpConfig(path=spec.mcp.path, key=spec.mcp.key, entry=spec.mcp.entry) if spec.mcp else None,
        options=[
            agent_pb2.AgentOption(
                name=option.name,
                description=option.description,
                type=_TYPES[option.type],
                choices=[_value(choice) for choice in option.choices],
                default_value=None if option.default is None else _value(option.default),
                minimum=option.minimum,
                maximum=option.maximum,
            )
            for option in spec.options
        ],
        events=agent_pb2.EventMapping(
            source=_SOURCES[spec.events.source],
            rules=[
                agent_pb2.EventRule(when=rule.when, kind=EVENT_KINDS[rule.kind], fields=rule.fields)
                for rule in spec.events.rules
            ],
        ),
        artifacts=[
            agent_pb2.ArtifactSpec(name=item.name, path=item.path, required=item.required, max_bytes=item.max_bytes)
            for item in spec.artifacts
        ],
        skip_permissions_argv=spec.skip_permissions_argv,
        skip_permissions_env=spec.skip_permissions_env,
        auxiliary_calls=agent_pb2.AuxiliaryCalls(**spec.auxiliary_calls.model_dump()),
        check_argv=spec.check_argv,
        success_exit_codes=spec.success_exit_codes,
        default_timeout=times.duration(spec.default_timeout_s),
        trial=agent_pb2.AgentTrial(**spec.trial.model_dump()) if spec.trial else None,
        resume=agent_pb2.AgentResume(**spec.resume.model_dump()) if spec.resume else None,
    )


def _known(table: Mapping[Any, Any], wire: int, where: str) -> Any:
    for value, known in table.items():
        if known == wire:
            return value
    description = f"{wire} is unknown to this version, and unset is not allowed"
    raise invalid_field(where, description)


def _toolbox_file(file: toolbox_service_pb2.ToolboxFile) -> dict[str, Any]:
    return {
        "path": file.path,
        "content": base64.b64encode(file.content),
        "mode": file.mode if file.HasField("mode") else None,
    }


def _config_file(file: agent_pb2.ConfigFile) -> dict[str, Any]:
    data: dict[str, Any] = {"path": file.path}
    kind = file.WhichOneof("content")
    if kind == "text":
        data["text"] = file.text
    elif kind == "json_list":
        data["json_list"] = whole_numbers(MessageToDict(file.json_list))
    elif kind:
        data[kind] = whole_numbers(struct_to_dict(getattr(file, kind)))
    if file.HasField("mode"):
        data["mode"] = file.mode
    return data


def _option(option: agent_pb2.AgentOption) -> dict[str, Any]:
    whole = option.type == agent_pb2.AgentOption.TYPE_INTEGER
    choices = [_plain(choice) for choice in option.choices]
    return {
        "name": option.name,
        "description": option.description,
        "type": _known(_TYPES, option.type, "options.type"),
        "choices": whole_numbers(choices) if whole else choices,
        "default": _plain(option.default_value) if option.HasField("default_value") else None,
        "minimum": option.minimum if option.HasField("minimum") else None,
        "maximum": option.maximum if option.HasField("maximum") else None,
    }


def _plain(value: Value) -> Any:
    kind = value.WhichOneof("kind")
    return getattr(value, kind) if kind in ("string_value", "number_value", "bool_value") else None


def _value(plain: Any) -> Value:
    if isinstance(plain, bool):
        return Value(bool_value=plain)
    return Value(string_value=plain) if isinstance(plain, str) else Value(number_value=float(plain))
