"""What a rollout's model calls were answered, from attempt to attempt: kept in a file, and given to the gate again.

Invariants: a rollout is never worse off with a recording than without: what cannot be read or loaded is sampled again.
Only a branch fails then, as it is none without what its parent was answered.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

import structlog

from penstock_chassis.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unsupported,
)
from penstock_driver.domain.failures import failure_of
from penstock_driver.domain.rollout import Cause, Component, Failure, Progress, Replay, RolloutFailed, failed
from penstock_driver.environments.throttle import patiently
from penstock_driver.placement.services import RunnerServices
from penstock_driver.rollouts.context import AttemptSpec
from penstock_driver.rollouts.recorder import RolloutRecorder
from penstock_driver.rollouts.recovery.replayed_answers import RecordingFile
from penstock_driver.trajectories.tensors import with_tensors

LOAD_S: Final = 60.0
"""Limit on waiting for a gate that is away, for each part of a recording."""
HAND_ON_S: Final = 15.0
"""Limit on writing down what a failed attempt was answered."""
_log = structlog.get_logger("penstock.driver")


class AttemptRecording:
    """The recording of one attempt: what is replayed in it, and what it leaves to the next one."""

    def __init__(self, attempt: AttemptSpec, services: RunnerServices, recorder: RolloutRecorder) -> None:
        self._attempt = attempt
        self._services = services
        self._recorder = recorder
        spec = attempt.rollout
        wanted = attempt.record.branched_from or (spec.max_attempts > 1 and spec.replay is not Replay.OFF)
        recordings = services.recordings
        self._file = RecordingFile(recordings, attempt.record.rollout_id) if recordings and wanted else None

    async def find(self) -> None:
        """Write the last attempt's answers to a file, if it did not do so itself at its end.

        A gate that is away is waited for, as its disk has them. It never fails: the attempt then samples everything
        again.
        """
        recording, last = self._file, self._attempt.number - 1
        if recording is None or await recording.attempt() == last:
            return
        waits_s = self._services.recording_wait_s if self._recorder.may_have_calls else 0.0
        try:
            async with asyncio.timeout(self._attempt.rollout.limits.prepare_s):
                await patiently(partial(self._keep, recording, last), full_s=waits_s, absent_s=waits_s)
        except NotFound as error:
            if self._recorder.has_calls:
                self._not_found(f"{error.reason}: its gate lost its disk, is no member any more, or never had it")
        except (PenstockError, TimeoutError, OSError) as error:
            why = getattr(error, "message", "") or getattr(error, "strerror", "") or "it took too long"
            self._not_found(f"{error.reason}: {why}" if isinstance(error, PenstockError) else why)

    def _not_found(self, why: str) -> None:
        self._recorder.append(Progress(f"the last attempt's answers cannot be read, to be replayed: {why}"))

    async def _keep(self, recording: RecordingFile, attempt: int) -> None:
        """Write an attempt's answers to a file. NotFound: its gate does not know it. PenstockError, OSError."""
        captures = self._services.captures
        if captures is None:
            return
        gates, home = self._recorder.gates, self._attempt.record.home
        gate = gates[-1] if gates else home.gate if home else ""
        rollout_id = self._attempt.record.rollout_id
        captured = with_tensors(
            captures,
            rollout_id,
            gate,
            captures.capture(rollout_id, gate=gate, include_bodies=False, include_top=True),
        )
        results = partial(captures.tool_results, rollout_id, gate=gate)
        async with self._services.loadings:  # a part is in memory, and a lost host loses many attempts at once
            await recording.write(
                captured, attempt, exact=self._attempt.rollout.replay is Replay.EXACT, results=results
            )

    async def hand_on(self, failure: Failure | None) -> None:
        """Keep what this attempt was answered for the next one, while its gate is there; else that one looks for it."""
        recording = self._file
        is_last = self._attempt.number >= self._attempt.rollout.max_attempts or failure is None or not failure.retriable
        if recording is None or is_last or self._services.is_gate_lost() or not self._recorder.has_calls:
            return
        try:
            async with asyncio.timeout(HAND_ON_S):
                await self._keep(recording, self._attempt.number)
        except (PenstockError, TimeoutError, OSError) as error:
            _log.warning(
                "the next attempt looks for the recording",
                rollout_id=self._attempt.record.rollout_id,
                error=repr(error),
            )

    async def load(self) -> None:
        """Give the gate the last attempt's answers, before the agent starts."""
        recording = self._file
        if recording is None or not (recording.is_there or self._attempt.record.branched_from):
            return
        count = 0
        try:
            async with self._services.loadings:
                whole = await recording.count()  # a damaged file is not loaded in part
            offset: int | None = 0
            while offset is not None:
                load = partial(self._load_part, recording, offset, count)
                count, offset = await patiently(load, full_s=LOAD_S, absent_s=LOAD_S)
        except Unsupported as error:
            self._not_loaded("nothing is replayed: the gate is older than LoadRecording", error)
            return
        except (InvalidArgument, ResourceExhausted, DeadlineExceeded, OSError, ValueError) as error:
            self._not_loaded(f"the recording cannot be loaded, {count} calls of it are replayed: {error}", error)
            return
        except PenstockError as error:
            raise RolloutFailed(failure_of(error, self._recorder.progress.phase, Component.GATE)) from error
        if self._attempt.record.branched_from is not None and count < whole:
            self._not_loaded("the gate is older than branches: it leaves out the branch point", None)
        branch = self._attempt.record.branched_from
        if branch is not None and not branch.answer_given and not await recording.attempt():
            count -= 1  # the branch point, which is sampled
        self._recorder.replays(count)
        if count:
            self._recorder.append(Progress(f"{count} recorded calls are replayed as far as the agent asks the same"))

    async def _load_part(self, recording: RecordingFile, offset: int, count: int) -> tuple[int, int | None]:
        """Load the part at an offset; return how many calls the gate has, `count` before, and the next part's offset.

        The part is in memory while few others are: a group of branches begins at once, and each has parts of its own.
        """
        async with self._services.loadings:
            found = await asyncio.to_thread(recording.part, offset)
            if found is None:
                return count, None
            return await self._services.gate.load_recording(found[0]), found[1]

    def _not_loaded(self, message: str, error: Exception | None) -> None:
        """Go on without a recording, except as a branch: that is none without what its parent was answered."""
        if self._attempt.record.branched_from is None:
            self._recorder.append(Progress(message))
            return
        raise failed(
            Cause.INFRASTRUCTURE,
            "RECORDING_NOT_LOADED",
            message,
            self._recorder.progress.phase,
            component=Component.DRIVER,
        ) from error
