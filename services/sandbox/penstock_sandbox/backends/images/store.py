"""The images of this machine: pulled, unpacked once per layer, and kept within a limit of bytes.

Purpose: an image is a list of directories, the lowest first, that overlayfs takes as its layers. Images share them:
a layer is named by the digest of its content.

Layout under ``root``: ``layers/NAME/fs`` (a layer, read-only from its first moment), ``images/DIGEST.json`` (an image,
by the digest of its configuration), ``drafts`` (work in progress, and what is being removed).

Invariants
- A layer or an image appears by one rename, complete; ``drafts``, and layers of no image, are removed at the start. So
  a ``kill -9`` leaves nothing that is half there. A layer that is there is never replaced: sandboxes may be on it.
- Both digests of a layer are checked: of what the registry sends, and of what it unpacks to.
- An image in use is never evicted, nor a layer of it. The others together take at most ``most_bytes``: the least
  recently used are evicted first. They also give way to a pull for which too little of the disk is free; one that
  leaves less than the minimum is refused, or stopped, with nothing left of it.
- Callers' names lead to no host but the operator's registries.
- One pull of an image and one of a layer at a time, shared by all callers; a cancelled caller does not stop it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fnmatch
import json
import os
import platform
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog

from penstock_chassis.aio.retry import Pause
from penstock_chassis.aio.single_flight import SingleFlight
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.disk import REFUSED as DISK_REFUSED
from penstock_chassis.errors import DeadlineExceeded, PenstockError, ResourceExhausted
from penstock_sandbox.backends.images import errors, reference, unpack
from penstock_sandbox.backends.images.reference import Reference
from penstock_sandbox.backends.images.registry import Blob, Manifest, Registry, RegistryOptions
from penstock_sandbox.domain.free_space import Watermark
from penstock_sandbox.guest.common import walk

MOST_ENTRIES: Final = 1_000_000
"""Maximum entries of a layer."""
_MOST_LAYERS = 128
_AT_ONCE = 3
_PULLS_AT_ONCE = 32
_MOST_CONFIG = 1024 * 1024
ENTRY_BYTES = 4096
"""What an entry of a layer counts, beside its content: an inode and its place in a directory, which disks lack, too."""
# Of the digest's 64 digits: the kernel takes one page of paths for all layers of an overlay.
_NAME_DIGITS = 40
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
_VERSION = 1
_DISK_RETRY_S = 5.0
_UNPACKED = 4
"""What a packed layer may take: itself, and about three times as much unpacked."""
_SCARCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
"""This machine has too few open files, memory or processes at the moment."""
# A sandbox of a pulled image is made sooner than this.
_GRACE_S = 60.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """The operator's choices.

    Args:
        registries: patterns of the registries that are asked for what callers name, beside those of ``registry``.
        own: images that are pulled whatever their registry, as those of ``prefetch`` are.
        unpack_as: the host user that layers belong to; None = this process's own.
    """

    registry: RegistryOptions = field(default_factory=RegistryOptions)
    most_bytes: int = 40 * 1024**3
    most_image_bytes: int = 20 * 1024**3
    pull_timeout_s: float = 600.0
    prefetch: tuple[str, ...] = ()
    registries: tuple[str, ...] = ("*",)
    own: tuple[str, ...] = ()
    unpack_as: int | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """An unpacked layer: its directory's name, the digest of its tar, the bytes of its files and entries."""

    name: str
    diff_id: str
    size: int


@dataclass(frozen=True, slots=True)
class Image:
    """An image that is here. ``layers`` are listed from the lowest up; the rest is its configuration's."""

    id: str
    layers: tuple[Layer, ...]
    env: Mapping[str, str]
    workdir: str
    architecture: str


@dataclass(slots=True)
class _Kept:
    image: Image
    names: set[str]
    used_at: float


