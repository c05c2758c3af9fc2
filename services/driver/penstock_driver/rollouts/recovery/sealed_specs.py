"""The specs of rollouts that have not ended: sealed for the next driver process, and opened by it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from penstock.driver.v1 import rollout_pb2
from penstock_chassis.errors import PenstockError
from penstock_driver.agents.registry import AgentRegistry
from penstock_driver.domain.records import Record
from penstock_driver.domain.rollout import Cause, Component, Failure, Phase, RolloutSpec
from penstock_driver.domain.unended import Unended, spec_context
from penstock_driver.store.records import Records
from penstock_driver.store.seal import Seal, SealBroken
from penstock_driver.wire.specs import LONG_LOCKS, rollout_spec

_WITHOUT_CHANGES: Final = b"\x00"
_WITH_CHANGES: Final = b"\x01"
"""First byte of what is sealed: whether the backend reports changes. The serialized request follows."""


class NotAdoptable(Exception):
    """A rollout cannot be taken up; carries its failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class SealedSpecs:
    """Seals and opens specs. `agents` has the versions of agents that they name."""

    def __init__(self, seal: Seal, agents: AgentRegistry) -> None:
        self._seal = seal
        self._agents = agents

    async def sealed(self, spec: RolloutSpec, record: Record) -> bytes:
        """The spec of a new rollout or, with its secrets and contents, of all rollouts of its group."""
        await self._agents.keep(spec.agent)
        request = rollout_pb2.RolloutSpec()
        request.CopyFrom(spec.request)
        request.agent.spec_sha256 = spec.agent.sha256
        request.sandbox.backend = spec.sandbox.backend
        if spec.task.verifier is not None:
            request.task.verifier.fresh_fork = bool(spec.task.verifier.fresh_fork)
        flag = _WITH_CHANGES if spec.reports_changes else _WITHOUT_CHANGES
        return self._seal.seal(flag + request.SerializeToString(), spec_context(record))

    async def read(self, unended: Unended) -> RolloutSpec:
        """As `opened`: in a thread if the spec is long, since its locks are parsed."""
        if len(unended.sealed or b"") > LONG_LOCKS:
            return await asyncio.to_thread(self.opened, unended)
        return self.opened(unended)

    def opened(self, unended: Unended) -> RolloutSpec:
        """The spec of a rollout that an earlier process accepted. Raises NotAdoptable."""
        record = unended.record
        if unended.sealed is None:
            message = "the driver died while the rollout ran, and was of a version that kept no sealed spec of it"
            raise NotAdoptable(
                Failure(
                    Cause.INFRASTRUCTURE, "DRIVER_RESTARTED", message, True, record.phase, component=Component.DRIVER
                )
            )
        try:
            data = self._seal.open(unended.sealed, spec_context(record))
            request = rollout_pb2.RolloutSpec.FromString(data[1:])
            spec = rollout_spec(request, self._agents, record.namespace)
        except SealBroken as error:
            message = f"the rollout's sealed spec cannot be opened: {error}; give journal_key the key of the last start"
            raise _unreadable(message, record.phase) from error
        except PenstockError as error:
            message = f"this version of the driver does not accept the rollout's spec: {error.message}"
            raise _unreadable(message, record.phase) from error
        return replace(spec, reports_changes=data[:1] == _WITH_CHANGES)


class LeftSpecs:
    """The specs of the rollouts that an earlier process left. Each is read and opened once, and is in memory once,
    however many rollouts of its group have it.
    """

    def __init__(self, specs: SealedSpecs, records: Records, left: Sequence[Unended]) -> None:
        self._specs = specs
        self._records = records
        self._sharers = Counter(spec_context(unended.record) for unended in left)
        self._opened: dict[str, RolloutSpec | Failure] = {}

    def is_shared(self, record: Record) -> bool:
        """Whether other rollouts that were left have the same spec."""
        return self._sharers[spec_context(record)] > 1

    async def of(self, unended: Unended) -> RolloutSpec:
        """The spec of one of them. Raises NotAdoptable."""
        record = unended.record
        if not unended.is_readable:
            return self._specs.opened(unended)  # as one without a spec
        context = spec_context(record)
        found = self._opened.get(context)
        if found is None:
            found = await self._read(record)
            if self.is_shared(record):
                self._opened[context] = found
        if isinstance(found, Failure):
            raise NotAdoptable(replace(found, phase=record.phase))
        return found

    async def _read(self, record: Record) -> RolloutSpec | Failure:
        try:
            return await self._specs.read(Unended(record, await self._records.sealed_spec(record)))
        except NotAdoptable as error:
            return error.failure


def _unreadable(message: str, phase: Phase) -> NotAdoptable:
    return NotAdoptable(
        Failure(Cause.INFRASTRUCTURE, "SPEC_UNREADABLE", message, True, phase, component=Component.OPERATOR)
    )
