"""A trial sandbox of the local backend, seen from inside: isolation is checked before it is claimed."""

from __future__ import annotations

import asyncio

from penstock_sandbox.backends.base import SandboxHandle
from penstock_sandbox.backends.collected import Collected

# Each line printed is a claim that does not hold.
_LOOK = r"""
cd /
status() { while read -r key value; do [ "$key" = "$1:" ] && echo "$value"; done < /proc/self/status; }
for set in CapInh CapPrm CapEff CapBnd CapAmb; do
  case "$(status $set)" in *[!0]*) echo "capabilities remain: $set";; esac
done
[ "$(status NoNewPrivs)" = 1 ] || echo "privileges can be gained"
[ "$(echo /proc/[0-9]* | wc -w)" -lt 10 ] || echo "processes of the host are visible"
[ "$(grep -c : /proc/net/dev)" = 1 ] || echo "network interfaces beside loopback"
echo trial > /workspace/trial && echo trial > "$HOME/trial" || echo "files cannot be written"
: 2>/dev/null > /usr/trial && echo "the host's programs can be written"
[ -e /sys/kernel ] && echo "/sys is visible"
[ -e /proc/1/root/usr ] && echo "the first process can be traced"
exit 0
"""


async def look(handle: SandboxHandle) -> str:
    """What a sandbox that should be closed lets through; empty when all is as claimed."""
    sink = Collected()
    process = await handle.start(
        ["/bin/bash", "-c", _LOOK], handle.default_env, handle.workdir, sink, stdin=False, pty=None
    )
    async with asyncio.timeout(20):
        ended = await sink.ended
        await sink.closed_output.wait()
    await process.aclose()
    if ended is None or ended.code != 0:
        return "the trial process did not finish"
    return sink.text.decode(errors="replace").strip().replace("\n", "; ")
