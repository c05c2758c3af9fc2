"""Puts new weights in force on all replicas or on none: all check the update, then all stop, switch and resume.

The update is in force as soon as one replica has switched: any other replica, dead or not, is then restarted with it.
Any earlier error leaves the old weights everywhere. Since all replicas stop and no request is admitted, no token is
sampled by weights that are not in force.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from penstock_chassis.errors import PenstockError
from penstock_chassis.membership.routing import Router
from penstock_inference.domain.weights import PauseMode, UpdatePhases
from penstock_inference.engines.checkpoint import Spool
from penstock_inference.engines.weight_updates import FileUpdates
from penstock_inference.replicas.replica_process import ReplicaProcess, replica_died
from penstock_inference.replicas.supervisor import Policy, ReplicaSupervisor, is_death
from penstock_inference.replicas.wire import Stage

_log = structlog.get_logger("penstock.inference")


class Updates(FileUpdates):
    """The update of a pool; only one may be open.

    Args:
        supervisor: the replicas.
        router: drops its known prefixes after an update.
        spool: keeps pushed files while their weights are in force.
    """

    def __init__(self, supervisor: ReplicaSupervisor, router: Router, spool: Spool) -> None:
        super().__init__(spool)
        self._supervisor = supervisor
        self._router = router
        self.aborts: Callable[[], object] = lambda: None
        """Called when an update aborts everything in flight, on any replica."""
        self._free = asyncio.Event()
        self._free.set()

    @property
    def switching(self) -> bool:
        """Whether admission is closed, because replicas are about to switch weights."""
        return not self._free.is_set()

    async def settled(self) -> None:
        """Wait until no switch is in progress."""
        await self._free.wait()

    @property
    def version(self) -> int:
        return self._supervisor.policy.version

    def files_in_force(self) -> Iterable[Path]:
        """The files of the policy."""
        return self._supervisor.policy.files

    async def commit(self, mode: PauseMode) -> UpdatePhases:
        """See `Engine.commit_update`. Once the replicas are involved, it completes even if the caller is cancelled."""
        update, began = self._open(), time.monotonic()
        try:
            policy = await asyncio.to_thread(
                self._supervisor.policy.updated, update.version, update.label, update.files, update.update_format
            )
        except BaseException:
            await self.abort()
            raise
        stage = policy.stage_only(update.files, update.update_format)
        return await self._to_its_end(self._put_in_force(policy, stage, mode, began))

    async def _put_in_force(self, policy: Policy, stage: Stage, mode: PauseMode, began: float) -> UpdatePhases:
        try:
            async with self._supervisor.lock:
                lives = await self._stage(stage)
                staged = time.monotonic()
                # A pause in progress has so far frozen only some replicas: wait for it.
                async with self._supervisor.freezing:
                    self._free.clear()
                try:
                    await self._switch(lives, policy, mode)
                finally:
                    self._free.set()
                    self._supervisor.changed()
                return UpdatePhases(load_s=staged - began, pause_s=time.monotonic() - staged)
        finally:
            await self._clean()

    async def _stage(self, stage: Stage) -> list[ReplicaProcess]:
        """Return the processes that staged the update. If one refuses it, all drop it and its error is raised."""
        lives = self._supervisor.lives()
        outcomes = await self._supervisor.ask(lives, "stage", stage)
        refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException) and not is_death(outcome)]
        ready = [life for life, outcome in zip(lives, outcomes, strict=True) if outcome is None]
        if refused:
            await self._supervisor.ask(ready, "drop")
            raise refused[0]
        if not ready:
            raise replica_died()
        return ready

    async def _switch(self, lives: list[ReplicaProcess], policy: Policy, mode: PauseMode) -> None:
        supervisor, paused = self._supervisor, self._supervisor.paused
        if mode is PauseMode.ABORT:
            self.aborts()
        try:
            # Frozen generations cannot finish before a resume; those of a WAIT pause can, so wait for them.
            if paused is None or mode is PauseMode.ABORT or (mode, paused) == (PauseMode.WAIT, PauseMode.WAIT):
                lives = await self._stand_still(lives, mode)
            outcomes = await supervisor.ask(lives, "switch")
            errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            if len(errors) == len(lives):
                raise next((error for error in errors if not is_death(error)), replica_died())
            supervisor.policy = policy
            self._router.forget_prefixes()
            for life, outcome in zip(lives, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    reason = outcome.reason if isinstance(outcome, PenstockError) else type(outcome).__name__
                    _log.error("a replica did not switch weights and restarts", replica=life.name, reason=reason)
                    supervisor.end(life)
        finally:
            if paused is None:
                for life, outcome in zip(lives, await supervisor.ask(lives, "resume"), strict=True):
                    if isinstance(outcome, BaseException) and not is_death(outcome):
                        # It would block its requests forever.
                        _log.error("a replica did not resume and restarts", replica=life.name)
                        supervisor.end(life)

    async def _stand_still(self, lives: list[ReplicaProcess], mode: PauseMode) -> list[ReplicaProcess]:
        """Return the processes that paused. If one refuses, all drop the update and its error is raised."""
        outcomes = await self._supervisor.ask(lives, "pause", mode)
        refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException) and not is_death(outcome)]
        still = [life for life, outcome in zip(lives, outcomes, strict=True) if not is_death(outcome)]
        if refused:
            await self._supervisor.ask(still, "drop")
            raise refused[0]
        if not still:
            raise replica_died()
        return still
