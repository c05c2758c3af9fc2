"""slime's abort as the generate function sees it; its classes have the form of the commit that the plug-in names."""

from __future__ import annotations

import asyncio
import importlib
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

NAME = "penstock.adapters.trainers.plugins.slime"
Generate = Callable[[Namespace, Any, dict[str, Any]], Awaitable[Any]]


@dataclass
class Sample:
    """slime's, as far as an aborted one goes."""

    class Status(Enum):
        PENDING = "pending"
        ABORTED = "aborted"

    label: str
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)


class GenerateState:
    """One for the process: each construction is the same."""

    aborted: ClassVar[bool] = False

    def __init__(self, _args: Namespace) -> None: ...


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The plug-in's module, imported where slime's classes are those above and its servers are asked nothing."""
    names = ("slime", "slime.utils", "slime.utils.http_utils", "slime.utils.types")
    made = {name: ModuleType(name) for name in (*names, "slime.rollout", "slime.rollout.sglang_rollout")}
    made["slime.utils"].http_utils = made["slime.utils.http_utils"]  # type: ignore[attr-defined]
    made["slime.utils.types"].Sample = Sample  # type: ignore[attr-defined]
    made["slime.rollout.sglang_rollout"].GenerateState = GenerateState  # type: ignore[attr-defined]
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(GenerateState, "aborted", False)
    found = importlib.import_module(NAME)
    monkeypatch.setattr(found, "_LOOK_S", 0.0, raising=False)
    yield found
    del sys.modules[NAME]


def generate(plugin: ModuleType, row: Callable[[str, Any], Awaitable[Any]]) -> Awaitable[Any]:
    made: Generate = plugin.generate_with(SimpleNamespace(row=row))
    return made(Namespace(rollout_top_p=1.0), Sample("kiwi"), {"max_new_tokens": 8})


@pytest.mark.requirement("R70")
async def test_slimes_abort_ends_a_rollout_between_its_calls(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a command of its agent, while it is prepared or graded: slime's step waits for every rollout that is left."""
    cancelled = False

    async def row(_label: str, _answer: Any) -> None:
        nonlocal cancelled
        monkeypatch.setattr(GenerateState, "aborted", True)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled = True
            raise

    sample = await generate(plugin, row)
    assert sample.status is Sample.Status.ABORTED and cancelled


@pytest.mark.requirement("R70")
async def test_no_call_is_sent_once_slime_aborts(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers are to become idle: slime asks them to stop until they are."""

    async def row(_label: str, answer: Any) -> None:
        monkeypatch.setattr(GenerateState, "aborted", True)
        await answer(SimpleNamespace())

    assert (await generate(plugin, row)).status is Sample.Status.ABORTED
