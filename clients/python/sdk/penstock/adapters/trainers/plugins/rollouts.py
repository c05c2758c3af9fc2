"""What all plug-ins share: one rollout, whose model calls the trainer's own engine answers.

Invariant: a rollout that is not returned does not run on; an error or a cancellation of the trainer cancels it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from penstock.adapters.trainers.selection import Place, Row, select
from penstock.client.connection import Penstock, connect
from penstock.client.errors import CallEnded, FailedPrecondition, InvalidArgument, RolloutFailed
from penstock.client.intercept.calls import ModelCall
from penstock.client.rollouts.client import RolloutOptions
from penstock.client.rollouts.handles import RolloutHandle, abandon, created_with_room
from penstock.client.tasks.file import task_file_of
from penstock.client.tasks.spec import AgentChoice
from penstock.client.tasks.task import Task
from penstock.client.types.chat import Completion, LogprobsMode, Sampling
from penstock.client.types.results import RolloutResult

MAX_TRIES: Final = 16

_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Parameters that shape the distribution, as vLLM and SGLang name them."""

_LOGPROBS_MODES: Final = {"raw_logprobs": LogprobsMode.RAW, "processed_logprobs": LogprobsMode.PROCESSED}

Sample = Callable[[ModelCall], Awaitable[Completion]]
"""The trainer's engine: answers one call by its `prompt_token_ids`. It is cancelled when the call needs no answer.

It raises CannotAnswer where the agent is to get an error and the rollout goes on; any other error ends the rollout.
"""


class CannotAnswer(Exception):
    """The engine cannot answer this call, for a reason that lies in the conversation: it has outgrown the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRollouts:
    """Rollouts of one agent on a set of tasks.

    Attributes:
        tasks: by id.
        agent: a registered agent's name, or a choice with options.
        connection: a connection file; None = the services that `connect()` finds.
        tries: how many rollouts are run, 1 to 16, until one can be learned from.
        options: of each rollout; see `RolloutOptions`.
        messages: whether calls carry messages and tools beside tokens, for an engine that wants them.
    """

    tasks: dict[str, Task] = field(repr=False)
    agent: str | AgentChoice
    connection: Path | None = None
    tries: int = 3
    options: RolloutOptions = field(default_factory=RolloutOptions)
    messages: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.tries <= MAX_TRIES:
            raise InvalidArgument(f"tries: 1 to {MAX_TRIES}, not {self.tries}", reason="PLUGIN_OPTION")
        if not self.tasks:
            raise InvalidArgument("tasks: none", reason="PLUGIN_OPTION")

    @classmethod
    def load(
        cls,
        tasks: str | Path,
        agent: str | AgentChoice,
        *,
        connection: str | Path | None = None,
        tries: int = 3,
        **options: Any,
    ) -> "AgentRollouts":
        """Reads a task file or directory, or a directory with files of tasks. Raises InvalidArgument `TASK_FILE`."""
        if unknown := options.keys() - RolloutOptions.__annotations__.keys():
            raise InvalidArgument(f"Unknown options: {', '.join(sorted(unknown))}", reason="PLUGIN_OPTION")
        given = Path(tasks)
        files = [given] if given.is_file() or task_file_of(given) else sorted(given.glob("*.yaml"))
        found = {task.task_id: task for task in map(Task.load, files)}
        file = None if connection is None else Path(connection)
        return cls(tasks=found, agent=agent, connection=file, tries=tries, options=cast(RolloutOptions, options))

    def task(self, task_id: object) -> Task:
        """Returns the task of a row of the trainer's data. Raises InvalidArgument `TASK_UNKNOWN`."""
        if not isinstance(task_id, str) or (found := self.tasks.get(task_id)) is None:
            raise InvalidArgument(f"task_id: no task {task_id!r} among {len(self.tasks)}", reason="TASK_UNKNOWN")
        return found

    async def run(self, task_id: object, sample: Sample) -> RolloutResult:
        """Runs one rollout to its end, and returns it with the samples of its trajectory.

        Raises:
            InvalidArgument: `TASK_UNKNOWN`; as `ps.rollouts.create`.
            Exception: whatever `sample` raises; the rollout is cancelled.
        """
        task = self.task(task_id)
        async with _connected(self.connection) as ps:
            handle = await created_with_room(
                lambda: ps.rollouts.create(task, self.agent, **self.options), "the trainer stopped"
            )
            try:
                await _answer_all(handle, sample, messages=self.messages)
                ended = await handle.result()
            except BaseException:
                await abandon(handle, "the trainer stopped")
                raise
            try:
                trajectory = await handle.trajectory(samples_only=True)
            except FailedPrecondition as error:
                if error.reason != "TRAJECTORY_ABSENT":
                    raise
                return ended
            return RolloutResult(ended.rollout, ended.outcome, trajectory)

    async def place(self, task_id: object, sample: Sample, *, one_sequence: bool = False) -> Place:
        """Returns the sequences of a rollout, at least one; with `one_sequence` that with most trained tokens.

        A rollout that nothing can be learned from is no reward of zero: another one is run, `tries` in all.

        Raises:
            RolloutFailed: `NOTHING_TO_LEARN`; the message has the last one's reason.
            Exception: as `run`.
        """
        for left in reversed(range(self.tries)):
            (place,) = select([await self.run(task_id, sample)], one_sequence=one_sequence).places
            if place.rows:
                return place
            if not left and place.dropped is not None:
                dropped = place.dropped
                raise RolloutFailed(f"After {self.tries} tries: {dropped}", reason="NOTHING_TO_LEARN")
        raise AssertionError("unreachable: there is a try")

    async def row(self, task_id: object, sample: Sample) -> Row:
        """Returns the sequence of `place` with most trained tokens, for a trainer that takes one of each rollout."""
        (row,) = (await self.place(task_id, sample, one_sequence=True)).rows
        return row


