"""Where a rollout is graded: in the agent's sandbox, or in a fresh fork of the prepared state with the agent's changes.

Purpose: `rewards` runs a verifier in a sandbox; this brings the sandbox into the state in which that may happen, and
keeps the record of how it was done.

Invariants: of the agent's sandbox nothing but files below declared directories reaches the fork (R76); it is given
back whether or not the fork is there yet, so that graded rollouts never wait for each other's places; in the agent's
sandbox no verifier starts on programs that the agent could not change and did (R90); what an agent left can cost it its
grade, as its own failure, but is never taken for a fault of the infrastructure.
"""

from __future__ import annotations

import asyncio
import posixpath
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final

from penstock_chassis.errors import ResourceExhausted
from penstock_driver import changes, restoring, rewards
from penstock_driver.endings import of_the_agent
from penstock_driver.ports import Sandboxes, SandboxFacts
from penstock_driver.rollouts import (
    CARRY_S,
    Cause,
    CommandFinished,
    Grading,
    Phase,
    Reward,
    RolloutFailed,
    Verifier,
    failed,
)

ROOT: Final = ("root", "0")
"""Users whose agents may change the system: who grades those in place has chosen so."""
TAKE_S: Final = 120.0
"""How long reading the agent's changes may take, of CARRY_S."""
DEFAULT_MAX_CHANGES_BYTES: Final = 1 << 30
SYSTEM: Final = (
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt/penstock", "/usr/bin", "/usr/sbin"),
    *("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/libexec", "/usr/local"),
)
"""Programs, libraries and settings that a verifier runs by and an agent that is not root has no business with."""
_OF_THE_CONTAINER: Final = frozenset({"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab"})
"""What a container engine puts there itself."""
_MAX_SYSTEM_BYTES: Final = 1 << 20


