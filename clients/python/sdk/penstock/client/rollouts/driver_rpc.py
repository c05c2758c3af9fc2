"""The driver's RPCs as the handles use them: reads, waits that survive a restart, trajectories, sessions."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final, Protocol, TypeVar

from penstock.chat.v1 import completion_pb2
from penstock.client.errors import DataLoss, DeadlineExceeded, FailedPrecondition, NotFound, PenstockError, Unavailable
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

CREATE_TIMEOUT_S: Final = 120.0
"""Timeout of a create in seconds: the driver checks what it can before it answers."""

RESULT_TIMEOUT_S: Final = 300.0
"""Timeout of each request for an ended rollout's result: thousands of rollouts may end at once."""
REGRADE_TIMEOUT_S: Final = 3600.0
"""Timeout of a further grade in seconds: the driver's own limits are those of the rollout's spec."""

_UNANSWERED: Final = (Unavailable, DeadlineExceeded)
"""Errors of a long poll that is repeated: the driver is down, or did not answer in time."""


class Intercept(Protocol):
    """Opens a session for a handle: `Penstock.intercept`."""

    def __call__(
        self, selector: Selector, *, credits: int, policy_version: int | None, messages: bool, images: bool
    ) -> InterceptSession:
        """Opens a session for the calls of `selector`."""


