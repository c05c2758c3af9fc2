"""Whether a template's sandboxes are closed: what its policy says, and what a program inside can reach.

Purpose: a NetworkPolicy is an object that a cluster may not enforce (its network plugin does), and a template may have
none. So the template is read, and the network tried from inside. Silence proves little where there is no route at all;
an answer proves that it is open.
"""

from __future__ import annotations

from typing import Final

from penstock_sandbox.backends.kubernetes.cluster import Object
from penstock_sandbox.backends.remote_machine.bootstrap import PreparedMachine
from penstock_sandbox.backends.remote_machine.machine import Machine

# Public resolvers by address, since names may be blocked and addresses open; and the API server, by the address that
# every pod has. Only a connection that is accepted counts.
_ASK: Final = """
import os, socket, sys
places = [("1.1.1.1", 443), ("8.8.8.8", 53)]
with open("/proc/1/environ", "rb") as file:
    environment = dict(line.partition(b"=")[::2] for line in file.read().split(b"\\0"))
server = environment.get(b"KUBERNETES_SERVICE_HOST", b"").decode()
if server:
    places.append((server, int(environment.get(b"KUBERNETES_SERVICE_PORT", b"443"))))
for place in places:
    try:
        socket.create_connection(place, 3).close()
    except OSError:
        continue
    print("%s:%d" % place)
"""


def declares_closed(template: Object) -> bool:
    """Whether a template's own policy lets nothing out. Without one the controller's default lets the internet in."""
    spec = template["spec"]
    policy = spec.get("networkPolicy")
    return (
        spec.get("networkPolicyManagement", "Managed") == "Managed" and policy is not None and not policy.get("egress")
    )


async def leak(machine: Machine, place: PreparedMachine) -> str:
    """Returns what the network of a sandbox reaches, or "". Raises Unavailable."""
    reached = await machine.run([place.python, "-I", "-S", "-c", _ASK])
    return ", ".join(reached.stdout.split())[:200]
