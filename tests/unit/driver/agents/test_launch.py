"""From a spec to what is really started: values of any form arrive intact, and secrets stay where they belong."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.tasks import field_types
from penstock_chassis.errors import FailedPrecondition, InvalidArgument
from penstock_driver.agents.launch import (
    HOST_TOOLS_SERVER,
    MAX_SERVERS,
    AgentChoice,
    Launch,
    LaunchContext,
    McpServer,
    check_choice,
    check_host_tools,
    plan_launch,
)
from penstock_driver.agents.registry import built_in_specs
from penstock_driver.agents.specs import AgentSpec, OptionType, PromptDelivery, parse_spec

SPECS = {spec.name: spec for spec in built_in_specs()}
ANYTHING = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
NASTY = ["sk-test '$(leak)", '"}], {"', "{{model}}", "{env:HOME}", "`id`", "a\nb", "--flag", "!cat /etc/passwd", "\\"]
everyone = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def place(**changes: Any) -> LaunchContext:
    values = {
        "home": "/home/agent", "workdir": "/workspace", "toolbox": "/opt/t", "base_url": "http://127.0.0.1:7780/r/1/v1",
        "api_key": "the-key", "model": "Qwen/Q3:x", "rollout_id": "r1", "wall_time_s": 60.0,
    }  # fmt: skip
    return LaunchContext(**{**values, **changes})


def files(launch: Launch) -> dict[str, bytes]:
    return {file.path: file.content for file in launch.files}


def tree(path: str, content: bytes) -> Any:
    """A JSON, TOML or YAML file's values; None for any other."""
    if path.endswith(".json"):
        return json.loads(content)
    if path.endswith((".yaml", ".yml")):
        return yaml.safe_load(content)
    return tomllib.loads(content.decode()) if path.endswith(".toml") else None


def holds(tree: Any, value: Any) -> bool:
    """Whether a JSON tree has `value` as one of its leaves."""
    if isinstance(tree, dict):
        return any(holds(item, value) for item in tree.values())
    if isinstance(tree, list):
        return any(holds(item, value) for item in tree)
    return type(tree) is type(value) and bool(tree == value)


@pytest.mark.requirement("R1", "R2")
@everyone
@given(key=st.one_of(st.sampled_from(NASTY), ANYTHING.filter(str.strip)))
def test_key_of_any_form_reaches_the_agent_by_file_not_argument(spec: AgentSpec, key: str) -> None:
    """For every built-in agent; the key is a file's content, its last line's, or one value of JSON or TOML."""
    marked = f"<{key}>"
    launch = plan_launch(spec, AgentChoice(), place(api_key=marked), "task")
    assert not any(marked in argument for argument in launch.argv)
    assert not any(marked in value for value in launch.env.values())
    found = [
        path
        for path, content in files(launch).items()
        if content == marked.encode()
        or content.endswith(b"_KEY=" + marked.encode())
        or holds(tree(path, content), marked)
    ]
    assert len(found) == 1


@pytest.mark.requirement("R67", "R68")
@everyone
@given(instruction=st.one_of(st.sampled_from(NASTY), ANYTHING))
def test_an_instruction_of_any_form_arrives_byte_for_byte(spec: AgentSpec, instruction: str) -> None:
    """By standard input or a file; never by argv for the built-in agents."""
    launch = plan_launch(spec, AgentChoice(), place(), instruction)
    if spec.instruction.method is PromptDelivery.STDIN:
        assert launch.stdin == instruction.encode()
    elif spec.instruction.method is PromptDelivery.CONFIG:
        assert any(holds(tree(path, content), instruction) for path, content in files(launch).items())
    else:
        assert files(launch)[f"/home/agent/{spec.instruction.path}"] == instruction.encode()
        assert launch.stdin is None
    assert launch.argv == plan_launch(spec, AgentChoice(), place(), "").argv


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    "spec", [spec for spec in SPECS.values() if spec.option("system_prompt")], ids=lambda spec: str(spec.name)
)
@given(prompt=st.one_of(st.sampled_from(NASTY), ANYTHING))
def test_a_system_prompt_of_any_form_arrives_intact(spec: AgentSpec, prompt: str) -> None:
    """As a JSON or TOML value, or as the end of a text file."""
    launch = plan_launch(spec, AgentChoice(options={"system_prompt": prompt}), place(), "task")
    plain = plan_launch(spec, AgentChoice(), place(), "task")
    new = {path: content for path, content in files(launch).items() if files(plain).get(path) != content}
    assert len(new) == 1
    for path, content in new.items():
        if tree(path, content) is not None:
            assert holds(tree(path, content), prompt)
        else:
            assert content.endswith(prompt.encode())


