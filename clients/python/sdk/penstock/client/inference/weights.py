"""New weights for an engine: pushed as one file, named by path or moved by the trainer itself; and adapters."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

from numpy.typing import NDArray

from penstock.client.errors import Aborted, InvalidArgument, PenstockError, Unavailable
from penstock.client.inference.engines import Done
from penstock.client.inference.safetensors import TensorFile
from penstock.client.transport.rpc import Backoff, Service
from penstock.client.wire import chat
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.inference.v1 import inference_service_pb2_grpc as pb_grpc
from penstock.values import reader

A = TypeVar("A")
Q = TypeVar("Q")
OTHERS_S: Final = 60.0
"""How long a push to one of several engines waits for another one that runs there."""
Tensors = Mapping[str, NDArray[Any]]


class PauseMode(StrEnum):
    """How generations in flight are handled when the engine pauses: aborted, finished first, or frozen."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The result of a push; times in seconds, None = unknown. Of several engines, the slowest one's times.

    `away`: the names of engines that do not answer and got nothing. They get calls again when they have these weights.
    """

    policy_version: int
    transfer: float | None
    pause: float | None
    load: float | None
    away: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter in force beside the base weights, and its own policy version."""

    name: str
    policy_version: int
    rank: int
    namespace: str = "default"


class _Phased(Protocol):
    """The common part of the answers to an update and a transfer."""

    @property
    def policy_version(self) -> int: ...
    @property
    def phases(self) -> pb.UpdatePhases: ...


