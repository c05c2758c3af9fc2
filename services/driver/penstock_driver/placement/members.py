"""What a driver says of the services of which it has a list: to clients, and in its refusals of what others have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from penstock.ops.v1 import operations_service_pb2 as pb
from penstock_chassis.membership.peers import Peers, State
from penstock_chassis.membership.reporting import STATES


class PeerAddresses(Mapping[str, str]):
    """The addresses of other drivers by their own names, as the list has them now; `given` are those of `peers`.

    A member whose certificate has another name than its address is left out: an address alone would not do.
    """

    def __init__(self, peers: Peers, given: Mapping[str, str]) -> None:
        self._peers = peers
        self._given = given

    def __getitem__(self, name: str) -> str:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> Mapping[str, str]:
        listed = {
            peer.own_name or peer.name: peer.member.address for peer in self._peers.all() if not peer.member.certified
        }
        return {**listed, **self._given}


def shown(lists: Mapping[str, Peers], own_name: str) -> Iterable[pb.Member]:
    """The members of each kind, as GetServerInfo has them. The driver of `own_name` is up: it answers."""
    for service, peers in lists.items():
        named = ((peer.own_name or ("" if peer.member.certified else peer.name), peer) for peer in peers.all())
        for name, peer in sorted(named, key=lambda pair: (pair[0], pair[1].member.address)):
            is_own = service == "driver" and name == own_name
            yield pb.Member(
                service=service,
                name=name,
                address=peer.member.address,
                certified_name=peer.member.certified,
                state=pb.MEMBER_STATE_UP if is_own and peer.state is not State.DRAINING else STATES[peer.state],
            )
