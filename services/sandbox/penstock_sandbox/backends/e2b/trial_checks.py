"""Checks trial sandboxes: which of E2B's promises hold in this deployment.

Purpose: a deployment may accept a request and ignore it; then nothing is claimed (R55). A network that lets something
out is open; silence proves little, as there may be no route at all. A pause counts only if the same guest agent serves
the sandbox before and after, in a network that is still closed; a copy of a live sandbox counts only if none of its
processes run in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.backends.e2b.provisioning import run, serves
from penstock_sandbox.backends.e2b.sandbox import E2BSandbox

if TYPE_CHECKING:
    from e2b import AsyncSandbox

# By address, since names may be blocked and addresses open. A filter may accept a connection before it cuts it, so
# only a response counts.
_ADDRESSES: Final = (("1.1.1.1", 80), ("8.8.8.8", 443))
_ASK: Final = r"""
for where in {where}; do
    (timeout 4 bash -c "exec 3<>/dev/tcp/$where && printf 'HEAD / HTTP/1.0\r\n\r\n' >&3 && head -c 1 <&3" | wc -c) &
done 2>/dev/null
wait
"""
_LIMIT_S: Final = 30.0


async def leak(sandbox: AsyncSandbox) -> str:
    """Returns the failure of the sandbox's closed network, or "". Raises PenstockError, Gone or Denied."""
    where = " ".join(f"{host}/{port}" for host, port in _ADDRESSES)
    _, out = await run(sandbox, _ASK.replace("{where}", where), _LIMIT_S)
    if any(line.strip() not in ("", "0") for line in out.splitlines() if line.strip().isdigit()):
        return "a sandbox that was made without internet reached it"
    return ""


async def pauses(sandbox: E2BSandbox) -> str:
    """Returns why sandboxes cannot be paused, or "" after this one was paused and resumed. Raises Unavailable."""
    try:
        await sandbox.pause()
        await sandbox.resume()
        # Only the instance that greeted before answers: another would be a sandbox that started afresh.
        await sandbox.stat("/")
    except FailedPrecondition as error:
        return error.message
    return ""


async def holds_processes(child: E2BSandbox, source: E2BSandbox) -> bool:
    """Whether a copy of a live sandbox came with its processes. Raises PenstockError, Gone or Denied."""
    return await serves(child.made, source.id)
