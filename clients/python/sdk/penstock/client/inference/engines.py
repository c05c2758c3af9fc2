"""All engines of a connection's inference source: what changes an engine is done at each of them."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.client.errors import ConfigurationError, EnginesFailed, FailedPrecondition, PenstockError
from penstock.client.transport.cluster import Cluster
from penstock.client.transport.rpc import Service
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.inference.v1 import inference_service_pb2_grpc as pb_grpc

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Engine:
    """One inference service."""

    name: str
    service: Service
    stub: Any

    @classmethod
    def of(cls, service: Service, name: str = "") -> "Engine":
        """An engine at an address; its name is empty where it is the only one."""
        return cls(name, service, pb_grpc.InferenceServiceStub(service.channel))

    async def version(self) -> int:
        """The policy version of the base weights in force."""
        answer: pb.GetInfoResponse = await self.service.call(self.stub.GetInfo, pb.GetInfoRequest(), repeatable=True)
        return answer.policy_version


@dataclass(frozen=True, slots=True)
class Done:
    """What each engine answered, by name, and the names of those that are lost and were not asked."""

    answers: Mapping[str, Any]
    away: Sequence[str] = ()


class Engines:
    """The engines that the gates have a list of; without a list, the one at the connection's address."""

    def __init__(self, given: Service, cluster: Cluster | None = None) -> None:
        self._given = Engine.of(given)
        self._cluster = cluster
        self._base: tuple[int, int] | None = None
        """The version of the last partial push, and the one that it was made for."""
        self._pushed = -1
        """The version that all engines had after this client's last push; -1 = unknown."""

    async def at_all(self, work: Callable[[Engine], Awaitable[T]]) -> Done:
        """Does something at all engines at once. Those that a gate cannot reach are left out, while others answer.

        Raises:
            EnginesFailed: some of several engines failed.
            PenstockError: the error of the only engine, or the one that all have.
        """
        engines, away = await self._found()
        if len(engines) == 1 and not away:
            return Done({engines[0].name: await work(engines[0])})
        results = await asyncio.gather(*(work(engine) for engine in engines), return_exceptions=True)
        failures: dict[str, PenstockError] = {}
        answers: dict[str, Any] = {}
        for engine, result in zip(engines, results, strict=True):
            if isinstance(result, PenstockError):
                failures[engine.name] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                answers[engine.name] = result
        if not failures:
            return Done(answers, away)
        if not answers and len({(type(error), error.reason) for error in failures.values()}) == 1:
            raise next(iter(failures.values()))
        raise EnginesFailed(failures, await self._in_force(engines), reason="ENGINES_FAILED")

    async def push_partial(self, version: int, push: Callable[[Engine], Awaitable[T]]) -> Done:
        """As `at_all`, for a push of some tensors.

        It is made for the newest older version that any engine has, or this client pushed last. An engine with another
        version fails (BASE_VERSION_DIFFERS), because its other tensors are not those that the push was made for.
        """
        engines, away = await self._found()
        if len(engines) == 1 and not away:
            return await self.at_all(push)
        have = {name: has for name, has in (await self._in_force(engines)).items() if has is not None}
        base = self._base[1] if self._base and self._base[0] == version else self._made_for(version, have.values())

        async def checked(engine: Engine) -> T:
            has = have[engine.name] if engine.name in have else await engine.version()
            if has not in (base, version):
                raise FailedPrecondition(
                    f"It has policy version {has}, and the push is for engines with version {base}: push all tensors",
                    reason="BASE_VERSION_DIFFERS",
                )
            return await push(engine)

        return await self.at_all(checked)

    def pushed(self, version: int) -> None:
        """Notes that all engines have a version."""
        self._pushed = version

    def _made_for(self, version: int, have: Collection[int]) -> int:
        """The version that a partial push is made for; -1 = unknown. A repeat is made for the same one."""
        # Where an engine has the version already, nobody knows for which one it was made.
        older = [] if version in have else [has for has in (*have, self._pushed) if has < version]
        base = max(older, default=-1)
        if have:  # else no engine answers, and a repeat asks again
            self._base = (version, base)
        return base

    async def only(self) -> Engine:
        """The engine of a connection that has one.

        Raises:
            ConfigurationError: `ENGINE_LIST`, there are several.
        """
        engines, away = await self._found()
        if len(engines) + len(away) > 1:
            raise ConfigurationError(
                "The gate has a list of engines, and this is done at one: connect to each by its address, with "
                "Endpoints(discover=False)",
                reason="ENGINE_LIST",
            )
        return engines[0]

    async def _found(self) -> tuple[Sequence[Engine], Sequence[str]]:
        """The engines that may answer, and the names of those that are lost; all may answer if all are lost."""
        if self._cluster is None:
            return [self._given], ()
        members = await self._cluster.engines()
        live = [member for member in members if not member.is_lost] or members
        away = [member.name for member in members if member not in live]
        return [Engine.of(member.service, member.name) for member in live], away

    @staticmethod
    async def _in_force(engines: Sequence[Engine]) -> Mapping[str, int | None]:
        found = await asyncio.gather(*(engine.version() for engine in engines), return_exceptions=True)
        versions: dict[str, int | None] = {}
        for engine, result in zip(engines, found, strict=True):
            if isinstance(result, BaseException) and not isinstance(result, PenstockError):
                raise result
            versions[engine.name] = None if isinstance(result, BaseException) else result
        return versions
