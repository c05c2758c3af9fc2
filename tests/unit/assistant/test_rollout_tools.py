"""What tools say of a rollout: its calls and its events, shortened, without parts of secrets."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.analysis.recordings import Recording, Turn
from penstock.assistant.answers import render
from penstock.assistant.context import Context
from penstock.assistant.tools import tools
from penstock.client import AgentEvent, CommandFinished, Endpoints, Exit, Phase, RolloutEvent

TOKEN = "b7" * 32
PARTED = re.compile("(b7){4}")


class Recorded(Context):
    """A server with one recording."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(lambda: Endpoints(), self._examine, environment={"MY_TOKEN": TOKEN})
        self._recording = recording

    async def _examine(self, *_: object) -> Any:
        raise AssertionError

    async def recording(self, rollout_id: str) -> Recording:
        """The only one."""
        return self._recording


def call(text: str) -> Turn:
    """A call that is answered with a text."""
    return Turn(
        index=0, call_id="c", parent_call_id=None, branch_id="b", role="main", state="delivered", answerer="engine",
        prompt=None, shared=0, sampled=None, logprobs=None, versions=(), finish_reason="stop", end_reason="",
        engine="numpy", model="m", sampling={}, normalisations=(), tools=(), injected=False,
        message={"role": "assistant", "parts": [{"kind": "text", "text": text}]}, body=None, receive_time=None,
        end_time=None,
    )  # fmt: skip


async def said(name: str, recording: Recording) -> str:
    """A tool's answer."""
    context = Recorded(recording)
    tool = next(tool for tool in tools(allow_writes=False) if tool.name == name)
    answer = await tool.run(context, tool.arguments.model_validate({"rollout_id": "r"}))
    return render(answer, context.redact)


@pytest.mark.requirement("R8")
@pytest.mark.parametrize("inside", [8, 32, 63])
@pytest.mark.parametrize("bound", [160, 640])
async def test_the_list_of_calls_has_no_part_of_a_secret(bound: int, inside: int) -> None:
    """An answer is shortened after its secrets are taken out."""
    space = "y" + " " * (bound - inside - 13) if bound > 160 else "y" * (bound - inside - 13)
    shown = await said("calls", Recording(origin="o", rollout_id="r", turns=(call(f"{space} {TOKEN} and more"),)))
    assert "0: [assistant]" in shown and not PARTED.search(shown)


@pytest.mark.requirement("R8")
@pytest.mark.parametrize("inside", [8, 32, 63])
async def test_events_have_no_part_of_a_secret(inside: int) -> None:
    """A long command, and a long line of the agent."""
    done = Exit("exited", 0, None, "", 1.0)
    line = "z" * (1999 - inside) + f" {TOKEN} and more"
    payloads: tuple[CommandFinished | AgentEvent, ...] = (
        CommandFinished(Phase.SETTING_UP, 0, "y" * (499 - inside) + f" {TOKEN} and more", done, b"", b""),
        AgentEvent("other", {}, line.encode()),
    )
    events = tuple(RolloutEvent(number, "r", None, payload) for number, payload in enumerate(payloads, 1))
    shown = await said("events", Recording(origin="o", rollout_id="r", events=events))
    assert "$ yyy" in shown and "[2] zzz" in shown and not PARTED.search(shown)
    assert "and more" not in shown
