"""Agent specs: what is refused and why, and that the built-in ones survive the wire."""

from __future__ import annotations

import base64
import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock_chassis.errors import FailedPrecondition, InvalidArgument
from penstock_chassis.journal import Journal
from penstock_driver.agents.check import remarks
from penstock_driver.agents.registry import AgentRegistry, built_in_specs, load_spec
from penstock_driver.agents.specs import AgentSpec, parse_spec
from penstock_driver.app import MIGRATIONS
from penstock_driver.wire.agents import spec_from_proto, spec_to_proto

SPECS = {spec.name: spec for spec in built_in_specs()}
GOOD: dict[str, Any] = {
    "name": "tool",
    "version": "1.0.0",
    "argv": ["tool", "--file", "{{instruction_path}}", "{{option.level}}"],
    "instruction": {"method": "file", "path": ".tool/task.md"},
    "files": [{"path": ".tool/config.json", "json": {"url": "{{base_url}}", "key": "{{api_key}}"}}],
    "dialects": ["chat_completions"],
    "options": [{"name": "level", "type": "string"}],
}


def changed(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(GOOD), **changes}


def refusal(data: dict[str, Any]) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        parse_spec(data)
    assert caught.value.reason == "FIELD_INVALID"
    return caught.value


@pytest.mark.requirement("R66")
async def test_a_registered_agent_survives_a_restart_and_its_versions_stay_known(tmp_path: Path) -> None:
    """The newest is listed, an older one is found by its hash, a deleted one is not listed."""
    toolbox = {"files": [{"path": "bin/x", "content": base64.b64encode(b"\x00\xff")}]}
    first, second = parse_spec(changed(toolbox=toolbox)), parse_spec(changed(version="2"))
    async with await Journal.open(tmp_path / "driver.db", MIGRATIONS) as journal:
        registry = await AgentRegistry.open(journal)
        await registry.register("default", first)
        await registry.register("default", second)
    async with await Journal.open(tmp_path / "driver.db", MIGRATIONS) as journal:
        registry = await AgentRegistry.open(journal)
        assert registry.get("default", "tool").spec == second
        assert registry.get("default", "tool", first.sha256).spec == first
        await registry.delete("default", "tool")
        assert [agent.spec.name for agent in registry.agents("default")] == sorted(SPECS)
        with pytest.raises(FailedPrecondition):
            await registry.delete("default", "shell")


@pytest.mark.requirement("R66")
def test_the_guides_example_holds() -> None:
    """What docs/guides/your-own-agent.md shows is a spec that loads."""
    guide = (Path(__file__).parents[4] / "docs/guides/your-own-agent.md").read_text("utf-8")
    example = guide.partition("```yaml agent\n")[2].partition("```")[0]
    assert load_spec(example, {"mine.sh": Path(__file__)}).name == "mine"


@pytest.mark.requirement("R66")
def test_the_built_in_agents_are_the_yaml_files() -> None:
    """What comes with the driver is data."""
    assert set(SPECS) == {
        "aider",
        "claude-code",
        "cline",
        "codex",
        "copilot-cli",
        "gemini-cli",
        "kilo",
        "kimi-cli",
        "mini-swe-agent",
        "opencode",
        "openhands",
        "pi",
        "qwen-code",
        "shell",
        "terminus-2",
    }


@pytest.mark.requirement("R17")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_a_built_in_spec_survives_the_wire_unchanged(spec: AgentSpec) -> None:
    """A spec travels whole in its proto, so a client in any language can register one."""
    assert spec_from_proto(spec_to_proto(spec)) == spec
    assert spec_from_proto(spec_to_proto(spec)).sha256 == spec.sha256


@pytest.mark.requirement("R63")
def test_a_built_in_agent_takes_no_top_p_with_which_every_call_is_refused() -> None:
    """The gate takes more than 0, up to 1."""
    options = {spec.name: option for spec in SPECS.values() for option in spec.options if option.name == "top_p"}
    assert {"aider", "gemini-cli", "opencode"} <= set(options)
    for option in options.values():
        assert option.problem(0) == "expected at least 0.0001"
        assert option.problem(0.0001) is option.problem(1) is None


