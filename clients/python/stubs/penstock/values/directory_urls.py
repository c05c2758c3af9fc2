"""URLs of directories in which services keep files: of a shared file system, or of an object store."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

LOCAL: Final = frozenset({"file", "local"})
_SCHEME: Final = "://"


def checked(url: str, service: str, schemes: Collection[str] = ()) -> str:
    """Returns the URL without a slash at its end.

    Args:
        url: such as `s3://bucket/runs`.
        service: the service that uses it, for messages.
        schemes: those that it may have; none = any that fsspec knows.

    Raises:
        ValueError: says what is wrong, without repeating the URL, which may hold a password.
    """
    scheme, found, rest = url.partition(_SCHEME)
    if not found or not scheme.isidentifier() or not rest.strip("/") or "::" in url:
        raise ValueError("a URL of a directory such as s3://bucket/runs, gs://bucket/runs or file:///data/runs")
    if schemes and scheme not in schemes:
        raise ValueError(f"a URL that begins with {' or '.join(f'{name}://' for name in schemes)}")
    parts = urlsplit(url)
    if parts.password is not None or parts.query or parts.fragment:
        raise ValueError(
            f"without a password, query or fragment: credentials come from the environment of the {service}, as "
            "fsspec's filesystem for this URL reads them"
        )
    if scheme in LOCAL and not rest.startswith("/"):
        raise ValueError("an absolute path: file:///data/runs")
    return url.rstrip("/")
