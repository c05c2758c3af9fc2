"""A stream of batches for an asynchronous trainer: groups start as fast as they end, within what its policy promises.

Each group has a task of its own, which creates it and collects its rollouts as they end. Whatever changes, an end, a
batch or a version, groups are started while the policy admits them and fewer rollouts than `concurrency` run. What a
stream keeps is bounded by its policy: the results of groups that wait for their batch.
"""

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, Final, Self

from penstock.client.errors import PenstockError
from penstock.client.pacing.meter import Bias, BiasMeter, Facts, is_trainable
from penstock.client.pacing.policies import Now, Policy
from penstock.client.rollouts.handles import GroupHandle, abandon, created_with_room
from penstock.client.tasks.task import Task
from penstock.client.types.results import RolloutResult

_REASON: Final = "its stream does not want it any more"


@dataclass(frozen=True, slots=True, eq=False)
class StreamedGroup:
    """A group to train.

    Attributes:
        number: its place in the order of starts, from 0.
        policy_version: the newest one as it was started.
        staleness: policy versions between its start and its batch.
        results: its rollouts that ended, by index, failed ones included.
        left_out: how many still run, and are not waited for.
        baseline: mean reward of the rollouts that ended with one, those aside that failed by no fault of the policy.
            One that is left out counts with the mean of those left out before that have ended since. None = no reward.
        error: why the rollouts that are missing were lost: their driver came back without them, for example.
    """

    group_id: str
    task: Task
    number: int
    policy_version: int
    staleness: int
    results: tuple[RolloutResult, ...]
    left_out: int
    baseline: float | None
    error: PenstockError | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StreamBatch:
    """What a trainer's next step learns from.

    Attributes:
        groups: in the order of their starts.
        policy_version: the trainer's newest one.
        late: rollouts that were left out of earlier batches and ended since the last one, without trajectories.
    """

    groups: tuple[StreamedGroup, ...]
    policy_version: int
    late: tuple[RolloutResult, ...] = ()

    @property
    def results(self) -> tuple[RolloutResult, ...]:
        """The rollouts of all groups."""
        return tuple(result for group in self.groups for result in group.results)


@dataclass(slots=True, eq=False)
class _Started:
    """A group that was started; see `penstock.client.pacing.policies.Group`."""

    number: int
    version: int
    task: Task
    size: int
    running: int
    ready: int | None = None
    is_out: bool = False
    """Whether a batch had the rest of it, or the policy dropped it."""
    handle: GroupHandle | None = None
    results: list[RolloutResult] = field(default_factory=list)
    error: PenstockError | None = None
    work: asyncio.Task[None] | None = None


