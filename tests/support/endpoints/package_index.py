"""Locks, and what they lock: packages that are made here, and an index of PyPI's and a registry of npm's kind for them.

The indexes are real servers on loopback, of which the real pip and npm install. They count what is fetched, and may ask
for a password.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import tarfile
import threading
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

USER: Final = "reader"
PASSWORD: Final = "a-password-of-the-index"


def wheel(name: str, modules: Mapping[str, str], programs: Mapping[str, str], version: str = "1.0") -> bytes:
    """A wheel of a package with modules by file name, and programs by name."""
    info = f"{name}-{version}.dist-info"
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for file, text in modules.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        entries = "".join(f"{program} = {target}\n" for program, target in programs.items())
        archive.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{entries}")
        archive.writestr(f"{info}/RECORD", "")
    return content.getvalue()


def source_distribution(name: str, setup: str) -> bytes:
    """A source distribution, whose setup.py pip would run."""
    return _tar({f"{name}-1.0/setup.py": setup, f"{name}-1.0/PKG-INFO": f"Name: {name}\nVersion: 1.0\n"})


def npm_package(manifest: Mapping[str, Any], files: Mapping[str, str]) -> bytes:
    """An npm package's archive."""
    return _tar({"package/package.json": json.dumps(manifest), **{f"package/{k}": v for k, v in files.items()}})


def line(name: str, content: bytes, version: str = "1.0") -> str:
    """A package's line in a requirements file with hashes."""
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(content).hexdigest()}\n"


def integrity(content: bytes) -> str:
    """An archive's integrity, as in a package-lock.json."""
    return "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()


def npm_lock(packages: Mapping[str, Mapping[str, Any]], **root: Any) -> str:
    """A package-lock.json of packages by their names."""
    wanted = {name: entry["version"] for name, entry in packages.items()}
    entries = {f"node_modules/{name}": entry for name, entry in packages.items()}
    whole = {"lockfileVersion": 3, "requires": True, "packages": {"": {"dependencies": wanted, **root}, **entries}}
    return json.dumps({"name": "project", **whole})


NPM_LOCK: Final = npm_lock({"tool": {"version": "1.0.0", "integrity": integrity(b"anything")}})
"""One that can be read, of a package that is nowhere."""


@dataclass
class Index:
    """An index: files by their paths, and how often each was fetched."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    fetched: Counter[str] = field(default_factory=Counter)
    refused: int = 0

    @property
    def with_password(self) -> str:
        """Its address, with what it asks for."""
        return self.url.replace("://", f"://{USER}:{PASSWORD}@")

    def add_python(self, file: str, content: bytes) -> None:
        """Adds a distribution, as PEP 503 lists it."""
        name = file.partition("-")[0]
        self.files[f"/files/{file}"] = content
        self.files[f"/simple/{name}/"] = f'<a href="/files/{file}">{file}</a>'.encode()

    def add_npm(self, name: str, version: str, content: bytes, manifest: Mapping[str, Any]) -> None:
        """Adds a package with one version."""
        path = f"/npm/{name}/-/{name}-{version}.tgz"
        self.files[path] = content
        dist = {"tarball": f"{self.url}{path}", "integrity": integrity(content)}
        versions = {version: {**manifest, "dist": dist}}
        document = {"name": name, "dist-tags": {"latest": version}, "versions": versions}
        self.files[f"/npm/{name}"] = json.dumps(document).encode()


@contextmanager
def index(*, password: bool = False) -> Iterator[Index]:
    """Serves an index; with `password`, to those alone who know it."""
    expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if password and self.headers.get("Authorization") != expected:
                served.refused += 1
                self._answer(401, b"")
                return
            content = served.files.get(self.path)
            served.fetched[self.path] += 1
            self._answer(404 if content is None else 200, content or b"")

        def _answer(self, status: int, content: bytes) -> None:
            self.send_response(status)
            if status == 401:
                self.send_header("WWW-Authenticate", 'Basic realm="index"')
            is_document = self.path.startswith("/npm/") and not self.path.endswith(".tgz")
            kind = "text/html" if self.path.startswith("/simple/") else "application/octet-stream"
            self.send_header("Content-Type", "application/json" if is_document else kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served = Index(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()


def _tar(files: Mapping[str, str]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text.encode()), 0o755
            archive.addfile(member, io.BytesIO(text.encode()))
    return gzip.compress(content.getvalue(), mtime=0)
