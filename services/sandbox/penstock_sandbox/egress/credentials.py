"""What the proxy adds to requests upstream."""

from __future__ import annotations

import base64
import netrc
from collections.abc import Mapping
from pathlib import Path

from penstock_sandbox.egress.requests import Request


class Credentials:
    """Bearer tokens by host, and logins from a file in netrc's format: the service's, which no sandbox sees."""

    def __init__(self, file: Path | None, tokens: Mapping[str, str]) -> None:
        self._logins = dict(netrc.netrc(str(file)).hosts) if file is not None else {}
        # A login for every host is one for the hosts of strangers; netrc's module keeps it as that of a host "default".
        self._logins.pop("default", None)
        self._tokens = tokens

    def header(self, request: Request) -> str | None:
        """Returns a request's Authorization; None without TLS, which would show it to the network."""
        host = request.origin.host
        if request.origin.scheme != "https":
            return None
        if (token := self._tokens.get(host)) is not None:
            return f"Bearer {token}"
        if (entry := self._logins.get(host)) is None:
            return None
        login, _, password = entry
        return "Basic " + base64.b64encode(f"{login}:{password}".encode()).decode()
