"""`python -m tests.hosts up`: says how to reach a fleet, and waits for the end."""

from __future__ import annotations

import os
import signal
import threading
from typing import Final

from tests.hosts.fleet import Fleet

_LOOK_S: Final = 0.2


def lines(fleet: Fleet) -> list[str]:
    """Where everything is."""
    services = ("driver", "interception", "sandbox", "inference")
    names = [name for service in services for name in fleet.size.names(service)]
    kept = fleet.folder / "credentials"
    first = fleet.network.hosts[names[0]]
    return [
        *(f"{name:4} {fleet.kind(name):13} {fleet.address(name):16}  {_pid(fleet, name)}" for name in names),
        f"tokens     {kept}/trainer.token, operator.token, observer.token",
        f"authority  {kept}/ca.pem",
        f"logs       {fleet.folder}/NAME.log",
        "enter a host, or the trainer's place, which reaches all of them:",
        f"  nsenter --net=/proc/{first.holder.pid}/ns/net bash",
        f"  nsenter --net=/proc/{os.getpid()}/ns/net bash",
        "then, for example:",
        f"  export PENSTOCK_TOKEN_FILE={kept}/trainer.token PENSTOCK_CA_FILE={kept}/ca.pem",
        f"  export PENSTOCK_DRIVER_ADDRESS={fleet.address('d0')} PENSTOCK_INTERCEPTION_ADDRESS={fleet.address('g0')}",
        f"  export PENSTOCK_SANDBOX_ADDRESS={fleet.address('n0')} PENSTOCK_INFERENCE_ADDRESS={fleet.address('e0')}",
        "  penstock status",
        "Ctrl-C ends all of it.",
    ]


def wait(fleet: Fleet) -> None:
    """Print `lines`, and return on SIGINT or SIGTERM."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    print("\n".join(lines(fleet)), flush=True)
    while not ended.wait(_LOOK_S):  # the handler runs between two waits
        pass


def _pid(fleet: Fleet, name: str) -> str:
    return f"namespace of process {fleet.network.hosts[name].holder.pid}"
