"""Lints agent specs without running them: the model checks their validity, this module their quality.

Remarks are advice, each with what to do: nothing here refuses a spec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock_driver.agents.launch import reaches_host_tools
from penstock_driver.agents.output_events import EventKind
from penstock_driver.agents.specs import AgentSpec, EventSource, PromptDelivery
from penstock_driver.agents.templates import names


@dataclass(frozen=True, slots=True)
class Remark:
    """A field of the spec and the advice about it."""

    where: str
    message: str


def remarks(spec: AgentSpec) -> Iterator[Remark]:
    """Advice on a valid spec."""
    yield from _endpoint(spec)
    yield from _instruction(spec)
    yield from _events(spec)
    if not spec.check_argv:
        yield Remark("check_argv", "is empty: a broken installation shows only when a rollout fails; try --version")
    if spec.mcp is None:
        yield Remark("mcp", "is missing: rollouts with MCP servers or host tools are refused for this agent")
    elif not reaches_host_tools(spec):
        yield Remark("mcp.entry", "leaves out url or headers: rollouts that are offered host tools are refused")
    if not spec.can_skip_permissions and spec.mcp is not None:
        yield Remark("skip_permissions_argv", "is empty: correct only if the agent never asks before it runs a command")
    if spec.needs_root:
        yield Remark("needs_root", "is set: the agent is refused on backends without root")
    if spec.option("seed") is None:
        yield Remark("options", "has no seed: a rollout or group with a seed is refused for this agent")
    unused = [name for name in ("temperature", "max_tokens") if spec.option(name) is None]
    if unused:
        yield Remark("options", f"has no {' and no '.join(unused)}: only the gate's sampling can set them")


def _endpoint(spec: AgentSpec) -> Iterator[Remark]:
    for variable, template in spec.env.items():
        if {"api_key", "base_url"} & set(names(template)):
            yield Remark(
                f"env.{variable}",
                "is inherited by every program that the agent starts, which can then call the model with its key: "
                "use a config file if the agent reads one",
            )
    if any("base_url" in names(argument) for argument in spec.argv):
        yield Remark(
            "argv", "has the endpoint, visible in the list of processes: use a config file if the agent reads one"
        )
    for index, file in enumerate(spec.files):
        if "api_key" in names(file.text or "") + _names_in(file.tree) and file.mode & 0o077:
            yield Remark(f"files[{index}].mode", "lets other users read a file with the agent key: use 0600")


def _instruction(spec: AgentSpec) -> Iterator[Remark]:
    if spec.instruction.method is PromptDelivery.ARGV:
        yield Remark(
            "instruction.method",
            "is argv: instructions beyond 100 KiB are refused, and the list of processes shows them: use stdin, "
            "file or config if the agent supports one of them",
        )


def _events(spec: AgentSpec) -> Iterator[Remark]:
    if spec.events.source is EventSource.NONE:
        yield Remark("events.source", "is none: the agent has no events while it runs; does it print JSON lines?")
        return
    kinds = {rule.kind for rule in spec.events.rules}
    for wanted, why in (
        ({EventKind.ASSISTANT}, "its answers have no events"),
        ({EventKind.TOOL_CALL, EventKind.TOOL_RESULT}, "its commands have no events"),
        ({EventKind.DONE}, "its failures are known by its exit code only"),
    ):
        if not kinds & wanted:
            yield Remark("events.rules", f"has no rule of kind {' or '.join(sorted(wanted))}: {why}")


def _names_in(tree: object) -> list[str]:
    if isinstance(tree, str):
        return names(tree)
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [name for item in items for name in _names_in(item)]
