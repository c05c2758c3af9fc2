"""The driver's health: its gauges and its diagnostics. Read-only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from penstock_chassis.membership.peers import Host, Peer, State
from penstock_chassis.operations import Trouble
from penstock_chassis.telemetry.metrics import Read, Reader
from penstock_driver import metrics
from penstock_driver.placement.placement import Placement
from penstock_driver.rollouts.manager import RolloutManager
from penstock_driver.terminals.manager import TerminalManager


class Health:
    """Observes one driver."""

    def __init__(self, manager: RolloutManager, terminals: TerminalManager, placement: Placement) -> None:
        self._manager = manager
        self._terminals = terminals
        self._placement = placement

    @contextmanager
    def reported(self) -> Iterator[None]:
        """While the context is open, the gauges report this driver's values."""
        with ExitStack() as stack:
            reading: list[tuple[Read, Reader]] = [
                (metrics.ROLLOUTS, self._rollouts),
                (metrics.GROUPS, lambda: self._manager.live_groups),
                (metrics.OWED, lambda: len(self._manager.pending_cleanups) + len(self._terminals.pending_cleanups)),
                (metrics.TERMINALS, lambda: self._terminals.open_count),
                (metrics.PEER_UP, lambda: self._peers(State.SERVING, State.DRAINING)),
                (metrics.PEER_LOST, lambda: self._peers(State.LOST)),
            ]
            for gauge, read in reading:
                stack.enter_context(gauge.supplied_by(read))
            yield

    def troubles(self, _patience_s: float) -> Iterator[Trouble]:
        """Members that do not answer, and what ended rollouts and episodes still have, mostly there."""
        for kind, peers in self._placement.peers().items():
            for peer in peers:
                if peer.state is State.LOST:
                    yield _lost(kind, peer)
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
                )

    def _rollouts(self) -> dict[tuple[str, ...], float]:
        return {(phase.name.lower(),): count for phase, count in Counter(self._manager.live_phases()).items()}

    def _peers(self, *states: State) -> dict[tuple[str, ...], float]:
        return {(kind,): sum(peer.state in states for peer in peers) for kind, peers in self._placement.peers().items()}


def _lost(kind: str, peer: Peer) -> Trouble:
    where = f"the {kind} service {peer.name} at {peer.member.address}"
    if peer.host is Host.SILENT:
        return Trouble(
            "MEMBER_LOST",
            f"{where} does not answer, and its host is silent",
            "check that the host runs and can be reached; if it is gone for good, take it off the members",
            subjects=(peer.name,),
        )
    return Trouble(
        "MEMBER_LOST",
        f"{where} does not answer or is not used, although its host answers",
        "start it there; if it runs, the driver's log says why it is not used: its certificate, token or name",
        subjects=(peer.name,),
    )
