"""Environments: each has its own state and at most one rollout at a time; the operator limits their number.

Invariants: a closed environment has ended everything it started before its slot is reused; an idle environment is
closed after `idle_s`, sooner when its client's connection was lost; a session id is 128 random bits and serves as its
credential.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from penstock.adapters.openenv.rollout_arguments import Defaults, RunRollout, parse
from penstock.adapters.openenv.rollouts import CommandResult, run_rollout, see_through
from penstock.adapters.openenv.terminals import KEYS as TERMINAL_KEYS
from penstock.adapters.openenv.terminals import TOOL as TERMINAL
from penstock.adapters.openenv.terminals import EnvironmentTerminal, EpisodeEnded, check_call
from penstock.client.connection import Penstock
from penstock.client.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from penstock.client.terminus.session import TERMINAL_TOOL
from penstock.client.transport.background import TaskOwner

TOOL: Final = "run_rollout"
LEFT_S: Final = 60.0
"""Seconds that a session waits for its client to reconnect."""
MAX_WAITING: Final = 16
"""Calls of one environment that may wait for their turn; further ones are refused."""
_DESCRIPTION: Final = (
    "Run one coding agent on one task in its own sandbox: setup, agent, verify. Returns a JSON text: reward"
    " (null = not graded), setup_results, verify_results, proxy_turns with the sampled token ids and logprobs, files,"
    " error."
)
_TOOLS: Final[Sequence[Mapping[str, Any]]] = (
    {"name": TOOL, "description": _DESCRIPTION, "input_schema": RunRollout.model_json_schema()},
    {
        "name": TERMINAL,
        "description": TERMINAL_TOOL.description,
        "input_schema": json.loads(TERMINAL_TOOL.parameters_json_schema),
    },
)


def tools() -> list[dict[str, Any]]:
    """Returns the tools of every environment, callable without a reset."""
    return [dict(tool) for tool in _TOOLS]


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a tool call. `reward` and `done` are a terminal's: a rollout's reward is in its result."""

    text: str
    reward: float | None = None
    done: bool = False


@dataclass(slots=True)
class State:
    """The state of an environment, for `state`."""

    episode_id: str
    step_count: int = 0
    rollouts_completed: int = 0
    last_reward: float | None = None
    last_task_id: str | None = None
    last_sandbox_id: str | None = None
    last_rollout_id: str | None = None


@dataclass(slots=True)
class Episode:
    """The settings made by a reset."""

    seed: int | None = None
    state: State = field(default_factory=lambda: State(secrets.token_hex(16)))
    terminal: EnvironmentTerminal | None = None


