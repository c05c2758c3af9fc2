"""The header by which a router outside knows the requests of one session: vLLM's, SGLang's, Dynamo's, a proxy's."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_TAKEN: Final = frozenset(
    {
        "accept",
        "accept-encoding",
        "api-key",
        "authorization",
        "connection",
        "content-length",
        "content-type",
        "cookie",
        "host",
        "transfer-encoding",
        "x-api-key",
        "x-goog-api-key",
    }
)
_SAFE: Final = "#/:~"


def checked_name(name: str) -> str:
    """Returns a header's name in lower case; empty stays empty. Raises ValueError."""
    if name and (_NAME.fullmatch(name) is None or name.lower() in _TAKEN):
        raise ValueError("must be the name of a header that carries nothing else, such as x-session-id")
    return name.lower()


def headers(name: str, session_id: str) -> dict[str, str]:
    """Returns the header that carries a session's id; none without a name or an id. Odd characters are quoted."""
    return {name: quote(session_id, safe=_SAFE)} if name and session_id else {}
