"""A real image registry on loopback (Debian's docker-registry), and images that are pushed to it byte by byte."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from tests.support.absent import absent
from tests.support.waiting import eventually

ADVICE: Final = "apt-get install -y --no-install-recommends docker-registry skopeo umoci"
MACHINE: Final = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_LAYER: Final = "application/vnd.oci.image.layer.v1.tar+gzip"
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"

USER: Final = "penstock"
PASSWORD: Final = "loopback"
# bcrypt, the one kind that it takes; of PASSWORD.
_HASHED: Final = "$2y$04$abcdefghijklmnopqrstuuK6Z2t6B12451zvTkgfvZ0Xhp7HHreWm"

Entry = tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]


def program(name: str) -> str:
    """A program of Debian's; skips, or fails where CI is set, if it is not installed."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin")
    if found is None:
        absent(f"{name} is not installed: {ADVICE}")
    return str(found)


def digest(content: bytes) -> str:
    """A content's name."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def entry(name: str, content: bytes | None = None, kind: bytes = tarfile.REGTYPE, **fields: Any) -> Entry:
    """A member of a layer: a file of ``content``, or, without one, a directory."""
    member = tarfile.TarInfo(name)
    member.mode = 0o755
    member.type = tarfile.DIRTYPE if content is None and kind == tarfile.REGTYPE else kind
    for field, value in fields.items():
        setattr(member, field, value)
    if content is None or kind != tarfile.REGTYPE:
        return member
    member.size = len(content)
    return member, content


def layer(entries: Iterable[Entry]) -> bytes:
    """A layer's tar."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for one in entries:
            if isinstance(one, tuple):
                archive.addfile(one[0], io.BytesIO(one[1]))
            else:
                archive.addfile(one)
    return sink.getvalue()


@dataclass
class Registry:
    """A running registry, and the directory that it keeps everything in."""

    host: str
    folder: Path
    log: Path

    def image(self, name: str, tag: str = "1") -> str:
        """How a spec names an image of it."""
        return f"{self.host}/{name}:{tag}"

    async def push(
        self,
        name: str,
        layers: Sequence[bytes],
        config: Mapping[str, Any] | None = None,
        *,
        tag: str = "1",
        diff_ids: Sequence[str] | None = None,
        architecture: str = MACHINE,
        headers: Mapping[str, str] | None = None,
        level: int = 1,
    ) -> str:
        """Push an image of these tars; returns its manifest's digest. ``diff_ids``: what its configuration claims.

        ``level``: how hard the layers are compressed, 0 to 9.
        """
        packed = [await asyncio.to_thread(gzip.compress, one, level, mtime=0) for one in layers]
        described = {
            "os": "linux",
            "architecture": architecture,
            "config": dict(config or {}),
            "rootfs": {"type": "layers", "diff_ids": list(diff_ids or map(digest, layers))},
        }
        text = json.dumps(described).encode()
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": {"mediaType": _CONFIG, "digest": digest(text), "size": len(text)},
            "layers": [{"mediaType": _LAYER, "digest": digest(one), "size": len(one)} for one in packed],
        }
        async with aiohttp.ClientSession(headers=headers) as session:
            for blob in {digest(one): one for one in (text, *packed)}.values():
                await self._blob(session, name, blob)
            return await self._manifest(session, name, tag, _MANIFEST, json.dumps(manifest).encode())

    async def push_index(self, name: str, tag: str, entries: Sequence[Mapping[str, Any]]) -> str:
        """Push an index of manifests that are there."""
        content = {"schemaVersion": 2, "mediaType": INDEX, "manifests": list(entries)}
        async with aiohttp.ClientSession() as session:
            return await self._manifest(session, name, tag, INDEX, json.dumps(content).encode())

    async def _blob(self, session: aiohttp.ClientSession, name: str, content: bytes) -> None:
        async with session.post(f"http://{self.host}/v2/{name}/blobs/uploads/") as begun:
            assert begun.status == 202, await begun.text()
            place = begun.headers["Location"]
        sign = "&" if "?" in place else "?"
        async with session.put(f"{place}{sign}digest={digest(content)}", data=content) as done:
            assert done.status == 201, await done.text()

    async def _manifest(self, session: aiohttp.ClientSession, name: str, tag: str, kind: str, content: bytes) -> str:
        url = f"http://{self.host}/v2/{name}/manifests/{tag}"
        async with session.put(url, data=content, headers={"Content-Type": kind}) as done:
            assert done.status == 201, await done.text()
        return digest(content)


@asynccontextmanager
async def registry(*, closed: bool = False) -> AsyncIterator[Registry]:
    """Run a registry; a ``closed`` one answers USER with PASSWORD alone."""
    path = program("docker-registry")
    with tempfile.TemporaryDirectory(prefix="penstock-registry-") as place:
        folder = Path(place)
        settings: dict[str, Any] = {
            "version": 0.1,
            "log": {"level": "info"},
            "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
            "http": {"addr": "127.0.0.1:0"},
        }
        if closed:
            users = folder / "users"
            users.write_text(f"{USER}:{_HASHED}\n")
            settings["auth"] = {"htpasswd": {"realm": "tests", "path": str(users)}}
        (folder / "config.yml").write_text(json.dumps(settings))
        log = folder / "log"
        with log.open("wb") as sink:
            process = await asyncio.create_subprocess_exec(
                path, "serve", str(folder / "config.yml"), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
            )
        try:
            yield Registry(await _address(log, process), folder, log)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _address(log: Path, process: asyncio.subprocess.Process) -> str:
    """Where it listens, once it does."""
    found: list[str] = []

    def listens() -> bool:
        found[:] = re.findall(r"listening on (127\.0\.0\.1:\d+)", log.read_text())
        return bool(found) or process.returncode is not None

    await eventually(listens, "the registry listens")
    assert found, f"the registry ended: {log.read_text()[-2000:]}"
    return found[0]
