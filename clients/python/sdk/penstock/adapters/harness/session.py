"""Sessions without `await`, with the methods that harness workers call: create, wait_for_completion, verify, close.

    factory = SessionFactory(agent="opencode", options={"source": Inference()})
    session = factory.create("Fix the failing test.", episode_id="7c1e")
    try:
        session.wait_for_completion()
        trace, reward = session.fetch_training_trace(), session.verify([]).env_reward
    finally:
        session.close()

A session is one rollout, whose agent runs by itself; a worker pickles the factory into its own process. TRL's
`HarnessRolloutWorker` accepts `functools.partial(SessionFactory, ...)` unchanged (docs/guides/openenv.md).

Invariants: `close` may be called at any time, from any thread, any number of times; it ends the rollout with its
sandbox and all waits (R70). An agent that ran out of time keeps its captured turns. A reward is computed inside the
environment and only passed on; None = not graded, which is not zero (R74, R79).
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, TypeVar

from penstock.adapters.harness.tasks import sampling_of, task_of
from penstock.adapters.harness.traces import TrainingTrace, proxy_trace, training_trace
from penstock.client import connection
from penstock.client.connection import Penstock
from penstock.client.errors import InvalidArgument, RolloutFailed, SessionClosed
from penstock.client.rollouts.client import RolloutOptions
from penstock.client.rollouts.handles import RolloutHandle
from penstock.client.tasks.spec import AgentChoice, Limits, Mode
from penstock.client.tasks.task import Task
from penstock.client.transport.blocking import Loop
from penstock.client.transport.endpoints import Target, Tls
from penstock.client.types.chat import Sampling
from penstock.client.types.results import AgentEvent, ArtifactCollected, AttemptFailed, FailureCause, RolloutResult
from penstock.client.types.trajectories import Trajectory

T = TypeVar("T")

MakeTask = Callable[[Any, int | None], Task]
"""Returns the task for a worker's prompt and seed: a group's rollouts share both, and must share the task."""

_ENDED_BY_ITSELF: Final = (FailureCause.AGENT, FailureCause.BUDGET, FailureCause.VERIFIER)
"""Failures after which the agent's turns are kept; the others say nothing about the policy."""
_CANCEL_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a session's tool: always an error, the agent has its own tools."""

    data: Any = None
    done: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The rollout's grade. `env_reward` None = not graded, which is not zero."""

    env_reward: float | None = None
    done: bool = True
    metrics: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)


