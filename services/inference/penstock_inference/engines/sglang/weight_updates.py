"""Puts new weights in force on an SGLang server: files in a directory that the server reads.

Its other ways carry handles of a trainer's own process (CUDA memory, NCCL groups), not tensors.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock_chassis.errors import FailedPrecondition
from penstock_inference.domain.weights import PauseMode, UpdateFormat, UpdatePhases
from penstock_inference.engines.checkpoint import Checkpoint, Spool
from penstock_inference.engines.optional_features import missing_capability
from penstock_inference.engines.sglang.server import Server
from penstock_inference.engines.sglang.weight_files import lay_out
from penstock_inference.engines.weight_updates import FileUpdates


class Updates(FileUpdates):
    """The update of a server; only one may be open.

    Args:
        server: the server.
        checkpoint: the weights in force at the start.
        directory: for pushed files; the server must see it under the same path.
        spans: whether the server reports which weights sampled which tokens.
        abort: aborts what runs.
    """

    def __init__(
        self,
        server: Server,
        checkpoint: Checkpoint,
        directory: Path,
        spans: Callable[[], bool],
        abort: Callable[[], object],
    ) -> None:
        super().__init__(Spool(directory))
        self._server = server
        self._checkpoint = checkpoint
        self._directory = directory
        self._spans = spans
        self._abort_running = abort
        self._staged: tuple[Checkpoint, Path] | None = None
        """The weights in force with the open update's files, once checked and laid out."""
        self._layouts = 0

    @property
    def version(self) -> int:
        return self._server.version or 0

    def files_in_force(self) -> Iterable[Path]:
        """The files from which tensors are loaded."""
        return self._checkpoint.sources.values()

    async def begin(self, version: int, label: str, update_format: UpdateFormat) -> None:
        if update_format is UpdateFormat.DELTA and not self._server.base_known:
            raise FailedPrecondition(
                "the server had its weights before this service started, so no file here could complete a partial push:"
                " push all tensors",
                reason="WEIGHTS_LOST",
            )
        await super().begin(version, label, update_format)
        self._staged = None

    async def stage(self) -> None:
        """See `StagedUpdates`."""
        update = self._open()
        self._layouts += 1
        layout = self._directory / f"weights-{self._layouts}"
        try:
            checkpoint = await asyncio.to_thread(self._checkpoint.updated, update.files, update.update_format)
            self._staged = checkpoint, await asyncio.to_thread(lay_out, checkpoint, layout)
        except BaseException:
            await self.abort()
            raise

    async def commit(self, mode: PauseMode) -> UpdatePhases:
        """See `Engine.commit_update`. Once loading has started, it completes even if the caller is cancelled."""
        update, server, began = self._open(), self._server, time.monotonic()
        if mode is PauseMode.KEEP and not self._spans():
            await self.abort()
            raise missing_capability(
                "in_flight_update: this server does not report versions; commit with WAIT or ABORT"
            )
        if self._staged is None:
            await self.stage()
        assert self._staged is not None
        checkpoint, layout = self._staged
        self._staged = None
        checked = time.monotonic()

        async def swap() -> float:
            try:
                async with server.stopped(mode, self._abort_running):
                    still = time.monotonic()
                    await server.load(str(layout), update.version, update.label)
                    self._checkpoint = checkpoint
                    return time.monotonic() - still
            finally:
                await self._clean()

        loading = await self._to_its_end(swap())
        return UpdatePhases(checked - began + loading, time.monotonic() - checked - loading)

    async def _clean(self) -> None:
        await super()._clean()
        await asyncio.to_thread(self._drop_layouts)

    def _drop_layouts(self) -> None:
        staged = None if self._staged is None else self._staged[1]
        for layout in self._directory.glob("weights-*"):
            if layout != staged and str(layout) != self._server.path:
                shutil.rmtree(layout, ignore_errors=True)