@pytest.mark.requirement("R63")
def test_a_spec_is_known_by_its_content() -> None:
    """The version pin is part of what tells specs apart."""
    assert parse_spec(GOOD).sha256 == parse_spec(copy.deepcopy(GOOD)).sha256
    assert parse_spec(GOOD).sha256 != parse_spec(changed(version="1.0.1")).sha256


@pytest.mark.requirement("R1", "R2", "R18", "R63")
@pytest.mark.parametrize(
    ("data", "field", "reason"),
    [
        (changed(colour="red"), "colour", "not permitted"),
        (changed(name="Not A Name"), "name", "pattern"),
        (changed(argv=[]), "argv", "at least 1"),
        (changed(argv=["tool", "{{nonsense}}", "{{option.level}}"]), "spec", "unknown placeholder {{nonsense}}"),
        (changed(argv=["tool", "{{api_key}}", "{{option.level}}"]), "spec", "{{api_key}} may not be used here"),
        (changed(argv=["tool", "{{instruction}}", "{{option.level}}"]), "spec", "method is argv"),
        (changed(argv=["tool"]), "spec", "level is declared, but nothing uses it"),
        (changed(files=[]), "spec", "nothing uses {{base_url}}"),
        (changed(dialects=["morse"]), "dialects.0", "chat_completions"),
        (changed(instruction={"method": "file"}), "instruction", "path is required"),
        (changed(instruction={"method": "file", "path": "../up"}), "instruction.path", "without '..'"),
        (changed(toolbox={"npm_packages": ["opencode-ai"]}), "toolbox.npm_packages.0", "pattern"),
        (changed(toolbox={"npm_packages": ["x@latest"]}), "toolbox.npm_packages.0", "pattern"),
        (changed(toolbox={"python_packages": ["x==1.0"]}), "toolbox.python_packages.0", "pattern"),
        (
            changed(toolbox={"python_packages": [f"x==1.0 --hash=sha256:{'0' * 64}"]}),
            "toolbox",
            "needs python",
        ),
        (changed(instruction={"method": "config"}, argv=["x", "{{option.level}}"]), "spec", "argv or config"),
        (changed(instruction={"method": "config"}, argv=["{{instruction}}"]), "spec", "may not be used here"),
        (changed(trial={"work": "do it"}), "trial", "{{command}} or {{word}}"),
        (changed(trial={"end": "a", "end_command": "b"}), "trial", "not both"),
        (changed(files=[{"path": "a", "text": "k={{api_key}}\nurl={{base_url}}"}]), "spec", "only be at the end"),
        (changed(files=[{"path": "a", "json": {}, "text": "{{base_url}}"}]), "files.0", "exactly one"),
        (changed(events={"rules": [{"when": "type ==", "kind": "done"}]}), "events.rules.0.when", "JMESPath"),
        (changed(mcp={"path": "a", "key": "k", "entry": "{"}), "mcp.entry", "JMESPath"),
        (changed(env={"A B": "x"}), "env.A B.[key]", "pattern"),
        (changed(needs_root="yes"), "needs_root", "valid boolean"),
        (changed(success_exit_codes=[True]), "success_exit_codes.0", "valid integer"),
        (changed(resume={"argv": []}), "resume.argv", "at least 1 item"),
        (changed(resume={"argv": ["{{api_key}}"]}), "spec", "resume.argv[0]: {{api_key}} may not be used here"),
        (changed(check_argv=["{{option.level}}"]), "spec", "may not be used here"),
    ],
)
def test_a_wrong_spec_is_refused_by_field_and_reason(data: dict[str, Any], field: str, reason: str) -> None:
    """What a spec may not say, it cannot say."""
    error = refusal(data)
    found = [(violation.field, violation.description) for violation in error.violations]
    assert any(where == field and reason in why for where, why in found), found


@pytest.mark.requirement("R17")
def test_all_mistakes_of_a_spec_are_named_at_once() -> None:
    """Whoever corrects a spec does not have to ask once for each mistake."""
    error = refusal(changed(argv=["x", "{{nothing}}"], files=[]))
    whys = [violation.description for violation in error.violations]
    assert len(whys) == 3  # the placeholder, the option that nothing uses any more, the address
    assert all(why in str(error) for why in whys)