@pytest.mark.requirement("R63")
@everyone
def test_every_declared_option_takes_effect(spec: AgentSpec) -> None:
    """With any option given, what is started differs from what is started without it."""
    samples: dict[str, Any] = {"string": "high", "integer": 7, "number": 0.5, "boolean": True}
    plain = plan_launch(spec, AgentChoice(), place(), "task")
    for option in spec.options:
        samples["string"] = next((value for value in option.choices if value != option.default), "high")
        value = not option.default if option.type is OptionType.BOOLEAN else samples[option.type.value]
        choice = AgentChoice(options={option.name: value})
        check_choice(spec, choice, "task")
        assert plan_launch(spec, choice, place(), "task") != plain, option.name


@pytest.mark.requirement("R10", "R18")
@everyone
def test_model_endpoint_is_in_a_file_not_in_the_programs_environment(spec: AgentSpec) -> None:
    """The base URL arrives, and only by file."""
    launch = plan_launch(spec, AgentChoice(), place(), "task")
    url = place().base_url
    assert any(
        holds(tree(path, content), url) or f"_BASE_URL={url}\n".encode() in content
        for path, content in files(launch).items()
    )
    assert place().base_url not in str(launch.env)
    assert not launch.secret_env


@pytest.mark.requirement("R63", "R64", "R68", "R69")
def test_unsupported_requests_of_an_agent_are_refused_before_the_start() -> None:
    """Options, seed, permissions, MCP servers."""
    choice = AgentChoice(
        options={"thinking": "high", "temperature": "hot", "max_turns": 1.5, "stream": 1},
        skip_permissions=True,
        mcp_servers=(McpServer("s", ("prog",)),),
    )
    with pytest.raises(InvalidArgument) as caught:
        check_choice(SPECS["shell"], choice, "task")
    assert {violation.field for violation in caught.value.violations} == {
        "spec.agent.options.thinking",
        "spec.agent.options.temperature",
        "spec.agent.options.max_turns",
        "spec.agent.options.stream",
        "spec.agent.skip_permissions",
        "spec.agent.mcp_servers",
    }
    with pytest.raises(InvalidArgument, match="has no option seed"):
        check_choice(SPECS["pi"], AgentChoice(seed=1), "task")


@pytest.mark.requirement("R64")
def test_unset_and_false_are_different() -> None:
    config = "/home/agent/.shell-agent/config.json"

    def stream(choice: AgentChoice) -> Any:
        launched = plan_launch(SPECS["shell"], choice, place(), "task")
        return json.loads(files(launched)[config]).get("stream", "unset")

    assert stream(AgentChoice()) == "unset"
    assert stream(AgentChoice(options={"stream": False})) is False


@pytest.mark.requirement("R63")
def test_whole_numbers_stay_whole() -> None:
    """A Struct has doubles only, and an integer option is an integer all the same."""
    launch = plan_launch(SPECS["shell"], AgentChoice(options={"max_turns": 3.0}, seed=7), place(), "task")
    config = json.loads(files(launch)["/home/agent/.shell-agent/config.json"])
    assert (config["max_turns"], config["seed"]) == (3, 7)
    assert isinstance(config["max_turns"], int)


