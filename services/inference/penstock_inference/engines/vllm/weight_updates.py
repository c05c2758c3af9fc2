"""Puts new weights in force, completely or not at all: pushed as files, or moved by the trainer itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_chassis.errors import (
    Aborted,
    FailedPrecondition,
    InvalidArgument,
    PenstockError,
    Unsupported,
    Violation,
)
from penstock_inference.domain.weights import PauseMode, UpdateFormat, UpdatePhases
from penstock_inference.engines.checkpoint import Checkpoint
from penstock_inference.engines.vllm.core import Core
from penstock_inference.engines.weight_updates import FileUpdates


@dataclass(slots=True)
class _Transfer:
    version: int
    stopping: Any
    """The context in which vLLM is stopped."""
    began: float
    pause_s: float
    touched: bool = False
    """Some tensors are already replaced."""


class Updates(FileUpdates):
    """The update or transfer of a core; only one may be open."""

    def __init__(self, core: Core) -> None:
        super().__init__(core.spool)
        self._core = core
        self._staged: Checkpoint | None = None
        """The weights in force with the open update's files, once checked."""
        self._transfer: _Transfer | None = None
        self._starting = False
        """A transfer waits for vLLM to stop, which may take as long as a generation."""

    @property
    def version(self) -> int:
        return self._core.version

    def files_in_force(self) -> Iterable[Path]:
        """The files from which tensors are loaded."""
        return self._core.checkpoint.sources.values()

    async def begin(self, version: int, label: str, update_format: UpdateFormat) -> None:
        if self._core.features.platform == "cpu" and any(".experts." in name for name in self._core.checkpoint.sources):
            # Its kernels for CPUs keep experts in another layout, into which a reload writes them as they are in files.
            raise Unsupported(
                "vLLM for CPUs computes wrong logprobs once the weights of a mixture-of-experts model were replaced",
                reason="CAPABILITY_MISSING",
                metadata={"capability": "updates of experts on a CPU"},
            )
        if update_format is UpdateFormat.DELTA and self._core.unsaved:
            raise FailedPrecondition(
                "the weights in force came by a transfer, so no file could complete a partial push: push all tensors",
                reason="WEIGHTS_LOST",
            )
        await super().begin(version, label, update_format)
        self._staged = None

    async def stage(self) -> None:
        """See `StagedUpdates`."""
        update = self._open()
        try:
            self._staged = await asyncio.to_thread(self._core.checkpoint.updated, update.files, update.update_format)
        except BaseException:
            await self.abort()
            raise

    async def commit(self, mode: PauseMode) -> UpdatePhases:
        """See `Engine.commit_update`. Once loading has started, it completes even if the caller is cancelled."""
        update, core, began = self._open(), self._core, time.monotonic()
        if self._staged is None:
            await self.stage()
        checkpoint, self._staged = self._staged, None
        assert checkpoint is not None
        checked = time.monotonic()

        async def swap() -> float:
            try:
                async with core.stopped(mode):
                    still = time.monotonic()
                    await core.load(checkpoint)
                    try:
                        await core.put_in_force(update.version, update.label, checkpoint)
                    except BaseException:
                        # The workers already have the new weights, but their tokens would be labelled with the old
                        # version.
                        core.runtime.kill()
                        raise
                    return time.monotonic() - still
            finally:
                await self._clean()

        loading = await self._to_its_end(swap())
        return UpdatePhases(checked - began + loading, time.monotonic() - checked - loading)

    async def init_transfer(self, backend: str, options: Mapping[str, Any]) -> None:
        """See `WeightTransfers`."""
        if backend != self._core.chosen.transfer_backend:
            ready = self._core.chosen.transfer_backend or "none"
            raise Unsupported(
                f"weights cannot come by {backend!r}; the engine was started for: {ready}",
                reason="CAPABILITY_MISSING",
                metadata={"capability": f"transfer:{backend}"},
            )
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=dict(options))
        await self._ask(lambda llm: llm.init_weight_transfer_engine(request), "options_json")

    async def start_transfer(self, version: int, mode: PauseMode) -> None:
        """See `WeightTransfers`."""
        self._check_free(version)
        self._starting = True
        try:
            began = time.monotonic()
            stopping = self._core.stopped(mode)
            await stopping.__aenter__()
            try:
                await self._ask(lambda llm: llm.start_weight_update(), "transfer")
            except BaseException:
                await stopping.__aexit__(None, None, None)
                raise
            self._transfer = _Transfer(version, stopping, time.monotonic(), time.monotonic() - began)
        finally:
            self._starting = False

    async def transfer_tensors(self, descriptor: Mapping[str, Any] | list[Mapping[str, Any]]) -> None:
        """See `WeightTransfers`."""
        transfer = self._open_transfer()
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info=descriptor)
        transfer.touched = True
        await self._ask(lambda llm: llm.update_weights(request), "descriptor_json")

    async def finish_transfer(self, commit: bool) -> UpdatePhases:
        """See `WeightTransfers`. A rollback loads the old weights again from their files."""
        transfer = self._open_transfer()
        core = self._core

        async def finish() -> None:
            try:
                try:
                    await self._ask(lambda llm: llm.finish_weight_update(), "transfer")
                except InvalidArgument:
                    # vLLM aborts an update itself when it refused some of its tensors.
                    if commit:
                        raise
                if commit:
                    await core.put_in_force(transfer.version, "", None)
                elif transfer.touched and core.unsaved:
                    core.runtime.kill()
                elif transfer.touched:
                    await core.load(core.checkpoint)
            except BaseException:
                if transfer.touched:
                    core.runtime.kill()
                raise
            finally:
                self._transfer = None
                await transfer.stopping.__aexit__(None, None, None)

        await self._to_its_end(finish())
        return UpdatePhases(time.monotonic() - transfer.began, transfer.pause_s)

    async def _ask(self, call: Callable[[Any], Awaitable[Any]], field: str) -> None:
        """Raises InvalidArgument (TRANSFER_REFUSED) when vLLM refuses."""
        try:
            await self._core.ask(call)
        except PenstockError:
            raise
        except Exception as error:
            lines = str(error).splitlines()
            text = f"is refused by vLLM: {lines[-1] if lines else type(error).__name__}"
            raise InvalidArgument(
                f"{field} {text}", reason="TRANSFER_REFUSED", violations=[Violation(field, text)]
            ) from error

    def _check_free(self, version: int) -> None:
        if self._transfer is not None or self._starting:
            raise Aborted("another update is open", reason="UPDATE_IN_PROGRESS", retry_after_s=1.0)
        super()._check_free(version)

    def _open_transfer(self) -> _Transfer:
        if self._transfer is None:
            raise FailedPrecondition("no transfer is open", reason="NO_TRANSFER")
        return self._transfer