class RolloutStream:
    """Starts groups and gives a trainer its batches, in an `async with` block; made by `ps.stream`.

    `batches()` yields them, and rollouts run meanwhile. The end of the block cancels those that still run.
    """

    def __init__(
        self,
        create: Callable[[Task], Coroutine[Any, Any, GroupHandle]],
        tasks: Iterable[Task],
        *,
        size: int,
        pacing: Policy,
        concurrency: int,
        policy_version: int,
        top: bool,
    ) -> None:
        """`create` returns a coroutine that starts a task's group of `size` rollouts."""
        if concurrency < size:
            raise ValueError(f"concurrency: at least the {size} rollouts of a group, not {concurrency}")
        self._create = create
        self._tasks: Iterator[Task] = iter(tasks)
        self._size, self._pacing, self._concurrency, self._top = size, pacing, concurrency, top
        self._version, self._is_taken, self._is_announced = policy_version, False, False
        self._groups: list[_Started] = []
        self._live: set[_Started] = set()
        # Groups that could not be cancelled, and may run on.
        self._uncancelled: list[GroupHandle] = []
        self._number = self._ready = self._left_out = 0
        self._late: list[RolloutResult] = []
        self._late_sum, self._late_count = 0.0, 0
        self._meter = BiasMeter()
        self._changed = asyncio.Event()
        self._is_open = self._is_last = False
        self._failure: BaseException | None = None
        # Groups are started wherever something changes; they belong to the program that opened the stream.
        self._context = contextvars.copy_context()

    @property
    def policy_version(self) -> int:
        """The newest policy version."""
        return self._version

    async def __aenter__(self) -> Self:
        self._is_open, self._context = True, contextvars.copy_context()
        self._fill()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels all rollouts that run, and starts no more. Idempotent."""
        self._is_open = False
        self._notify()
        work = [group.work for group in self._live if group.work is not None]
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        again, self._uncancelled = self._uncancelled, []
        await asyncio.gather(*(abandon(handle, _REASON) for handle in again))

    def announce(self, policy_version: int) -> None:
        """Sets the trainer's newest policy version, from which staleness is counted.

        Without any announcement each batch makes a version. Bounds of staleness hold while there is at most one
        version for each batch.
        """
        self._is_announced = True
        if policy_version != self._version:
            self._version, self._is_taken = policy_version, False
        self._fill()
        self._notify()

    def bias(self) -> Bias:
        """Returns how far what batches had is from what was started, so far."""
        return self._meter.report()

    async def batches(self) -> AsyncGenerator[StreamBatch, None]:
        """Yields batches until all tasks were trained; the last one may be smaller. For one loop.

        Asking for the next batch says that the last one is trained, unless versions are announced.

        Raises:
            PenstockError: as `ps.groups.create`, after which nothing more is started.
            Exception: what the iterator of tasks raises.
        """
        while self._is_open:
            self._changed.clear()  # before the look: what it changes is looked at again
            if not self._groups:  # of a bound of 0 the next batch is of this version, or there is none
                self._is_taken = False
            self._fill()
            batch = self._take()
            if batch is not None:
                yield batch
                if not self._is_announced:
                    self._version, self._is_taken = self._version + 1, False
                continue
            if self._failure is not None:
                raise self._failure
            if self._is_last and not self._groups:
                return
            await self._changed.wait()

    # Starts.

    def _now(self) -> Now:
        started = self._number * self._size
        return Now(self._groups, self._version, self._is_taken, self._is_last, started, self._left_out)

    def _fill(self) -> None:
        """Starts groups while there is room."""
        while (
            self._is_open
            and not self._is_last
            and self._failure is None
            and sum(group.running for group in self._live) + self._size <= self._concurrency
            and self._pacing.admits(self._now())
        ):
            try:
                task = next(self._tasks, None)
            except Exception as error:  # noqa: BLE001 - `batches` raises it
                self._fail(error)
                return
            if task is None:
                self._is_last = True
                self._notify()
                return
            group = _Started(self._number, self._version, task, self._size, self._size)
            self._number += 1
            self._groups.append(group)
            self._live.add(group)
            self._meter.start(task.task_id, self._size)
            group.work = asyncio.get_running_loop().create_task(
                self._run(group), name=f"penstock-stream-{group.number}", context=self._context.copy()
            )
            # Not in `_run`: a task that is cancelled before its first step runs nothing.
            group.work.add_done_callback(partial(self._over, group))

    async def _run(self, group: _Started) -> None:
        """Creates a group and collects its rollouts; cancels those that it does not see the end of."""
        try:
            group.handle = await created_with_room(partial(self._create, group.task), _REASON)
            try:
                async with aclosing(group.handle.as_ended(top=self._top)) as ended:
                    async for result in ended:
                        self._ended(group, result)
            except PenstockError as error:
                group.error = error
                await self._abandon(group)  # before `_over`: until then they count as running
        except asyncio.CancelledError:
            await self._abandon(group)
            raise
        except Exception as error:  # noqa: BLE001 - `batches` raises it
            self._fail(error)
            await self._abandon(group)

    async def _abandon(self, group: _Started) -> None:
        """Cancels what still runs of a group; what cannot be cancelled now is tried again by `close`."""
        if group.handle is not None and group.running and not await abandon(group.handle, _REASON):
            self._uncancelled.append(group.handle)

    # Ends.

    def _ended(self, group: _Started, result: RolloutResult) -> None:
        group.running -= 1
        self._meter.end(Facts.of(result))
        if not group.is_out:
            group.results.append(result)
        else:
            self._late.append(replace(result, trajectory=None))
            if result.reward is not None and is_trainable(result):
                self._late_sum, self._late_count = self._late_sum + result.reward.value, self._late_count + 1
        if not group.running:
            self._complete(group)
        self._fill()
        self._notify()

    def _over(self, group: _Started, _work: asyncio.Task[None]) -> None:
        """Nothing more comes of a group: what has not ended is lost."""
        for _ in range(group.running):
            self._meter.end(Facts(group.task.task_id))
        group.running = 0
        self._complete(group)
        self._live.discard(group)
        self._fill()
        self._notify()

    def _complete(self, group: _Started) -> None:
        if group.ready is None:
            group.ready, self._ready = self._ready, self._ready + 1

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._notify()

    def _notify(self) -> None:
        self._changed.set()

    # Batches.

    def _take(self) -> StreamBatch | None:
        """Takes the next batch, if there is one, and drops what the policy drops."""
        if self._failure is not None:
            return None
        choice = self._pacing.choose(self._now())
        train = {group.number for group in choice.train}
        drop = {group.number for group in choice.drop}
        chosen = [group for group in self._groups if group.number in train]
        dropped = [group for group in self._groups if group.number in drop]
        self._groups = [group for group in self._groups if group.number not in train | drop]
        for group in dropped:
            group.is_out = True
            if group.work is not None and group in self._live:
                group.work.cancel()
        if dropped:
            self._notify()  # there is room for others, and nothing that runs may be left to say so
        if not chosen:
            return None
        groups = tuple(map(self._streamed, chosen))
        late, self._late = tuple(self._late), []
        self._is_taken = True
        return StreamBatch(groups, self._version, late)

    def _streamed(self, group: _Started) -> StreamedGroup:
        group.is_out = True
        self._left_out += group.running
        results, group.results = tuple(sorted(group.results, key=lambda result: result.rollout.index)), []
        for result in results:
            if is_trainable(result):
                self._meter.train(Facts.of(result))
        rewards = [one.reward.value for one in results if one.reward is not None and is_trainable(one)]
        if self._late_count and rewards:
            rewards += [self._late_sum / self._late_count] * group.running
        return StreamedGroup(
            group_id="" if group.handle is None else group.handle.group_id,
            task=group.task,
            number=group.number,
            policy_version=group.version,
            staleness=self._version - group.version,
            results=results,
            left_out=group.running,
            baseline=fmean(rewards) if rewards else None,
            error=group.error,
        )