class Environment:
    """One environment: reset, tool calls, state."""

    def __init__(self, ps: Penstock, defaults: Defaults, labels: Mapping[str, str]) -> None:
        self._ps = ps
        self._defaults = defaults
        self._labels = dict(labels)
        self._episode = Episode()
        self._turn = asyncio.Lock()
        self._calls = TaskOwner()
        self._closed = False

    @property
    def state(self) -> State:
        """Returns the current state."""
        return self._episode.state

    async def reset(self, arguments: Mapping[str, Any]) -> list[CommandResult] | None:
        """Begins an episode and ends the previous one's terminal; `seed` goes with every model call of its rollouts.

        If the arguments describe a terminal, it is opened: returns the results of its setup commands, else None.

        Raises:
            InvalidArgument: `OPENENV_ARGUMENTS`, an argument is unknown or invalid.
            PenstockError: the terminal cannot be opened; the episode has begun without one.
        """
        given = dict(arguments)
        seed, episode_id = given.pop("seed", None), given.pop("episode_id", None)
        if unknown := sorted(given.keys() - TERMINAL_KEYS):
            raise InvalidArgument(
                f"reset has no argument {', '.join(unknown)}: pass an agent's task to {TOOL}",
                reason="OPENENV_ARGUMENTS",
            )
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63):
            raise InvalidArgument("seed: must be a whole number from 0 to 2^63 - 1", reason="OPENENV_ARGUMENTS")
        if episode_id is not None and (not isinstance(episode_id, str) or not 0 < len(episode_id) <= 255):
            raise InvalidArgument("episode_id: must be a text of 1 to 255 characters", reason="OPENENV_ARGUMENTS")
        state = State(episode_id or secrets.token_hex(16))
        terminal = self._terminal(given, state) if given else None
        before, self._episode = self._episode, Episode(seed, state, terminal)
        if before.terminal is not None:
            await see_through(before.terminal.close())
        if terminal is None:
            return None
        state.last_sandbox_id = await terminal.open()
        return terminal.setup_results

    def _terminal(self, given: Mapping[str, Any], state: State) -> EnvironmentTerminal:
        return EnvironmentTerminal(self._ps, given, self._defaults.backend, self._labels_of(state))

    def _labels_of(self, state: State) -> dict[str, str]:
        return {"openenv_episode": _label(state.episode_id), **self._labels}

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        """Calls a tool; one call at a time, others wait in order. A cancelled call ends what it started.

        Raises:
            NotFound: `OPENENV_TOOL_UNKNOWN`.
            EpisodeEnded: as `EnvironmentTerminal.call`.
            PenstockError: the call was refused and nothing was started.
        """
        call: Callable[[], Coroutine[Any, Any, Answer]]
        if name == TOOL:
            call = partial(self._run, parse(arguments))
        elif name == TERMINAL:
            check_call(arguments)
            call = partial(self._type, arguments)
        else:
            known = " and ".join(str(tool["name"]) for tool in _TOOLS)
            raise NotFound(f"Unknown tool: {name[:80]!r}; known tools: {known}", reason="OPENENV_TOOL_UNKNOWN")
        if self._closed:
            raise FailedPrecondition("The session is closed", reason="OPENENV_SESSION_CLOSED")
        if len(self._calls) > MAX_WAITING:
            raise ResourceExhausted("Too many calls wait in this session", reason="OPENENV_BUSY")
        work = self._calls.start(call())
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if work.cancelled() and not (task and task.cancelling()):  # by close()
                raise FailedPrecondition(
                    "The session was closed while its call ran; the work that it started is ended",
                    reason="OPENENV_SESSION_CLOSED",
                ) from None
            work.cancel()
            await asyncio.wait([work])
            raise

    async def close(self) -> None:
        """Ends running work and waits for it; refuses every later call. Idempotent."""
        self._closed = True
        await self._calls.close()
        if self._episode.terminal is not None:
            await self._episode.terminal.close()

    async def _type(self, arguments: Mapping[str, Any]) -> Answer:
        async with self._turn:
            episode = self._episode
            state = episode.state
            state.step_count += 1
            if episode.terminal is None:
                episode.terminal = self._terminal({}, state)
            state.last_sandbox_id = await episode.terminal.open()
            try:
                seen = await episode.terminal.call(arguments)
            except EpisodeEnded as over:
                state.last_reward = over.reward
                raise
            reward = seen.reward.value if seen.reward is not None else None
            if seen.ended:
                state.last_reward = reward
            return Answer(seen.text(), reward, seen.ended)

    async def _run(self, given: RunRollout) -> Answer:
        async with self._turn:
            episode = self._episode
            state = episode.state
            state.step_count += 1
            labels = self._labels_of(state)
            result = await run_rollout(self._ps, given, self._defaults, seed=episode.seed, labels=labels)
            state.rollouts_completed += 1
            state.last_reward = result.reward
            state.last_task_id = given.task_id or None
            state.last_sandbox_id = result.sandbox_id or None
            state.last_rollout_id = result.rollout_id
            return Answer(result.json())