class Driver:
    """The driver service, as used by handles."""

    def __init__(self, service: Service, intercept: Intercept, name: str = "", cluster: Cluster | None = None) -> None:
        """`name` is its own, where it is known; `cluster` says where the driver of that name is by now."""
        self.name = name
        self.service = service
        self.stub = pb_grpc.RolloutServiceStub(service.channel)
        self._intercept = intercept
        self._cluster = cluster

    async def follow(self) -> None:
        """Goes to another address, if the other drivers list this one there: it was started again elsewhere.

        Raises ConfigurationError `MEMBER_NOT_TRUSTED`: the token must not be sent there.
        """
        if self._cluster is None or not self.name:
            return
        service = await self._cluster.named("driver", self.name)
        if service is not None and service.address != self.service.address:
            self.service = service
            self.stub = pb_grpc.RolloutServiceStub(service.channel)

    async def get(self, rollout_id: str, *, timeout: float = 30.0) -> results.Rollout:
        """Fetches a rollout's current state. `timeout`: seconds."""
        request = pb.GetRolloutRequest(rollout_id=rollout_id)
        answer = await self.service.call(self.stub.GetRollout, request, timeout=timeout, repeatable=True)
        return wire_results.rollout(answer.rollout)

    async def branch(self, request: pb.BranchRolloutRequest) -> results.Group:
        """Starts branches of a rollout; returns their group."""
        answer = await self.service.call(
            self.stub.BranchRollout, request, timeout=CREATE_TIMEOUT_S, repeatable=True, while_draining=True
        )
        return wire_results.group(answer.group)

    async def regrade(self, request: pb.RegradeRolloutRequest) -> results.Grade:
        """Has an ended rollout graded again; returns the grade."""
        answer = await self.service.call(self.stub.RegradeRollout, request, timeout=REGRADE_TIMEOUT_S, repeatable=True)
        return wire_results.grade(answer.grade)

    async def annotate(self, request: pb.AnnotateTrajectoryRequest) -> None:
        """Adds annotations to an ended rollout's trajectory."""
        await self.service.call(self.stub.AnnotateTrajectory, request, timeout=RESULT_TIMEOUT_S, repeatable=True)

    async def get_group(self, group_id: str) -> results.Group:
        """Fetches a group's current state."""
        request = pb.GetGroupRequest(group_id=group_id)
        answer = await self.service.call(self.stub.GetGroup, request, repeatable=True)
        return wire_results.group(answer.group)

    async def wait(self, rollout_id: str) -> results.Rollout:
        """Waits until a rollout has ended; returns it. Raises NotFound `HOME_LOST` if its driver lost its state."""
        patience = Patience(self.follow)
        request = pb.WaitRolloutRequest(rollout_id=rollout_id)
        while True:
            asked = asyncio.get_running_loop().time()
            try:
                answer = await self.service.call(self.stub.WaitRollout, request, timeout=LONG_POLL_S)
            except _UNANSWERED as error:
                await patience.pause(error)
                continue
            except NotFound as error:
                raise patience.explained(error) from error
            patience.sign()
            if answer.rollout.HasField("outcome"):
                return wire_results.rollout(answer.rollout)
            await patience.ask_again(asked)

    async def wait_group(self, group_id: str) -> results.Group:
        """As `wait`, for all rollouts of a group; returns the group."""
        patience = Patience(self.follow)
        request = pb.WaitGroupRequest(group_id=group_id)
        while True:
            asked = asyncio.get_running_loop().time()
            try:
                answer = await self.service.call(self.stub.WaitGroup, request, timeout=LONG_POLL_S)
            except _UNANSWERED as error:
                await patience.pause(error)
                continue
            except NotFound as error:
                raise patience.explained(error) from error
            patience.sign()
            if answer.group.ended:
                return wire_results.group(answer.group)
            await patience.ask_again(asked)

    async def trajectory(
        self,
        rollout_id: str,
        *,
        samples_only: bool = False,
        bodies: bool = False,
        top: bool = False,
        tensors: bool = False,
        images: bool = False,
        grade: str = "",
    ) -> Trajectory:
        """Fetches an ended rollout's trajectory; with the rows of tensors, and the files of images, of its calls and
        samples if requested.
        """
        request = pb.GetTrajectoryRequest(
            rollout_id=rollout_id, samples_only=samples_only, include_bodies=bodies, include_top=top, grade=grade
        )
        whole = trajectory_pb2.Trajectory()
        for fragment in await self.service.collect(self.stub.GetTrajectory, request, timeout=RESULT_TIMEOUT_S):
            whole.MergeFrom(fragment.trajectory)
        if tensors:
            await self.add_tensors(whole)
        if images:
            await self.add_images(whole)
        return wire_results.trajectory(whole)

    async def add_tensors(self, trajectory: trajectory_pb2.Trajectory) -> None:
        """Fetches the rows of all tensors that a trajectory's calls and samples describe.

        Raises DataLoss `TENSOR_DAMAGED`: what came is not what the digest says.
        """
        for call in trajectory.calls:
            for tensor in call.completion.tensors:
                tensor.data = await self._rows(trajectory.rollout_id, tensor, call_id=call.call_id)
        for sample in trajectory.samples:
            for tensor in sample.tensors:
                tensor.data = await self._rows(trajectory.rollout_id, tensor, sample_id=sample.sample_id)

    async def add_images(self, trajectory: trajectory_pb2.Trajectory) -> None:
        """Fetches the files of all images that a trajectory's calls and samples describe, each once.

        Raises DataLoss `IMAGE_DAMAGED`, NotFound `MEDIA_UNKNOWN`.
        """
        files: dict[bytes, bytes] = {}
        of_calls = (media for call in trajectory.calls for media in call.media)
        of_samples = (media for sample in trajectory.samples for media in sample.media)
        for media in (*of_calls, *of_samples):
            if media.sha256 not in files:
                files[media.sha256] = await self.image(trajectory.rollout_id, media.sha256)
            media.data = files[media.sha256]

    async def image(self, rollout_id: str, sha256: bytes) -> bytes:
        """Fetches the file of one image. Raises DataLoss `IMAGE_DAMAGED`: what came is not what the digest says."""
        request = pb.GetMediaRequest(rollout_id=rollout_id, sha256=sha256)
        pieces = await self.service.collect(self.stub.GetMedia, request, timeout=RESULT_TIMEOUT_S)
        data = b"".join(piece.chunk for piece in pieces)
        if hashlib.sha256(data).digest() != sha256:
            raise DataLoss(f"An image of {rollout_id} arrived damaged", reason="IMAGE_DAMAGED")
        return data

    async def _rows(self, rollout_id: str, tensor: completion_pb2.TokenTensor, **holder: str) -> bytes:
        request = pb.GetTensorRequest(rollout_id=rollout_id, name=tensor.name, start=tensor.start, **holder)
        pieces = await self.service.collect(self.stub.GetTensor, request, timeout=RESULT_TIMEOUT_S)
        data = b"".join(piece.tensor.data for piece in pieces)
        if hashlib.sha256(data).digest() != tensor.sha256:
            raise DataLoss(f"A tensor of {rollout_id} arrived damaged", reason="TENSOR_DAMAGED")
        return data

    async def result(
        self, rollout_id: str, *, samples_only: bool, top: bool, tensors: bool = False
    ) -> results.RolloutResult:
        """Returns an ended rollout with its trajectory, None where the gate was never opened."""
        info = await self.get(rollout_id, timeout=RESULT_TIMEOUT_S)
        trajectory = None
        try:
            trajectory = await self.trajectory(rollout_id, samples_only=samples_only, top=top, tensors=tensors)
        except FailedPrecondition as error:
            if error.reason != "TRAJECTORY_ABSENT":
                raise
        return results.RolloutResult(info, info.outcome or results.Outcome(), trajectory)

    async def calls_until(
        self,
        selector: Selector,
        ended: Callable[[], Awaitable[object]],
        credits: int,
        policy_version: int | None,
        messages: bool,
        images: bool,
    ) -> AsyncGenerator[ModelCall, None]:
        """Yields the calls of a session that lasts until `ended` returns."""
        async with self._intercept(
            selector, credits=credits, policy_version=policy_version, messages=messages, images=images
        ) as session:
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

    async def all(self) -> list[Driver]:
        """Returns a client of each driver; see `Cluster.members`. Of several, none is awaited while it restarts."""
        members = await self._cluster.members("driver")
        return [self._driver(member, briefly=len(members) > 1) for member in members]

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
        for member in members:
            try:
                return self._driver(member), await fetch(self._driver(member, briefly=len(members) > 1))
            except NotFound as error:
                unknown = error
            except _UNANSWERED as error:
                away = error
        if away is not None:
            raise away
        if unknown is None:
            raise AssertionError("there is a driver, or no client of it")
        raise unknown

    async def create(self, make: Callable[[Driver, bool], Awaitable[T]], chosen: str = "") -> tuple[Driver, T]:
        """Makes something new at a driver that takes work; see `Cluster.create`."""
        member, made = await self._cluster.create(
            "driver", lambda member, is_only: make(self._driver(member), is_only), chosen
        )
        return self._driver(member), made

    def _driver(self, member: Member, *, briefly: bool = False) -> Driver:
        service = member.service.briefly() if briefly else member.service
        return Driver(service, self._intercept, member.name, self._cluster)
