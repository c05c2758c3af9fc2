"""Handles of rollouts and groups. They hold no connection and can be recreated at any time (`attach`)."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Final, Literal, TypeVar

from penstock.client.errors import NotFound, PenstockError, ResourceExhausted, Unavailable, is_broken
from penstock.client.intercept.calls import ModelCall
from penstock.client.intercept.session import Selector
from penstock.client.rollouts.driver_rpc import Driver
from penstock.client.tasks.spec import Replay, Verifier
from penstock.client.transport.patience import Patience
from penstock.client.transport.rpc import Backoff
from penstock.client.types import results
from penstock.client.types.chat import Message, Role
from penstock.client.types.trajectories import Annotation, Trajectory
from penstock.client.wire import chat, specs
from penstock.client.wire import results as wire_results
from penstock.client.wire.chat import duration
from penstock.driver.v1 import rollout_service_pb2 as pb

H = TypeVar("H", "RolloutHandle", "GroupHandle")

PAUSE_S: Final = 60.0
"""Seconds for the services to hold a rollout, or to let it go."""
CANCEL_S: Final = 30.0
_FULL_FIRST_S: Final = 1.0
_FULL_MOST_S: Final = 30.0
"""Seconds to wait for a cancellation; after that the rollout's own limits end it."""


class RolloutHandle:
    """One rollout: `events`, `result`, `trajectory`, `calls`, `branch`, `regrade`, `annotate`, `pause`, `resume`,
    `cancel`, `delete`.
    """

    def __init__(self, driver: Driver, info: results.Rollout) -> None:
        self._driver = driver
        self.info: results.Rollout = info
        """The rollout as last reported."""

    def __repr__(self) -> str:
        return f"RolloutHandle({self.rollout_id}, {self.info.phase})"

    @property
    def rollout_id(self) -> str:
        """The rollout's id."""
        return self.info.rollout_id

    async def refresh(self) -> results.Rollout:
        """Fetches the rollout's current state."""
        self.info = await self._driver.get(self.rollout_id)
        return self.info

    async def events(self, *, after: int = 0) -> AsyncGenerator[results.RolloutEvent, None]:
        """Yields its events with a sequence number greater than `after`, the past ones first; ends after `Ended`, or at
        once where an ended rollout has none.

        A broken stream is resumed. Raises NotFound `HOME_LOST` if the driver came back without its state.
        """
        position = after
        patience = Patience(self._driver.follow)
        while True:
            request = pb.WatchRolloutRequest(rollout_id=self.rollout_id, after_sequence=position)
            error: PenstockError = Unavailable("The driver ended the stream", reason="STREAM_ENDED")
            try:
                async with aclosing(self._driver.service.stream(self._driver.stub.WatchRollout, request)) as messages:
                    async for message in messages:
                        patience.sign()
                        if not message.HasField("event"):
                            continue
                        position = message.event.sequence
                        event = wire_results.event(message.event)
                        if event is not None:
                            yield event
                        if message.event.HasField("ended"):
                            return
                # The driver itself ended the stream: it sends nothing more where `Ended` is not after `position`.
                if (await self.refresh()).outcome is not None and position >= self.info.last_sequence:
                    return
            except PenstockError as broken:
                if not is_broken(broken):
                    raise patience.explained(broken) from broken
                error = broken
            await patience.pause(error)

    async def result(self) -> results.RolloutResult:
        """Waits until the rollout has ended; returns its outcome. For the trajectory use `trajectory()`."""
        self.info = await self._driver.wait(self.rollout_id)
        return results.RolloutResult(self.info, self.info.outcome or results.Outcome())

    async def trajectory(
        self,
        *,
        samples_only: bool = False,
        bodies: bool = False,
        top: bool = False,
        tensors: bool = False,
        images: bool = False,
        grade: str = "",
    ) -> Trajectory:
        """Fetches the ended rollout's trajectory.

        Args:
            samples_only: without calls and branches: enough for training.
            bodies: with the agent's request bodies.
            top: with the rows of alternatives (top-k logprobs), 8 * k bytes per sampled token.
            tensors: with the rows of tensors (`TokenTensor`) of samples and calls. Routed experts are layers x experts
                per token bytes a token, or twice that with more than 256 experts.
            images: with the files of images (`PromptImage`) of samples and calls.
            grade: with the reward of the further grade of this name; empty = of the first one.

        Raises:
            NotFound: `GRADE_UNKNOWN`.
            FailedPrecondition: `ROLLOUT_RUNNING`; `TRAJECTORY_ABSENT`: it ended before the gate was opened.
        """
        return await self._driver.trajectory(
            self.rollout_id,
            samples_only=samples_only,
            bodies=bodies,
            top=top,
            tensors=tensors,
            images=images,
            grade=grade,
        )

    async def image(self, sha256: bytes) -> bytes:
        """Fetches the file of one image of the ended rollout's prompts (`PromptImage.sha256`).

        Raises:
            NotFound: `MEDIA_UNKNOWN`.
            FailedPrecondition: `ROLLOUT_RUNNING`; `TRAJECTORY_ABSENT`.
        """
        return await self._driver.image(self.rollout_id, sha256)

    async def calls(
        self, *, credits: int = 64, policy_version: int | None = None, messages: bool = False, images: bool = False
    ) -> AsyncGenerator[ModelCall, None]:
        """Yields the model calls of this rollout until it has ended. Calls wait at the gate, so none is missed.

        With `messages`, calls carry messages and tools beside tokens; with `images`, the bytes of their images.
        """
        selector = Selector(rollout_ids=(self.rollout_id,))
        async for call in self._driver.calls_until(selector, self.result, credits, policy_version, messages, images):
            yield call

    async def branch(
        self,
        call: str | int,
        n: int = 1,
        *,
        answer: Message | str | None = None,
        group_id: str = "",
        train_prefix: bool = False,
        replay: Replay | Literal["exact", "until_divergence"] = "exact",
        seed: int | None = None,
    ) -> "GroupHandle":
        """Starts n rollouts that continue this one from one of its calls; see `ps.rollouts.branch`."""
        request = branch_request(
            self.rollout_id,
            call,
            n,
            answer=answer,
            group_id=group_id,
            train_prefix=train_prefix,
            replay=replay,
            seed=seed,
        )
        return GroupHandle(self._driver, await self._driver.branch(request))

    async def regrade(self, verifier: Verifier | None = None, *, name: str = "") -> results.Grade:
        """Runs a verifier on the ended rollout's end state; see `ps.rollouts.regrade`."""
        return await self._driver.regrade(regrade_request(self.rollout_id, verifier, name))

    async def annotate(self, *annotations: Annotation) -> None:
        """Adds annotations to the ended rollout's trajectory; see `ps.rollouts.annotate`."""
        await self._driver.annotate(annotate_request(self.rollout_id, annotations))

    async def cancel(self, reason: str = "") -> None:
        """Cancels it: returns when agent and sandbox are removed. An ended rollout keeps its outcome."""
        request = pb.CancelRolloutRequest(rollout_id=self.rollout_id, reason=reason)
        answer = await self._driver.service.call(
            self._driver.stub.CancelRollout, request, timeout=120.0, repeatable=True
        )
        self.info = wire_results.rollout(answer.rollout)

    async def pause(self, reason: str = "", *, max_duration: float | None = None) -> bool:
        """Pauses it, in whatever phase it is, for at most so many seconds; returns once it is held.

        Its agent's sandbox is frozen, its calls wait at the gate, and its time limits stand still; one that waits is
        not started; one that is being graded ends. A repeat replaces reason and duration.

        Args:
            reason: for the record.
            max_duration: seconds, 1 to a day; then it goes on. None = as long as the operator allows.

        Returns:
            Whether its sandbox is frozen. False: no agent runs, or the backend cannot freeze it.

        Raises:
            FailedPrecondition: ROLLOUT_ENDED.
            ResourceExhausted: PAUSE_LIMIT: it has been paused for as long as the operator allows.
            Unavailable: PAUSE_PENDING, DRAINING.
        """
        request = pb.PauseRolloutRequest(rollout_id=self.rollout_id, reason=reason, max_duration=duration(max_duration))
        answer = await self._driver.service.call(
            self._driver.stub.PauseRollout, request, timeout=PAUSE_S, repeatable=True
        )
        self.info = wire_results.rollout(answer.rollout)
        return answer.sandbox_paused

    async def resume(self) -> None:
        """Ends its pause, if it has one: returns once nothing holds it. Raises Unavailable: PAUSE_PENDING."""
        request = pb.ResumeRolloutRequest(rollout_id=self.rollout_id)
        answer = await self._driver.service.call(
            self._driver.stub.ResumeRollout, request, timeout=PAUSE_S, repeatable=True
        )
        self.info = wire_results.rollout(answer.rollout)

    async def delete(self) -> None:
        """Deletes the ended rollout with its events and trajectory."""
        request = pb.DeleteRolloutRequest(rollout_id=self.rollout_id)
        await self._driver.service.call(self._driver.stub.DeleteRollout, request, repeatable=True)


