"""The built page: its files, read once, and the headers that keep a browser from running anything else.

Invariant: the files are served as they were when read; no path of a request reaches the file system.
"""

import hashlib
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.client.errors import ConfigurationError

STATIC: Final = Path(__file__).parent / "static"
"""Output directory of `make dashboard`."""

HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
"""Headers of every answer."""


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    content_type: str
    cache_control: str
    etag: str


def load(directory: Path = STATIC) -> Mapping[str, Asset]:
    """Returns the page's files by path, `index.html` also under the empty one.

    Raises:
        ConfigurationError: `DASHBOARD_NOT_BUILT`.
    """
    if not (directory / "index.html").is_file():
        raise ConfigurationError(
            "The dashboard's page is not built: run `make dashboard` in a checkout (it needs Node.js), or install"
            " a released wheel, which has it.",
            reason="DASHBOARD_NOT_BUILT",
        )
    found = {
        path.relative_to(directory).as_posix(): _asset(path, is_named_by_content=path.parent.name == "assets")
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    return {"": found["index.html"], **found}


def _asset(path: Path, *, is_named_by_content: bool) -> Asset:
    body = path.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    text = kind.startswith("text/") or kind.endswith(("javascript", "json", "svg+xml"))
    return Asset(
        body=body,
        content_type=f"{kind}; charset=utf-8" if text else kind,
        cache_control="public, max-age=31536000, immutable" if is_named_by_content else "no-cache",
        etag=f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    )
