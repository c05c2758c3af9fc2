"""Environments: each has its own state and at most one rollout at a time; there are as many as the operator allows.

Invariants: an environment that is closed has ended what it started before its place is given to another; one that
nobody holds or uses is closed after `idle_s`, sooner when its client's connection was lost; a session id is 128 random
bits, so that knowing one is holding it.
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

from penstock.client.connection import Penstock
from penstock.client.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from penstock.client.terminus import TERMINAL_TOOL
from penstock.openenv.arguments import Defaults, RunRollout, parse
from penstock.openenv.rollouts import CommandResult, run_rollout, see_through
from penstock.openenv.terminals import KEYS as TERMINAL_KEYS
from penstock.openenv.terminals import TOOL as TERMINAL
from penstock.openenv.terminals import EnvironmentTerminal, check_call

TOOL: Final = "run_rollout"
LEFT_S: Final = 60.0
"""How long a session waits for its client to come back, once the connection that it had is gone."""
MAX_WAITING: Final = 16
"""Calls of one environment that wait for their turn; another is refused."""
_DESCRIPTION: Final = (
    "Run one coding agent on one task in a sandbox of its own: setup, agent, verify. Answers with a JSON text: reward"
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
    """What can be called in every environment, with no need of a reset."""
    return [dict(tool) for tool in _TOOLS]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call of a tool gives. `reward` and `done` are a terminal's: a rollout's reward is in its result."""

    text: str
    reward: float | None = None
    done: bool = False


@dataclass(slots=True)
class State:
    """What `state` shows of an environment."""

    episode_id: str
    step_count: int = 0
    rollouts_completed: int = 0
    last_reward: float | None = None
    last_task_id: str | None = None
    last_sandbox_id: str | None = None
    last_rollout_id: str | None = None


@dataclass(slots=True)
class Episode:
    """What a reset decides."""

    seed: int | None = None
    state: State = field(default_factory=lambda: State(secrets.token_hex(16)))
    terminal: EnvironmentTerminal | None = None


class Environment:
    """One environment: reset, call a tool, look at its state."""

    def __init__(self, ps: Penstock, defaults: Defaults, labels: Mapping[str, str]) -> None:
        self._ps = ps
        self._defaults = defaults
        self._labels = dict(labels)
        self._episode = Episode()
        self._turn = asyncio.Lock()
        self._calls: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def state(self) -> State:
        """As it stands."""
        return self._episode.state

    async def reset(self, arguments: Mapping[str, Any]) -> list[CommandResult] | None:
        """Begins an episode and ends the terminal of the one before; `seed` goes with every model call of its rollouts.

        Where it says what is in a terminal, that is opened: the results of its setup commands, else None.

        Raises:
            InvalidArgument: `OPENENV_ARGUMENTS`, an argument that is none or does not hold.
            PenstockError: the terminal cannot be opened; the episode has begun without one.
        """
        given = dict(arguments)
        seed, episode_id = given.pop("seed", None), given.pop("episode_id", None)
        if unknown := sorted(given.keys() - TERMINAL_KEYS):
            raise InvalidArgument(
                f"reset has no argument {', '.join(unknown)}: an agent's task is given to {TOOL}",
                reason="OPENENV_ARGUMENTS",
            )
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63):
            raise InvalidArgument("seed: a whole number from 0 to 2^63 - 1", reason="OPENENV_ARGUMENTS")
        if episode_id is not None and (not isinstance(episode_id, str) or not 0 < len(episode_id) <= 255):
            raise InvalidArgument("episode_id: a text of 1 to 255 characters", reason="OPENENV_ARGUMENTS")
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
        """Calls a tool; one call at a time, the others in their order. A cancelled call ends what it started.

        Raises:
            NotFound: `OPENENV_TOOL_UNKNOWN`.
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
            raise NotFound(f"Unknown tool: {name[:80]!r}; there are {known}", reason="OPENENV_TOOL_UNKNOWN")
        if self._closed:
            raise FailedPrecondition("The session is closed", reason="OPENENV_SESSION_CLOSED")
        if len(self._calls) > MAX_WAITING:
            raise ResourceExhausted("Too many calls wait in this session", reason="OPENENV_BUSY")
        work = asyncio.ensure_future(call())
        self._calls.add(work)
        work.add_done_callback(self._calls.discard)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if work.cancelled() and not (task and task.cancelling()):  # by close()
                raise FailedPrecondition(
                    "The session was closed while its call ran; what it started is ended",
                    reason="OPENENV_SESSION_CLOSED",
                ) from None
            work.cancel()
            await asyncio.wait([work])
            raise

    async def close(self) -> None:
        """Ends what runs and waits for it; from now on every call is refused. Idempotent."""
        self._closed = True
        running = list(self._calls)
        for call in running:
            call.cancel()
        if running:
            await asyncio.wait(running)
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
            seen = await episode.terminal.call(arguments)
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
    """An environment under an id; `holders` are the connections and calls that use it now."""

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
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    def create(self) -> Session:
        """A new session, which nobody holds yet.

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
        """An open session.

        Raises:
            NotFound: `OPENENV_SESSION_UNKNOWN`.
        """
        session = self._open.get(session_id)
        if session is None or session.closing:
            raise NotFound("Unknown session_id", reason="OPENENV_SESSION_UNKNOWN")
        return session

    @asynccontextmanager
    async def held(self, session: Session) -> AsyncIterator[Environment]:
        """The session's environment, which does not fall idle inside the block."""
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
        """For the one connection that a session may have; one that was asked to close meanwhile closes after it.

        Raises:
            FailedPrecondition: `OPENENV_SESSION_ATTACHED`.
        """
        if session.attached:
            raise FailedPrecondition("The session has a connection already", reason="OPENENV_SESSION_ATTACHED")
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
        """A session that lasts as long as the block."""
        session = self.create()
        try:
            async with self.held(session):
                yield session
        finally:
            await self.close(session)

    async def close(self, session: Session) -> None:
        """Ends the session and all that it started; its place is free when this returns. Idempotent."""
        session.closing = True
        if session.idle is not None:
            session.idle.cancel()
            session.idle = None
        work = asyncio.ensure_future(self._end(session))
        self._ending.add(work)
        work.add_done_callback(self._ending.discard)
        await asyncio.shield(work)

    async def close_all(self) -> None:
        """Ends every session."""
        await asyncio.gather(*(self.close(session) for session in list(self._open.values())))
        if self._ending:
            await asyncio.wait(self._ending)

    async def _end(self, session: Session) -> None:
        try:
            await session.environment.close()
        finally:
            self._open.pop(session.session_id, None)

    def _rest(self, session: Session) -> None:
        """Nobody uses the session now: it is closed if that lasts."""

        def close() -> None:
            work = asyncio.ensure_future(self.close(session))
            self._ending.add(work)
            work.add_done_callback(self._ending.discard)

        patience = min(self._idle_s, LEFT_S) if session.left else self._idle_s
        session.idle = asyncio.get_running_loop().call_later(patience, close)


def _label(text: str) -> str:
    """A caller's text as the value of a label."""
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.-") else "-" for letter in text)[
        :63
    ]
