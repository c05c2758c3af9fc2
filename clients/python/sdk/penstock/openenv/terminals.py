"""The terminal of an environment: `reset` opens it where it says what is in it, else the first command does.

Invariants: the verifier's commands are told to nobody, and the reward is in no text that a command could write: it
travels in the observation's own field (R77); a terminal that is closed, left or replaced is gone with its sandbox, also
when that happens while it is opened (R70).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

from penstock.client.connection import Penstock
from penstock.client.errors import FailedPrecondition, InvalidArgument, PenstockError
from penstock.client.tasks import SandboxChoice
from penstock.client.terminals import Observation, TerminalHandle
from penstock.client.terminus import TERMINAL_TOOL
from penstock.client.terminus_calls import call_problem
from penstock.client.terminus_tasks import as_task, sandbox_of
from penstock.openenv.rollouts import CANCEL_S, CommandResult, command_result, see_through

TOOL: Final = TERMINAL_TOOL.name
KEYS: Final = frozenset(
    {"instruction", "setup", "setup_scripts", "verify", "verify_scripts", "task_id", "sandbox_root", "forward_hf_token"}
    | {f"{before}sandbox_{name}" for before in ("", "hf_") for name in ("image", "flavor", "timeout")}
    | {"sandbox_backend"}
)
"""What a reset may say of a terminal."""

_log = logging.getLogger("penstock.openenv")


class EnvironmentTerminal:
    """One terminal, which is opened once; `labels` are its own."""

    def __init__(self, ps: Penstock, given: Mapping[str, Any], backend: str, labels: Mapping[str, str]) -> None:
        """Raises InvalidArgument: `OPENENV_ARGUMENTS`, what the reset says does not hold."""
        try:
            self._task = as_task({"instruction": "Work in the terminal.", **given})
            self._sandbox, self._wall_time = sandbox_of(given, SandboxChoice(backend=backend), None)
        except (InvalidArgument, TypeError, ValueError) as error:
            raise InvalidArgument(f"reset: {error}", reason="OPENENV_ARGUMENTS") from None
        self._ps = ps
        self._labels = labels
        self._handle: TerminalHandle | None = None
        self._closed = False

    async def open(self) -> str:
        """The sandbox of the terminal, which is opened where it is not yet.

        Raises:
            PenstockError: it cannot be opened, and nothing of it is left.
        """
        if self._handle is None:
            opening = asyncio.ensure_future(
                self._ps.terminals.open(
                    self._task, sandbox=self._sandbox, wall_time=self._wall_time, labels=self._labels
                )
            )
            try:
                self._handle = await asyncio.shield(opening)
            except asyncio.CancelledError:
                await see_through(_left(opening))
                raise
            if self._closed:
                await see_through(_closed(self._handle))
                raise FailedPrecondition("The environment was reset meanwhile", reason="OPENENV_SESSION_CLOSED")
        return self._handle.info.sandbox_id

    @property
    def setup_results(self) -> list[CommandResult]:
        """The setup commands, where this terminal's preparation ran them."""
        ran = self._handle.info.setup if self._handle is not None else ()
        return [command_result(item, [str(command.shell) for command in self._task.setup]) for item in ran]

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        """Runs `command`, or gives `final_answer`, which ends the episode; it is open.

        Raises:
            PenstockError: `EPISODE_ENDED`, `STEP_LIMIT`.
        """
        assert self._handle is not None
        if command := arguments.get("command"):
            return await self._handle.run(command)
        return await self._handle.answer(arguments["final_answer"])

    async def close(self) -> None:
        """Ends it with its sandbox; what cannot be reached is ended by the driver's own limit."""
        self._closed = True
        if self._handle is not None:
            await _closed(self._handle)


def check_call(arguments: Mapping[str, Any]) -> None:
    """Raises InvalidArgument: `OPENENV_ARGUMENTS`, neither a command nor an answer, or both."""
    # Both generations of clients send an empty text for what is not meant.
    given = {name: value for name, value in arguments.items() if value != "" or name not in ("command", "final_answer")}
    if problem := call_problem(TOOL, given):
        raise InvalidArgument(f"Invalid arguments: {problem}", reason="OPENENV_ARGUMENTS")


async def _left(opening: asyncio.Future[TerminalHandle]) -> None:
    try:
        handle = await opening
    except PenstockError:
        return  # refused: there is none
    await _closed(handle)


async def _closed(handle: TerminalHandle) -> None:
    try:
        async with asyncio.timeout(CANCEL_S):
            await handle.close()
    except (PenstockError, TimeoutError) as error:
        _log.warning("closing %s failed, its own limit ends it: %s", handle.terminal_id, error)
