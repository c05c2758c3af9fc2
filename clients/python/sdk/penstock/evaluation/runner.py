"""Runs every task of a set n times, and resumes after any interruption: finished attempts are in the book, running
rollouts are found again.

An attempt is a rollout whose id is derived from the evaluation, the task and the attempt, so that nothing is started
twice: an interrupted run finds its rollouts at the driver by their run id. An attempt that ended without a reward for a
transient reason (`Failure.retriable`), or because it was cancelled, is repeated; it never counts as zero.

Invariants: at most `concurrency` rollouts at once; the first attempts of all tasks come before the second ones; when
the run is cancelled, so are its rollouts.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Final, Protocol

from penstock.analysis.prices import Used, by_model, paid
from penstock.client.connection import Penstock
from penstock.client.errors import AlreadyExists, FailedPrecondition, first_of
from penstock.client.rollouts.client import RolloutOptions
from penstock.client.rollouts.handles import RolloutHandle, abandon, created_with_room
from penstock.client.tasks.spec import AgentChoice
from penstock.client.tasks.task import Task
from penstock.client.types.results import (
    AgentEvent,
    AttemptFailed,
    CallFinished,
    CommandFinished,
    Ended,
    Failure,
    FailureCause,
    Outcome,
    Party,
    Phase,
    PhaseChanged,
    RolloutEvent,
)
from penstock.evaluation.attempts import Attempt, Book, Ran
from penstock.evaluation.summary import settled

RETRIES: Final = 2
"""Further rollouts for an attempt that was not graded for a transient reason."""
_STOPPED: Final = ("cancelled", "operator", "refused")
"""Causes that say nothing about the attempt."""
_INTERRUPTED: Final = "the evaluation was interrupted"
_TEXT_CHARACTERS: Final = 4000
_OUTPUT_CHARACTERS: Final = 2000


class Observer(Protocol):
    """Receives notifications; its methods are not awaited."""

    def event(self, task_id: str, index: int, event: RolloutEvent) -> None:
        """Called for each event of a running attempt."""

    def ended(self, attempt: Attempt) -> None:
        """Called when an attempt has ended and is in the book."""


@dataclass(slots=True)
class _Story:
    """The accumulated events of a rollout."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    said: str = ""
    phase: Phase | None = None
    ran: list[Ran] = field(default_factory=list)
    outcome: Outcome = field(default_factory=Outcome)
    used: dict[str, Used] = field(default_factory=dict)
    """By the call that was sampled: a further attempt may replay its answer."""

    def add(self, event: RolloutEvent) -> None:
        match event.payload:
            case PhaseChanged(phase):
                self.phase = phase
            case CallFinished(call):
                self.calls += 1
                self.prompt_tokens += call.prompt_count
                self.completion_tokens += call.sampled_count
                for call_id, tokens in paid([call]).items():
                    self.used.setdefault(call_id, tokens)
            case AgentEvent(kind="assistant", data=data) if str(data.get("text") or "").strip():
                self.said = str(data["text"])[-_TEXT_CHARACTERS:]
            case CommandFinished() as done:
                output = (done.stdout_tail + done.stderr_tail).decode("utf-8", "replace")[-_OUTPUT_CHARACTERS:]
                seconds = done.exit.duration
                self.ran.append(
                    Ran(
                        phase=done.phase.value,
                        command=done.command[:500],
                        end=str(done.exit),
                        seconds=seconds,
                        output=output,
                    )
                )
            case AttemptFailed():  # its calls are not in the trajectory either; they are paid for
                self.calls = self.prompt_tokens = self.completion_tokens = 0
                self.said = ""
                self.ran.clear()
            case Ended(outcome):
                self.outcome = outcome


