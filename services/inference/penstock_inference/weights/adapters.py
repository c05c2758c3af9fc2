"""Receives LoRA adapters: begin, chunks of `adapter_model.safetensors` (or a path instead), commit.

Atomic, like a push of weights: nothing changes until the engine has loaded it. Repeating an adapter that is in force
succeeds. Once complete, an adapter is loaded even if the caller is cancelled. Its files stay while it is in force.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary

from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.auth import DEFAULT_NAMESPACE
from penstock_chassis.disk import on_disk
from penstock_chassis.errors import PermissionDenied, Violation
from penstock_chassis.validation import invalid
from penstock_inference.domain.namespaces import scoped
from penstock_inference.domain.weights import PauseMode
from penstock_inference.engines.base import Engine
from penstock_inference.engines.optional_features import AdapterInfo, Adapters, AdapterSource, missing_capability
from penstock_inference.weights.uploads import Commit, Uploads, frame_invalid, under

MAX_NAME_LENGTH = 128
MAX_UNLOADED = 1000
"""How many unloaded adapters are remembered."""


@dataclass(frozen=True, slots=True)
class AdapterBegin:
    """Announces an adapter."""

    name: str
    policy_version: int
    config_json: str = ""
    """adapter_config.json as PEFT writes it; with a path, the file in that directory is used."""
    path: str = ""
    mode: PauseMode = PauseMode.KEEP


AdapterFrame = AdapterBegin | bytes | Commit


@dataclass(frozen=True, slots=True)
class KeptAdapter:
    """An adapter in force, with where its files are.

    Attributes:
        name: the engine's (`namespaces.scoped`).
        version: its policy version.
        directory: has `adapter_config.json` and `adapter_model.safetensors`, while the adapter is in force.
        digest: SHA-256 of `adapter_model.safetensors`; empty for a path.
        path: that the push named, below the adapters directory; empty for a file.
    """

    name: str
    version: int
    directory: Path
    digest: bytes = b""
    path: str = ""


class AdapterUploads:
    """Receives adapters for one engine.

    Args:
        engine: loads the adapters.
        uploads: the limits.
        adapters_dir: the directory for paths; None refuses paths.
        spool_dir: keeps the files of uploaded adapters while they are loaded.
    """

    def __init__(
        self, engine: Engine, uploads: Uploads, adapters_dir: Path | None = None, spool_dir: Path | None = None
    ) -> None:
        self._engine = engine
        self._uploads = uploads
        self._adapters_dir = adapters_dir
        self._spool_dir = spool_dir
        self._in_force: dict[str, tuple[int, bytes]] = {}
        self._unloaded: dict[str, AdapterInfo] = {}
        self._sent: dict[str, Path] = {}
        """The directory of each uploaded adapter."""
        # By adapter: a load may wait for completions, which are nobody else's. One is kept while it is in use.
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._finishing = TaskOwner()

    def engine(self) -> Adapters:
        """The engine, if it supports adapters. Raises Unsupported (CAPABILITY_MISSING)."""
        if not self._engine.info().capabilities.adapters or not isinstance(self._engine, Adapters):
            raise missing_capability("adapters")
        return self._engine

    def in_force(self) -> tuple[AdapterInfo, ...]:
        """Every adapter; none with an engine that does not support them."""
        return self.engine().adapters() if self._engine.info().capabilities.adapters else ()

    def unloaded(self) -> tuple[AdapterInfo, ...]:
        """The adapters that were unloaded and not loaded again, the last `MAX_UNLOADED`."""
        return tuple(self._unloaded.values())

    def kept(self) -> tuple[KeptAdapter, ...]:
        """Every adapter in force that could be loaded into another engine."""
        return tuple(
            KeptAdapter(name, version, self._sent[name], digest=identity)
            if name in self._sent
            else KeptAdapter(name, version, Path(), path=identity.decode())
            for name, (version, identity) in self._in_force.items()
        )

    async def load(
        self, frames: AsyncIterator[AdapterFrame], namespace: str = DEFAULT_NAMESPACE, *, paths: bool = True
    ) -> AdapterInfo:
        """Read one adapter to its end and put it in force in a namespace; `paths`: it may be named by a path.

        The info that it returns has the engine's name of it (`namespaces.scoped`).

        Raises InvalidArgument (UPDATE_FRAME_INVALID, PATH_REFUSED, ADAPTER_INVALID), FailedPrecondition (PATHS_OFF),
        PermissionDenied (NAMESPACE_NOT_ALLOWED: a path), ResourceExhausted (UPDATE_TOO_LARGE), DataLoss
        (DIGEST_MISMATCH), DeadlineExceeded (UPDATE_STALLED), Unavailable (DISK_REFUSED), and the engine's errors.
        """
        with on_disk("this adapter"):
            return await self._receive(frames, namespace, paths=paths)

    async def _receive(self, frames: AsyncIterator[AdapterFrame], namespace: str, *, paths: bool) -> AdapterInfo:
        engine = self.engine()
        begin = await self._uploads.next(frames)
        if not isinstance(begin, AdapterBegin):
            raise frame_invalid("the first message must be `begin`")
        _check(begin)
        begin = replace(begin, name=scoped(namespace, begin.name))
        if begin.path:
            if not paths:
                raise PermissionDenied(
                    "A path names the operator's files, which are for the namespace that the operator set as "
                    "weights_namespace: send the adapter's file instead.",
                    reason="NAMESPACE_NOT_ALLOWED",
                )
            directory = under(self._adapters_dir, begin.path, "adapters_dir", "begin.path")
            await self._uploads.nothing(frames)
            return await self._finishing.run(
                self._put(engine, begin, begin.path.encode(), directory, ours=False), "load-adapter"
            )
        directory = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="adapter-", dir=self._spool_dir))
        try:
            digest = await self._uploads.write(frames, directory / "adapter_model.safetensors")
            await asyncio.to_thread((directory / "adapter_config.json").write_text, begin.config_json, "utf-8")
        except BaseException:
            await self._remove(directory)
            raise
        return await self._finishing.run(self._put_ours(engine, begin, digest, directory), "load-adapter")

    async def unload(self, name: str, namespace: str = DEFAULT_NAMESPACE) -> None:
        """Unload a namespace's adapter. Idempotent."""
        await self._finishing.run(self._unload(self.engine(), scoped(namespace, name)), "unload-adapter")

    async def aclose(self) -> None:
        """Wait for adapters that are being loaded, and remove the uploaded files."""
        await self._finishing.wait()
        for directory in self._sent.values():
            await self._remove(directory)
        self._sent.clear()

    async def _unload(self, engine: Adapters, name: str) -> None:
        async with self._changing.setdefault(name, asyncio.Lock()):
            before = next((one for one in engine.adapters() if one.name == name), None)
            await engine.unload_adapter(name)
            self._in_force.pop(name, None)
            if before is not None:
                self._unloaded[name] = before
                while len(self._unloaded) > MAX_UNLOADED:
                    del self._unloaded[next(iter(self._unloaded))]
            await self._remove(self._sent.pop(name, None))

    async def _put_ours(self, engine: Adapters, begin: AdapterBegin, identity: bytes, directory: Path) -> AdapterInfo:
        try:
            return await self._put(engine, begin, identity, directory, ours=True)
        finally:
            if self._sent.get(begin.name) != directory:
                await self._remove(directory)

    async def _put(
        self, engine: Adapters, begin: AdapterBegin, identity: bytes, directory: Path, *, ours: bool
    ) -> AdapterInfo:
        async with self._changing.setdefault(begin.name, asyncio.Lock()):
            if self._in_force.get(begin.name) == (begin.policy_version, identity):
                return next(adapter for adapter in engine.adapters() if adapter.name == begin.name)
            source = AdapterSource(begin.name, begin.policy_version, directory, temporary=ours)
            loaded = await engine.load_adapter(source, begin.mode)
            self._in_force[begin.name] = (begin.policy_version, identity)
            self._unloaded.pop(begin.name, None)
            older = self._sent.pop(begin.name, None)
            if ours:
                self._sent[begin.name] = directory
            # An engine that may read the files again, for completions in flight, has links of its own.
            await self._remove(older)
            return loaded

    async def _remove(self, directory: Path | None) -> None:
        if directory is not None:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


def _check(begin: AdapterBegin) -> None:
    violations = []
    if not 0 < len(begin.name) <= MAX_NAME_LENGTH:
        violations.append(Violation("begin.name", f"must be of 1 to {MAX_NAME_LENGTH} characters"))
    if begin.policy_version < 0:
        violations.append(Violation("begin.policy_version", "must be at least 0"))
    if bool(begin.path) == bool(begin.config_json):
        violations.append(Violation("begin.adapter_config_json", "must be set, or a path: exactly one of them"))
    if violations:
        raise invalid(violations)
