"""One rollout, from its start to the result of `run_rollout`.

Invariants: a caller's mistakes are raised before anything starts; later failures are in the result's `error` as
CAUSE/REASON, without a reward; cancelling the wait, in any way, ends the rollout with its sandbox (R70).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import orjson

from penstock.adapters.openenv.rollout_arguments import Defaults, RunRollout, agent_of, options_of, task_of
from penstock.client.connection import Penstock
from penstock.client.errors import FailedPrecondition, PenstockError
from penstock.client.rollouts.handles import RolloutHandle
from penstock.client.tasks.spec import AgentChoice, Mode
from penstock.client.types.results import (
    AgentEvent,
    ArtifactCollected,
    CommandFinished,
    Ended,
    EventPayload,
    Exit,
    FailureCause,
    Outcome,
    Phase,
    PhaseChanged,
)
from penstock.client.types.trajectories import Call, Trajectory

TAIL_CHARS: Final = 2000
MAX_FILE_CHARS: Final = 8000
MAX_FILES: Final = 32
KEPT_FILES: Final = "files/"
"""Prefix of the working directory's files among the artifacts (`Task.keep_files`)."""
CANCEL_S: Final = 120.0
_SANDBOX_LABEL: Final = "penstock_rollout"
"""The driver's label on a sandbox with its rollout's id."""

_log = logging.getLogger("penstock.adapters.openenv")


@dataclass(slots=True)
class CommandResult:
    """A setup or verify command. `exit_code` None = a signal or its timeout ended it; see `stderr`."""

    cmd: str
    exit_code: int | None
    stdout: str
    stderr: str
    duration_s: float


@dataclass(slots=True)
class RolloutTurn:
    """A model call. `per_token_logps` is empty where the engine gives none, never filled in."""

    turn: int
    finish_reason: str | None = None
    completion_tokens: list[str] = field(default_factory=list)
    completion_token_ids: list[int] = field(default_factory=list)
    per_token_logps: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    timestamp: float = 0.0
    upstream_status: int | None = None
    upstream_error: dict[str, Any] | None = None


@dataclass(slots=True)
class RolloutResult:
    """The result of `run_rollout`, as JSON. `reward` None = not graded, which is not zero."""

    task_id: str
    mode: str
    sandbox_id: str = ""
    rollout_id: str = ""
    reward: float | None = None
    agent_exit_code: int | None = None
    wall_s: float = 0.0
    setup_results: list[CommandResult] = field(default_factory=list)
    verify_results: list[CommandResult] = field(default_factory=list)
    proxy_turns: list[RolloutTurn] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    files_extra: list[str] = field(default_factory=list)
    agent_log_tail: str = ""
    proxy_log_tail: str = ""
    error: str | None = None

    def json(self) -> str:
        """Returns the text of the tool's answer."""
        return orjson.dumps(asdict(self)).decode()


async def run_rollout(
    ps: Penstock, given: RunRollout, defaults: Defaults, *, seed: int | None, labels: Mapping[str, str]
) -> RolloutResult:
    """Runs one rollout to its end; a cancelled wait cancels the rollout and returns when its sandbox is gone.

    Raises:
        PenstockError: the arguments are invalid, or the services refuse the rollout: nothing was started.
    """
    started = time.monotonic()
    rollout_id = f"openenv-{secrets.token_hex(16)}"
    result = RolloutResult(task_id=given.task_id, mode=given.mode, rollout_id=rollout_id)
    options = options_of(given, defaults, seed, labels)
    choice = await _choice(ps, given, defaults)
    creating = asyncio.ensure_future(ps.rollouts.create(task_of(given), choice, rollout_id=rollout_id, **options))
    try:
        handle = await asyncio.shield(creating)
        await _watch(ps, handle, given, result)
    except asyncio.CancelledError:
        await _ended(creating)
        raise
    except PenstockError as error:
        if not creating.done() or creating.exception() is not None:
            raise
        # The rollout exists but cannot be followed: end it, and answer with the known state.
        await _ended(creating)
        result.error = f"infrastructure/{error.reason}: {error}"
    result.wall_s = round(time.monotonic() - started, 3)
    return result


async def _choice(ps: Penstock, given: RunRollout, defaults: Defaults) -> AgentChoice:
    """Returns the agent. The operator's choice applies to agents with prompts, a caller's always."""
    choice = agent_of(given, defaults)
    if not choice.skip_permissions or given.skip_permissions is not None:
        return choice
    return replace(choice, skip_permissions=(await ps.agents.get(choice.name)).can_skip_permissions)


async def _ended(creating: asyncio.Future[RolloutHandle]) -> None:
    """Cancels the rollout that was or is being created; continues if the waiting task is cancelled again."""

    async def end() -> None:
        try:
            handle = await creating
        except PenstockError:
            return  # refused: there is none
        try:
            async with asyncio.timeout(CANCEL_S):
                await handle.cancel("the OpenEnv session was closed")
        except (PenstockError, TimeoutError) as error:
            _log.warning("cancelling %s failed; its own limits will end it: %s", handle.rollout_id, error)

    await see_through(end())


