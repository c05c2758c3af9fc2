"""The four-call transfer: who began one, and its end when nobody goes on with it."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import structlog

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, PenstockError, Violation
from penstock_inference.engines.base import Engine, PauseMode
from penstock_inference.engines.optional import WeightTransfers, missing_capability
from penstock_inference.metrics import UPDATE_SECONDS
from penstock_inference.weights import UpdateResult

DEFAULT_IDLE_S = 300.0
MAX_IDLE_S = 3600.0
_log = structlog.get_logger("penstock.inference")


class Transfers:
    """Transfers into one engine, one at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._request_id = ""
        self._transfer_id = ""
        self._version = 0
        self._idle_s = DEFAULT_IDLE_S
        self._guard: asyncio.Task[None] | None = None
        self._under_way = 0
        """Transfers of tensors that the engine is busy with: while there are any, nobody is waited for."""
        self._last: tuple[str, UpdateResult] | None = None
        """The transfer that ended last, for who asks again."""

    async def init(self, backend: str, options_json: str) -> None:
        """Raises Unsupported (CAPABILITY_MISSING), InvalidArgument for what is no JSON object."""
        options = _json(options_json or "{}", "options_json")
        if not isinstance(options, dict):
            raise _invalid("options_json", "must be a JSON object")
        await self._offered().init_transfer(backend, options)

    async def start(self, request_id: str, version: int, mode: PauseMode, idle_s: float | None) -> str:
        """The transfer's id; the same for the same request. Raises what `WeightTransfers.start_transfer` does."""
        engine = self._offered()
        if not request_id:
            raise _invalid("request_id", "must not be empty")
        idle = DEFAULT_IDLE_S if idle_s is None else idle_s
        if not 0 < idle <= MAX_IDLE_S:
            raise _invalid("idle_timeout", f"must be in (0 s, {MAX_IDLE_S:g} s]")
        if self._transfer_id and request_id == self._request_id:
            return self._transfer_id
        await engine.start_transfer(version, mode)
        self._request_id, self._transfer_id, self._version, self._idle_s = request_id, str(uuid.uuid4()), version, idle
        self._watch()
        return self._transfer_id

    async def transfer(self, transfer_id: str, descriptor_json: str) -> None:
        """Raises FailedPrecondition (NO_TRANSFER), InvalidArgument."""
        engine = self._offered()
        descriptor = _json(descriptor_json, "descriptor_json")
        if not isinstance(descriptor, dict | list):
            raise _invalid("descriptor_json", "must be a JSON object, or an array of one for each data-parallel rank")
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
        """Raises FailedPrecondition (NO_TRANSFER), except for the transfer that ended last."""
        engine = self._offered()
        if self._last is not None and self._last[0] == transfer_id:
            return self._last[1]
        self._check(transfer_id)
        self._unwatch()
        self._transfer_id = ""
        phases = await engine.finish_transfer(commit)
        version = self._engine.info().policy_version
        result = UpdateResult(version, transfer_s=phases.load_s, pause_s=phases.pause_s)
        if commit:
            for phase, took in (("load", phases.load_s), ("pause", phases.pause_s)):
                UPDATE_SECONDS.labels(phase).observe(took)
        self._last = (transfer_id, result)
        return result

    async def aclose(self) -> None:
        """Stop watching."""
        self._unwatch()

    def _offered(self) -> WeightTransfers:
        if not self._engine.info().capabilities.transfer_backends or not isinstance(self._engine, WeightTransfers):
            raise missing_capability("external_transfer")
        return self._engine

    def _check(self, transfer_id: str) -> None:
        if not transfer_id or transfer_id != self._transfer_id:
            raise FailedPrecondition("no transfer of this id is open", reason="NO_TRANSFER")

    def _watch(self) -> None:
        self._unwatch()
        if self._under_way:
            return  # whoever ends last watches
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
        _log.warning("a transfer stalled and was given up", transfer_id=transfer_id, seconds=self._idle_s)
        try:
            await self._offered().finish_transfer(False)
        except PenstockError as error:
            _log.warning("giving up a transfer failed", reason=error.reason)


def _json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise _invalid(field, "must be JSON") from None


def _invalid(field: str, text: str) -> InvalidArgument:
    return InvalidArgument(f"{field} {text}", reason="REQUEST_INVALID", violations=[Violation(field, text)])