class GroupHandle:
    """Rollouts of one spec: `calls`, `events`, `as_ended`, `results`, `pause`, `resume`, `cancel`, `delete`."""

    def __init__(self, driver: Driver, info: results.Group) -> None:
        self._driver = driver
        self.info: results.Group = info
        """The group as last reported."""

    def __repr__(self) -> str:
        return f"GroupHandle({self.group_id}, {self.info.ended_count} of {len(self.info.rollout_ids)} ended)"

    @property
    def group_id(self) -> str:
        """The group's id."""
        return self.info.group_id

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """Ids of the group's rollouts, spares included."""
        return self.info.rollout_ids

    async def refresh(self) -> results.Group:
        """Fetches the group's current state."""
        self.info = await self._driver.get_group(self.group_id)
        return self.info

    async def events(self, *, summary: bool = False) -> AsyncGenerator[results.RolloutEvent, None]:
        """Yields the events of all its rollouts, in order per rollout, until all have ended. A broken stream is
        resumed.

        Args:
            summary: phase changes and ends only.
        """
        positions: dict[str, int] = {}
        patience = Patience(self._driver.follow)
        while True:
            request = pb.WatchGroupRequest(group_id=self.group_id, after_sequences=positions, summary=summary)
            error: PenstockError = Unavailable("The driver ended the stream", reason="STREAM_ENDED")
            try:
                async with aclosing(self._driver.service.stream(self._driver.stub.WatchGroup, request)) as messages:
                    async for message in messages:
                        patience.sign()
                        if message.HasField("group"):
                            self.info = wire_results.group(message.group)
                            if self.info.ended:
                                return
                        elif message.HasField("event"):
                            positions[message.event.rollout_id] = message.event.sequence
                            event = wire_results.event(message.event)
                            if event is not None:
                                yield event
            except PenstockError as broken:
                if not is_broken(broken):
                    raise patience.explained(broken) from broken
                error = broken
            await patience.pause(error)

    async def wait(self) -> results.Group:
        """Waits until all its rollouts have ended."""
        self.info = await self._driver.wait_group(self.group_id)
        return self.info

    async def as_ended(
        self, *, samples_only: bool = True, top: bool = False, tensors: bool = False
    ) -> AsyncGenerator[results.RolloutResult, None]:
        """Yields each rollout as it ends, with its trajectory (None where the gate was never opened)."""
        async with aclosing(self.events(summary=True)) as events:
            async for event in events:
                if isinstance(event.payload, results.Ended):
                    yield await self._driver.result(
                        event.rollout_id, samples_only=samples_only, top=top, tensors=tensors
                    )

    async def results(
        self, *, samples_only: bool = True, top: bool = False, tensors: bool = False
    ) -> list[results.RolloutResult]:
        """Waits for all; returns every rollout ordered by index, failed ones and spares included.

        Those that count are `info.result_rollout_ids`; those that are `surplus` are beyond its size. Trajectories have
        samples only, unless `samples_only` is False; `top`: with alternatives, `tensors`: with the rows of tensors, as
        in `RolloutHandle.trajectory`.
        """
        by_id: dict[str, results.RolloutResult] = {}
        async with aclosing(self.as_ended(samples_only=samples_only, top=top, tensors=tensors)) as ended:
            async for result in ended:
                by_id[result.rollout_id] = result
        surplus = set(self.info.surplus_rollout_ids)  # known now: the stream ends with the group
        found = [replace(result, surplus=result.rollout_id in surplus) for result in by_id.values()]
        return sorted(found, key=lambda result: result.rollout.index)

    async def calls(
        self, *, credits: int = 64, policy_version: int | None = None, messages: bool = False, images: bool = False
    ) -> AsyncGenerator[ModelCall, None]:
        """Yields the model calls of all its rollouts until all have ended. Calls wait at the gate, so none is missed.

        With `messages`, calls carry messages and tools beside tokens; with `images`, the bytes of their images.
        For pauses, announcements and a session that spans groups use `ps.intercept`.
        """
        selector = Selector(group_id=self.group_id)
        async for call in self._driver.calls_until(selector, self.wait, credits, policy_version, messages, images):
            yield call

    async def cancel(self, reason: str = "") -> None:
        """Cancels all its rollouts."""
        request = pb.CancelGroupRequest(group_id=self.group_id, reason=reason)
        answer = await self._driver.service.call(self._driver.stub.CancelGroup, request, timeout=120.0, repeatable=True)
        self.info = wire_results.group(answer.group)

    async def pause(self, reason: str = "", *, max_duration: float | None = None) -> None:
        """Pauses each of its rollouts that has not ended: see `RolloutHandle.pause`. The grace of stragglers waits."""
        request = pb.PauseGroupRequest(group_id=self.group_id, reason=reason, max_duration=duration(max_duration))
        answer = await self._driver.service.call(
            self._driver.stub.PauseGroup, request, timeout=PAUSE_S, repeatable=True
        )
        self.info = wire_results.group(answer.group)

    async def resume(self) -> None:
        """Ends the pauses of its rollouts: see `RolloutHandle.resume`."""
        request = pb.ResumeGroupRequest(group_id=self.group_id)
        answer = await self._driver.service.call(
            self._driver.stub.ResumeGroup, request, timeout=PAUSE_S, repeatable=True
        )
        self.info = wire_results.group(answer.group)

    async def delete(self) -> None:
        """Deletes the ended group with its rollouts."""
        request = pb.DeleteGroupRequest(group_id=self.group_id)
        await self._driver.service.call(self._driver.stub.DeleteGroup, request, repeatable=True)


