"""Locks of Debian packages, made by this machine's apt: what it would install, each file with its path and its SHA-256.

Invariants: nothing is installed, and nothing is changed; names are passed to apt as names alone, never as options.
"""

import asyncio
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from penstock.client.errors import ConfigurationError, FailedPrecondition, InvalidArgument
from penstock.values.locks import DebianPackage, LockProblem, debian_lock

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9+.-]{1,127}(=[0-9][A-Za-z0-9.+:~-]{0,127})?")
_PLANNED: Final = re.compile(
    r"Inst (?P<name>[a-z0-9][a-z0-9+.-]*)(?::\S+)? (?:\[\S+\] )?\((?P<version>\S+) .*\[(?P<machine>\S+)\]\)"
)
_TAIL_CHARACTERS: Final = 2000


async def lock(names: Sequence[str], status: Path | None = None) -> tuple[DebianPackage, ...]:
    """Returns packages, with those dependencies that are not installed; recommended ones are left out.

    Args:
        names: of packages, as NAME or NAME=VERSION; at least one.
        status: of dpkg, as /var/lib/dpkg/status of the image that the lock is for; None = this machine's.

    Raises:
        InvalidArgument: a name is none, or there is no name.
        ConfigurationError: this machine has no apt (APT_MISSING).
        FailedPrecondition: apt does not know a package, or cannot install it (LOCK_FAILED).
    """
    wrong = next((name for name in names if not _NAME.fullmatch(name)), None)
    if wrong is not None or not names:
        raise InvalidArgument(f"expected names of Debian packages, as jq or jq=1.6-2.1, not {wrong!r}")
    if shutil.which("apt-get") is None or shutil.which("apt-cache") is None:
        raise ConfigurationError("a lock of Debian packages needs apt: make it on Debian", reason="APT_MISSING")
    where = [] if status is None else ["-o", f"Dir::State::status={status.absolute()}"]
    # Those that are named are locked even if they are installed here: sandboxes of an image may lack them.
    planned = await _asked(
        "apt-get", *where, "--simulate", "--no-install-recommends", "--reinstall", "install", "--", *names
    )
    wanted = {
        (found["name"], found["version"], found["machine"])
        for found in map(_PLANNED.match, planned.splitlines())
        if found
    }
    if not wanted:
        raise FailedPrecondition("apt would install nothing", reason="LOCK_FAILED")
    named = [
        f"{name}:{machine}={version}" if machine != "all" else f"{name}={version}" for name, version, machine in wanted
    ]
    described = await _asked("apt-cache", *where, "show", "--", *sorted(named))
    lines = {}
    for text in described.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in text.splitlines() if re.match(r"[A-Za-z0-9-]+: ", line))
        key = (fields.get("Package", ""), fields.get("Version", ""), fields.get("Architecture", ""))
        # What is only installed, and on no mirror, has neither.
        if key in wanted and "Filename" in fields and "SHA256" in fields:
            lines[key] = f"{key[0]}={key[1]} {fields['Filename'].removeprefix('./')} --hash=sha256:{fields['SHA256']}"
    if missing := wanted - lines.keys():
        raise FailedPrecondition(
            f"no mirror of apt has {', '.join('='.join(key[:2]) for key in sorted(missing))}: run `apt-get update`",
            reason="LOCK_FAILED",
        )
    try:
        return debian_lock("\n".join(lines[key] for key in sorted(lines)))
    except LockProblem as problem:
        raise FailedPrecondition(f"apt's packages cannot be locked: {problem}", reason="LOCK_FAILED") from None


async def _asked(program: str, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        program, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, problem = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode != 0:
        text = problem.decode("utf-8", "replace").strip()[-_TAIL_CHARACTERS:]
        raise FailedPrecondition(f"{program} failed: {text}", reason="LOCK_FAILED")
    return output.decode("utf-8", "replace")
