"""An image registry on loopback with one image in it: enough of the distribution API for a daemon to pull."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import tarfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

NAME: Final = "small"
_UNKNOWN: Final = b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}'
_MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"


@dataclass
class Registry:
    """A running registry. While ``gate`` is not set, it answers nothing."""

    address: str
    gate: asyncio.Event
    asked: Counter[str] = field(default_factory=Counter)

    @property
    def image(self) -> str:
        """The image's name."""
        return f"{self.address}/{NAME}:1"


@asynccontextmanager
async def registry(marker: str, *, answering: bool = True) -> AsyncIterator[Registry]:
    """Serve an image that is a file named ``marker`` and nothing else."""
    content = _content(marker)
    gate = asyncio.Event()
    if answering:
        gate.set()
    made = Registry("", gate)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                while (await reader.readline()).strip():
                    pass
                await gate.wait()
                made.asked[f"{method} {path}"] += 1
                status, kind, body = content.get(path, ("404 Not Found", "application/json", _UNKNOWN))
                head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                head += (
                    f"Docker-Content-Digest: {_digest(body)}\r\nDocker-Distribution-Api-Version: registry/2.0\r\n\r\n"
                )
                writer.write(head.encode() + (b"" if method == "HEAD" else body))
                await writer.drain()
        except (OSError, ValueError):
            pass  # the daemon left
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        made.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield made


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _content(marker: str) -> dict[str, tuple[str, str, bytes]]:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(marker), io.BytesIO())
    layer = sink.getvalue()
    packed = gzip.compress(layer, mtime=0)
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["FROM_IMAGE=yes"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": {
                "mediaType": "application/vnd.docker.container.image.v1+json",
                "size": len(config),
                "digest": _digest(config),
            },
            "layers": [
                {
                    "mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip",
                    "size": len(packed),
                    "digest": _digest(packed),
                }
            ],
        }
    ).encode()
    ok = "200 OK"
    return {
        "/v2/": (ok, "application/json", b"{}"),
        f"/v2/{NAME}/manifests/1": (ok, _MANIFEST, manifest),
        f"/v2/{NAME}/manifests/{_digest(manifest)}": (ok, _MANIFEST, manifest),
        f"/v2/{NAME}/blobs/{_digest(config)}": (ok, "application/octet-stream", config),
        f"/v2/{NAME}/blobs/{_digest(packed)}": (ok, "application/octet-stream", packed),
    }