@pytest.mark.requirement("R69")
def test_mcp_servers_are_configured_in_the_agents_own_way() -> None:
    """The agent's configuration has each server, secrets of a server included, and nothing else is lost."""
    servers = (
        McpServer("local", ("prog", "a b"), {"A": "b"}, {"S": "secret"}),
        McpServer("remote", url="http://127.0.0.1:9/mcp"),
    )
    launch = plan_launch(SPECS["opencode"], AgentChoice(mcp_servers=servers), place(), "task")
    config = json.loads(files(launch)["/home/agent/.config/opencode/opencode.json"])
    assert config["mcp"]["local"]["command"] == ["prog", "a b"]
    assert config["mcp"]["local"]["environment"] == {"A": "b", "S": "secret"}
    assert config["mcp"]["remote"] == {"type": "remote", "url": "http://127.0.0.1:9/mcp", "enabled": True}
    assert config["model"] == "gate/Qwen/Q3:x"
    launch = plan_launch(SPECS["codex"], AgentChoice(mcp_servers=servers), place(), "task")
    config = tree("config.toml", files(launch)["/home/agent/.codex/config.toml"])
    local, remote = config["mcp_servers"]["local"], config["mcp_servers"]["remote"]
    assert local == {"command": "prog", "args": ["a b"], "env": {"A": "b", "S": "secret"}}
    assert remote == {"url": "http://127.0.0.1:9/mcp"}
    assert config["model"] == "Qwen/Q3:x"


@pytest.mark.requirement("R1", "R10", "R69")
def test_claude_code_is_configured_by_files_alone() -> None:
    """No secret and no endpoint in its environment or argv; MCP servers of both kinds."""
    servers = (
        McpServer("local", ("prog", "a b"), {"A": "b"}, {"S": "secret"}),
        McpServer("remote", url="http://x/mcp"),
    )
    launch = plan_launch(SPECS["claude-code"], AgentChoice(mcp_servers=servers), place(), "task")
    assert "the-key" not in str((launch.argv, launch.env)) and not launch.secret_env
    assert place().base_url not in str((launch.argv, launch.env))
    settings = json.loads(files(launch)["/home/agent/.claude/settings.json"])
    assert settings["env"]["ANTHROPIC_BASE_URL"] == place().base_url
    assert files(launch)["/home/agent/.claude/key"] == b"the-key"
    assert json.loads(files(launch)["/home/agent/.claude.json"])["mcpServers"] == {
        "local": {"type": "stdio", "command": "prog", "args": ["a b"], "env": {"A": "b", "S": "secret"}},
        "remote": {"type": "http", "url": "http://x/mcp"},
    }


@pytest.mark.requirement("R68")
@pytest.mark.parametrize(("agent", "flag"), [("opencode", "--auto"), ("claude-code", "--dangerously-skip-permissions")])
def test_permission_skipping_flags_are_given_only_when_asked_for(agent: str, flag: str) -> None:
    spec = SPECS[agent]
    assert flag not in plan_launch(spec, AgentChoice(), place(), "t").argv
    assert flag in plan_launch(spec, AgentChoice(skip_permissions=True), place(), "t").argv


@pytest.mark.requirement("R1", "R69")
def test_gate_tools_are_configured_with_the_rollouts_key_for_capable_agents() -> None:
    """At the URL in the sandbox, the token in a file that is the agent's alone, beside the task's servers."""
    here = replace(place(), tools_url="http://127.0.0.1:4000/rollout/r/mcp")
    servers = (McpServer("local", ("prog",)),)
    launch = plan_launch(SPECS["opencode"], AgentChoice(mcp_servers=servers), here, "task")
    [file] = [item for item in launch.files if item.path.endswith("opencode.json")]
    mcp = json.loads(file.content)["mcp"]
    assert mcp.keys() == {"local", "penstock"}
    assert mcp["penstock"]["url"] == here.tools_url
    assert mcp["penstock"]["headers"] == {"Authorization": f"Bearer {here.api_key}"}
    assert mcp["penstock"]["oauth"] is False
    assert file.mode == 0o600
    assert not any(here.api_key in argument for argument in launch.argv)
    assert all(here.api_key not in value for value in launch.env.values())
    check_host_tools(SPECS["opencode"], ["lookup"])
    for name in ("pi", "shell"):
        check_host_tools(SPECS[name], [])
        with pytest.raises(FailedPrecondition, match=name) as refused:
            check_host_tools(SPECS[name], ["lookup"])
        assert refused.value.reason == "AGENT_WITHOUT_MCP"
        assert "lookup" in refused.value.message