def regrade_request(rollout_id: str, verifier: Verifier | None, name: str) -> pb.RegradeRolloutRequest:
    """Returns the request for a further grade; see `ps.rollouts.regrade`."""
    message = None if verifier is None else specs.verifier(verifier)
    return pb.RegradeRolloutRequest(rollout_id=rollout_id, verifier=message, name=name)


def annotate_request(rollout_id: str, annotations: Sequence[Annotation]) -> pb.AnnotateTrajectoryRequest:
    """Returns the request for annotations; see `ps.rollouts.annotate`."""
    messages = [wire_results.annotation_to(one) for one in annotations]
    return pb.AnnotateTrajectoryRequest(rollout_id=rollout_id, annotations=messages)


def branch_request(
    rollout_id: str,
    call: str | int,
    n: int,
    *,
    answer: Message | str | None,
    group_id: str,
    train_prefix: bool,
    replay: Replay | str,
    seed: int | None,
) -> pb.BranchRolloutRequest:
    """Returns the request for branches; see `ps.rollouts.branch`."""
    request = pb.BranchRolloutRequest(
        request_id=secrets.token_hex(16),
        rollout_id=rollout_id,
        count=n,
        group_id=group_id,
        train_prefix=train_prefix,
        replay=specs.replay(replay),
        seed=seed,
    )
    if isinstance(call, str):
        request.call_id = call
    else:
        request.call_index = call
    if answer is not None:
        message = Message.of(Role.ASSISTANT, answer) if isinstance(answer, str) else answer
        request.answer.CopyFrom(chat.message_to(message))
    return request