class SessionFactory:
    """Makes sessions. Picklable if `task` and `options` are; the process that uses it connects by itself.

    Args:
        agent: a registered agent's name, or a choice with options.
        task: common to all sessions: a worker's prompt replaces its instruction. A callable of prompt and seed
            makes the whole task. None = the prompt is the task: a text, chat messages (the last of the user), a
            mapping (instruction, setup, verify, upload_files, task_id, metadata), or a Task.
        sampling: overrides, field by field, the agents' sampling. A worker passes its training policy here, as a
            mapping or as `Sampling`; in a mapping, top_k -1 or 0 turns the agents' own off, as top_k 0 does in a
            `Sampling`.
        agent_timeout_s: seconds that an agent may run; its rollout is still graded afterwards.
        target, token, tls: as `penstock.client.connect`.
        options: as `ps.rollouts.create`; the mode is transparent_proxy unless given.
    """

    def __init__(
        self,
        agent: str | AgentChoice,
        task: Task | MakeTask | None = None,
        *,
        sampling: Sampling | Mapping[str, Any] | None = None,
        agent_timeout_s: float | None = None,
        target: Target | None = None,
        token: str | None = None,
        tls: Tls | None = None,
        options: RolloutOptions | None = None,
    ) -> None:
        self._agent = agent
        self._task = task
        self._options: RolloutOptions = {**(options or {})}
        self._options.setdefault("mode", Mode.TRANSPARENT_PROXY)
        if sampling is not None:
            if "sampling" in self._options:
                raise InvalidArgument("sampling is set twice", reason="HARNESS_SAMPLING")
            self._options["sampling"] = sampling if isinstance(sampling, Sampling) else sampling_of(sampling)
        if agent_timeout_s is not None:
            self._options["limits"] = replace(self._options.get("limits", Limits()), agent=agent_timeout_s)
        self._connection = (target, token, tls)
        self._lock = threading.Lock()
        self._link: _Link | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_link")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock, self._link = threading.Lock(), None

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> Session:
        """Starts a rollout; its agent runs when this returns.

        Args:
            task: the worker's prompt; see the class.
            seed: passed to a callable `task`, so that a group's sessions get one task. It seeds no sampling.
            episode_id: the rollout's id, so a repeated one is refused; None = assigned.

        Raises:
            InvalidArgument: the prompt is no valid task; or as `ps.rollouts.create`.
        """
        made = self._task_for(task, seed)
        link = self._linked()
        rollout_id = episode_id or f"session-{secrets.token_hex(16)}"
        handle = link.run(link.ps.rollouts.create(made, self._agent, rollout_id=rollout_id, **self._options))
        return Session(link, handle, made)

    def close(self) -> None:
        """Closes this process's connection; sessions are closed by themselves. Idempotent."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _linked(self) -> _Link:
        with self._lock:
            if self._link is None:
                self._link = _Link(*self._connection)
            return self._link

    def _task_for(self, prompt: Any, seed: int | None) -> Task:
        if callable(self._task):
            return self._task(prompt, seed)
        return task_of(prompt, self._task)


class Session:
    """One rollout: `wait_for_completion`, the `fetch_` methods, `verify`, `close`."""

    def __init__(self, link: _Link, handle: RolloutHandle, task: Task) -> None:
        self._link = link
        self._handle = handle
        self._task = task
        self._lock = threading.Lock()
        self._closed = False
        self._released = False
        self._waiting: set[Future[Any]] = set()
        self._trajectory: Trajectory | None = None

    def __repr__(self) -> str:
        return f"Session({self.rollout_id})"

    @property
    def rollout_id(self) -> str:
        """The rollout's id."""
        return self._handle.rollout_id

    # For harnesses that step by themselves; this one's agent does everything on its own
    # --------------------------------

    def initial_messages(self) -> list[dict[str, Any]]:
        """The instruction as the user's message."""
        return [{"role": "user", "content": self._task.instruction}]

    def list_tools(self) -> list[Any]:
        """Returns an empty list: the agent has its own tools."""
        return []

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Refuses: the agent calls its own tools."""
        return ToolResult(error=f"this session's agent calls its own tools: {name!r} is not one of the session's")

    # The rollout ------------------------------------------------------------------------------------------------------

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Waits until the agent has ended and was graded; returns its exit code, 128 plus the number for a signal.

        Args:
            timeout_s: seconds; None = the agent's own limit. A rollout ended by this timeout is not
                graded; to have it graded, set the limit in the factory.

        Raises:
            TimeoutError: the agent ran out of time; captured turns are kept.
            RolloutFailed: it failed through no fault of the policy.
            SessionClosed: it was closed meanwhile.
        """
        try:
            ended = self._wait(self._result(timeout_s))
        except TimeoutError:
            self._wait(self._handle.cancel("wait_for_completion timed out"))
            raise TimeoutError(f"{self.rollout_id}: the agent was still running after {timeout_s:g} s") from None
        failure = ended.failure
        if failure is not None and failure.cause is FailureCause.TIMEOUT:
            raise TimeoutError(f"{self.rollout_id}: {failure.message}")
        if failure is not None and failure.cause is FailureCause.CANCELLED and self._closed:
            raise _closed(self.rollout_id)
        if failure is not None and failure.cause not in _ENDED_BY_ITSELF:
            raise RolloutFailed(failure.message, reason=failure.reason, metadata={"cause": failure.cause.value})
        exited = ended.outcome.agent_exit
        if exited is None:
            raise RolloutFailed("the agent's exit is unknown", reason="HARNESS_NO_EXIT")
        return exited.code if exited.code is not None else 128 + (exited.signal or 0)

    def verify(self, transcript: Sequence[Any] = (), final_state: Any = None) -> VerifyResult:
        """Returns the ended rollout's grade, computed inside its environment: neither argument changes it."""
        ended = self._wait(self._result(None))
        reward, failure = ended.reward, ended.failure
        metrics: dict[str, Any] = {} if reward is None else {f"reward/{k}": v for k, v in reward.components.items()}
        if failure is not None:
            metrics |= {"failure_cause": failure.cause.value, "failure_reason": failure.reason}
        return VerifyResult(None if reward is None else reward.value, metrics=metrics)

    def fetch_training_trace(self) -> TrainingTrace:
        """Returns the answered calls with their tokens, logprobs and masks.

        Raises:
            ValueError: some call of a trained model has no tokens or logprobs.
            FailedPrecondition: `ROLLOUT_RUNNING`, or `TRAJECTORY_ABSENT`.
        """
        return training_trace(self._captured())

    def fetch_proxy_trace(self) -> list[dict[str, Any]]:
        """Returns all calls in order of arrival, with request and response. Raises FailedPrecondition, as above."""
        return proxy_trace(self._captured())

    def fetch_trace(self) -> list[dict[str, Any]]:
        """Returns the agent's reported events so far, as `type`, `data` and the `raw` line."""
        return [
            {"type": event.kind, "data": dict(event.data), "raw": event.raw_line.decode("utf-8", "replace")}
            for event in self._events(AgentEvent)
        ]

    def collect_artifacts(self) -> dict[str, bytes]:
        """Returns the files collected from the sandbox, by name."""
        return {event.name: event.content for event in self._events(ArtifactCollected)}

    def close(self) -> None:
        """Ends the rollout, its sandbox and all waits. Idempotent, thread-safe."""
        with self._lock:
            self._closed = True
            if self._released:
                return
        try:
            self._link.run(_bounded(self._handle.cancel("the session was closed")))
            self._released = True
        finally:
            # The rollout's end wakes waiters; this wakes them if the driver cannot report it.
            with self._lock:
                waiting = () if self._released else tuple(self._waiting)
            for future in waiting:
                future.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _result(self, timeout_s: float | None) -> RolloutResult:
        async with asyncio.timeout(timeout_s):
            return await self._handle.result()

    def _captured(self) -> Trajectory:
        if self._trajectory is None:
            self._trajectory = self._link.run(self._handle.trajectory(bodies=True))
        return self._trajectory

    def _events(self, kind: type[T]) -> list[T]:
        async def collect() -> list[T]:
            last = (await self._handle.refresh()).last_sequence
            found: list[T] = []
            if not last:
                return found
            async for event in self._handle.events():
                if isinstance(event.payload, AttemptFailed):
                    found.clear()  # an attempt that the driver repeats leaves nothing behind
                if isinstance(event.payload, kind):
                    found.append(event.payload)
                if event.sequence >= last:
                    break
            return found

        return self._link.run(collect())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits; `close` ends the wait."""
        future = self._link.submit(work)
        with self._lock:
            self._waiting.add(future)
        try:
            return future.result()
        except FutureCancelled:
            raise _closed(self.rollout_id) from None
        except BaseException:
            future.cancel()
            raise
        finally:
            with self._lock:
                self._waiting.discard(future)


class _Link:
    """The connection of a process: one event loop in a thread, shared by all sessions."""

    def __init__(self, target: Target | None, token: str | None, tls: Tls | None) -> None:
        self.ps: Penstock = connection.connect(target, token, tls=tls)
        self._loop = Loop()
        try:
            self._loop.run(self.ps.__aenter__())
        except BaseException:
            self._loop.close()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts work on the loop."""
        return self._loop.submit(work)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work on the loop and waits for it."""
        result: T = self._loop.run(work)
        return result

    def close(self) -> None:
        """Ends the connection and the thread."""
        try:
            self._loop.run(self.ps.__aexit__(None, None, None))
        finally:
            self._loop.close()


async def _bounded(work: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(_CANCEL_S):
        await work


def _closed(rollout_id: str) -> SessionClosed:
    return SessionClosed(f"The session of {rollout_id} is closed", reason="HARNESS_CLOSED")


__all__ = [
    "RolloutFailed",
    "Session",
    "SessionClosed",
    "SessionFactory",
    "ToolResult",
    "TrainingTrace",
    "VerifyResult",
    "task_of",
]