def sampling_sent(params: Any) -> Sampling:
    """Returns the parameters of the distribution among those that an engine was sent: a mapping, or attributes.

    Engines write no top_k as -1 or 0; here it is unset.
    """
    given = params if isinstance(params, Mapping) else {name: getattr(params, name, None) for name in _SAMPLING}
    found = {name: value for name in _SAMPLING if (value := given.get(name)) is not None}
    if found.get("top_k", 1) < 1:
        del found["top_k"]
    return Sampling(**found)


def logprobs_of_vllm(mode: str | None) -> LogprobsMode:
    """Returns the kind of the logprobs that vLLM returns with this `logprobs_mode`; None = its default, raw ones.

    Raises:
        InvalidArgument: `NO_LOGPROBS`, with this one it returns logits in their place.
    """
    try:
        return _LOGPROBS_MODES[mode or "raw_logprobs"]
    except KeyError:
        known = " or ".join(_LOGPROBS_MODES)
        raise InvalidArgument(f"logprobs_mode: {known}, not {mode}", reason="NO_LOGPROBS") from None


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the first error of its tasks as it is: trainers know no groups of errors."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def _answer_all(handle: RolloutHandle, sample: Sample, *, messages: bool) -> None:
    async with together() as answering:
        async for call in handle.calls(messages=messages):
            answering.create_task(_answer(call, sample))


async def _answer(call: ModelCall, sample: Sample) -> None:
    """Samples and delivers, unless the call ends first."""
    sampling = asyncio.ensure_future(sample(call))
    ending = asyncio.ensure_future(call.wait_ended())
    try:
        await asyncio.wait([sampling, ending], return_when=asyncio.FIRST_COMPLETED)
        if sampling.done():
            with suppress(CallEnded):
                try:
                    completion = sampling.result()
                except CannotAnswer as error:
                    await call.fail("CONTEXT_EXCEEDED", str(error))
                else:
                    await call.deliver(completion)
    finally:
        for task in (sampling, ending):
            task.cancel()
        await asyncio.gather(sampling, ending, return_exceptions=True)


@dataclass
class _Shared:
    """A connection and how many rollouts use it."""

    stack: AsyncExitStack
    ps: asyncio.Future[Penstock]
    users: int = 0


_connections: dict[tuple[asyncio.AbstractEventLoop, Path | None], _Shared] = {}
"""Trainers make an object per rollout: those that run at once share a connection, which the last one closes."""


@asynccontextmanager
async def _connected(file: Path | None) -> AsyncIterator[Penstock]:
    loop = asyncio.get_running_loop()
    key = (loop, file)
    shared = _connections.get(key)
    if shared is None:
        shared = _connections[key] = _Shared(AsyncExitStack(), loop.create_future())
        try:
            shared.ps.set_result(await shared.stack.enter_async_context(connect(file)))
        except BaseException as error:
            del _connections[key]
            shared.ps.set_exception(
                error if isinstance(error, Exception) else RuntimeError("The connection was cancelled")
            )
            shared.ps.exception()  # seen, also where nobody else waits
            raise
    shared.users += 1
    try:
        yield await asyncio.shield(shared.ps)
    finally:
        shared.users -= 1
        if not shared.users and _connections.get(key) is shared:
            del _connections[key]
            await shared.stack.aclose()