def entries_within(most_bytes: int) -> int:
    """Returns the most entries that fit these bytes, by what each counts."""
    return min(MOST_ENTRIES, most_bytes // ENTRY_BYTES)


async def unpacked(blob: int, tree: Path, user: int | None, most_bytes: int, most_entries: int) -> dict[str, Any]:
    """Unpacks the tar ``blob``, a descriptor, into ``tree`` in a process of its own, which dies with this call.

    ``user`` is the host user to become, who owns ``tree``; None = this process's own. Bytes and entries are counted
    before they are written. Returns what it prints.

    Raises unpack.Refused, OSError.
    """
    target = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-m", unpack.__name__),
            *map(str, (target, -1 if user is None else user, most_bytes, most_entries)),
            stdin=blob,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(target,),
            cwd="/",
            env={},
        )
    finally:
        os.close(target)
    try:
        answer, _ = await process.communicate()
    except BaseException:
        if process.returncode is None:
            process.kill()
        await process.wait()
        raise
    try:
        done: dict[str, Any] = json.loads(answer)
    except ValueError as error:
        raise unpack.Refused(unpack.DAMAGED, f"unpacking ended with status {process.returncode}") from error
    if "errno" in done:
        raise OSError(done["errno"], done["what"])
    if "kind" in done:
        raise unpack.Refused(done["kind"], done["what"])
    return done


