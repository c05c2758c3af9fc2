"""Receives new weights: begin, chunks of one safetensors file (or a path instead), commit with its digest.

All or nothing: on any error, from a broken stream to a tensor that does not fit, the engine keeps its weights and
version. Pushing the version and digest in force again succeeds, so a trainer that lost the response can repeat its
push. Once the commit has started, it completes even if the caller is cancelled.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.disk import on_disk
from penstock_chassis.errors import Unsupported
from penstock_inference.domain.weights import PauseMode, UpdateFormat, UpdatePhases
from penstock_inference.engines.base import Engine
from penstock_inference.engines.checkpoint import parse_safetensors
from penstock_inference.engines.optional_features import WeightFiles
from penstock_inference.metrics import UPDATE_SECONDS
from penstock_inference.weights.kept import KeptPush, KeptPushes
from penstock_inference.weights.uploads import Commit, Uploads, frame_invalid, under


@dataclass(frozen=True, slots=True)
class UpdateBegin:
    """Announces an update."""

    policy_version: int
    update_format: UpdateFormat
    mode: PauseMode = PauseMode.KEEP
    size_bytes: int | None = None
    sha256: bytes | None = None
    label: str = ""
    path: str = ""
    """Instead of chunks; below the operator's weights directory."""


UpdateFrame = UpdateBegin | bytes | Commit


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The version in force, and how many seconds each step took."""

    policy_version: int
    transfer_s: float = 0.0
    load_s: float = 0.0
    pause_s: float = 0.0


class WeightUpdates:
    """Receives pushes for one engine.

    Args:
        engine: receives the weights.
        uploads: the limits.
        weights_dir: the directory for paths; None refuses paths.
        spool_dir: where a push is written for an engine that reads files.
        kept: keeps the pushes that are in force; None keeps none.
    """

    def __init__(
        self,
        engine: Engine,
        uploads: Uploads,
        weights_dir: Path | None = None,
        spool_dir: Path | None = None,
        kept: KeptPushes | None = None,
    ) -> None:
        self._kept = kept
        self._engine = engine
        self._uploads = uploads
        self._weights_dir = weights_dir
        self._spool_dir = spool_dir
        self._last: tuple[int, bytes] | None = None
        """The version and identity of the last push that came in force."""
        self._committing: dict[int, asyncio.Event] = {}
        """By version; set when it is in force or refused."""
        self._finishing = TaskOwner()

    async def receive(self, frames: AsyncIterator[UpdateFrame]) -> UpdateResult:
        """Read one push to its end and put it in force.

        Raises InvalidArgument (UPDATE_FRAME_INVALID, PATH_REFUSED), FailedPrecondition (PATHS_OFF), Unsupported
        (CAPABILITY_MISSING), ResourceExhausted (UPDATE_TOO_LARGE), DataLoss (DIGEST_MISMATCH), DeadlineExceeded
        (UPDATE_STALLED), Unavailable (DISK_REFUSED), and the engine's errors.
        """
        with on_disk("this push of weights"):
            return await self._receive(frames)

    async def _receive(self, frames: AsyncIterator[UpdateFrame]) -> UpdateResult:
        if not self._engine.info().capabilities.weight_update:
            raise Unsupported("this engine's weights cannot be replaced", reason="CAPABILITY_MISSING")
        began = time.monotonic()
        begin = await self._uploads.next(frames)
        if not isinstance(begin, UpdateBegin):
            raise frame_invalid("the first message must be `begin`")
        if (over := self._committing.get(begin.policy_version)) is not None:
            # Wait: only then can this push be recognized as a repetition.
            await over.wait()
        path = under(self._weights_dir, begin.path, "weights_dir", "begin.path") if begin.path else None
        known = begin.path.encode() if path is not None else begin.sha256
        if known is not None and self._in_force() == (begin.policy_version, known):
            return UpdateResult(begin.policy_version)
        if begin.size_bytes is not None:
            self._uploads.check_size(begin.size_bytes)
        if path is None and (last := self._in_force()) is not None and last[0] == begin.policy_version:
            # Only the digest at the end shows whether this push is a repetition.
            _, digest = await self._uploads.read(frames)
            if self._in_force() == (begin.policy_version, digest):
                return UpdateResult(begin.policy_version, time.monotonic() - began)
        await self._engine.begin_update(begin.policy_version, begin.label, begin.update_format)
        staged: Path | None = None
        try:
            if path is not None:
                await self._uploads.nothing(frames)
                identity, transferred = begin.path.encode(), time.monotonic()
                await self._push_path(path)
            else:
                identity, transferred, staged = await self._push_chunks(frames)
            parsed = time.monotonic()
        except BaseException:
            await self._engine.abort_update()
            raise
        phases = await self._finishing.run(self._commit(begin, identity, staged), "commit-update")
        result = UpdateResult(
            begin.policy_version, transferred - began, parsed - transferred + phases.load_s, phases.pause_s
        )
        for phase, took in (("transfer", result.transfer_s), ("load", result.load_s), ("pause", result.pause_s)):
            UPDATE_SECONDS.labels(phase).observe(took)
        return result

    def _in_force(self) -> tuple[int, bytes] | None:
        """The last push, unless weights that came by a transfer replaced its own."""
        last = self._last
        return last if last is not None and self._engine.info().policy_version == last[0] else None

    async def aclose(self) -> None:
        """Wait for a commit in progress."""
        await self._finishing.wait()

    async def _commit(self, begin: UpdateBegin, identity: bytes, staged: Path | None) -> UpdatePhases:
        over = self._committing[begin.policy_version] = asyncio.Event()
        try:
            base = self._engine.info().policy_version
            phases = await self._engine.commit_update(begin.mode)
            self._last = (begin.policy_version, identity)
            if self._kept is not None:
                digest = b"" if begin.path else identity
                await self._kept.add(
                    KeptPush(begin.policy_version, base, begin.update_format, digest, staged, begin.path)
                )
            return phases
        except BaseException:
            await self._engine.abort_update()
            if self._kept is not None and staged is not None:
                await self._kept.drop(staged)
            raise
        finally:
            del self._committing[begin.policy_version]
            over.set()

    async def _push_chunks(self, frames: AsyncIterator[UpdateFrame]) -> tuple[bytes, float, Path | None]:
        """The file's digest, when its last chunk arrived, and the file that is to be kept."""
        if not isinstance(self._engine, WeightFiles):
            data, digest = await self._uploads.read(frames)
            transferred = time.monotonic()
            await self._engine.push_tensors(await asyncio.to_thread(parse_safetensors, data))
            return digest, transferred, None if self._kept is None else await self._kept.stage(data)
        with tempfile.TemporaryDirectory(prefix="push-", dir=self._spool_dir) as directory:
            file = Path(directory) / "incoming.safetensors"
            digest = await self._uploads.write(frames, file)
            transferred = time.monotonic()
            staged = None if self._kept is None else await self._kept.stage(file)
            await self._engine.push_file(file)
        return digest, transferred, staged

    async def _push_path(self, path: Path) -> None:
        if isinstance(self._engine, WeightFiles):
            await self._engine.push_path(path)
            return
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
            data = await asyncio.to_thread(file.read_bytes)
            self._uploads.check_size(len(data))
            await self._engine.push_tensors(await asyncio.to_thread(parse_safetensors, data))