def as_json(value: Any, what: str) -> str:
    """Returns JSON. Raises InvalidArgument (NOT_JSON), for example for a set, as in an unsaved PEFT configuration."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{what} has a value that JSON cannot represent: {error}", reason="NOT_JSON") from None


def pause_mode(mode: PauseMode | str) -> pb.PauseMode.ValueType:
    """Returns the mode on the wire. Raises InvalidArgument (ENUM_VALUE)."""
    found: pb.PauseMode.ValueType = chat.number(pb.PauseMode, mode, "PAUSE_MODE_")
    return found


async def file_of(tensors: Tensors) -> TensorFile:
    """Returns the safetensors file of these tensors, made off the event loop."""
    return await asyncio.to_thread(TensorFile.of, tensors)


async def tensors_begin(
    version: int, tensors: Tensors, *, partial: bool, mode: PauseMode | str
) -> tuple[pb.UpdateWeightsRequest.UpdateBegin, TensorFile]:
    """See `InferenceClient.update_weights`."""
    file = await file_of(tensors)
    begin = pb.UpdateWeightsRequest.UpdateBegin(
        policy_version=version,
        format=_format(partial),
        mode=pause_mode(mode),
        size_bytes=file.size_bytes,
        sha256=file.sha256,
    )
    return begin, file


def path_begin(version: int, path: str, *, partial: bool, mode: PauseMode | str) -> pb.UpdateWeightsRequest.UpdateBegin:
    """See `InferenceClient.update_weights_from`."""
    return pb.UpdateWeightsRequest.UpdateBegin(
        policy_version=version, format=_format(partial), mode=pause_mode(mode), path=path
    )


def together(done: Done) -> WeightUpdate:
    """The result of a push to all engines: each step lasted as long as at the slowest one."""
    updates: Sequence[WeightUpdate] = list(done.answers.values())

    def slowest(times: Iterable[float | None]) -> float | None:
        return max((time for time in times if time is not None), default=None)

    return WeightUpdate(
        min(update.policy_version for update in updates),
        slowest(update.transfer for update in updates),
        slowest(update.pause for update in updates),
        slowest(update.load for update in updates),
        tuple(done.away),
    )


async def load_adapter(
    service: Service,
    stub: Any,
    begin: pb.LoadAdapterRequest.AdapterBegin,
    file: TensorFile | None,
    timeout: float | None,
) -> Adapter:
    """See `InferenceClient.load_adapter`; without a file `begin` names a path."""
    frame = pb.LoadAdapterRequest

    def frames() -> AsyncIterator[pb.LoadAdapterRequest]:
        commit = frame.AdapterCommit(sha256=b"" if file is None else file.sha256)
        return _frames(frame(begin=begin), file, lambda chunk: frame(chunk=chunk), frame(commit=commit))

    answer = await _push(service, stub.LoadAdapter, frames, timeout)
    return adapter_from(answer.adapter)


adapter_from: Final = reader(Adapter, pb.Adapter)
"""Converts the message."""


class WeightTransfer:
    """A transfer in which a trainer moves weights itself (NCCL, IPC) while the engine is paused.

        async with await ps.inference.start_transfer(version) as transfer:
            await transfer.tensors(descriptor)
            update = await transfer.commit()

    Leaving the block without `commit` abandons the transfer: the old weights stay in force.
    """

    def __init__(self, service: Service, stub: pb_grpc.InferenceServiceStub, transfer_id: str) -> None:
        self._service = service
        self._stub: Any = stub
        self._over = False
        self.id: str = transfer_id

    async def tensors(
        self, descriptor: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, timeout: float | None = 600.0
    ) -> None:
        """Makes the engine receive some tensors, which the trainer sends meanwhile.

        Args:
            descriptor: the backend's input: names, shapes, dtypes; one for each data-parallel rank, or one.
            timeout: seconds.

        Raises:
            InvalidArgument: `TRANSFER_REFUSED`.
            FailedPrecondition: `NO_TRANSFER`, it was abandoned meanwhile.
        """
        request = pb.TransferTensorsRequest(transfer_id=self.id, descriptor_json=as_json(descriptor, "descriptor"))
        await self._service.call(self._stub.TransferTensors, request, timeout=timeout)

    async def commit(self, *, timeout: float | None = 600.0) -> WeightUpdate:
        """Puts the version in force; generations go on."""
        return await self._finish(True, timeout)

    async def give_up(self, *, timeout: float | None = 600.0) -> WeightUpdate:
        """Abandons the transfer and resumes with the old weights."""
        return await self._finish(False, timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._over:
            return
        try:
            await self.give_up()
        except PenstockError:
            # The block's own error takes precedence; the engine also abandons the transfer by itself.
            if error is None:
                raise

    async def _finish(self, commit: bool, timeout: float | None) -> WeightUpdate:
        self._over = True
        request = pb.FinishTransferRequest(transfer_id=self.id, commit=commit)
        answer = await self._service.call(self._stub.FinishTransfer, request, timeout=timeout, repeatable=True)
        return _weight_update(answer)


async def update(
    service: Service,
    stub: Any,
    begin: pb.UpdateWeightsRequest.UpdateBegin,
    file: TensorFile | None,
    timeout: float | None,
) -> WeightUpdate:
    """Pushes to one engine; without a file `begin` names a path."""
    frame = pb.UpdateWeightsRequest

    def frames() -> AsyncIterator[pb.UpdateWeightsRequest]:
        commit = frame.UpdateCommit(sha256=b"" if file is None else file.sha256)
        return _frames(frame(begin=begin), file, lambda chunk: frame(chunk=chunk), frame(commit=commit))

    return _weight_update(await _push(service, stub.UpdateWeights, frames, timeout))


async def _push(service: Service, method: Any, frames: Callable[[], AsyncIterator[Q]], timeout: float | None) -> Any:
    try:
        return await service.push(method, frames, timeout=timeout)
    except Unavailable as error:
        # Committing a version that is in force succeeds, so a lost answer may be retried.
        await asyncio.sleep(Backoff().next(error))
        return await service.push(method, frames, timeout=timeout)


async def after_others(push: Callable[[], Awaitable[A]]) -> A:
    """Returns the result of a push, repeated while another one runs at the engine: others may hand weights on to it."""
    loop, backoff = asyncio.get_running_loop(), Backoff()
    until = loop.time() + OTHERS_S
    while True:
        try:
            return await push()
        except Aborted as error:
            if error.reason != "UPDATE_IN_PROGRESS" or loop.time() >= until:
                raise
            await asyncio.sleep(backoff.next(error))


async def _frames(begin: Q, file: TensorFile | None, chunk: Callable[[bytes], Q], commit: Q) -> AsyncIterator[Q]:
    yield begin
    for data in () if file is None else file.chunks():
        yield chunk(data)
    yield commit


def _format(partial: bool) -> pb.WeightFormat.ValueType:
    return pb.WEIGHT_FORMAT_SAFETENSORS_PARTIAL if partial else pb.WEIGHT_FORMAT_SAFETENSORS


def _weight_update(answer: _Phased) -> WeightUpdate:
    phases = answer.phases
    return WeightUpdate(
        answer.policy_version,
        chat.seconds(phases, "transfer"),
        chat.seconds(phases, "pause"),
        chat.seconds(phases, "load"),
    )
