"""What an agent's work left in its working directory, recorded: what changed (Task.keep_diff), and the small files that
lie there (Task.keep_files).

The directory is read when the agent is dead, for a diff also before there is one, so it works on every backend. Both
are records: nothing is graded by them. Invariants: their size, and what they cost to make, are bounded whatever the
agent left; that one cannot be made is told in a line and never fails a rollout, the loss of its sandbox apart.
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
from penstock_driver.endings import OF_THE_SANDBOX
from penstock_driver.ports import Sandboxes, SandboxFacts
from penstock_driver.rollouts import DIFF_S, ArtifactCollected, Happening, Progress, Task
from penstock_driver.workdiff import NAME, unified
from penstock_driver.workfiles import PREFIX, Found, small_files
from penstock_driver.worktree import TooMany

MAX_TREE_BYTES: Final = 32 << 20
"""Of a working directory that is read."""


class Work:
    """The record of one rollout's directory: `keep` before the agent, `tell` when it is dead, `close` in any case."""

    def __init__(
        self, task: Task, sandboxes: Sandboxes, *, spool: Path | None, record: Callable[[Happening], None]
    ) -> None:
        self._task = task
        self._sandboxes = sandboxes
        self._spool = spool
        self._record = record
        self._before: BinaryIO | None = None

    async def keep(self, sandbox: SandboxFacts) -> None:
        """Read the directory as it was prepared, where a diff is wanted."""
        if self._task.keep_diff:
            self._before = await self._read(sandbox)

    async def tell(self, sandbox: SandboxFacts) -> None:
        """Record what changed since, be it nothing, and what lies there; that it cannot be told is told."""
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
                    self._tell_files(await asyncio.to_thread(small_files, after))
            except (tarfile.TarError, TooMany) as error:
                self._give_up(str(error))

    def _tell_files(self, found: Found) -> None:
        for path, content in found.files:
            self._record(ArtifactCollected(PREFIX + path, content, len(content)))
        if found.more:
            self._record(Progress(f"{found.more} more files of the working directory are not kept"))

    def close(self) -> None:
        """Forget it; idempotent."""
        if self._before is not None:
            with suppress(OSError):  # a full disk: what it did not take is wanted by nobody now
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
                    self._give_up(f"the working directory has more than {MAX_TREE_BYTES >> 20} MiB")
                case TimeoutError():
                    self._give_up(f"the working directory could not be read in {DIFF_S:g} s")
                case PenstockError() if error.reason not in OF_THE_SANDBOX:
                    self._give_up(error.message)
                case OSError():
                    self._give_up(f"the driver's disk did not take the working directory: {error.strerror}")
                case _:
                    raise
            return None
        return tree

    def _give_up(self, why: str) -> None:
        self._record(Progress(f"the agent's work is not kept as the task asks: {why}"))