class Evaluation:
    """A run: `await Evaluation(...).run()`; the attempts are in the book.

    Args:
        ps: the services.
        book: where attempts are stored.
        tasks: the tasks; each has a verifier.
        agent: the agent.
        options: of the rollouts; run id, labels and seed are set for each attempt.
        attempts: number per task.
        concurrency: maximum at once.
        retries: further rollouts for an attempt that was not graded for a transient reason.
        observer: receives notifications.

    Raises:
        FailedPrecondition: `TASK_UNGRADED`, a task has no verifier.
    """

    def __init__(
        self,
        ps: Penstock,
        book: Book,
        tasks: Sequence[Task],
        agent: AgentChoice,
        options: RolloutOptions,
        *,
        attempts: int,
        concurrency: int,
        observer: Observer,
        retries: int = RETRIES,
    ) -> None:
        self._ps = ps
        self._book = book
        self._tasks = {task.task_id: task for task in tasks}
        self._agent = agent
        self._options = options
        self._attempts = attempts
        self._concurrency = concurrency
        self._retries = retries
        self._observer = observer
        self._known: dict[str, bool] = {}
        """Rollouts of this evaluation known to the driver; whether each has ended."""
        ungraded = sorted(task.task_id for task in tasks if task.verifier is None)
        if ungraded:
            raise FailedPrecondition(
                f"tasks without a verifier cannot be counted: {', '.join(ungraded)}", reason="TASK_UNGRADED"
            )

    async def run(self) -> None:
        """Runs all attempts not in the book. Raises the error that stops it: a missing service, a refused request."""
        async for rollout in self._ps.rollouts.list(run_id=self._book.eval_id):
            self._known[rollout.rollout_id] = rollout.outcome is not None
        todo = iter(list(self._todo()))
        try:
            async with asyncio.TaskGroup() as workers:
                for number in range(self._concurrency):
                    workers.create_task(self._work(todo), name=f"penstock-eval-{number}")
        except BaseExceptionGroup as group:
            raise first_of(group) from None

    def _todo(self) -> Iterator[tuple[str, int]]:
        done = settled(self._book.attempts)
        for index in range(self._attempts):
            for task_id in sorted(self._tasks):
                attempt = done.get((task_id, index))
                if attempt is None or not self._is_final(attempt):
                    yield task_id, index

    def _is_final(self, attempt: Attempt) -> bool:
        if attempt.graded:
            return True
        if attempt.cause in _STOPPED:
            return False
        failed = [
            item
            for item in self._book.attempts
            if (item.task_id, item.index) == (attempt.task_id, attempt.index) and item.cause not in _STOPPED
        ]
        return not attempt.retriable or len(failed) > self._retries

    async def _work(self, todo: Iterator[tuple[str, int]]) -> None:
        for task_id, index in todo:
            while True:
                attempt = await self._attempt(task_id, index)
                self._book.add(attempt)
                self._observer.ended(attempt)
                # Rollouts cancelled or refused now are left to the next run; those cancelled by an earlier run are
                # repeated now.
                stopped = attempt.cause in _STOPPED and not self._known.get(attempt.rollout_id)
                if stopped or self._is_final(attempt):
                    break

    async def _attempt(self, task_id: str, index: int) -> Attempt:
        """Runs one rollout, from its creation or its current state, to its end."""
        again = self._next(task_id, index)
        rollout_id = self._rollout_id(task_id, index, again)
        blank = Attempt(task_id=task_id, index=index, again=again, rollout_id=rollout_id)
        try:
            handle = await self._handle(task_id, index, rollout_id)
        except FailedPrecondition as error:
            return replace(blank, cause="refused", reason=error.reason, message=str(error))
        story = _Story()
        try:
            async for event in handle.events():
                story.add(event)
                self._observer.event(task_id, index, event)
            info = await handle.refresh()
        except asyncio.CancelledError:
            await abandon(handle, _INTERRUPTED)
            raise
        return _completed(blank, story, info.phase_times)

    async def _handle(self, task_id: str, index: int, rollout_id: str) -> RolloutHandle:
        if rollout_id in self._known:
            return await self._ps.rollouts.attach(rollout_id)
        options = self._options.copy()
        options["run_id"] = self._book.eval_id
        options["labels"] = {**options.get("labels", {}), "attempt": str(index)}
        if "seed" in options:
            options["seed"] += index
        creation = self._ps.rollouts.create
        try:
            return await created_with_room(
                lambda: creation(self._tasks[task_id], self._agent, rollout_id=rollout_id, **options), _INTERRUPTED
            )
        except AlreadyExists:  # an earlier run created it and lost the answer
            return await self._ps.rollouts.attach(rollout_id)

    def _next(self, task_id: str, index: int) -> int:
        """Returns the number of the rollout to create or resume: the first that is not in the book."""
        written = {item.again for item in self._book.attempts if (item.task_id, item.index) == (task_id, index)}
        return next(number for number in range(len(written) + 1) if number not in written)

    def _rollout_id(self, task_id: str, index: int, again: int) -> str:
        # At most 120 characters: a long name is cut, and made unique by its hash.
        name = task_id if len(task_id) <= 60 else f"{task_id[:50]}-{sha256(task_id.encode()).hexdigest()[:9]}"
        # With a dot: "-" would make the first repetition of task `a` attempt 1 of a task `a-1`.
        return f"{self._book.eval_id}-{name}-{index}" + (f".{again}" if again else "")


def _cause(failure: Failure) -> str:
    """Returns the kind of a failure; one that only the operator can fix is "operator", whatever it broke."""
    operators = failure.cause is FailureCause.INFRASTRUCTURE and failure.caused_by is Party.OPERATOR
    return "operator" if operators and not failure.retriable else failure.cause.value


def _completed(blank: Attempt, story: _Story, phase_times: Mapping[Phase, float]) -> Attempt:
    outcome, reward = story.outcome, story.outcome.reward
    failure = outcome.failure
    # A rollout without a failure and without a reward was not graded either.
    ungraded = failure is None and reward is None
    return replace(
        blank,
        reward=None if reward is None else reward.value,
        range=(0.0, 1.0) if reward is None else (reward.range_min, reward.range_max),
        components={} if reward is None else dict(reward.components),
        cause="verifier" if ungraded else None if failure is None else _cause(failure),
        reason="NOT_GRADED" if ungraded else None if failure is None else failure.reason,
        message="" if failure is None else failure.message[:_OUTPUT_CHARACTERS],
        retriable=failure is not None and failure.retriable,
        agent_exit="" if outcome.agent_exit is None else str(outcome.agent_exit),
        seconds=sum(phase_times.values()),
        agent_seconds=phase_times.get(Phase.RUNNING, 0.0),
        calls=story.calls,
        prompt_tokens=story.prompt_tokens,
        completion_tokens=story.completion_tokens,
        said=story.said,
        ran=tuple(story.ran),
        used=by_model(story.used.values()),
    )
