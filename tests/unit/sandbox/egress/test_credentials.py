"""Whose login a request gets."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from penstock_sandbox.egress.credentials import Credentials
from penstock_sandbox.egress.requests import Origin, Request


@pytest.mark.requirement("R141")
def test_a_login_is_of_a_host_that_is_named(tmp_path: Path) -> None:
    """Not of all others, nor of a host that is called default."""
    file = tmp_path / "netrc"
    file.write_text("machine a.test login u password p\ndefault login any password secret\n")
    file.chmod(0o600)
    credentials = Credentials(file, {})

    def header(host: str) -> str | None:
        return credentials.header(Request("GET", Origin("https", host, 443), "/", {}, b""))

    assert header("a.test") == "Basic " + base64.b64encode(b"u:p").decode()
    assert header("b.test") is None and header("default") is None
