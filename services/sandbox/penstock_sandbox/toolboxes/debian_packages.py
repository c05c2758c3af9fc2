"""Debian packages of a task: downloaded from the operator's mirrors, checked by hash, and unpacked, not run.

Invariants
- Only files that a lock names are asked of a mirror, by paths below it or another mirror, and each has the lock's hash.
- No maintainer script, trigger or program of a package runs. Its files are taken by `images.unpack`, in a process
  without the rights of root; no set-user-id bit, owner, device or link is followed or kept that would lead outside.
- Callers' orders of a lock have one result: packages are unpacked in `ordered`'s, by which the toolbox's id goes, too.
- The result has usr, etc and var alone. What a package has in /bin, /sbin or /lib is in usr, as in Debian since 12.
- What is downloaded, and what it unpacks to, are bounded each, over all packages; each entry counts. All packages are
  there, or none.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import structlog

from penstock.values.locks import DebianPackage
from penstock_chassis.aio.retry import Delays, Pause, retry
from penstock_chassis.disk import REFUSED as DISK_REFUSED
from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_sandbox.backends.images import unpack
from penstock_sandbox.backends.images.store import ENTRY_BYTES, entries_within, machine, unpacked
from penstock_sandbox.egress import no_answer
from penstock_sandbox.toolboxes import debian_tree
from penstock_sandbox.toolboxes.installer import take_over
from penstock_sandbox.toolboxes.turns import Turn

if TYPE_CHECKING:
    import aiohttp

FOLDER: Final = "debian"
LAYOUT: Final = 2
"""Changes whenever what is made of a package does: earlier installations are then different toolboxes."""
_ATTEMPTS: Final = 4
_DELAYS: Final = Delays(1.0, 4.0)
_AT_ONCE: Final = 4
_CONNECT_S, _SILENCE_S, _FILE_S = 10.0, 60.0, 900.0
_CHUNK: Final = 1024 * 1024
_MOST_SHOWN: Final = 200
_AR: Final = b"!<arch>\n"
_AR_HEADER: Final = 60
_DATA: Final = frozenset({"data.tar", "data.tar.gz", "data.tar.xz", "data.tar.zst"})

_log = structlog.get_logger(__name__)


class _Failed(Exception):
    """A package that cannot be installed; ``passes``: another attempt may succeed."""

    def __init__(self, package: DebianPackage, code: str, reason: str, advice: str, *, passes: bool = False) -> None:
        super().__init__(f"{package.name}={package.version}: {reason}")
        self.package = package
        self.code = code
        self.advice = advice
        self.passes = passes

    def typed(self) -> Unavailable:
        """Returns the error that callers get."""
        return Unavailable(
            f"Debian packages: {self.code}: {self}; {self.advice}",
            reason="INSTALL_FAILED",
            metadata={
                "packages": self.package.name,
                "debian_code": self.code,
                "permanent": str(not self.passes).lower(),
            },
        )


def ordered(packages: Iterable[DebianPackage]) -> list[DebianPackage]:
    """Returns packages in the order in which they are unpacked, whatever the order of their lock."""
    return sorted(packages, key=lambda one: one.line)


class DebianPackages:
    """Installs from ``mirrors``, URLs in the order in which they are asked; none = nothing is installed.

    ``uid`` is the host user to become if the service is root, None otherwise.
    """

    def __init__(
        self, mirrors: Sequence[str], max_bytes: int, uid: int | None = None, *, pause: Pause = asyncio.sleep
    ) -> None:
        self._mirrors = tuple(mirrors)
        self._max_bytes = max_bytes
        self._uid = uid
        self._pause = pause

    async def install(
        self,
        packages: Sequence[DebianPackage],
        target: Path,
        report: Callable[[str], None],
        turn: Turn = nullcontext,
    ) -> None:
        """Unpacks ``packages`` into ``target``/debian, in a ``turn``.

        Raises FailedPrecondition (CAPABILITY_MISSING), Unavailable (INSTALL_FAILED), and what turns raise.
        """
        if not self._mirrors:
            raise FailedPrecondition(
                "this sandbox service installs no Debian packages: use an image with them; operators: debian_mirrors",
                reason="CAPABILITY_MISSING",
                metadata={"capabilities": "debian_packages"},
            )
        report(f"Debian packages: {len(packages)}")
        # A file of two packages is the later one's: callers' orders are one toolbox.
        packages = ordered(packages)
        try:
            try:
                async with turn():
                    await self._install(packages, target, report)
            except (OSError, ValueError, RecursionError) as error:
                if isinstance(error, OSError) and error.errno in DISK_REFUSED:
                    raise
                _log.warning("Debian packages cannot be installed", error=repr(error))
                raise _unusable(packages[-1], "it, or one before it, cannot be installed here") from None
        except _Failed as failed:
            report(str(failed))
            raise failed.typed() from None

    async def _install(self, packages: Sequence[DebianPackage], target: Path, report: Callable[[str], None]) -> None:
        tree = target / FOLDER
        tree.mkdir(mode=0o755)
        if self._uid is not None:
            os.chown(tree, self._uid, self._uid)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            files = await self._downloaded(packages, Path(folder), report)
            left, entries = self._max_bytes, entries_within(self._max_bytes)
            for package, file in zip(packages, files, strict=True):
                done = await self._unpacked(package, file, tree, left, min(entries, entries_within(left)))
                left -= int(done["size"]) + ENTRY_BYTES * int(done["entries"])
                entries -= int(done["entries"])
                if left < 0:
                    raise _too_large(package, self._max_bytes)
        try:
            await asyncio.to_thread(debian_tree.check, tree)
            await asyncio.to_thread(take_over, tree)
            dropped = await asyncio.to_thread(debian_tree.arrange, tree)
        except unpack.Refused as refused:
            raise _unusable(packages[-1], f"with it {_shown(str(refused))}") from None
        if dropped:
            shown = ", ".join(_shown(name) for name in dropped[:10])
            report(f"left out, as only usr, etc and var are taken: {shown}")

    # Downloading -------------------------------------------------------------------------------------------------

    async def _downloaded(
        self, packages: Sequence[DebianPackage], folder: Path, report: Callable[[str], None]
    ) -> list[Path]:
        import aiohttp  # a tenth of a second of each start, for what few services need

        left = self._max_bytes
        room = asyncio.Semaphore(_AT_ONCE)

        def take(package: DebianPackage, size: int) -> None:
            nonlocal left
            left -= size
            if left < 0:
                raise _too_large(package, self._max_bytes)

        async def one(session: aiohttp.ClientSession, number: int, package: DebianPackage) -> Path:
            if package.machine not in ("all", machine()):
                raise _Failed(package, "ARCHITECTURE", f"it is for {package.machine}", f"lock it for {machine()}")
            async with room:
                report(f"Debian package {package.name} {package.version}")
                with (folder / f"{number}.deb").open("w+b") as file:
                    await self._repeated(session, package, file, lambda size: take(package, size), report)
                return folder / f"{number}.deb"

        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=_FILE_S, sock_connect=_CONNECT_S, sock_read=_SILENCE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            # The file's bytes are what is hashed, whatever the server says of their encoding.
            auto_decompress=False,
            headers={"User-Agent": "penstock", "Accept-Encoding": "identity"},
        ) as session:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(session, *item)) for item in enumerate(packages)]
            except BaseExceptionGroup as failures:
                # The first has cancelled the others.
                raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _repeated(
        self,
        session: aiohttp.ClientSession,
        package: DebianPackage,
        file: IO[bytes],
        take: Callable[[int], None],
        report: Callable[[str], None],
    ) -> None:
        await retry(
            lambda: self._anywhere(session, package, file, take),
            _DELAYS,
            patience_s=lambda error: math.inf if isinstance(error, _Failed) and error.passes else 0.0,
            attempts=_ATTEMPTS,
            on_retry=lambda error, delay_s: report(f"{error}; again in {delay_s:g} s"),
            pause=self._pause,
        )

    async def _anywhere(
        self, session: aiohttp.ClientSession, package: DebianPackage, file: IO[bytes], take: Callable[[int], None]
    ) -> None:
        """Asks each mirror; raises what is worst: a wrong file, a mirror that does not answer, an absent file."""
        failures: list[_Failed] = []
        for mirror in self._mirrors:
            try:
                return await self._asked(session, mirror, package, file, take)
            except _Failed as failed:
                if failed.code == "TOO_LARGE":
                    raise
                failures.append(failed)
        raise min(failures, key=lambda one: ("HASH_MISMATCH", "UNREACHABLE", "NOT_FOUND").index(one.code))

    async def _asked(
        self,
        session: aiohttp.ClientSession,
        mirror: str,
        package: DebianPackage,
        file: IO[bytes],
        take: Callable[[int], None],
    ) -> None:
        from penstock_sandbox.toolboxes import debian_mirrors

        digest, size = hashlib.sha256(), 0
        file.seek(0)
        file.truncate()
        try:
            async with debian_mirrors.opened(session, f"{mirror}/{package.path}", self._mirrors) as answer:
                if answer.status in (403, 404, 410):
                    raise _Failed(
                        package,
                        "NOT_FOUND",
                        f"no mirror has {package.path} (HTTP {answer.status})",
                        "lock the version that the mirrors have now; operators: debian_mirrors",
                    )
                if answer.status != 200:
                    raise _unreachable(package, f"a mirror answers HTTP {answer.status}")
                async for piece in answer.content.iter_chunked(_CHUNK):
                    take(len(piece))
                    size += len(piece)
                    digest.update(piece)
                    await asyncio.to_thread(file.write, piece)
        except debian_mirrors.FAILURES as error:
            if isinstance(error, OSError) and error.errno in DISK_REFUSED:
                raise
            take(-size)
            _log.warning("a Debian mirror failed", mirror=mirror, file=package.path, error=no_answer.for_log(error))
            raise _unreachable(package, f"a mirror {debian_mirrors.why(error)}") from None
        file.flush()
        if digest.hexdigest() != package.sha256:
            take(-size)
            raise _Failed(
                package,
                "HASH_MISMATCH",
                "the mirror's file has another SHA-256",
                "the file is not the one that was locked: lock it again, or check the mirror",
            )

    # Unpacking ---------------------------------------------------------------------------------------------------

    async def _unpacked(
        self, package: DebianPackage, file: Path, tree: Path, most_bytes: int, most_entries: int
    ) -> dict[str, Any]:
        """Unpacks a package's files over those that are there; returns their bytes, size, and number, entries."""
        data = file.with_suffix(".tar")
        try:
            await asyncio.to_thread(_write_data, file, data)
            with data.open("rb") as blob:
                return await unpacked(blob.fileno(), tree, self._uid, most_bytes, most_entries)
        except unpack.Refused as refused:
            if refused.kind == unpack.LARGE:
                raise _too_large(package, self._max_bytes) from None
            raise _unusable(package, _shown(str(refused))) from None
        except OSError as error:
            if error.errno in DISK_REFUSED:
                raise
            _log.warning("a Debian package cannot be unpacked", file=package.path, error=repr(error))
            reason = "a file of it cannot be written: " + os.strerror(error.errno or errno.EIO)
            raise _unusable(package, reason) from None
        finally:
            file.unlink()
            data.unlink(missing_ok=True)


