"""The driver's health: its gauges and its diagnostics. Read-only."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from penstock_chassis.membership.peers import Peer, Peers, State
from penstock_chassis.membership.reporting import PEER_LOST, PEER_UP, member_lost
from penstock_chassis.operations import Trouble
from penstock_chassis.telemetry.metrics import Read, Reader
from penstock_driver import metrics
from penstock_driver.domain.rollout import Phase
from penstock_driver.placement.placement import Placement
from penstock_driver.rollouts.manager import RolloutManager
from penstock_driver.terminals.manager import TerminalManager
from penstock_driver.trajectories.exports.exporter import Exporter

EXPORT_PATIENCE_S: Final = 60.0
"""How long an export may fail before it is a problem."""


class ExportHealth:
    """Observes the export of ended rollouts.

    Args:
        exporter: None = the driver exports nothing.
        left: how many rollouts waited when the driver started.
    """

    def __init__(self, exporter: Exporter | None = None, left: int = 0) -> None:
        self._exporter = exporter
        self._left = left

    def pending(self) -> int:
        """How many ended rollouts are not stored."""
        return 0 if self._exporter is None else self._exporter.pending

    def oldest_s(self) -> float:
        """How long the oldest of them has waited, in seconds."""
        since = None if self._exporter is None else self._exporter.backlog.since
        return 0.0 if since is None else max(0.0, time.time() - since)

    def troubles(self) -> Iterator[Trouble]:
        """What is not stored, and why."""
        exporter = self._exporter
        if exporter is None:
            if self._left:
                yield Trouble(
                    "EXPORT_OFF",
                    f"{_rollouts(self._left)} of an earlier start wait to be exported, and the export is off",
                    "set export_url again, or delete these rollouts, which the driver counts when it starts: the gate "
                    "keeps their trajectories until then",
                    grave=False,
                )
            return
        failing = exporter.failing
        if failing is not None and time.time() - failing.since >= EXPORT_PATIENCE_S:
            yield Trouble(
                "EXPORT_FAILING",
                f"{_rollouts(exporter.pending)} wait to be stored at {exporter.url}, where nothing could be written "
                f"for {time.time() - failing.since:.0f} s: {failing.message}",
                "check that place, and the credentials in the driver's environment; nothing is lost meanwhile, but the "
                "gates keep these trajectories on their disks",
            )
        if broken := exporter.backlog.broken:
            yield Trouble(
                "EXPORT_BROKEN",
                f"{_rollouts(len(broken))} cannot be exported; the driver's log says why",
                "read them with `penstock rollout`; they are tried again each hour, and kept until they are stored",
                subjects=broken,
                owners=("",) * len(broken),
            )


class Health:
    """Observes one driver."""

    def __init__(
        self,
        manager: RolloutManager,
        terminals: TerminalManager,
        placement: Placement,
        exporting: ExportHealth | None = None,
        drivers: Peers | None = None,
        own_name: str = "",
    ) -> None:
        """`drivers`: all drivers, where there is a list of them; the one of `own_name` is this one."""
        self._exporting = exporting or ExportHealth()
        self._manager = manager
        self._terminals = terminals
        self._placement = placement
        self._drivers = drivers
        self._own_name = own_name

    @contextmanager
    def reported(self) -> Iterator[None]:
        """While the context is open, the gauges report this driver's values."""
        with ExitStack() as stack:
            reading: list[tuple[Read, Reader]] = [
                (metrics.ROLLOUTS, self._rollouts),
                (metrics.GROUPS, lambda: self._manager.live_groups),
                (metrics.OWED, lambda: len(self._manager.pending_cleanups) + len(self._terminals.pending_cleanups)),
                (metrics.TERMINALS, lambda: self._terminals.open_count),
                (metrics.EXPORTS_PENDING, self._exporting.pending),
                (metrics.EXPORTS_OLDEST, self._exporting.oldest_s),
                (PEER_UP, lambda: self._peers(State.SERVING, State.DRAINING)),
                (PEER_LOST, lambda: self._peers(State.LOST)),
            ]
            for gauge, read in reading:
                stack.enter_context(gauge.supplied_by(read))
            yield

    def troubles(self, _patience_s: float) -> Iterator[Trouble]:
        """Members that do not answer, what ended rollouts and episodes still have, mostly there, and the export."""
        yield from self._exporting.troubles()
        for kind, peers in self._listed().items():
            for peer in peers:
                if peer.state is State.LOST:
                    yield member_lost(kind, peer)
        for what, pending in (
            ("rollout", self._manager.pending_cleanups),
            ("terminal", self._terminals.pending_cleanups),
        ):
            if pending:
                yield Trouble(
                    "RELEASES_OWED",
                    f"{len(pending)} {what}{'s' * (len(pending) > 1)} ended with pending clean-up: a sandbox, or a "
                    "place at the gate, is still in use",
                    "check that the sandbox and interception services answer; the driver keeps retrying",
                    subjects=pending,
                    owners=("",) * len(pending),
                )

    def _rollouts(self) -> dict[tuple[str, ...], float]:
        """With those of no rollout: autoscalers take a gauge without values for an error."""
        counted: Counter[Phase] = Counter({phase: 0 for phase in Phase if phase is not Phase.ENDED})
        counted.update(self._manager.live_phases())
        return {(phase.name.lower(),): count for phase, count in counted.items()}

    def _listed(self) -> Mapping[str, Sequence[Peer]]:
        """The members of each kind, without this driver itself."""
        if self._drivers is None:
            return self._placement.peers()
        others = [peer for peer in self._drivers.all() if (peer.own_name or peer.name) != self._own_name]
        return {**self._placement.peers(), "driver": others}

    def _peers(self, *states: State) -> dict[tuple[str, ...], float]:
        return {(kind,): sum(peer.state in states for peer in peers) for kind, peers in self._listed().items()}


def _rollouts(count: int) -> str:
    return f"{count} ended rollout{'s' * (count != 1)}"
