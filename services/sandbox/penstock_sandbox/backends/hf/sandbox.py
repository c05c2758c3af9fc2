"""One sandbox of Hugging Face, with a guest agent whose pipe is made of SDK calls; it ends with its job.

Invariants: a job that is known to have ended is lost at once; no lease is renewed beyond the job's time limit; files to
be kept are captured after the link has closed and before the job is ended, and a failure of that does not prevent the
end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence

import structlog

from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_chassis.times import even_time
from penstock_sandbox.backends.guest_client.pipe import Pipe, SandboxGone
from penstock_sandbox.backends.guest_client.sandbox import (
    BackendHooks,
    GuestSandbox,
    ProcessDefaults,
    by_what_serves_it,
)
from penstock_sandbox.backends.hf.client import JobEnd, Remote
from penstock_sandbox.backends.remote_machine import bootstrap

# Each heartbeat of a silent sandbox is a request to it.
_HEARTBEAT_S = 20.0

_log = structlog.get_logger(__name__)


class HfSandbox(GuestSandbox):
    """See the module. ``release`` ends the job; ``path`` are directories for PATH, before the system's."""

    def __init__(
        self,
        sandbox_id: str,
        remote: Remote,
        image: str,
        place: bootstrap.PreparedMachine,
        path: Sequence[str],
        on_lost: Callable[[str], None],
        release: Callable[[HfSandbox], Awaitable[None]],
    ) -> None:
        super().__init__(
            sandbox_id,
            self._open_pipe,
            ProcessDefaults(place.home, bootstrap.WORKDIR, place.user, bootstrap.environment(place, path)),
            BackendHooks(on_lost, destroy=self._end_at_hf, judge=self._what_ended_it),
            heartbeat_s=_HEARTBEAT_S,
        )
        self.machine = remote
        self.base = image
        self.place = place
        self.keep: Callable[[], Awaitable[None]] | None = None
        """Run once by ``destroy``, after the link has closed and before the job is ended."""
        self._release = release
        self._attached = False
        self._job_end: JobEnd | None = None

    async def renewed(self, until: float) -> None:
        if until > self.machine.ends_at:
            left_s = max(self.machine.ends_at - even_time(), 0.0)
            raise FailedPrecondition(
                f"the sandbox's job ends in {left_s:.0f} s, and Hugging Face extends no job's time limit",
                reason="LEASE_REFUSED",
            )

    async def _open_pipe(self) -> Pipe:
        if self._attached:
            # The last pipe broke: perhaps because the job ended. If that is unknown, trying shows it.
            with contextlib.suppress(Unavailable):
                if end := await self.machine.ended():
                    _log.warning(
                        "a job ended", sandbox=self.id, job=self.machine.job_id, how=end.stage, message=end.message
                    )
                    self._job_end = end
                    raise SandboxGone("JOB_ENDED")
        self._attached = True
        return await self.machine.attach(self.place.command)

    async def _what_ended_it(self, reason: str) -> str:
        # Its first process only waits: it fails by itself only if the workload used up the job's memory. At the idle
        # timeout it completes, and the job's time limit looks like a failure if Hugging Face does not name it.
        ended = self._job_end
        failed = ended is not None and ended.failed and even_time() < self.machine.ends_at
        return "JOB_FAILED" if reason == "JOB_ENDED" and failed else await by_what_serves_it(reason)

    async def _end_at_hf(self) -> None:
        try:
            if self.keep is not None:
                await self.keep()
        finally:
            await self._release(self)
