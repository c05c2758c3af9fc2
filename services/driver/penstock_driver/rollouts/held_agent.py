"""What a pause holds of an attempt whose sandbox is there: the gate's calls, then the sandbox (decision 060)."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_driver.domain.ports import Gate, Sandboxes


@dataclass(frozen=True, slots=True)
class HeldAgent:
    """See `pausing.Held`. `lease_s` is of the sandbox."""

    sandboxes: Sandboxes
    gate: Gate
    sandbox_id: str
    rollout_id: str
    lease_s: float

    async def hold(self) -> bool:
        """The calls first, so that none is given out for an agent that is about to stand still."""
        await self.gate.hold_calls(self.rollout_id, held=True)
        return await self.sandboxes.pause(self.sandbox_id, self.lease_s)

    async def keep(self) -> None:
        """Renews the sandbox's lease."""
        await self.sandboxes.renew(self.sandbox_id, self.lease_s)

    async def release(self) -> None:
        """The sandbox first: what it asks meanwhile waits at the gate."""
        await self.sandboxes.resume(self.sandbox_id, self.lease_s)
        await self.gate.hold_calls(self.rollout_id, held=False)
