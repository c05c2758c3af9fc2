"""The terminal of an environment: opened by `reset` if its arguments describe one, else by the first command.

Invariants: the verifier's commands are never exposed, and the reward is in no text that a command could write: it has
its own field in the observation (R77); a terminal that is closed, left or replaced is removed with its sandbox, even if
that happens while it is being opened (R70).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

from penstock.adapters.openenv.rollouts import CANCEL_S, CommandResult, command_result, see_through
from penstock.client.connection import Penstock
from penstock.client.errors import FailedPrecondition, InvalidArgument, PenstockError
from penstock.client.tasks.spec import SandboxChoice
from penstock.client.terminals import Observation, TerminalHandle
from penstock.client.terminus.calls import call_problem
from penstock.client.terminus.session import TERMINAL_TOOL
from penstock.client.terminus.tasks import as_task, sandbox_of

TOOL: Final = TERMINAL_TOOL.name
KEYS: Final = frozenset(
    {"instruction", "setup", "setup_scripts", "verify", "verify_scripts", "task_id", "sandbox_root", "forward_hf_token"}
    | {f"{before}sandbox_{name}" for before in ("", "hf_") for name in ("image", "flavor", "timeout")}
    | {"sandbox_backend"}
)
"""Arguments of a reset that describe a terminal."""

_log = logging.getLogger("penstock.adapters.openenv")


class EpisodeEnded(FailedPrecondition):
    """`EPISODE_ENDED` of an episode whose end is recorded; `reward` None = not graded."""

    def __init__(self, message: str, reward: float | None) -> None:
        super().__init__(message, reason="EPISODE_ENDED")
        self.reward = reward


class EnvironmentTerminal:
    """One terminal, which is opened once; `labels` are its own."""

    def __init__(self, ps: Penstock, given: Mapping[str, Any], backend: str, labels: Mapping[str, str]) -> None:
        """Raises InvalidArgument: `OPENENV_ARGUMENTS`, the reset's arguments are invalid."""
        try:
            self._task = as_task({"instruction": "Work in the terminal.", **given})
            self._sandbox, self._wall_time = sandbox_of(given, SandboxChoice(backend=backend), None)
        except (InvalidArgument, TypeError, ValueError) as error:
            raise InvalidArgument(f"reset: {error}", reason="OPENENV_ARGUMENTS") from None
        self._ps = ps
        self._labels = labels
        self._handle: TerminalHandle | None = None
        self._opening = asyncio.Lock()
        self._closed = False

    async def open(self) -> str:
        """Opens the terminal unless it is open; returns its sandbox.

        Raises:
            PenstockError: it cannot be opened, and nothing of it is left.
        """
        async with self._opening:  # a reset may be opening it when another call of the session arrives
            self._refuse_when_closed()
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
                self._refuse_when_closed()
            return self._handle.info.sandbox_id

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise FailedPrecondition("The environment was reset meanwhile", reason="OPENENV_SESSION_CLOSED")

    @property
    def setup_results(self) -> list[CommandResult]:
        """Returns the results of the setup commands, if this terminal's preparation ran them."""
        ran = self._handle.info.setup if self._handle is not None else ()
        return [command_result(item, [str(command.shell) for command in self._task.setup]) for item in ran]

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        """Runs `command`, or submits `final_answer`, which ends the episode. The terminal must be open.

        Raises:
            EpisodeEnded: it had ended before, with or without a step of this environment.
            PenstockError: `EPISODE_ENDED`, its answer is being graded; `STEP_LIMIT`.
        """
        assert self._handle is not None
        try:
            if command := arguments.get("command"):
                return await self._handle.run(command)
            return await self._handle.answer(arguments["final_answer"])
        except FailedPrecondition as error:
            if error.reason != "EPISODE_ENDED":
                raise
            known = await self._handle.refresh()
            if not known.ended:
                raise
            raise EpisodeEnded(error.message, None if known.reward is None else known.reward.value) from error

    async def close(self) -> None:
        """Ends it with its sandbox; if the driver cannot be reached, the driver's own limit ends it."""
        self._closed = True
        if self._handle is not None:
            await _closed(self._handle)


def check_call(arguments: Mapping[str, Any]) -> None:
    """Raises InvalidArgument: `OPENENV_ARGUMENTS`, neither a command nor an answer, or both."""
    # Both generations of clients send an empty text for an omitted argument.
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
        _log.warning("closing %s failed; its own limit will end it: %s", handle.terminal_id, error)
