"""What the Docker backend reads of a companion's image: whom a user is, and which check it declares."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, PenstockError
from penstock_sandbox.backends.docker.cleanup.reaper import Owner
from penstock_sandbox.backends.docker.companions import Companions, Planned, declared_check
from penstock_sandbox.backends.docker.engine.errors import Missing, Refused
from penstock_sandbox.backends.docker.images import account_files
from penstock_sandbox.backends.docker.images.account_files import Ids, ids_of
from penstock_sandbox.backends.docker.options import DockerOptions
from penstock_sandbox.domain.model import Companion, HealthCheck


class Files:
    """A daemon with one container, of which it has texts, links (str after "->") and pipes (None) by path."""

    def __init__(self, **content: str | None) -> None:
        self._content = {f"/etc/{name}": text for name, text in content.items()}

    async def stat(self, container: str, path: str) -> dict[str, Any] | None:
        if path not in self._content:
            return None
        text = self._content[path]
        if text is None:
            return {"mode": 0o644 | 1 << 25, "linkTarget": ""}
        if text.startswith("->"):
            return {"mode": 0o777 | 1 << 27, "linkTarget": text.removeprefix("->")}
        return {"mode": 0o644, "linkTarget": ""}

    async def fetch(self, container: str, path: str, limit: int) -> bytes:
        text = (self._content[path] or "").encode()
        member = tarfile.TarInfo("file")
        member.size = len(text)
        with tarfile.open(fileobj=(whole := io.BytesIO()), mode="w") as archive:
            archive.addfile(member, io.BytesIO(text))
        return whole.getvalue()


POSTGRES = "root:x:0:0::/root:/bin/sh\npostgres:x:999:998::/:/bin/sh\n"
GROUPS = "root:x:0:\npostgres:x:998:\ncerts:x:101:other,postgres\nstaff:x:50:postgresql\n"


@pytest.mark.requirement("R54", "R55")
@pytest.mark.parametrize(
    ("accounts", "user", "ids"),
    [
        (POSTGRES, "postgres", Ids(999, 998, (101,))),
        (POSTGRES, "999", Ids(999, 998, (101,))),
        (POSTGRES, "postgres:root", Ids(999, 0)),
        (POSTGRES, "postgres:certs", Ids(999, 101)),
        (POSTGRES, "postgres:7", Ids(999, 7)),
        (POSTGRES, "", Ids(0, 0)),
        (POSTGRES, "root", Ids(0, 0)),
        # As images without accounts have it, and those whose files belong to the group 0.
        ("", "1001", Ids(1001, 0)),
        ("", "00", Ids(0, 0)),
        ("", "root", Ids(0, 0)),
        ("toor:x:0:0::/:\n", "toor", Ids(0, 0)),
        ("a:x:1000:1000::/:\na:x:0:0::/:\n", "a", Ids(1000, 1000)),
        ("", "65531", Ids(65531, 0)),
    ],
)
def test_a_user_of_an_image_is_numbers(accounts: str, user: str, ids: Ids) -> None:
    assert ids_of(user, accounts, GROUPS) == ids


@pytest.mark.requirement("R54", "R55")
@pytest.mark.parametrize(
    ("accounts", "user"),
    [
        ("", "postgres"),
        # What the daemon takes for 0: too large for the kernel, no number, a sign at which only some end a line.
        ("a:x:4294967296:5::/:\n", "a"),
        ("a:x:1000\x0b:5::/:\n", "a"),
        ("a:x:none:1::/:\n", "a"),
        ("a:x:+1:1::/:\n", "a"),
        ("a:x:1:-1::/:\n", "a"),
        (f"a:x:{'9' * 5000}:1::/:\n", "a"),
        ("a:x\n", "a"),
        ("b:\x0ca:x:1000:1000::/:\n", "a"),
        (" a:x:1000:1000::/:\n", "a"),
        # A name of digits, which some engines look for first.
        ("65534:x:0:0::/:\n", "65534"),
        ("a:x:7:7::/:\n7:x:0:0::/:\n", "a"),
        ("", "1:2147483648"),
        ("", "2147483648"),
        ("", "-1"),
        ("", "1:nowhere"),
        ("", "9" * 5000),
    ],
)
def test_a_user_that_is_not_clearly_one_is_none(accounts: str, user: str) -> None:
    assert ids_of(user, accounts, GROUPS) is None


@pytest.mark.requirement("R54", "R55")
@pytest.mark.parametrize(
    ("user", "root", "reason"),
    [
        ("postgres", False, ""),
        ("root", True, ""),
        ("root", False, "CAPABILITY_MISSING"),
        ("", False, "CAPABILITY_MISSING"),
        ("nobody", True, "USER_UNKNOWN"),
        ("65531", True, "USER_RESERVED"),
        ("postgres:65533", False, "USER_RESERVED"),
    ],
)
async def test_who_may_not_be_a_companion_is_refused_before_anything_starts(
    tmp_path: Path, user: str, root: bool, reason: str
) -> None:
    class Known:
        async def inspected(self, image: str, field: str) -> dict[str, Any]:
            return {"Id": "sha256:1", "Config": {}}

        async def ids(self, image: dict[str, Any], user: str) -> Ids | None:
            return ids_of(user, POSTGRES, GROUPS)

    images, unused = cast(Any, Known()), cast(Any, None)
    companions = Companions(DockerOptions(tmp_path, "a", "b"), unused, Owner("i", "r"), unused, images, "")
    planning = companions.plan([Companion("db", "postgres:16", user=user)], root=root)
    if not reason:
        assert [one.image for one in await planning] == ["sha256:1"]
        return
    with pytest.raises(PenstockError) as refused:
        await planning
    assert refused.value.reason == reason
    if isinstance(refused.value, InvalidArgument):
        assert refused.value.violations[0].field == "spec.companions[0].user"


@pytest.mark.requirement("R49", "R54")
async def test_account_files_that_the_daemon_would_wait_for_are_refused() -> None:
    for broken in ({"passwd": None}, {"passwd": "->/etc/pipe", "pipe": None}, {"passwd": POSTGRES, "group": None}):
        daemon: Any = Files(**broken)
        for use in (account_files.check, account_files.read):
            with pytest.raises(Refused):
                await use(daemon, "container")
    linked: Any = Files(passwd="->/etc/real", real=POSTGRES, group="->/etc/absent")
    assert await account_files.read(linked, "container") == (POSTGRES, "")
    # A companion's programs could replace what a link leads to.
    with pytest.raises(Refused):
        await account_files.check_in_place(linked, "container")
    await account_files.check_in_place(cast(Any, Files(passwd=POSTGRES)), "container")


class Ending(Files):
    """A daemon whose container ends with code 3 while its check begins: the daemon has forgotten that command."""

    async def create(self, name: str, settings: dict[str, Any], host: dict[str, Any]) -> str:
        return name

    async def start(self, container: str) -> None:
        pass

    async def execute(self, container: str, argv: tuple[str, ...]) -> str:
        return "f560"

    @asynccontextmanager
    async def command(self, execution: str) -> AsyncIterator[None]:
        if execution:
            raise Missing(404, f"No such exec instance: {execution}")
        yield

    async def inspect(self, container: str) -> dict[str, Any]:
        return {"State": {"Running": False, "OOMKilled": False, "ExitCode": 3}}

    async def last_output(self, container: str, lines: int, size: int) -> str:
        return "cannot open its files"


@pytest.mark.requirement("R54", "R146")
async def test_a_companion_that_ends_while_its_check_begins_is_said_to_have_ended(tmp_path: Path) -> None:
    class Removed:
        async def container(self, name: str) -> None:
            pass

    daemon: Any = Ending(passwd=POSTGRES, group="")
    reaper: Any = Removed()
    unused: Any = None
    companions = Companions(DockerOptions(tmp_path, "a", "b"), daemon, Owner("i", "r"), reaper, unused, "")
    planned = Planned(Companion("db", "postgres:16"), "sha256:1", Ids(999, 998), HealthCheck(("true",)), False)
    with pytest.raises(FailedPrecondition) as failed:
        await companions.start("s", "container", [planned])
    assert failed.value.reason == "COMPANION_FAILED"
    assert failed.value.message == (
        "the companion db failed: it ended with exit code 3; its last lines:\ncannot open its files"
    )


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