class Grader:
    """Grades one rollout. `prepare` before the agent starts, then `take` and `put` or `check_system`, `grade`; `close`.

    What is taken over lies in temporary files in `spool`, at most `max_bytes` of each kind.
    """

    def __init__(self, sandboxes: Sandboxes, verifier: Verifier, *, spool: Path | None, max_bytes: int) -> None:
        self._sandboxes = sandboxes
        self._verifier = verifier
        self._spool = spool
        self._max_bytes = max_bytes
        self._kept: restoring.Kept | None = None
        self._layer: BinaryIO | None = None
        self.grading = Grading(bool(verifier.fresh_fork), len(verifier.commands))

    async def prepare(self, sandbox: SandboxFacts) -> None:
        """Keep what will be put back, from the agent's sandbox before there is an agent. RolloutFailed (TASK)."""
        if self._verifier.fresh_fork:
            self._roots(sandbox)  # what is wrong with them is told before the agent has worked
            return
        try:
            async with asyncio.timeout(CARRY_S):
                await self._keep(sandbox)
        except TimeoutError:
            message = f"what is to be restored could not be read in {CARRY_S:g} s"
            raise failed(Cause.TASK, "RESTORE_TOO_LARGE", message, Phase.CONFIGURING) from None

    async def check_system(self, sandbox: SandboxFacts) -> None:
        """See the function."""
        await check_system(self._sandboxes, sandbox, self._spool)

    async def take(self, sandbox: SandboxFacts) -> None:
        """Fetch the agent's changes. RolloutFailed (AGENT, CHANGES_TOO_LARGE)."""
        roots = self._roots(sandbox)
        try:
            async with asyncio.timeout(TAKE_S):
                await self._take(sandbox, roots)
        except TimeoutError:  # how many they are is the agent's choice
            raise _too_large(f"they could not be read in {TAKE_S:g} s") from None
        except changes.TooManyChanges as error:
            raise _too_large(str(error)) from error

    async def _take(self, sandbox: SandboxFacts, roots: list[str]) -> None:
        with tempfile.TemporaryFile(dir=self._spool) as diff:
            with of_the_agent():
                try:
                    deleted = await self._sandboxes.diff(sandbox.sandbox_id, roots, diff, self._max_bytes)
                except ResourceExhausted as error:
                    raise _too_large(error.message) from error
            diff.seek(0)
            self._layer = tempfile.TemporaryFile(dir=self._spool)  # noqa: SIM115 - closed by close()
            taken = await asyncio.to_thread(changes.layer, diff, deleted, roots, self._layer)
        self.grading = replace(self.grading, changes=taken)

    async def put(self, fork: SandboxFacts) -> None:
        """Put the changes into a fresh fork. RolloutFailed (AGENT, CHANGES_TOO_LARGE)."""
        await self._keep(fork)
        taken = self.grading.changes
        assert self._layer is not None
        assert taken is not None
        if not taken.entries and not taken.removed:
            return
        self._layer.seek(0)
        with of_the_agent():
            try:
                async with asyncio.timeout(CARRY_S):
                    await self._sandboxes.put_layer(fork.sandbox_id, "/", self._layer)
            except ResourceExhausted as error:
                raise _too_large(error.message) from error
            except TimeoutError:
                raise _too_large(f"they could not be written in {CARRY_S:g} s") from None

    async def grade(self, sandbox: SandboxFacts, record: Callable[[CommandFinished], None]) -> Reward:
        """Put back what is to be restored, run the verifier and return its reward; RolloutFailed when it gives none."""

        def tell(event: CommandFinished) -> None:
            self.grading = replace(self.grading, commands=(*self.grading.commands, event))
            record(event)

        if self._kept is not None:
            with of_the_agent():
                restored = await self._kept.put_back(self._sandboxes, sandbox.sandbox_id, self._spool)
            self.grading = replace(self.grading, restored=restored)
        return await rewards.verify(self._sandboxes, sandbox.sandbox_id, sandbox.workdir, self._verifier, tell)

    def close(self) -> None:
        """Remove the temporary files; idempotent."""
        if self._kept is not None:
            self._kept.close()
        if self._layer is not None:
            with suppress(OSError):  # as in Kept.close
                self._layer.close()

    async def _keep(self, sandbox: SandboxFacts) -> None:
        if self._verifier.restore:
            patterns = restoring.expanded(self._verifier.restore, sandbox.home, sandbox.workdir)
            self._kept = await restoring.Kept.keep(
                self._sandboxes, sandbox.sandbox_id, patterns, self._spool, self._max_bytes
            )

    def _roots(self, sandbox: SandboxFacts) -> list[str]:
        """The directories whose changes are taken over, absolute; RolloutFailed (TASK, CHANGES_UNBOUNDED)."""
        given = self._verifier.changes_below or (sandbox.workdir,)
        roots = [posixpath.normpath(posixpath.join(sandbox.workdir, path)) for path in given]
        if any(root.strip("/") == "" for root in roots):
            message = "the working directory is the root: name the directories to grade in verifier.changes_below"
            raise failed(Cause.TASK, "CHANGES_UNBOUNDED", message, Phase.CONFIGURING)
        return roots


async def check_system(sandboxes: Sandboxes, sandbox: SandboxFacts, spool: Path | None) -> None:
    """That the agent's sandbox has the system that it was prepared with. RolloutFailed (GRADING_BLOCKED)."""
    own = (sandbox.workdir, sandbox.home)
    looked_at = [path for path in SYSTEM if not any(f"{place}/".startswith(f"{path}/") for place in own)]
    with tempfile.TemporaryFile(dir=spool) as diff:
        with of_the_agent():
            deleted = await sandboxes.diff(sandbox.sandbox_id, looked_at, diff, _MAX_SYSTEM_BYTES)
        diff.seek(0)
        changed = [*deleted, *await asyncio.to_thread(changes.files_of, diff)]
    if foreign := sorted(set(changed) - _OF_THE_CONTAINER):
        message = f"the agent changed the system that its verifier would run on: {foreign[0]!a}"
        if len(foreign) > 1:
            message += f" and {len(foreign) - 1} more"
        raise failed(Cause.AGENT, "GRADING_BLOCKED", message, Phase.VERIFYING)


def _too_large(what: str) -> RolloutFailed:
    return failed(
        Cause.AGENT, "CHANGES_TOO_LARGE", f"the agent's changes cannot be taken over: {what}", Phase.VERIFYING
    )
