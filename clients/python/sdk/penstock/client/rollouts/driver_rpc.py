"""The driver's RPCs as the handles use them: reads, waits that survive a restart, trajectories, sessions."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final, Protocol

from penstock.client.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from penstock.client.intercept.calls import ModelCall
from penstock.client.intercept.session import InterceptSession, Selector
from penstock.client.transport.patience import LONG_POLL_S, Patience
from penstock.client.transport.rpc import Service
from penstock.client.types import results
from penstock.client.types.trajectories import Trajectory
from penstock.client.wire import results as wire_results
from penstock.driver.v1 import rollout_service_pb2 as pb
from penstock.driver.v1 import rollout_service_pb2_grpc as pb_grpc
from penstock.trajectory.v1 import trajectory_pb2

_UNANSWERED: Final = (Unavailable, DeadlineExceeded)
"""Errors of a long poll that is repeated: the driver is down, or did not answer in time."""


class Intercept(Protocol):
    """Opens a session for a handle: `Penstock.intercept`."""

    def __call__(self, selector: Selector, *, credits: int, policy_version: int | None) -> InterceptSession:
        """Opens a session for the calls of `selector`."""


class Driver:
    """The driver service, as used by handles."""

    def __init__(self, service: Service, intercept: Intercept) -> None:
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
