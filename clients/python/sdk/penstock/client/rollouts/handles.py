"""Handles of rollouts and groups. They hold no connection and can be recreated at any time (`attach`)."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Final

from penstock.client.errors import PenstockError, Unavailable, is_broken
from penstock.client.intercept.calls import ModelCall
from penstock.client.intercept.session import Selector
from penstock.client.rollouts.driver_rpc import Driver
from penstock.client.transport.patience import Patience
from penstock.client.types import results
from penstock.client.types.trajectories import Trajectory
from penstock.client.wire import results as wire_results
from penstock.driver.v1 import rollout_service_pb2 as pb

CANCEL_S: Final = 30.0
"""Seconds to wait for a cancellation; after that the rollout's own limits end it."""


class RolloutHandle:
    """One rollout: `events`, `result`, `trajectory`, `calls`, `cancel`, `delete`."""

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
        """Yields its events with a sequence number greater than `after`, the past ones first; ends after `Ended`.

        A broken stream is resumed.
        """
        position = after
        patience = Patience()
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
            except PenstockError as broken:
                if not is_broken(broken):
                    raise
                error = broken
            await patience.pause(error)

    async def result(self) -> results.RolloutResult:
        """Waits until the rollout has ended; returns its outcome. For the trajectory use `trajectory()`."""
        self.info = await self._driver.wait(self.rollout_id)
        return results.RolloutResult(self.info, self.info.outcome or results.Outcome())

    async def trajectory(self, *, samples_only: bool = False, bodies: bool = False, top: bool = False) -> Trajectory:
        """Fetches the ended rollout's trajectory.

        Args:
            samples_only: without calls and branches: enough for training.
            bodies: with the agent's request bodies.
            top: with the rows of alternatives (top-k logprobs), 8 * k bytes per sampled token.

        Raises:
            FailedPrecondition: `ROLLOUT_RUNNING`; `TRAJECTORY_ABSENT`: it ended before the gate was opened.
        """
        return await self._driver.trajectory(self.rollout_id, samples_only=samples_only, bodies=bodies, top=top)

    async def calls(self, *, credits: int = 64, policy_version: int | None = None) -> AsyncGenerator[ModelCall, None]:
        """Yields the model calls of this rollout until it has ended. Calls wait at the gate, so none is missed."""
        selector = Selector(rollout_ids=(self.rollout_id,))
        async for call in self._driver.calls_until(selector, self.result, credits, policy_version):
            yield call

    async def cancel(self, reason: str = "") -> None:
        """Cancels it: returns when agent and sandbox are removed. An ended rollout keeps its outcome."""
        request = pb.CancelRolloutRequest(rollout_id=self.rollout_id, reason=reason)
        answer = await self._driver.service.call(
            self._driver.stub.CancelRollout, request, timeout=120.0, repeatable=True
        )
        self.info = wire_results.rollout(answer.rollout)

    async def delete(self) -> None:
        """Deletes the ended rollout with its events and trajectory."""
        request = pb.DeleteRolloutRequest(rollout_id=self.rollout_id)
        await self._driver.service.call(self._driver.stub.DeleteRollout, request, repeatable=True)


class GroupHandle:
    """Rollouts of one spec: `calls`, `events`, `as_ended`, `results`, `cancel`, `delete`."""

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
        """Its rollouts, spares included."""
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
        patience = Patience()
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
                    raise
                error = broken
            await patience.pause(error)

    async def wait(self) -> results.Group:
        """Waits until all its rollouts have ended."""
        self.info = await self._driver.wait_group(self.group_id)
        return self.info

    async def as_ended(
        self, *, samples_only: bool = True, top: bool = False
    ) -> AsyncGenerator[results.RolloutResult, None]:
        """Yields each rollout as it ends, with its trajectory (None where the gate was never opened)."""
        async with aclosing(self.events(summary=True)) as events:
            async for event in events:
                if isinstance(event.payload, results.Ended):
                    yield await self._driver.result(event.rollout_id, samples_only=samples_only, top=top)

    async def results(self, *, samples_only: bool = True, top: bool = False) -> list[results.RolloutResult]:
        """Waits for all; returns every rollout ordered by index, failed ones and spares included.

        Those that count are `info.result_rollout_ids`. Trajectories have samples only, unless `samples_only` is False;
        `top`: with alternatives, as in `RolloutHandle.trajectory`.
        """
        by_id: dict[str, results.RolloutResult] = {}
        async with aclosing(self.as_ended(samples_only=samples_only, top=top)) as ended:
            async for result in ended:
                by_id[result.rollout_id] = result
        return sorted(by_id.values(), key=lambda result: result.rollout.index)

    async def calls(self, *, credits: int = 64, policy_version: int | None = None) -> AsyncGenerator[ModelCall, None]:
        """Yields the model calls of all its rollouts until all have ended. Calls wait at the gate, so none is missed.

        For pauses, announcements and a session that spans groups use `ps.intercept`.
        """
        selector = Selector(group_id=self.group_id)
        async for call in self._driver.calls_until(selector, self.wait, credits, policy_version):
            yield call

    async def cancel(self, reason: str = "") -> None:
        """Cancels all its rollouts."""
        request = pb.CancelGroupRequest(group_id=self.group_id, reason=reason)
        answer = await self._driver.service.call(self._driver.stub.CancelGroup, request, timeout=120.0, repeatable=True)
        self.info = wire_results.group(answer.group)

    async def delete(self) -> None:
        """Deletes the ended group with its rollouts."""
        request = pb.DeleteGroupRequest(group_id=self.group_id)
        await self._driver.service.call(self._driver.stub.DeleteGroup, request, repeatable=True)


async def abandon(handle: RolloutHandle, reason: str) -> None:
    """Cancels a rollout even if the caller is cancelled meanwhile; errors are suppressed."""
    # In a task of its own: the caller's task may be cancelled again while it waits.
    work = asyncio.ensure_future(handle.cancel(reason))
    with suppress(Exception, asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(work), CANCEL_S)
    work.cancel()


async def created(creation: Coroutine[Any, Any, RolloutHandle], reason: str) -> RolloutHandle:
    """Awaits a creation; if cancelled meanwhile, cancels the rollout that it creates."""
    creating = asyncio.ensure_future(creation)
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        with suppress(Exception, asyncio.CancelledError):
            await abandon(await asyncio.wait_for(creating, CANCEL_S), reason)
        raise
