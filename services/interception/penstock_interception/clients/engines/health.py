"""What the gate says of its lists of engines: to operators, to clients, in its metrics. Read-only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from penstock.ops.v1 import operations_service_pb2 as pb
from penstock_chassis.membership.peers import State
from penstock_chassis.membership.reporting import PEER_LOST, PEER_UP, STATES, member_lost
from penstock_chassis.operations import Trouble
from penstock_interception import metrics
from penstock_interception.clients.engines.pool import EnginePool
from penstock_interception.clients.engines.values import Engine, Load

KIND: Final = "inference"


class EngineHealth:
    """Observes the pools that have a list."""

    def __init__(self, pools: Sequence[EnginePool]) -> None:
        self._pools = pools

    @contextmanager
    def gauges(self) -> Iterator[None]:
        """While the context is open, supplies the gauges' values, if there is a list."""
        with ExitStack() as stack:
            if self._pools:
                stack.enter_context(PEER_UP.supplied_by(lambda: self._count(State.SERVING, State.DRAINING)))
                stack.enter_context(PEER_LOST.supplied_by(lambda: self._count(State.LOST)))
                stack.enter_context(metrics.ENGINE_RUNNING.supplied_by(lambda: self._loads(lambda load: load.running)))
                stack.enter_context(metrics.ENGINE_WAITING.supplied_by(lambda: self._loads(lambda load: load.waiting)))
                stack.enter_context(metrics.ENGINE_POLICY.supplied_by(self._versions))
            yield

    def troubles(self) -> Iterator[Trouble]:
        """Engines that do not answer, and those that get no calls because of their weights."""
        for pool in self._pools:
            for peer in pool.peers():
                if peer.state is State.LOST:
                    yield member_lost(KIND, peer)
            known = [engine for engine in pool.engines() if engine.weights is not None]
            if len({engine.weights.tokenizer_sha256 for engine in known if engine.weights is not None}) > 1:
                yield Trouble(
                    "ENGINES_DIFFER",
                    f"engines of {pool.name} have different tokenizers: a rollout's calls go to those alone that have "
                    "the tokenizer of its first one",
                    "give all engines of a list the same model",
                    subjects=tuple(engine.name for engine in known),
                )
            for engine in pool.behind():
                has = engine.weights.version if engine.weights is not None else 0
                yield Trouble(
                    "ENGINE_BEHIND",
                    f"engine {engine.name} came with policy version {has} and gets no calls before it has version "
                    f"{engine.behind}, which other engines of {pool.name} have",
                    "push the weights again, or give the engines pool_members, so that they hand them on",
                    grave=False,
                    subjects=(engine.name,),
                )

    def members(self) -> Iterator[pb.Member]:
        """See GetServerInfoResponse.members."""
        for pool in self._pools:
            for peer in pool.peers():
                name = peer.own_name or ("" if peer.member.certified else peer.name)
                yield pb.Member(
                    service=KIND,
                    name=name,
                    address=peer.member.address,
                    certified_name=peer.member.certified,
                    state=STATES[peer.state],
                    pool=pool.name,
                )

    def _loads(self, of: Callable[[Load], int]) -> dict[tuple[str, ...], float]:
        return {
            (pool.name, _shown(engine)): of(engine.load)
            for pool in self._pools
            for engine in pool.engines()
            if engine.load is not None
        }

    def _versions(self) -> dict[tuple[str, ...], float]:
        return {
            (pool.name, _shown(engine)): engine.weights.version
            for pool in self._pools
            for engine in pool.engines()
            if engine.weights is not None and not engine.peer.is_lost
        }

    def _count(self, *states: State) -> dict[tuple[str, ...], float]:
        return {(KIND,): sum(peer.state in states for pool in self._pools for peer in pool.peers())}


def _shown(engine: Engine) -> str:
    """The engine's name in metrics: its own, as in the list of members."""
    return engine.peer.own_name or engine.name
