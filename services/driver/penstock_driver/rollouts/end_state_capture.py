"""Keeps the agent's changes at the end of an attempt, for verifiers to come. It never fails a rollout."""

from __future__ import annotations

import asyncio
from sqlite3 import Error as SqliteError
from typing import Final

from penstock_driver.domain.ports import SandboxFacts
from penstock_driver.domain.rollout import Progress, RolloutFailed
from penstock_driver.grading.grader import Grader
from penstock_driver.rollouts.context import AttemptSpec
from penstock_driver.rollouts.recorder import RolloutRecorder

KEEP_S: Final = 30.0
"""Limit on packing an end state."""


class EndStateCapture:
    """Keeps the end state of one attempt, if its spec and the driver's settings want it."""

    def __init__(self, attempt: AttemptSpec, recorder: RolloutRecorder) -> None:
        self._attempt = attempt
        self._recorder = recorder

    @property
    def is_on(self) -> bool:
        """Whether the end state is kept."""
        states = self._attempt.end_states
        # What the agent did to companions is in no end state.
        wanted = self._attempt.rollout.keep_end_state is not False and not self._attempt.rollout.sandbox.companions
        return states is not None and states.is_on and wanted

    async def take(self, grader: Grader, sandbox: SandboxFacts) -> None:
        """Read and keep the agent's changes where the verifier does not need them. It never fails a rollout, but for
        what becomes of its sandbox.
        """
        try:
            await grader.take(sandbox)
        except RolloutFailed as error:
            self._recorder.append(Progress(f"the end state is not kept: {error.failure.message}"))
            return
        except OSError as error:
            self._recorder.append(Progress(f"the end state is not kept: {error}"))
            return
        await self.keep(grader)

    async def keep(self, grader: Grader) -> None:
        """Keep what was taken of the agent's work, for later verifiers."""
        states = self._attempt.end_states
        if states is None or not self.is_on:
            return
        record = self._attempt.record
        try:
            async with asyncio.timeout(KEEP_S):
                changes, layer = grader.end_state()
                kept = await states.keep(record.rollout_id, record.namespace, self._attempt.number, changes, layer)
            if not kept:
                self._recorder.append(Progress("the end state is not kept: it alone exceeds kept_end_state_bytes"))
        except TimeoutError:  # an agent chooses how much there is to pack: no other rollout's grade waits longer for it
            self._recorder.append(Progress(f"the end state is not kept: it could not be packed in {KEEP_S:g} s"))
        except (OSError, SqliteError) as error:
            self._recorder.append(Progress(f"the end state is not kept: {error}"))
