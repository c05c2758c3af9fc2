"""What a rollout needs to know of placement: `Placement` gives each attempt a `Place`, until that is lost.

Invariant: an attempt runs at one sandbox service and one gate, from its start to its end. When either is lost, the
attempt is over at once, and is never graded (R120): the next one has another place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from penstock_chassis.membership.peers import Peer
from penstock_driver.domain.ports import CallEnded
from penstock_driver.domain.rollout import Failure, RolloutSpec
from penstock_driver.placement.services import RunnerServices

OnLoss = Callable[[Failure], None]


@dataclass(slots=True)
class Avoid:
    """Sandbox services and gates that failed a rollout's earlier attempts, by their names among the members."""

    nodes: set[str] = field(default_factory=set)
    gates: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an attempt runs. `services` are of this sandbox service and this gate."""

    services: RunnerServices
    node: str = ""
    gate: str = ""


class Placement(Protocol):
    """All sandbox services and gates that a driver may use."""

    async def follow(self) -> None:
        """End the attempts at places that are lost. Never returns; cancel it. Its error ends the driver."""

    async def place(self, spec: RolloutSpec, avoid: Avoid) -> Place:
        """Choose a place, waiting for one a while. Raises RolloutFailed: there is none."""

    def at(self, node: str, gate: str) -> Place:
        """The place of these names, where an attempt of an earlier process runs. Raises RolloutFailed: it is gone."""

    def occupied(self, place: Place, on_loss: OnLoss) -> AbstractContextManager[None]:
        """While the context is open, the attempt counts as load there, and `on_loss` is called once if it is lost."""

    async def release(self, rollout_id: str, labels: Mapping[str, str], *, sandboxes_over: bool = False) -> None:
        """Delete the sandboxes with these labels and close the rollout, wherever they are.

        `sandboxes_over`: their leases have ended, so that nothing is left of them at a sandbox service that is lost.
        Raises PenstockError: something is not released, or may not be.
        """

    def on_return(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a lost sandbox service or gate is back. It must not raise."""

    def peers(self) -> Mapping[str, Sequence[Peer]]:
        """The members by kind of service; empty where none is probed."""

    def calls(self, labels: Mapping[str, str]) -> AsyncIterator[CallEnded]:
        """Yield the model calls of all gates as they end. Never ends."""


class OnePlace:
    """The placement of a driver with one sandbox service and one gate, whose absence it waits out."""

    def __init__(self, services: RunnerServices) -> None:
        self._place = Place(services)

    async def follow(self) -> None:
        """See Placement. There is nothing to follow."""
        await asyncio.Event().wait()

    async def place(self, spec: RolloutSpec, avoid: Avoid) -> Place:
        """See Placement."""
        return self._place

    def at(self, node: str, gate: str) -> Place:
        """See Placement. Names are of no use where there is one place."""
        return self._place

    @contextmanager
    def occupied(self, place: Place, on_loss: OnLoss) -> Iterator[None]:
        """See Placement."""
        yield

    async def release(self, rollout_id: str, labels: Mapping[str, str], *, sandboxes_over: bool = False) -> None:
        """See Placement."""
        await self._place.services.sandboxes.delete_labelled(labels)
        await self._place.services.gate.close(rollout_id, "ROLLOUT_ENDED")

    def calls(self, labels: Mapping[str, str]) -> AsyncIterator[CallEnded]:
        """See Placement."""
        return self._place.services.gate.calls(labels)

    def on_return(self, listener: Callable[[], None]) -> None:
        """See Placement. No service is known to be lost."""

    def peers(self) -> Mapping[str, Sequence[Peer]]:
        """See Placement."""
        return {}
