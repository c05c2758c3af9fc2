"""What one attempt holds at other services: its sandboxes, and its rollout at the gate; how they are released.

Invariants: requests are idempotent by attempt and purpose. A failed release is pending and never hides why a rollout
ended (R49). What a lost service has is not waited for: it is released when that is back, or gone.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable
from typing import Final

import structlog

from penstock.sandbox.v1 import sandbox_pb2
from penstock_chassis.errors import PenstockError
from penstock_driver.domain.ports import SandboxFacts
from penstock_driver.domain.records import Record, recording_of
from penstock_driver.domain.rollout import Progress, RolloutSpec
from penstock_driver.environments.prepare import PreparedEnvironment
from penstock_driver.environments.throttle import never, patiently
from penstock_driver.placement.services import RunnerServices
from penstock_driver.rollouts.context import AttemptSpec
from penstock_driver.rollouts.recorder import RolloutRecorder

CLEAN_UP_S: Final = 60.0
LEAVE_S: Final = 5.0
"""Limit on what a stopping driver still asks of the sandbox service."""
GRADING: Final = "/grading"
"""Purpose of the forks in which verifiers run, also those that grade again: they share their recording."""
_log = structlog.get_logger("penstock.driver")


def allowlist_of(spec: RolloutSpec, record: Record, purpose: str) -> sandbox_pb2.Allowlist | None:
    """What a fork of a rollout may reach, the agent's if `purpose` is empty; None = nothing.

    The verifier's recording is another one: no agent asks first for what it will get.
    """
    given = spec.verifier_network if purpose else spec.agent_network
    if given is None:
        return None
    listed = sandbox_pb2.Allowlist()
    listed.CopyFrom(given)
    listed.recording = given.recording or f"{recording_of(record)}{purpose}"
    return listed


class AttemptResources:
    """The sandboxes of an attempt, and whether the gate may have its rollout."""

    def __init__(self, attempt: AttemptSpec, services: RunnerServices, recorder: RolloutRecorder) -> None:
        self._id = attempt.record.rollout_id
        self._attempt = attempt
        self._spec = attempt.rollout
        self._services = services
        self._sandboxes = services.sandboxes
        self._recorder = recorder
        self.sandbox: SandboxFacts | None = None
        """The sandbox of the phase: the agent's, later the fork to grade in."""
        self.forking: asyncio.Task[SandboxFacts] | None = None
        """The fork to grade in, from its request until it has the agent's changes. There may be two sandboxes then."""
        self.gate_asked = attempt.taken_up is not None
        """Whether the gate may have a rollout. No fork is requested before that, so without it there is no sandbox."""
        self.cleanup_pending = False
        self._deleting: asyncio.Task[None] | None = None
        """The deletion of the agent's sandbox, which a fork replaces."""
        self._releasing: list[tuple[str, asyncio.Task[None]]] = []
        """The clean-up's requests, with what they release."""
        self._life = secrets.token_hex(4) if attempt.is_moved or attempt.taken_up else ""
        """Keeps this process's requests for forks apart from those of an attempt that began before."""

    async def fork(
        self,
        prepared: PreparedEnvironment,
        *,
        upstream: str = "",
        purpose: str = "",
        joins: str = "",
        patience_s: float = math.inf,
    ) -> SandboxFacts:
        """Fork the prepared state; `purpose` distinguishes the attempt's forks, so that each request is idempotent.

        Waits `patience_s` for a full service, at most the rollout's `prepare_s`.
        """
        snapshot_id = prepared.snapshot.snapshot_id
        return await self._services.forks.fork(
            snapshot_id,
            request_id=f"{self._id}/{self._attempt.number}/{snapshot_id}{purpose}{self._life and '/'}{self._life}",
            backend=self._spec.sandbox.backend,
            lease_s=self._spec.limits.sandbox_s,
            labels=self._attempt.labels,
            patience_s=min(patience_s, self._spec.limits.prepare_s),
            port=self._services.agent_port if upstream else 0,
            upstream=upstream,
            repeatable=self._spec.repeatable and not purpose,
            allowlist=allowlist_of(self._spec, self._attempt.record, purpose),
            joins=joins,
            has_room_elsewhere=never if purpose else self._services.has_room_elsewhere,
        )

    def begin_to_delete(self, sandbox: SandboxFacts) -> None:
        """Begin to delete the agent's sandbox, which a fork replaces; `release` waits for that."""
        deletion = self.try_release("sandbox", self._sandboxes.delete(sandbox.sandbox_id))
        self._deleting = asyncio.ensure_future(deletion)
        self._releasing.append(("sandbox", self._deleting))

    async def leave(self) -> None:
        """Leave the attempt to the next process. Its sandbox is kept for that, and no other one."""
        for task in (self.forking, self._deleting):
            if task is not None:
                task.cancel()
        needed = self._recorder.needed_sandbox
        lease_s = min(self._services.leave_s, self._spec.limits.sandbox_s)
        try:
            async with asyncio.timeout(LEAVE_S):
                # Killed before the disk knows that a sandbox is needed no more, the next process would look for it.
                is_safe = self.gate_asked and await self._recorder.secure()
                for sandbox_id in await self._sandboxes.labelled(self._attempt.labels) if is_safe else ():
                    if sandbox_id == needed:
                        await self._sandboxes.renew(sandbox_id, lease_s)
                    else:
                        await self._sandboxes.delete(sandbox_id)
        except (PenstockError, TimeoutError) as error:
            _log.warning("sandboxes are left with their whole lease", rollout_id=self._id, error=repr(error))

    def abandon_lost(self) -> None:
        """Stop waiting for what a lost place still has: it is released when that is back, or gone."""
        is_lost = {"sandbox": self._services.is_node_lost(), "gate": self._services.is_gate_lost()}
        for what, task in self._releasing:
            if is_lost[what] and not task.done():
                task.cancel()
                self.cleanup_pending = True

    async def release(self, *, gate_is_closed: bool) -> None:
        """Release everything. `gate_is_closed`: the rollout at the gate is closed, with all that belongs to it."""
        async with asyncio.TaskGroup() as tasks:
            if self._services.is_node_lost():
                self.cleanup_pending |= self.gate_asked
            elif self.sandbox and self.forking is None and not self._life and not self._spec.sandbox.companions:
                deletion = self.try_release("sandbox", self._sandboxes.delete(self.sandbox.sandbox_id))
                self._releasing.append(("sandbox", tasks.create_task(deletion)))
            elif self.gate_asked:
                # There may be two, and a fork whose response was lost, or that an earlier process asked for, may have
                # created one: all carry these labels.
                deletion = self.try_release("sandbox", self._sandboxes.delete_labelled(self._attempt.labels))
                self._releasing.append(("sandbox", tasks.create_task(deletion)))
            if self._services.is_gate_lost():
                self.cleanup_pending |= self.gate_asked
            elif self.gate_asked and not gate_is_closed:
                # With the rollout, its judge is closed: not before its end is on disk, since a next process asks again.
                closing = patiently(
                    lambda: self._services.gate.close(self._id, "ROLLOUT_ENDED"), full_s=CLEAN_UP_S, absent_s=CLEAN_UP_S
                )
                self._releasing.append(("gate", tasks.create_task(self.try_release("gate", closing))))
            if self._deleting and self._services.is_node_lost():
                self._deleting.cancel()
            elif self._deleting:
                await asyncio.wait([self._deleting])

    async def try_release(self, what: str, work: Awaitable[object]) -> None:
        """Await a release. A failed one is pending, and recorded; it raises nothing."""
        try:
            async with asyncio.timeout(CLEAN_UP_S):
                await work
        except Exception as error:  # noqa: BLE001 - a failed cleanup never hides why the rollout ended (R49)
            self.cleanup_pending = True
            _log.warning("clean-up failed and is pending", what=what, rollout_id=self._id, error=repr(error))
            self._recorder.append(Progress(f"releasing the {what} failed: {error}; it is retried until it succeeds"))