@pytest.mark.requirement("R69")
def test_an_entry_that_takes_no_headers_is_refused_host_tools() -> None:
    """Its requests would come without the rollout's token."""
    spec = SPECS["opencode"]
    assert spec.mcp is not None
    without = spec.model_copy(update={"mcp": spec.mcp.model_copy(update={"entry": "{url: url}"})})
    with pytest.raises(FailedPrecondition):
        check_host_tools(without, ["lookup"])


@pytest.mark.requirement("R15", "R69")
def test_the_name_of_the_gates_own_server_is_taken() -> None:
    """A task's server cannot stand in its place."""
    assert (field_types.GATES_SERVER, field_types.MAX_SERVERS) == (HOST_TOOLS_SERVER, MAX_SERVERS)
    choice = AgentChoice(mcp_servers=(McpServer("penstock", ("prog",)),))
    with pytest.raises(InvalidArgument) as refused:
        check_choice(SPECS["opencode"], choice, "task")
    assert [violation.field for violation in refused.value.violations] == ["spec.agent.mcp_servers[0].name"]


def test_a_rollout_has_at_most_so_many_servers() -> None:
    """A client chooses their number, and each is compared with those before it."""
    servers = tuple(McpServer(f"s{number}", ("prog",)) for number in range(MAX_SERVERS + 1))
    check_choice(SPECS["opencode"], AgentChoice(mcp_servers=servers[1:]), "task")
    with pytest.raises(InvalidArgument, match=f"at most {MAX_SERVERS}"):
        check_choice(SPECS["opencode"], AgentChoice(mcp_servers=servers), "task")


@pytest.mark.requirement("R2")
@pytest.mark.parametrize("model", ["", "-x", "a b", "{{key}}", "a\nb", "{env:X}", "x" * 300])
def test_a_model_name_that_could_be_read_as_something_else_is_refused(model: str) -> None:
    with pytest.raises(FailedPrecondition, match="model's name"):
        plan_launch(SPECS["shell"], AgentChoice(), place(model=model), "t")


@pytest.mark.requirement("R2", "R63")
@given(value=ANYTHING)
def test_toml_values_keep_their_type_and_omitted_options_leave_no_trace(value: str) -> None:
    """The same rules for TOML files, arguments and environment."""
    spec = parse_spec({
        "name": "t", "version": "1", "dialects": ["responses"], "instruction": {"method": "stdin"},
        "argv": ["t", "--x={{option.x}}", "{{option.n}}"],
        "env": {"KEY": "{{api_key}}", "X": "{{option.x}}"},
        "files": [{"path": "c.toml", "toml": {"url": "{{base_url}}", "n": "{{option.n}}", "x": "{{option.x}}"}}],
        "options": [{"name": "x", "type": "string"}, {"name": "n", "type": "integer"}],
    })  # fmt: skip
    without = plan_launch(spec, AgentChoice(), place(), "t")
    assert without.argv == ("t",)
    assert (dict(without.env), dict(without.secret_env)) == ({}, {"KEY": "the-key"})
    assert tomllib.loads(files(without)["/home/agent/c.toml"].decode()) == {"url": place().base_url}
    launch = plan_launch(spec, AgentChoice(options={"x": value, "n": 3.0}), place(), "t")
    assert launch.argv == ("t", f"--x={value}", "3")
    assert launch.env["X"] == value
    assert tomllib.loads(files(launch)["/home/agent/c.toml"].decode()) == {"url": place().base_url, "n": 3, "x": value}
