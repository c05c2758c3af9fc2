"""The driver's RPCs as the handles use them: reads, waits that survive a restart, trajectories, sessions."""

import asyncio
import hashlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final, Protocol, TypeVar

from penstock.client.errors import DeadlineExceeded, FailedPrecondition, NotFound, PenstockError, Unavailable
from penstock.client.intercept.calls import ModelCall
from penstock.client.intercept.session import InterceptSession, Selector
from penstock.client.transport.cluster import Cluster, Member
from penstock.client.transport.patience import LONG_POLL_S, Patience
from penstock.client.transport.rpc import Service
from penstock.client.types import results
from penstock.client.types.trajectories import Trajectory
from penstock.client.wire import results as wire_results
from penstock.driver.v1 import rollout_service_pb2 as pb
from penstock.driver.v1 import rollout_service_pb2_grpc as pb_grpc
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values import ids

T = TypeVar("T")

_UNANSWERED: Final = (Unavailable, DeadlineExceeded)
"""Errors of a long poll that is repeated: the driver is down, or did not answer in time."""


class Intercept(Protocol):
    """Opens a session for a handle: `Penstock.intercept`."""

    def __call__(self, selector: Selector, *, credits: int, policy_version: int | None) -> InterceptSession:
        """Opens a session for the calls of `selector`."""


class Driver:
    """The driver service, as used by handles."""

    def __init__(self, service: Service, intercept: Intercept, name: str = "") -> None:
        """`name` is its own, where it is known."""
        self.name = name
        self.service = service
        self.stub = pb_grpc.RolloutServiceStub(service.channel)
        self._intercept = intercept

    async def get(self, rollout_id: str) -> results.Rollout:
        """Fetches a rollout's current state."""
        request = pb.GetRolloutRequest(rollout_id=rollout_id)
        answer = await self.service.call(self.stub.GetRollout, request, repeatable=True)
        return wire_results.rollout(answer.rollout)

    async def get_group(self, group_id: str) -> results.Group:
        """Fetches a group's current state."""
        request = pb.GetGroupRequest(group_id=group_id)
        answer = await self.service.call(self.stub.GetGroup, request, repeatable=True)
        return wire_results.group(answer.group)

    async def wait(self, rollout_id: str) -> results.Rollout:
        """Waits until a rollout has ended; returns it."""
        patience = Patience()
        request = pb.WaitRolloutRequest(rollout_id=rollout_id)
        while True:
            asked = asyncio.get_running_loop().time()
            try:
                answer = await self.service.call(self.stub.WaitRollout, request, timeout=LONG_POLL_S)
            except _UNANSWERED as error:
                await patience.pause(error)
                continue
            patience.sign()
            if answer.rollout.HasField("outcome"):
                return wire_results.rollout(answer.rollout)
            await patience.ask_again(asked)

    async def wait_group(self, group_id: str) -> results.Group:
        """Waits until all rollouts of a group have ended; returns the group."""
        patience = Patience()
        request = pb.WaitGroupRequest(group_id=group_id)
        while True:
            asked = asyncio.get_running_loop().time()
            try:
                answer = await self.service.call(self.stub.WaitGroup, request, timeout=LONG_POLL_S)
            except _UNANSWERED as error:
                await patience.pause(error)
                continue
            patience.sign()
            if answer.group.ended:
                return wire_results.group(answer.group)
            await patience.ask_again(asked)

    async def trajectory(
        self, rollout_id: str, *, samples_only: bool = False, bodies: bool = False, top: bool = False
    ) -> Trajectory:
        """Fetches an ended rollout's trajectory."""
        request = pb.GetTrajectoryRequest(
            rollout_id=rollout_id, samples_only=samples_only, include_bodies=bodies, include_top=top
        )
        whole = trajectory_pb2.Trajectory()
        for fragment in await self.service.collect(self.stub.GetTrajectory, request, timeout=300.0):
            whole.MergeFrom(fragment.trajectory)
        return wire_results.trajectory(whole)

    async def result(self, rollout_id: str, *, samples_only: bool, top: bool) -> results.RolloutResult:
        """Returns an ended rollout with its trajectory, None where the gate was never opened."""
        info = await self.get(rollout_id)
        trajectory = None
        try:
            trajectory = await self.trajectory(rollout_id, samples_only=samples_only, top=top)
        except FailedPrecondition as error:
            if error.reason != "TRAJECTORY_ABSENT":
                raise
        return results.RolloutResult(info, info.outcome or results.Outcome(), trajectory)

    async def calls_until(
        self, selector: Selector, ended: Callable[[], Awaitable[object]], credits: int, policy_version: int | None
    ) -> AsyncGenerator[ModelCall, None]:
        """Yields the calls of a session that lasts until `ended` returns."""
        async with self._intercept(selector, credits=credits, policy_version=policy_version) as session:
            watch = asyncio.ensure_future(ended())
            watch.add_done_callback(lambda _: session.finish())
            try:
                async with aclosing(session.calls()) as calls:
                    async for call in calls:
                        yield call
                await watch
            finally:
                watch.cancel()
                await asyncio.wait([watch])


class Drivers:
    """All drivers of a connection."""

    def __init__(self, cluster: Cluster, intercept: Intercept) -> None:
        self._cluster = cluster
        self._intercept = intercept
        self._next = random.randrange(1 << 16)  # noqa: S311 - clients should not all begin with the same driver

    async def all(self) -> list[Driver]:
        """Returns a client of each driver; see `Cluster.members`."""
        return [self._driver(member) for member in await self._cluster.members("driver")]

    async def having(self, name: str, fetch: Callable[[Driver], Awaitable[T]]) -> tuple[Driver, T]:
        """Returns the driver that has a rollout or group, and what `fetch` returns there.

        An id that a driver made names it. One that a client chose names none: every driver is asked.

        Raises:
            NotFound: no driver has it.
            Unavailable: no driver that answers has it.
        """
        home = ids.home_of(name)
        members = await self._cluster.members("driver")
        if home is not None and not any(member.name == home[1] for member in members):
            members = await self._cluster.members("driver", age_s=0.0)
        if home is not None:
            # Where the list lacks it, any driver answers HOME_ELSEWHERE.
            members = [member for member in members if member.name == home[1]] or members[:1]
        unknown: PenstockError | None = None
        away: PenstockError | None = None
        for driver in map(self._driver, members):
            try:
                return driver, await fetch(driver)
            except NotFound as error:
                unknown = error
            except _UNANSWERED as error:
                away = error
        if away is not None:
            raise away
        if unknown is None:
            raise AssertionError("there is a driver, or no client of it")
        raise unknown

    async def for_new(self, chosen: str) -> Driver:
        """Returns the driver for a new rollout or group.

        Drivers that are lost or drain are avoided. An id that the client chose goes to the same driver from every
        client; others go round.
        """
        members = await self._cluster.members("driver")
        if len(members) > 1:
            members = await self._cluster.members("driver", age_s=0.0)
        members = [member for member in members if member.takes_work] or members
        if chosen:
            return self._driver(max(members, key=lambda member: _rank(member, chosen)))
        self._next += 1
        return self._driver(members[self._next % len(members)])

    def _driver(self, member: Member) -> Driver:
        return Driver(member.service, self._intercept, member.name)


def _rank(member: Member, key: str) -> tuple[bytes, str]:
    """Rendezvous hashing: each key ranks all drivers, and a driver that comes or goes moves its own share only."""
    return hashlib.sha256(f"{key}\0{member.name}".encode()).digest(), member.name
