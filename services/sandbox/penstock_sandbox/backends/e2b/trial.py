"""A look from inside a sandbox that was made without internet: does anything answer?

Purpose: a deployment may take the wish for a closed network and not fulfil it; then no claim is made (R55). The other
way round nothing is proved: where there is no route at all, nothing answers either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock_sandbox.backends.e2b.equipment import run

if TYPE_CHECKING:
    from e2b import AsyncSandbox

# By address, since names may be closed and addresses open. A filter may accept a connection before it cuts it, so only
# an answer counts.
_ADDRESSES: Final = (("1.1.1.1", 80), ("8.8.8.8", 443))
_ASK: Final = r"""
for where in {where}; do
    (timeout 4 bash -c "exec 3<>/dev/tcp/$where && printf 'HEAD / HTTP/1.0\r\n\r\n' >&3 && head -c 1 <&3" | wc -c) &
done 2>/dev/null
wait
"""
_LIMIT_S: Final = 30.0


async def leak(sandbox: AsyncSandbox) -> str:
    """What is wrong with the sandbox's network, or nothing. Raises PenstockError, Gone or Denied."""
    where = " ".join(f"{host}/{port}" for host, port in _ADDRESSES)
    _, out = await run(sandbox, _ASK.replace("{where}", where), _LIMIT_S)
    if any(line.strip() not in ("", "0") for line in out.splitlines() if line.strip().isdigit()):
        return "a sandbox that was made without internet reached it"
    return ""