@pytest.mark.requirement("R17")
def test_a_spec_that_is_no_yaml_mapping_is_refused() -> None:
    for text in ("[", "- a", "just text"):
        with pytest.raises(InvalidArgument):
            load_spec(text, {})


@pytest.mark.requirement("R12")
def test_a_toolbox_file_may_come_from_beside_the_spec_only() -> None:
    """Nothing else of the server's files can be named."""
    text = "toolbox: {files: [{path: a, from: /etc/passwd}]}"
    with pytest.raises(InvalidArgument, match="beside the spec"):
        load_spec(text, {})


@pytest.mark.requirement("R63")
def test_python_packages_come_from_a_requirements_file(tmp_path: Path) -> None:
    """As tools write one, comments and continued lines included; a list in the spec is the same."""
    pins = tmp_path / "pins.txt"
    pins.write_text(
        f"# made by a tool\nx==1.0 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{'1' * 64}\n    # via y\n"
    )
    line = f"x==1.0 --hash=sha256:{'0' * 64} --hash=sha256:{'1' * 64}"
    runtimes = [{"kind": "python", "below_version": "3.14"}]
    written = yaml.safe_dump(changed(toolbox={"runtimes": runtimes, "python_packages": {"from": "pins.txt"}}))
    spec = load_spec(written, {"pins.txt": pins})
    assert spec == parse_spec(changed(toolbox={"runtimes": runtimes, "python_packages": [line]}))
    assert spec_from_proto(spec_to_proto(spec)) == spec
    with pytest.raises(InvalidArgument) as caught:
        load_spec(written, {})
    assert "python_packages" in caught.value.message


@pytest.mark.requirement("R10", "R46", "R63", "R67", "R69", "R71")
@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"env": {"KEY": "{{api_key}}"}}, "env.KEY"),
        ({"argv": ["tool", "{{base_url}}", "{{option.level}}"]}, "argv"),
        (
            {"instruction": {"method": "argv"}, "argv": ["tool", "{{instruction}}", "{{option.level}}"]},
            "instruction.method",
        ),
        (
            {"files": [{"path": "a", "json": {"u": "{{base_url}}", "k": ["{{api_key}}"]}, "mode": 0o644}]},
            "files[0].mode",
        ),
        ({"mcp": {"path": "m", "key": "k", "entry": "{url: url}"}}, "mcp.entry"),
        ({"events": {"source": "stdout_lines", "rules": []}}, "events.rules"),
        ({"needs_root": True}, "needs_root"),
        ({}, "check_argv"),
    ],
)
def test_possible_improvements_of_a_spec_are_remarked(changes: dict[str, Any], where: str) -> None:
    """A spec that holds is read as a careful person would."""
    assert where in [remark.where for remark in remarks(parse_spec(changed(**changes)))]


@pytest.mark.requirement("R1", "R10", "R67", "R71")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_no_built_in_agent_hands_endpoint_or_key_to_its_programs(spec: AgentSpec) -> None:
    """They are in files, the instruction in none of the arguments, and what it does is seen."""
    serious = ("env.", "argv", "files", "instruction", "events", "check_argv")
    assert not [remark for remark in remarks(spec) if remark.where.startswith(serious)]


@pytest.mark.requirement("R145")
def test_a_python_package_may_have_a_hash_for_each_platforms_wheel() -> None:
    """As many as `uv pip compile --generate-hashes` writes for pydantic-core (140); the refusal of more names the
    package."""

    def toolbox(hashes: int) -> dict[str, Any]:
        line = "pydantic-core==2.1" + "".join(f" --hash=sha256:{number:064x}" for number in range(hashes))
        runtimes = [{"kind": "python", "below_version": "3.14"}]
        given: dict[str, Any] = changed(toolbox={"runtimes": runtimes, "python_packages": [line]})
        return given

    parsed = parse_spec(toolbox(140))
    assert len(parsed.toolbox.python_packages[0]) > 11_000
    with pytest.raises(InvalidArgument) as refused:
        parse_spec(toolbox(1000))
    assert "pydantic-core has 79018 characters with its hashes; at most 65536 are allowed" in str(refused.value)
