"""Records an agent's work in its working directory: the diff (Task.keep_diff) and small files (Task.keep_files).

The directory is read after the agent's death and, for a diff, also before its start, so this works on every backend.
Both are records: grading does not use them. Invariants: their size, and the cost of making them, are bounded whatever
the agent left. A record that cannot be made is reported in one line and never fails a rollout, unless the sandbox was
lost.
"""

from __future__ import annotations

import asyncio
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from penstock_chassis.errors import PenstockError, ResourceExhausted
from penstock_driver.domain.failures import OF_THE_SANDBOX
from penstock_driver.domain.ports import Sandboxes, SandboxFacts
from penstock_driver.domain.rollout import DIFF_S, ArtifactCollected, Progress, RolloutEvent, Task
from penstock_driver.rollouts.workdir.diff import NAME, unified
from penstock_driver.rollouts.workdir.files import PREFIX, SmallFiles, TooMany, small_files

MAX_TREE_BYTES: Final = 32 << 20
"""Maximum size of a working directory that is read."""


class WorkdirCapture:
    """What an agent changed in its directory: `keep` before the agent, `collect` after its death, `close` at last."""

    def __init__(
        self, task: Task, sandboxes: Sandboxes, *, spool: Path | None, record: Callable[[RolloutEvent], None]
    ) -> None:
        self._task = task
        self._sandboxes = sandboxes
        self._spool = spool
        self._record = record
        self._before: BinaryIO | None = None

    @property
    def needs_before(self) -> bool:
        """Whether `keep` reads anything."""
        return self._task.keep_diff

    async def keep(self, sandbox: SandboxFacts) -> None:
        """Read the prepared directory, if a diff is wanted."""
        if self._task.keep_diff:
            self._before = await self._read(sandbox)

    async def collect(self, sandbox: SandboxFacts) -> None:
        """Record the changes since `keep`, even if empty, and the small files; a failure is recorded as an event."""
        if self._before is None and not self._task.keep_files:
            return
        after = await self._read(sandbox)
        if after is None:
            return
        with after:
            try:
                if self._before is not None:
                    made = await asyncio.to_thread(unified, self._before, after)
                    self._record(ArtifactCollected(NAME, made.text, made.size_bytes))
                if self._task.keep_files:
                    self._collect_files(await asyncio.to_thread(small_files, after))
            except (tarfile.TarError, TooMany) as error:
                self.give_up(str(error))

    def _collect_files(self, found: SmallFiles) -> None:
        for path, content in found.files:
            self._record(ArtifactCollected(PREFIX + path, content, len(content)))
        if found.more:
            self._record(Progress(f"{found.more} more files of the working directory are not kept"))

    def give_up(self, why: str) -> None:
        """Record why there is no record."""
        self._record(Progress(f"the agent's work is not kept, though the task asks for it: {why}"))

    def close(self) -> None:
        """Remove the temporary files; idempotent."""
        if self._before is not None:
            with suppress(OSError):  # closing flushes again what a full disk refused; the data is no longer needed
                self._before.close()

    async def _read(self, sandbox: SandboxFacts) -> BinaryIO | None:
        tree = tempfile.TemporaryFile(dir=self._spool)  # noqa: SIM115 - closed by the caller, or below
        try:
            async with asyncio.timeout(DIFF_S):
                await self._sandboxes.read_tree(sandbox.sandbox_id, sandbox.workdir, tree, MAX_TREE_BYTES)
        except BaseException as error:
            tree.close()
            match error:
                case ResourceExhausted():
                    self.give_up(f"the working directory has more than {MAX_TREE_BYTES >> 20} MiB")
                case TimeoutError():
                    self.give_up(f"the working directory could not be read in {DIFF_S:g} s")
                case PenstockError() if error.reason not in OF_THE_SANDBOX:
                    self.give_up(error.message)
                case OSError():
                    self.give_up(f"the driver's disk refused the working directory: {error.strerror}")
                case _:
                    raise
            return None
        return tree