async def abandon(handle: RolloutHandle | GroupHandle, reason: str) -> bool:
    """Cancels a rollout or a group even if the caller is cancelled meanwhile; errors are suppressed.

    Returns whether nothing of it runs any more, as far as its driver knows.
    """
    # In a task of its own: the caller's task may be cancelled again while it waits.
    work = asyncio.ensure_future(handle.cancel(reason))
    with suppress(Exception, asyncio.CancelledError):
        with suppress(NotFound):  # its driver came back without it
            await asyncio.wait_for(asyncio.shield(work), CANCEL_S)
        return True
    work.cancel()
    return False


async def created_with_room(create: Callable[[], Coroutine[Any, Any, H]], reason: str) -> H:
    """Awaits a creation as `created` does, and repeats it for as long as the driver is full.

    Raises:
        ResourceExhausted: a limit that stays, such as a run's budget (`BUDGET_EXHAUSTED`): it has no `retry_after`.
        PenstockError: as the creation.
    """
    backoff = Backoff(_FULL_FIRST_S, _FULL_MOST_S)
    while True:
        try:
            return await created(create(), reason)
        except ResourceExhausted as full:
            if full.retry_after is None:
                raise
            await asyncio.sleep(backoff.next(full))


async def created(creation: Coroutine[Any, Any, H], reason: str) -> H:
    """Awaits a creation; if cancelled meanwhile, cancels what it creates."""
    creating = asyncio.ensure_future(creation)
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        with suppress(Exception, asyncio.CancelledError):
            await abandon(await asyncio.wait_for(creating, CANCEL_S), reason)
        raise