async def see_through(end: Coroutine[Any, Any, None]) -> None:
    """Awaits a cleanup to its end even if the waiting task is cancelled; the cancellation is raised afterwards."""
    work = asyncio.ensure_future(end)
    cancelled = False
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            cancelled = True
    work.result()
    if cancelled:
        raise asyncio.CancelledError


async def _watch(ps: Penstock, handle: RolloutHandle, given: RunRollout, result: RolloutResult) -> None:
    log: list[str] = []
    async with aclosing(handle.events()) as events:
        async for event in events:
            if isinstance(event.payload, PhaseChanged) and event.payload.phase is Phase.RUNNING:
                result.sandbox_id = await _sandbox_of(ps, handle.rollout_id)
            _take(event.payload, given, result, log)
    result.agent_log_tail = ("\n".join(log[-200:]) or result.agent_log_tail)[-TAIL_CHARS:]
    if given.mode == Mode.BLACK_BOX:
        return
    try:
        trajectory = await handle.trajectory()
    except FailedPrecondition:
        return  # it ended before the gate was opened
    result.proxy_turns, result.proxy_log_tail = _turns(trajectory)


def _take(payload: EventPayload, given: RunRollout, result: RolloutResult, log: list[str]) -> None:
    match payload:
        case CommandFinished(phase=Phase.SETTING_UP):
            _put(payload, given.setup, result.setup_results)
        case CommandFinished(phase=Phase.VERIFYING):
            _put(payload, given.verify, result.verify_results)
        case AgentEvent():
            log.append(payload.raw_line.decode("utf-8", "replace").rstrip("\n"))
            del log[:-400]
        case ArtifactCollected():
            name = payload.name.removeprefix(KEPT_FILES)
            if len(result.files) < MAX_FILES and not payload.truncated:
                result.files[name] = payload.content.decode("utf-8", "replace")[:MAX_FILE_CHARS]
            else:
                result.files_extra.append(name)
        case Ended():
            _end(payload.outcome, result)
        case _:
            pass


def _put(finished: CommandFinished, given: list[str], results: list[CommandResult]) -> None:
    """Adds a command's result. A driver that was restarted begins with the first command again: those count."""
    del results[finished.index :]
    results.append(command_result(finished, given))


def _end(outcome: Outcome, result: RolloutResult) -> None:
    failure = outcome.failure
    if failure is not None:
        result.error = f"{failure.cause}/{failure.reason}: {failure.message}"
    if outcome.reward is not None and (failure is None or failure.cause is not FailureCause.VERIFIER):
        result.reward = outcome.reward.value
    if outcome.agent_exit is not None:
        result.agent_exit_code = _code(outcome.agent_exit)
        result.agent_log_tail = outcome.agent_stderr.decode("utf-8", "replace")


def command_result(finished: CommandFinished, given: list[str]) -> CommandResult:
    """Converts a setup or verify command; `given` are all of its kind, as the caller wrote them."""
    stderr = finished.stderr_tail.decode("utf-8", "replace")[-TAIL_CHARS:]
    if finished.exit.code is None:
        stderr = f"{stderr}\n{finished.exit}".strip()
    return CommandResult(
        cmd=given[finished.index] if finished.index < len(given) else finished.command,
        exit_code=finished.exit.code,
        stdout=finished.stdout_tail.decode("utf-8", "replace")[-TAIL_CHARS:],
        stderr=stderr,
        duration_s=round(finished.exit.duration, 3),
    )


def _code(ended: Exit) -> int | None:
    """Returns a shell's exit status: the code, or 128 plus the signal's number."""
    return ended.code if ended.code is not None else None if ended.signal is None else 128 + ended.signal


def _turns(trajectory: Trajectory) -> tuple[list[RolloutTurn], str]:
    """Returns the calls in the order of their arrival, and a line for each that was not answered."""
    calls = sorted(trajectory.calls, key=lambda call: call.index)
    unanswered = [f"call {call.index}: {call.state}: {call.end_reason}" for call in calls if call.state != "delivered"]
    return [_turn(call) for call in calls], "\n".join(unanswered)[-TAIL_CHARS:]


def _turn(call: Call) -> RolloutTurn:
    turn = RolloutTurn(call.index)
    if call.receive_time is not None:
        turn.timestamp = call.receive_time.timestamp()
        if call.end_time is not None:
            turn.latency_s = (call.end_time - call.receive_time).total_seconds()
    if call.completion is None:
        turn.upstream_error = {"type": call.state, "message": call.end_reason}
        return turn
    turn.finish_reason = call.completion.finish_reason.value
    if call.completion.token_ids is not None:
        turn.completion_token_ids = call.completion.token_ids.tolist()
    if call.completion.logprobs is not None:
        turn.per_token_logps = call.completion.logprobs.tolist()
    return turn


async def _sandbox_of(ps: Penstock, rollout_id: str) -> str:
    """Returns a running rollout's sandbox id; empty if the token may not list sandboxes."""
    try:
        async with aclosing(ps.sandboxes.list(labels={_SANDBOX_LABEL: rollout_id})) as found:
            async for sandbox_id, _ in found:
                return sandbox_id
    except PenstockError as error:
        _log.warning("looking up the sandbox of %s failed: %s", rollout_id, error)
    return ""
