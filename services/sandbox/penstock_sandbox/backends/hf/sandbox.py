"""One sandbox of Hugging Face: an attended sandbox whose pipe is made of an SDK's calls, and whose end is its job's.

Invariants: a job that is known to have ended is lost at once; what is to be kept of one is kept after nobody is
attached any more and before it is ended, and a failure of that does not keep it from being ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence

import structlog

from penstock_chassis.errors import Unavailable
from penstock_sandbox.backends.attended.pipe import Pipe, SandboxGone
from penstock_sandbox.backends.attended.sandbox import AttendedSandbox, by_what_serves_it
from penstock_sandbox.backends.hf import bootstrap
from penstock_sandbox.backends.hf.client import Remote

# Each beat of a silent sandbox is a request to it.
_HEARTBEAT_S = 20.0

_BY_ITSELF = ("COMPLETED", "ERROR")

_log = structlog.get_logger(__name__)


class HfSandbox(AttendedSandbox):
    """See the module. ``release`` ends the job; ``path`` are directories for PATH, before the system's."""

    def __init__(
        self,
        sandbox_id: str,
        remote: Remote,
        place: bootstrap.Place,
        path: Sequence[str],
        on_lost: Callable[[str], None],
        release: Callable[[HfSandbox], Awaitable[None]],
    ) -> None:
        super().__init__(
            sandbox_id,
            self._open_pipe,
            home=place.home,
            workdir=bootstrap.WORKDIR,
            user=place.user,
            default_env=bootstrap.environment(place, path),
            on_lost=on_lost,
            destroy=self._end_at_hf,
            judge=self._what_ended_it,
            heartbeat_s=_HEARTBEAT_S,
        )
        self.remote = remote
        self.place = place
        self.keep: Callable[[], Awaitable[None]] | None = None
        """What ``destroy`` does once nobody is attached any more and before the job is ended."""
        self._release = release
        self._attached = False
        self._how = ""

    async def _open_pipe(self) -> Pipe:
        if self._attached:
            # The last pipe broke: perhaps of the job's end. When that is not known, trying tells.
            with contextlib.suppress(Unavailable):
                if how := await self.remote.ended():
                    _log.warning("a job ended", sandbox=self.id, job=self.remote.job_id, how=how)
                    self._how = how
                    raise SandboxGone("JOB_ENDED")
        self._attached = True
        return await self.remote.attach(self.place.command)

    async def _what_ended_it(self, reason: str) -> str:
        # Its first process only waits: it ends by itself when somebody in the job took its memory.
        if reason == "JOB_ENDED" and self._how in _BY_ITSELF:
            return "JOB_FAILED"
        return await by_what_serves_it(reason)

    async def _end_at_hf(self) -> None:
        try:
            if self.keep is not None:
                await self.keep()
        finally:
            await self._release(self)
