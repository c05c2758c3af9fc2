"""The four-call transfer: which one is open, and a timeout that ends an abandoned one."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import structlog

from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import FailedPrecondition, PenstockError
from penstock_chassis.validation import check_request_id, invalid_field
from penstock_inference.domain.weights import PauseMode
from penstock_inference.engines.base import Engine
from penstock_inference.engines.optional_features import WeightTransfers, missing_capability
from penstock_inference.metrics import UPDATE_SECONDS
from penstock_inference.weights.manager import UpdateResult

DEFAULT_IDLE_S = 300.0
MAX_IDLE_S = 3600.0
_log = structlog.get_logger("penstock.inference")


class Transfers:
    """Transfers into one engine, one at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._request_id = ""
        self._transfer_id = ""
        self._idle_s = DEFAULT_IDLE_S
        self._guard: asyncio.Task[None] | None = None
        self._under_way = 0
        """Number of running tensor calls; the idle timeout is off while there are any."""
        self._last: tuple[str, UpdateResult] | None = None
        """The last finished transfer, for repeated calls."""
        self._ending: tuple[str, asyncio.Event] | None = None
        """The transfer whose `finish` was called last; set when it has ended."""
        self._starting = asyncio.Lock()
        self._finishing = TaskOwner()

    async def init(self, backend: str, options_json: str) -> None:
        """Raises Unsupported (CAPABILITY_MISSING), InvalidArgument for anything but a JSON object."""
        options = _json(options_json or "{}", "options_json")
        if not isinstance(options, dict):
            raise invalid_field("options_json", "must be a JSON object")
        await self._offered().init_transfer(backend, options)

    async def start(self, request_id: str, version: int, mode: PauseMode, idle_s: float | None) -> str:
        """Return the transfer's id; idempotent by request. Raises the errors of `WeightTransfers.start_transfer`."""
        engine = self._offered()
        check_request_id(request_id)
        idle = DEFAULT_IDLE_S if idle_s is None else idle_s
        if not 0 < idle <= MAX_IDLE_S:
            raise invalid_field("idle_timeout", f"must be in (0 s, {MAX_IDLE_S:g} s]")
        async with self._starting:  # a repeated call may arrive while the first one waits for the engine
            if self._transfer_id and request_id == self._request_id:
                return self._transfer_id
            await engine.start_transfer(version, mode)
            self._request_id, self._transfer_id = request_id, str(uuid.uuid4())
            self._idle_s = idle
            self._watch()
            return self._transfer_id

    async def transfer(self, transfer_id: str, descriptor_json: str) -> None:
        """Raises FailedPrecondition (NO_TRANSFER), InvalidArgument."""
        engine = self._offered()
        descriptor = _json(descriptor_json, "descriptor_json")
        if not isinstance(descriptor, dict | list):
            raise invalid_field(
                "descriptor_json", "must be a JSON object, or an array of one for each data-parallel rank"
            )
        self._check(transfer_id)
        self._unwatch()
        self._under_way += 1
        try:
            await engine.transfer_tensors(descriptor)
        finally:
            self._under_way -= 1
            if self._transfer_id:
                self._watch()

    async def finish(self, transfer_id: str, commit: bool) -> UpdateResult:
        """End the transfer; completes even if the caller is cancelled.

        Raises FailedPrecondition (NO_TRANSFER). A repeated call for the transfer that ended last, or is just ending,
        returns its result again.
        """
        engine = self._offered()
        if self._ending is not None and self._ending[0] == transfer_id:
            await self._ending[1].wait()
        if self._last is not None and self._last[0] == transfer_id:
            return self._last[1]
        self._check(transfer_id)
        self._unwatch()
        self._transfer_id = ""
        self._ending = (transfer_id, asyncio.Event())
        return await self._finishing.run(self._finish(engine, transfer_id, commit, self._ending[1]), "finish-transfer")

    async def aclose(self) -> None:
        """Stop the idle timeout; wait for a transfer that is ending."""
        self._unwatch()
        await self._finishing.wait()

    async def _finish(
        self, engine: WeightTransfers, transfer_id: str, commit: bool, over: asyncio.Event
    ) -> UpdateResult:
        try:
            phases = await engine.finish_transfer(commit)
            version = self._engine.info().policy_version
            result = UpdateResult(version, transfer_s=phases.load_s, pause_s=phases.pause_s)
            self._last = (transfer_id, result)
        finally:
            over.set()
        if commit:
            for phase, took in (("load", phases.load_s), ("pause", phases.pause_s)):
                UPDATE_SECONDS.labels(phase).observe(took)
        return result

    def _offered(self) -> WeightTransfers:
        if not self._engine.info().capabilities.transfer_backends or not isinstance(self._engine, WeightTransfers):
            raise missing_capability("external_transfer")
        return self._engine

    def _check(self, transfer_id: str) -> None:
        if not transfer_id or transfer_id != self._transfer_id:
            raise FailedPrecondition("no transfer with this id is open", reason="NO_TRANSFER")

    def _watch(self) -> None:
        self._unwatch()
        if self._under_way:
            return  # the last call to end starts the timeout
        self._guard = asyncio.create_task(self._give_up(self._transfer_id), name="transfer-idle")

    def _unwatch(self) -> None:
        if self._guard is not None:
            self._guard.cancel()
            self._guard = None

    async def _give_up(self, transfer_id: str) -> None:
        await asyncio.sleep(self._idle_s)
        if transfer_id != self._transfer_id:
            return
        self._guard, self._transfer_id = None, ""
        _log.warning("a transfer stalled and was cancelled", transfer_id=transfer_id, seconds=self._idle_s)
        try:
            await self._offered().finish_transfer(False)
        except PenstockError as error:
            _log.warning("cancelling a transfer failed", reason=error.reason)


def _json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise invalid_field(field, "must be JSON") from None
