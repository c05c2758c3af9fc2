"""Passes the npm settings of this machine and of the service's user to an installer with another home.

Purpose: where `npm view` works for a user, the installer works for the service started by that user: with the same
registry, certificates and proxies. npm itself is asked for the paths of its settings, because `--prefix`, another HOME
and another user each change them.

Invariants: only npm's settings, proxies and certificates are passed, and the variables that settings reference as
`${NAME}`, never the service's own; copies are readable by the installer's user alone; no value is returned or logged.
npm starts no other program: neither git, nor another npm, which would read the settings that a package's author wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

NO_PROGRAMS: Final = """\
// Loaded before npm: it starts no other program.
const programs = require("node:child_process");
for (const name of ["exec", "execFile", "execFileSync", "execSync", "fork", "spawn", "spawnSync"]) {
    programs[name] = () => {
        const what = "npm may start no other program here, which a dependency from git needs";
        throw Object.assign(new Error(what), { code: "EALLOWGIT" });
    };
}
"""
"""npm prepares a git dependency by git and by another npm in the clone, although it runs no scripts. The clone's .npmrc
may name the program that is git, and options of Node.js, and may send what ${NAME} stands for to any registry."""
_TIMEOUT_S = 30.0
_PASSED = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE", "SSL_CERT_DIR")
# Settings that the installer sets itself, or that would change where it installs.
_OWN = ("userconfig", "globalconfig", "prefix", "global", "location", "cache", "cafile")
_NAMED = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\??\}")
_SERVICE_PREFIX = "PENSTOCK_"
_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_IN_SETTING = re.compile(r"((?:_auth|_authToken|_password|token|password)\s*[=:]\s*)\S+", re.IGNORECASE)


async def environment(command: Sequence[str], home: Path) -> dict[str, str]:
    """Returns the whole environment of an installer that ``command`` runs with the new directory ``home`` as its home.

    Copies settings files and certificates into ``home``: the installer's user may not be able to read the originals.
    """
    passed = {name: value for name, value in os.environ.items() if _is_passed(name)}
    named: dict[str, str] = {}
    found = await _ask(command)
    for setting in ("globalconfig", "userconfig"):
        source = found.get(setting, "")
        # Set even if there is nothing to read: with --prefix npm would look for the machine's settings below it.
        copy = home / setting
        text = _read(Path(source)) if source else b""
        named.update(_named(text.decode(errors="replace")))
        _write(copy, text)
        passed[f"npm_config_{setting}"] = str(copy)
    # Variables win over files, and a relative path or one in a closed directory could not be found from there.
    for variable, source in (
        ("npm_config_cafile", found.get("cafile", "")),
        ("NODE_EXTRA_CA_CERTS", passed.get("NODE_EXTRA_CA_CERTS", "")),
    ):
        if source and (certificates := _read(Path(source))):
            copy = home / f"{variable}.pem"
            _write(copy, certificates)
            passed[variable] = str(copy)
    _write(home / "no_programs.cjs", NO_PROGRAMS.encode())
    return {
        **named,
        **passed,
        "NODE_OPTIONS": f'--require "{home}/no_programs.cjs"',
        "HOME": str(home),
        "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
        "npm_config_cache": str(home / "cache"),
        "LANG": "C.UTF-8",
    }


def without_secrets(line: str) -> str:
    """Returns ``line`` without credentials in addresses and settings: callers see npm's output."""
    return _IN_SETTING.sub(r"\1***", _IN_URL.sub("***@", line))


def _is_passed(name: str) -> bool:
    if name.lower().startswith("npm_config_"):
        # npm reads these in any case, and treats _ and - alike.
        return name.lower().removeprefix("npm_config_") not in _OWN
    return name.upper() in _PASSED


async def _ask(command: Sequence[str]) -> Mapping[str, str]:
    """Returns npm's paths of settings and certificates for the service's own user; the usual ones if npm fails."""
    names = ("globalconfig", "userconfig", "cafile")
    # Run in the root directory: settings of a project in the service's working directory are not the machine's.
    process = subprocess.Popen(  # noqa: ASYNC220
        [*command, "config", "get", *names],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={
            **{name: value for name, value in os.environ.items() if name.lower().startswith("npm_config_")},
            "HOME": str(Path.home()),
            "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
        },
        cwd="/",
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            answer, _ = await asyncio.to_thread(process.communicate)
    except TimeoutError:
        # The user's own settings have one usual path; the machine's have several.
        return {"userconfig": str(Path.home() / ".npmrc")}
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)
    values = dict(line.split("=", 1) for line in answer.decode(errors="replace").splitlines() if "=" in line)
    return {name: values[name] for name in names if values.get(name, "null") not in ("null", "undefined", "")}


def _named(text: str) -> dict[str, str]:
    return {
        name: os.environ[name]
        for name in _NAMED.findall(text)
        if name in os.environ and not name.startswith(_SERVICE_PREFIX)
    }


def _read(path: Path) -> bytes:
    """Returns a file's content; nothing if it is absent or unreadable, as in npm itself."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _write(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