class Session:
    """An environment under an id; `holders` counts the connections and calls that use it now."""

    def __init__(self, session_id: str, environment: Environment) -> None:
        self.session_id = session_id
        self.environment = environment
        self.holders = 0
        self.attached = False
        self.left = False
        self.closing = False
        self.idle: asyncio.TimerHandle | None = None


class Sessions:
    """All sessions of a server."""

    def __init__(self, ps: Penstock, defaults: Defaults, *, most: int, idle_s: float) -> None:
        self._ps = ps
        self._defaults = defaults
        self.most = most
        self._idle_s = idle_s
        self._open: dict[str, Session] = {}
        self._ending = TaskOwner()

    def __len__(self) -> int:
        return len(self._open)

    def create(self) -> Session:
        """Creates a session, which nobody uses yet.

        Raises:
            ResourceExhausted: `OPENENV_CAPACITY`.
        """
        if len(self._open) >= self.most:
            raise ResourceExhausted(
                f"Server at capacity: {len(self._open)} of {self.most} sessions are open",
                reason="OPENENV_CAPACITY",
                metadata={"active_sessions": str(len(self._open)), "max_sessions": str(self.most)},
            )
        session_id = secrets.token_hex(16)
        environment = Environment(self._ps, self._defaults, {"openenv_session": session_id[:16]})
        session = self._open[session_id] = Session(session_id, environment)
        self._rest(session)
        return session

    def find(self, session_id: str) -> Session:
        """Returns an open session.

        Raises:
            NotFound: `OPENENV_SESSION_UNKNOWN`.
        """
        session = self._open.get(session_id)
        if session is None or session.closing:
            raise NotFound("Unknown session_id", reason="OPENENV_SESSION_UNKNOWN")
        return session

    @asynccontextmanager
    async def held(self, session: Session) -> AsyncIterator[Environment]:
        """Yields the session's environment, which does not become idle inside the block."""
        session.holders += 1
        if session.idle is not None:
            session.idle.cancel()
            session.idle = None
        try:
            yield session.environment
        finally:
            session.holders -= 1
            if not session.holders and session.session_id in self._open:
                self._rest(session)

    @asynccontextmanager
    async def attached(self, session: Session) -> AsyncIterator[Environment]:
        """Attaches the one connection that a session may have; a close requested meanwhile is done afterwards.

        Raises:
            FailedPrecondition: `OPENENV_SESSION_ATTACHED`.
        """
        if session.attached:
            raise FailedPrecondition("The session already has a connection", reason="OPENENV_SESSION_ATTACHED")
        session.attached, session.left = True, False
        try:
            async with self.held(session) as environment:
                try:
                    yield environment
                finally:
                    session.left = True
        finally:
            session.attached = False
            if session.closing:
                await self.close(session)

    @asynccontextmanager
    async def own(self) -> AsyncIterator[Session]:
        """Yields a session that lasts as long as the block."""
        session = self.create()
        try:
            async with self.held(session):
                yield session
        finally:
            await self.close(session)

    async def close(self, session: Session) -> None:
        """Ends the session and everything it started; its slot is free when this returns. Idempotent."""
        session.closing = True
        if session.idle is not None:
            session.idle.cancel()
            session.idle = None
        await asyncio.shield(self._ending.start(self._end(session)))

    async def close_all(self) -> None:
        """Ends every session."""
        await asyncio.gather(*(self.close(session) for session in list(self._open.values())))
        await self._ending.wait()

    async def _end(self, session: Session) -> None:
        try:
            await session.environment.close()
        finally:
            self._open.pop(session.session_id, None)

    def _rest(self, session: Session) -> None:
        """Starts the idle timer: the session is unused now."""

        def close() -> None:
            self._ending.start(self.close(session))

        patience = min(self._idle_s, LEFT_S) if session.left else self._idle_s
        session.idle = asyncio.get_running_loop().call_later(patience, close)


def _label(text: str) -> str:
    """Converts a caller's text to a label value."""
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.-") else "-" for letter in text)[
        :63
    ]
