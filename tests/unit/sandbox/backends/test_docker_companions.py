"""What the Docker backend reads of a companion's image: who root is, and which check it declares."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from penstock_sandbox.backends.docker.cleanup.reaper import Owner
from penstock_sandbox.backends.docker.companions import Companions, declared_check
from penstock_sandbox.backends.docker.engine.errors import Missing
from penstock_sandbox.backends.docker.options import DockerOptions
from penstock_sandbox.domain.model import HealthCheck


class Accounts:
    """A daemon with one container, whose list of accounts is a text, a link (None), or not there."""

    def __init__(self, *content: str | None) -> None:
        self._content = content

    async def has(self, container: str, path: str) -> bool:
        return bool(self._content)

    async def fetch(self, container: str, path: str, limit: int) -> bytes:
        if not self._content:
            raise Missing(404, path)
        member, text = tarfile.TarInfo("passwd"), (self._content[0] or "").encode()
        if self._content[0] is None:
            member.type, member.linkname = tarfile.SYMTYPE, "other"
        member.size = len(text)
        with tarfile.open(fileobj=(whole := io.BytesIO()), mode="w") as archive:
            archive.addfile(member, io.BytesIO(text))
        return whole.getvalue()


@pytest.mark.requirement("R54", "R55")
@pytest.mark.parametrize(
    ("accounts", "user", "root"),
    [
        (("postgres:x:999:999::/:/bin/sh\n",), "postgres", False),
        (("postgres:x:999:999::/:/bin/sh\n",), "postgres:root", False),
        ((), "65534", False),
        ((), "0", True),
        ((), "postgres", True),
        (("a:x:1:1::/:\n",), "postgres", True),
        (("toor:x:0:0::/:\n",), "toor", True),
        (("toor:x:00:0::/:\n",), "toor", True),
        # A name of digits, and an id that is none.
        (("65534:x:0:0::/:\n",), "65534", True),
        (("a:x:none:1::/:\n",), "a", True),
        (("a\n",), "a", True),
        (("a:x:1:1::/:\n a:x:0:0::/:\n",), "a", True),
        ((None,), "65534", True),
    ],
)
async def test_whoever_may_be_root_is_found(
    tmp_path: Path, accounts: tuple[str | None, ...], user: str, root: bool
) -> None:
    """As the daemon itself finds an account, where the image was made to deceive."""
    daemon: Any = Accounts(*accounts)
    unused: Any = None
    companions = Companions(DockerOptions(tmp_path, "a", "b"), daemon, Owner("i", "r"), unused, unused)
    assert await companions.may_be_root("container", user) is root


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({}, HealthCheck()),
        ({"Healthcheck": {"Test": ["NONE"]}}, HealthCheck()),
        ({"Healthcheck": {"Test": ["CMD", "check", "-q"]}}, HealthCheck(("check", "-q"))),
        (
            {
                "Healthcheck": {"Test": ["CMD-SHELL", "check || exit 1"], "Interval": 5 * 10**9, "Retries": 9},
                "Shell": ["/bin/bash", "-c"],
            },
            HealthCheck(("/bin/bash", "-c", "check || exit 1"), interval_s=5.0, retries=9),
        ),
    ],
)
def test_an_images_own_check_is_used(declared: dict[str, Any], expected: HealthCheck) -> None:
    assert declared_check(declared) == expected
