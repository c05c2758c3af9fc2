"""Passes the pip settings of this machine and of the service's user to a pip that runs with another home.

Purpose: where `pip install` works for a user, it works for the service started by that user: with the same indexes,
certificates, credentials and proxies.

Invariants: only pip's settings, proxies and certificates are passed, never the service's own variables; copies are
readable by the installer's user alone; no value is returned to callers or logged.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PASSED: Final = (
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "ALL_PROXY",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
)
# Settings of where to look and how to fetch. Others could change what pip installs, or where.
_SETTINGS: Final = (
    "cert",
    "client-cert",
    "default-timeout",
    "extra-index-url",
    "find-links",
    "index-url",
    "keyring-provider",
    "no-index",
    "proxy",
    "resume-retries",
    "timeout",
    "trusted-host",
)
_CERTIFICATES: Final = ("PIP_CERT", "PIP_CLIENT_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


def environment(home: Path) -> dict[str, str]:
    """Returns the whole environment of a pip with the new directory ``home`` as its home.

    Copies certificates and credentials into ``home``: the installer's user may not be able to read the originals.
    """
    passed = {name: value for name, value in os.environ.items() if name.upper() in _PASSED}
    for setting in _SETTINGS:
        variable = f"PIP_{setting.upper().replace('-', '_')}"
        value = os.environ.get(variable) or _configured(setting)
        if value:
            passed[variable] = value
    for variable in _CERTIFICATES:
        content = _read(Path(passed[variable])) if variable in passed else b""
        if content:
            passed[variable] = str(_written(home / f"{variable}.pem", content))
    if netrc := _read(Path(os.environ.get("NETRC") or Path.home() / ".netrc")):
        _written(home / ".netrc", netrc)
    return {
        **passed,
        "HOME": str(home),
        "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
        # The files' content is passed already; the installer's user might not be able to read them.
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_CACHE_DIR": str(home / "cache"),
        "LANG": "C.UTF-8",
    }


def _configured(setting: str) -> str:
    """Returns a setting from pip's files, of which the last wins; list items are joined by blanks, as in variables."""
    value = ""
    for file in _files():
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(_read(file).decode("utf-8", "replace"))
        except configparser.Error:
            continue
        for section in ("global", "install"):
            value = parser.get(section, setting, fallback=value)
    return " ".join(value.split())


def _files() -> Iterator[Path]:
    """Yields pip's settings files in pip's order, the strongest last."""
    if (named := os.environ.get("PIP_CONFIG_FILE")) == os.devnull:
        return
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    yield from (Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf"))
    yield from (Path.home() / ".pip" / "pip.conf", settings / "pip" / "pip.conf", Path(sys.prefix) / "pip.conf")
    if named:
        yield Path(named)


def _read(path: Path) -> bytes:
    """Returns a file's content; nothing if it is absent or unreadable, as in pip itself."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _written(path: Path, content: bytes) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(content)
    return path
