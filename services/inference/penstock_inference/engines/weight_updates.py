"""The open weight update of an engine whose weights are files, up to its commit.

Invariants:

- At most one update is open or in progress: another one is refused with Aborted (UPDATE_IN_PROGRESS).
- Pushed files stay in the spool while their weights are in force; otherwise they are removed.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import Unavailable, Violation
from penstock_inference.domain.weights import Tensors, UpdateFormat
from penstock_inference.engines.checkpoint import Spool, files_of
from penstock_inference.engines.checks import check_update, open_update, raise_violations

_Result = TypeVar("_Result")


@dataclass(slots=True)
class FileUpdate:
    """An open update: the files received so far."""

    version: int
    label: str
    update_format: UpdateFormat
    files: list[Path] = field(default_factory=list)


class FileUpdates(ABC):
    """Opens updates and receives their files; a subclass puts them in force.

    Args:
        spool: stores pushed files.
    """

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._update: FileUpdate | None = None
        self._commit = TaskOwner()
        """The commit in progress, which must not be cancelled halfway."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The policy version in force."""

    @abstractmethod
    def files_in_force(self) -> Iterable[Path]:
        """The files of the spool that are still needed, and perhaps others."""

    async def begin(self, version: int, label: str, update_format: UpdateFormat) -> None:
        """See `Engine.begin_update`."""
        self._check_free(version)
        self._update = FileUpdate(version, label, update_format)

    async def push_file(self, path: Path) -> None:
        """See `WeightFiles`."""
        update = self._open()
        update.files.append(await asyncio.to_thread(self._spool.take, path))

    async def push_path(self, path: Path) -> None:
        """See `WeightFiles`."""
        self._open().files += await asyncio.to_thread(files_of, path)

    async def push_tensors(self, tensors: Tensors) -> None:
        """See `Engine.push_tensors`."""
        update, path = self._open(), self._spool.new()
        try:
            whole = {name: np.ascontiguousarray(each) for name, each in tensors.items()}
            await asyncio.to_thread(save_file, whole, path)
        except SafetensorError as error:
            # Arrays are always serializable, so this is a disk error, whose number the library does not report.
            path.unlink(missing_ok=True)
            raise Unavailable(
                f"The service's disk refused these weights ({error}), so the old ones stay in force. Free space on "
                "the disk or repair it, then try again.",
                reason="DISK_REFUSED",
                retry_after_s=2.0,
            ) from error
        update.files.append(path)

    async def abort(self) -> None:
        """See `Engine.abort_update`."""
        if (update := self._update) is None:
            return
        try:
            if not self._under_way:
                await self._clean()
        finally:
            # Only now: otherwise the clean-up would remove the files of an update that begins meanwhile.
            if self._update is update:
                self._update = None

    async def aclose(self) -> None:
        """Wait for a commit in progress."""
        await self._commit.wait()

    @property
    def _under_way(self) -> bool:
        return bool(self._commit)

    def _check_free(self, version: int) -> None:
        check_update(version, self.version, another_open=self._update is not None or self._under_way)
        raise_violations([Violation("policy_version", "must be at least 0")] if version < 0 else [])

    def _open(self) -> FileUpdate:
        return open_update(self._update)

    async def _to_its_end(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run `work` to completion even if the caller is cancelled, and refuse other updates meanwhile."""
        self._update = None
        return await self._commit.run(work, "update-weights")

    async def _clean(self) -> None:
        await asyncio.to_thread(self._spool.keep_only, self.files_in_force())