class ImageStore:
    """The images under ``root``."""

    def __init__(
        self,
        root: Path,
        options: ImageOptions,
        *,
        space: Watermark | None = None,
        clock: Callable[[], float] = time.time,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._root = root
        self._space = space or Watermark(root)
        self._options = options
        self._clock = clock
        self._registry = Registry(options.registry, pause=pause)
        self._own = frozenset(_whole_names((*options.prefetch, *options.own)))
        self._images: dict[str, _Kept] = {}
        self._by_name: dict[str, str] = {}
        self._held: Counter[str] = Counter()
        # Layers of images that are being pulled, which no record names yet.
        self._pulled: Counter[str] = Counter()
        # Those of them that are complete: sandboxes may be on one, by another image, before its own is here.
        self._complete: dict[str, Layer] = {}
        self._pulls: SingleFlight[str, str] = SingleFlight(keep=0, finish=True)
        self._layers: SingleFlight[str, Layer] = SingleFlight(keep=0)
        self._downloads = asyncio.Semaphore(_AT_ONCE)
        # Each has a manifest in memory, and callers choose how many images they name.
        self._turns = asyncio.Semaphore(_PULLS_AT_ONCE)
        self._prefetches = TaskOwner()
        self._removals = TaskOwner()
        self.on_evicted: Callable[[Image], None] = lambda _: None
        """Called with each image that is evicted, which nobody holds."""

    @property
    def layers_folder(self) -> Path:
        """The directory in which each layer has its own."""
        return self._root / "layers"

    def folder(self, layer: Layer) -> Path:
        """Returns the directory that is the layer."""
        return self.layers_folder / layer.name / "fs"

    # Opening and closing -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Reads what earlier instances kept, removes what they left half done, and begins to prefetch."""
        await asyncio.to_thread(self._read)
        for name in self._options.prefetch:
            self._prefetches.start(self._prefetch(name), f"prefetch {name}")

    def _read(self) -> None:
        for folder in (self._root, self.layers_folder, self._root / "images", self._root / "drafts"):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o711)
        for child in (self._root / "drafts").iterdir():
            _remove(child)
        for file in (self._root / "images").iterdir():
            kept = self._record(file)
            if kept is None:
                file.unlink()
                continue
            self._images[kept.image.id] = kept
            self._by_name |= dict.fromkeys(kept.names, kept.image.id)
        named = {layer.name for kept in self._images.values() for layer in kept.image.layers}
        for child in self.layers_folder.iterdir():
            if child.name not in named:
                _remove(child)

    def _record(self, file: Path) -> _Kept | None:
        """Returns an image that an earlier instance recorded; None if it is not all there."""
        try:
            found = json.loads(file.read_text())
            if found["version"] != _VERSION:
                return None
            layers = tuple(Layer(**layer) for layer in found["layers"])
            image = Image(found["id"], layers, found["env"], found["workdir"], found["architecture"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning(
                "an image's record cannot be read; the image is pulled again", file=file.name, error=repr(error)
            )
            return None
        if not all(self.folder(layer).is_dir() for layer in layers):
            return None
        return _Kept(image, set(found["names"]), file.stat().st_mtime)

    async def _prefetch(self, name: str) -> None:
        try:
            self.release(await self.get(name))
        except PenstockError as error:
            _log.warning("an image was not prefetched", image=name, reason=error.reason, error=error.message)

    async def aclose(self) -> None:
        """Stops pulls; the images stay."""
        await self._prefetches.aclose()
        await asyncio.gather(self._pulls.aclose(), self._layers.aclose())
        await self._removals.wait()
        await self._registry.aclose()

    # Use ---------------------------------------------------------------------------------------------------------

    async def get(self, name: str) -> Image:
        """Returns an image, pulled if it is not here, and held until ``release``. A tag is looked up once.

        Raises InvalidArgument (FIELD_INVALID), what ``errors`` has, DeadlineExceeded (IMAGE_PULL_TIMEOUT) and
        ResourceExhausted (DISK_LOW).
        """
        wanted = reference.parse(name)
        key = str(wanted)
        while (found := self._images.get(self._by_name.get(key, ""))) is None:
            self._refuse_unlisted(wanted)
            await self._pulls.get(key, lambda: self._pull(wanted))
        self._held[found.image.id] += 1
        found.used_at = self._clock()
        return found.image

    def _refuse_unlisted(self, wanted: Reference) -> None:
        """Raises FailedPrecondition (IMAGE_NOT_ALLOWED) for an image whose registry the operator names nowhere.

        A registry is asked from this machine's network, and may send this service to any address of it for a login.
        """
        known, registry = self._options.registry, wanted.registry
        if registry in known.mirrors or registry in known.credentials or registry in known.plain_http:
            return
        if any(fnmatch.fnmatchcase(registry, pattern) for pattern in self._options.registries):
            return
        if str(wanted) not in self._own:
            raise errors.registry_not_listed(str(wanted), registry)

    def release(self, image: Image) -> None:
        """Drops a reference to an image."""
        self._held[image.id] -= 1
        kept = self._images.get(image.id)
        if kept is not None:
            kept.used_at = self._clock()
            # What the next start orders by.
            os.utime(self._file(image.id), (kept.used_at, kept.used_at))
        self._trim()

    def hold(self, image: Image) -> None:
        """Adds a reference to an image that has one."""
        self._held[image.id] += 1

    @property
    def bytes(self) -> int:
        """Bytes of all layers, each counted once."""
        layers = {layer.name: layer.size for kept in self._images.values() for layer in kept.image.layers}
        return sum(layers.values())

    # Pulling -----------------------------------------------------------------------------------------------------

    async def _pull(self, wanted: Reference) -> str:
        name, limit = str(wanted), self._options.pull_timeout_s
        _log.info("pulling an image", image=name)
        try:
            async with asyncio.timeout(limit), self._turns:
                image = await self._pulled_now(wanted)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the image {name} was not pulled within {limit:g} s: list it in image_prefetch, or raise "
                "image_pull_timeout_s",
                reason="IMAGE_PULL_TIMEOUT",
                metadata={"image": name},
            ) from error
        except OSError as error:
            _log.warning("an image could not be stored", image=name, error=repr(error))
            raise _not_stored(name, error) from error
        _log.info("an image is here", image=name, id=image.id)
        return image.id

    async def _pulled_now(self, wanted: Reference) -> Image:
        manifest = await self._manifest(wanted)
        config_blob, blobs = _parts_of(wanted, manifest)
        packed = sum(blob.size for blob in blobs)
        most = self._options.most_image_bytes
        if packed > most:
            raise errors.too_large(str(wanted), f"its layers have {packed} bytes; local_max_image_bytes is {most}")
        config = await self._config(wanted, config_blob)
        diff_ids = [str(one) for one in (config.get("rootfs") or {}).get("diff_ids") or ()]
        if len(diff_ids) != len(blobs) or not all(reference.DIGEST.fullmatch(one) for one in diff_ids):
            raise errors.unusable(str(wanted), "its configuration does not name the content of each layer")
        names = [_name(one) for one in diff_ids]
        self._pulled.update(names)
        try:
            parts = list(zip(diff_ids, blobs, strict=True))
            lacking = {diff_id: blob.size for diff_id, blob in parts if self._found(diff_id) is None}
            await self._make_room(sum(lacking.values()))
            async with self._space.kept():
                layers = await self._all_layers(wanted, parts)
            size = sum(layer.size for layer in {layer.name: layer for layer in layers}.values())
            if size > most:
                raise errors.too_large(str(wanted), f"it unpacks to {size} bytes; local_max_image_bytes is {most}")
            image = _described(config_blob.digest, layers, config)
            await self._keep(image, str(wanted))
        finally:
            self._pulled.subtract(names)
            for name in names:
                if not self._pulled[name]:
                    self._complete.pop(name, None)
            # After a failure: layers that were complete by then.
            self._remove_unused(names)
        self._trim()
        return image

    async def _make_room(self, packed: int) -> None:
        """Evicts images as long as layers of so many bytes may not fit. Raises ResourceExhausted (DISK_LOW)."""
        if not packed:
            return
        before = self._clock() - _GRACE_S
        for kept in self._by_use():
            if self._space.allows(_UNPACKED * packed) or kept.used_at > before:
                break
            # Looked up each time: images are taken and evicted while others are removed.
            if self._held[kept.image.id] <= 0 and self._images.get(kept.image.id) is kept:
                self._evict(kept)
                await self._removals.wait()
        self._space.check(packed)

    async def _all_layers(self, wanted: Reference, parts: Sequence[tuple[str, Blob]]) -> list[Layer]:
        tasks: list[asyncio.Task[Layer]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks += [
                    group.create_task(self._layers.get(diff_id, partial(self._layer, wanted, diff_id, blob)))
                    for diff_id, blob in parts
                ]
        except BaseExceptionGroup as failures:
            # The first has cancelled the others.
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _manifest(self, wanted: Reference) -> Manifest:
        """Returns the manifest for this machine, looked up in an index if the image has one."""
        manifest = await self._registry.manifest(wanted)
        if "manifests" not in manifest.content:
            return manifest
        architecture = machine()
        entries = [entry for entry in manifest.content["manifests"] or () if isinstance(entry, dict)]
        platforms = [entry.get("platform") or {} for entry in entries]
        for entry, found in zip(entries, platforms, strict=True):
            if (found.get("os"), found.get("architecture")) == ("linux", architecture):
                digest = str(entry.get("digest"))
                if not reference.DIGEST.fullmatch(digest):
                    raise errors.unusable(str(wanted), f"its index has the digest {digest[:80]!r}")
                return await self._registry.manifest(wanted, digest)
        offered = sorted({f"{one.get('os')}/{one.get('architecture')}" for one in platforms})
        raise errors.wrong_platform(str(wanted), f"linux/{architecture}", ", ".join(offered))

    async def _config(self, wanted: Reference, blob: Blob) -> dict[str, Any]:
        if blob.size > _MOST_CONFIG:
            raise errors.unusable(str(wanted), f"its configuration has {blob.size} bytes")
        content = bytearray()
        await self._registry.blob(wanted, blob, content.extend, content.clear)
        try:
            config = json.loads(content)
        except ValueError as error:
            raise errors.unusable(str(wanted), "its configuration is no JSON") from error
        if not isinstance(config, dict):
            raise errors.unusable(str(wanted), "its configuration is no JSON object")
        platform_of = (config.get("os"), config.get("architecture"))
        if platform_of != ("linux", machine()):
            raise errors.wrong_platform(str(wanted), f"linux/{machine()}", f"{platform_of[0]}/{platform_of[1]}")
        return config

    # Layers ------------------------------------------------------------------------------------------------------

    async def _layer(self, wanted: Reference, diff_id: str, blob: Blob) -> Layer:
        if (found := self._found(diff_id)) is not None:
            return found
        async with self._downloads:
            draft = self._root / "drafts" / secrets.token_hex(8)
            try:
                return await self._unpacked(wanted, diff_id, blob, draft)
            finally:
                self._remove_later(draft)

    def _found(self, diff_id: str) -> Layer | None:
        """Returns a layer that is here, of an image or of one that is being pulled."""
        for kept in self._images.values():
            for layer in kept.image.layers:
                if layer.diff_id == diff_id:
                    return layer
        return self._complete.get(_name(diff_id))

    async def _unpacked(self, wanted: Reference, diff_id: str, blob: Blob, draft: Path) -> Layer:
        layer_folder = draft / "layer"
        tree = layer_folder / "fs"
        await asyncio.to_thread(self._make, tree)
        with (draft / "blob").open("w+b") as file:

            def restart() -> None:
                file.seek(0)
                file.truncate()

            await self._registry.blob(wanted, blob, file.write, restart)
            file.flush()
            file.seek(0)
            done = await self._run(wanted, file.fileno(), tree)
        if done["diff_id"] != diff_id:
            raise errors.unusable(str(wanted), f"a layer unpacks to {done['diff_id']}; its configuration has {diff_id}")
        layer = Layer(_name(diff_id), diff_id, int(done["size"]) + ENTRY_BYTES * int(done["entries"]))
        target = self.layers_folder / layer.name
        # One that is there is complete, as it came by this rename, and sandboxes may be on it.
        if not target.exists():
            layer_folder.rename(target)
        self._complete[layer.name] = layer
        return layer

    def _make(self, tree: Path) -> None:
        tree.mkdir(parents=True)
        user = self._options.unpack_as
        if user is not None:
            os.chown(tree, user, user)
        for folder in (tree.parent, tree):
            folder.chmod(0o755)

    async def _run(self, wanted: Reference, blob: int, tree: Path) -> dict[str, Any]:
        try:
            most = self._options.most_image_bytes
            return await unpacked(blob, tree, self._options.unpack_as, most, entries_within(most))
        except unpack.Refused as refused:
            raised = errors.too_large if refused.kind == unpack.LARGE else errors.unusable
            raise raised(str(wanted), str(refused)) from refused

    # Keeping -----------------------------------------------------------------------------------------------------

    def _file(self, image_id: str) -> Path:
        return self._root / "images" / f"{image_id.removeprefix('sha256:')}.json"

    async def _keep(self, image: Image, name: str) -> None:
        known = self._images.get(image.id)
        names = {name} | (known.names if known is not None else set())
        record = {"version": _VERSION, "names": sorted(names), **asdict(image)}
        await asyncio.to_thread(self._write, self._file(image.id), json.dumps(record))
        self._images[image.id] = _Kept(image, names, self._clock())
        self._by_name[name] = image.id

    def _write(self, file: Path, text: str) -> None:
        draft = self._root / "drafts" / secrets.token_hex(8)
        draft.write_text(text)
        draft.rename(file)

    def _trim(self) -> None:
        """Evicts the least recently used images until the rest fits."""
        left, before = self.bytes, self._clock() - _GRACE_S
        for kept in self._by_use():
            if left <= self._options.most_bytes or kept.used_at > before:
                return
            if self._held[kept.image.id] <= 0:
                self._evict(kept)
                left = self.bytes

    def _by_use(self) -> list[_Kept]:
        """Returns all images, the least recently used first."""
        return sorted(self._images.values(), key=lambda one: one.used_at)

    def _evict(self, kept: _Kept) -> None:
        _log.info("an image is evicted", id=kept.image.id, names=sorted(kept.names))
        # The record first: without it a layer is no image's.
        self._file(kept.image.id).unlink(missing_ok=True)
        del self._images[kept.image.id]
        for name in kept.names:
            self._by_name.pop(name, None)
        # Those that a pull needs stay.
        self._complete |= {layer.name: layer for layer in kept.image.layers if self._pulled[layer.name]}
        self.on_evicted(kept.image)
        self._remove_unused([layer.name for layer in kept.image.layers])

    def _remove_unused(self, names: Iterable[str]) -> None:
        used = {layer.name for kept in self._images.values() for layer in kept.image.layers}
        for name in names:
            folder = self.layers_folder / name
            if name not in used and not self._pulled[name] and folder.exists():
                self._remove_later(self._to_draft(folder))

    def _to_draft(self, folder: Path) -> Path:
        target = self._root / "drafts" / secrets.token_hex(8)
        folder.rename(target)
        return target

    def _remove_later(self, path: Path) -> None:
        self._removals.start(asyncio.to_thread(_remove, path), f"remove {path.name}")


def _remove(path: Path) -> None:
    try:
        walk.remove(str(path))
    except OSError as error:
        # Space that the next start reclaims; no reason to refuse service.
        _log.error("what is left of an image was not removed", path=str(path), error=repr(error))


def _whole_names(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        # One that names no image is reported where it is used.
        with contextlib.suppress(PenstockError):
            yield str(reference.parse(name))


def _not_stored(name: str, error: OSError) -> PenstockError:
    # Without the error's own text, which may have a path: callers need neither the service's nor an image's names.
    why = os.strerror(error.errno) if error.errno is not None else "an input or output error"
    if error.errno in DISK_REFUSED:
        return ResourceExhausted(
            f"the image {name} could not be stored: {why}", reason="DISK_LOW", retry_after_s=_DISK_RETRY_S
        )
    if error.errno in _SCARCE:
        return errors.pull_failed(name, why)
    return errors.unusable(name, f"it cannot be stored here: {why}")


def machine() -> str:
    """Returns this machine's architecture as images name it."""
    return _MACHINES.get(platform.machine(), platform.machine())


def _name(diff_id: str) -> str:
    return diff_id.removeprefix("sha256:")[:_NAME_DIGITS]


def _parts_of(wanted: Reference, manifest: Manifest) -> tuple[Blob, list[Blob]]:
    """Returns a manifest's configuration and layers."""
    content = manifest.content
    try:
        config = _blob(content["config"])
        blobs = [_blob(layer) for layer in content["layers"]]
    except (KeyError, TypeError, ValueError) as error:
        raise errors.unusable(str(wanted), f"its manifest ({manifest.kind}) is not an image's") from error
    if len(blobs) > _MOST_LAYERS:
        raise errors.unusable(str(wanted), f"it has {len(blobs)} layers; {_MOST_LAYERS} are the most")
    for blob in blobs:
        if "tar" not in blob.kind:
            raise errors.unusable(str(wanted), f"a layer is {blob.kind}, not a tar")
    return config, blobs


def _blob(entry: Mapping[str, Any]) -> Blob:
    digest, size = str(entry["digest"]), int(entry["size"])
    if not reference.DIGEST.fullmatch(digest) or size < 0:
        raise ValueError(digest)
    return Blob(digest, size, str(entry.get("mediaType") or ""))


def _described(digest: str, layers: Sequence[Layer], config: Mapping[str, Any]) -> Image:
    inner = config.get("config") or {}
    env = dict(str(entry).split("=", 1) for entry in inner.get("Env") or () if "=" in str(entry))
    return Image(digest, tuple(layers), env, str(inner.get("WorkingDir") or ""), str(config["architecture"]))
