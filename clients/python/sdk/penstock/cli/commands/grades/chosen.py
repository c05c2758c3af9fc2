"""Finds what RUN means: a run, or a group."""

from dataclasses import dataclass
from typing import TypedDict

from rich.markup import escape

from penstock.cli.terminal.console import clean, counted, err
from penstock.client import Penstock


class Which(TypedDict, total=False):
    """The condition that selects rollouts."""

    run_id: str
    group_id: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """The condition that selects rollouts, and how many of them have ended."""

    where: Which
    ended: int


async def chosen(ps: Penstock, name: str) -> Chosen | None:
    """Returns what selects the rollouts: of a run, else of a group. None = none has ended, which is printed."""
    for where in (Which(run_id=name), Which(group_id=name)):
        count, ended = 0, 0
        async for one in ps.rollouts.list(**where):
            count, ended = count + 1, ended + (one.end_time is not None)
        if ended < count:
            _print(f"{counted(count - ended, 'rollout')} of {name} still run, and are left out")
        if ended:
            return Chosen(where, ended)
        if count:
            return None
    _print(
        f"no ended rollout of run or group {name}; `penstock watch --once` lists rollouts with their runs and groups"
    )
    return None


def _print(text: str) -> None:
    err.print(escape(clean(text)), soft_wrap=True)