def _too_large(package: DebianPackage, most: int) -> _Failed:
    reason = f"with it the packages have more than {most} bytes, or {entries_within(most)} entries"
    return _Failed(package, "TOO_LARGE", reason, "lock fewer packages; operators: debian_max_bytes")


def _unusable(package: DebianPackage, reason: str) -> _Failed:
    return _Failed(package, "UNUSABLE", reason, "lock another version, or without it")


def _shown(text: str) -> str:
    """A text with names of a package's author, as printable characters of ASCII and bounded."""
    return ascii(text)[1:-1][:_MOST_SHOWN]


def _unreachable(package: DebianPackage, reason: str) -> _Failed:
    return _Failed(package, "UNREACHABLE", reason, "try again; operators: debian_mirrors, and the proxy", passes=True)


def _write_data(package: Path, target: Path) -> None:
    """Copies the archive of a package's files, as it is compressed. Raises unpack.Refused."""
    with package.open("rb") as file, target.open("wb") as data:
        if file.read(len(_AR)) != _AR:
            raise unpack.Refused(unpack.DAMAGED, "it is no Debian package")
        # control, data and what tools add to them are few.
        for _ in range(16):
            header = file.read(_AR_HEADER)
            digits = header[48:58].strip()
            if len(header) < _AR_HEADER or not digits.isdigit():
                break
            size, name = int(digits), header[:16].decode("ascii", "replace").strip().rstrip("/")
            if name in _DATA:
                left = size
                while left and (piece := file.read(min(left, _CHUNK))):
                    data.write(piece)
                    left -= len(piece)
                if left:
                    raise unpack.Refused(unpack.DAMAGED, "the package ends early")
                return
            file.seek(size + size % 2, os.SEEK_CUR)
    raise unpack.Refused(unpack.DAMAGED, f"the package has none of {', '.join(sorted(_DATA))}")
