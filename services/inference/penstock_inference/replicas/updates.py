"""New weights for all replicas, or for none: every one checks the update, then all stand still, switch, and go on.

It is in force as soon as one replica has switched: from then on a replica that did not, dead or not, is started again
and given it. Before that, whatever goes wrong leaves the old weights everywhere. Since all stand still, and nobody is
let in, no token is sampled by weights that are not in force.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from penstock_chassis.errors import PenstockError
from penstock_inference.engines.base import PauseMode, UpdatePhases
from penstock_inference.engines.checkpoint import Spool
from penstock_inference.engines.file_updates import FileUpdates
from penstock_inference.replicas.keeper import Keeper, is_death
from penstock_inference.replicas.life import Life, replica_died
from penstock_inference.replicas.routing import Router
from penstock_inference.replicas.weights import Policy
from penstock_inference.replicas.wire import Stage

_log = structlog.get_logger("penstock.inference")


class Updates(FileUpdates):
    """The one update that may be open on a pool.

    Args:
        keeper: the replicas.
        router: its knowledge of prefixes is void after an update.
        spool: where pushed files stay while their weights are in force.
    """

    def __init__(self, keeper: Keeper, router: Router, spool: Spool) -> None:
        super().__init__(spool)
        self._keeper = keeper
        self._router = router
        self.aborts: Callable[[], object] = lambda: None
        """Called when an update ends what is in flight, wherever it is."""
        self._free = asyncio.Event()
        self._free.set()

    @property
    def switching(self) -> bool:
        """Whether nobody may be let in, because replicas are about to change their weights."""
        return not self._free.is_set()

    async def settled(self) -> None:
        """Until they are not."""
        await self._free.wait()

    @property
    def version(self) -> int:
        """The policy version in force."""
        return self._keeper.policy.version

    def files_in_force(self) -> Iterable[Path]:
        """Those of the policy."""
        return self._keeper.policy.files

    async def commit(self, mode: PauseMode) -> UpdatePhases:
        """See `Engine.commit_update`. Once the replicas hear of it, it goes on to its end, whoever waits."""
        update, began = self._open(), time.monotonic()
        try:
            policy = await asyncio.to_thread(
                self._keeper.policy.updated, update.version, update.label, update.files, update.update_format
            )
        except BaseException:
            await self.abort()
            raise
        stage = policy.stage_only(update.files, update.update_format)
        return await self._to_its_end(self._put_in_force(policy, stage, mode, began))

    async def _put_in_force(self, policy: Policy, stage: Stage, mode: PauseMode, began: float) -> UpdatePhases:
        try:
            async with self._keeper.lock:
                lives = await self._stage(stage)
                staged = time.monotonic()
                # A pause that began meanwhile holds only those that have answered it.
                async with self._keeper.freezing:
                    self._free.clear()
                try:
                    await self._switch(lives, policy, mode)
                finally:
                    self._free.set()
                    self._keeper.changed()
                return UpdatePhases(load_s=staged - began, pause_s=time.monotonic() - staged)
        finally:
            await self._clean()

    async def _stage(self, stage: Stage) -> list[Life]:
        """Those that are ready. Raises what the first raises that refuses, and none is ready any more."""
        lives = self._keeper.lives()
        outcomes = await self._keeper.ask(lives, "stage", stage)
        refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException) and not is_death(outcome)]
        ready = [life for life, outcome in zip(lives, outcomes, strict=True) if outcome is None]
        if refused:
            await self._keeper.ask(ready, "drop")
            raise refused[0]
        if not ready:
            raise replica_died()
        return ready

    async def _switch(self, lives: list[Life], policy: Policy, mode: PauseMode) -> None:
        keeper, paused = self._keeper, self._keeper.paused
        if mode is PauseMode.ABORT:
            self.aborts()
        try:
            # What a pause froze will not finish before it is resumed; what one lets finish is waited for.
            if paused is None or mode is PauseMode.ABORT or (mode, paused) == (PauseMode.WAIT, PauseMode.WAIT):
                lives = await self._stand_still(lives, mode)
            outcomes = await keeper.ask(lives, "switch")
            errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            if len(errors) == len(lives):
                raise next((error for error in errors if not is_death(error)), replica_died())
            keeper.policy = policy
            self._router.forget_prefixes()
            for life, outcome in zip(lives, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    reason = outcome.reason if isinstance(outcome, PenstockError) else type(outcome).__name__
                    _log.error("a replica did not switch and is started again", replica=life.name, reason=reason)
                    keeper.end(life)
        finally:
            if paused is None:
                for life, outcome in zip(lives, await keeper.ask(lives, "resume"), strict=True):
                    if isinstance(outcome, BaseException) and not is_death(outcome):
                        # It would keep its requests for ever.
                        _log.error("a replica did not go on and is started again", replica=life.name)
                        keeper.end(life)

    async def _stand_still(self, lives: list[Life], mode: PauseMode) -> list[Life]:
        """Those that do. Raises what the first raises that refuses, and none is ready for the update any more."""
        outcomes = await self._keeper.ask(lives, "pause", mode)
        refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException) and not is_death(outcome)]
        still = [life for life, outcome in zip(lives, outcomes, strict=True) if not is_death(outcome)]
        if refused:
            await self._keeper.ask(still, "drop")
            raise refused[0]
        if not still:
            raise replica_died()
        return still
