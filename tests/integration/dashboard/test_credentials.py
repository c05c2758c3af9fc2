"""What a person is told whose token the services do not take: where it is from, and where to look."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.support.services.stack import OBSERVER_TOKEN, Running
from tests.support.terminal.commands import invoke

from penstock.cli.terminal import console
from penstock.client.transport.endpoints import Endpoints, write_connection

WRONG = "nobody-knows-this"


def connection(folder: Path, stack: Running, token: str) -> dict[str, str]:
    """An environment in which a connection file with this token is found."""
    at = stack.ps.endpoints
    where = Endpoints(
        sandbox=at.sandbox, driver=at.driver, interception=at.interception, inference=at.inference, token=token
    )
    write_connection(folder / "connection.json", where, pid=os.getpid())
    return {"PENSTOCK_CONNECTION": str(folder / "connection.json")}


@pytest.mark.requirement("R8")
@pytest.mark.parametrize("place", ["file", "PENSTOCK_TOKEN", "PENSTOCK_TOKEN_FILE", "none"])
async def test_refused_token_is_named_by_its_source(place: str, stack: Running, tmp_path: Path) -> None:
    """Nobody has to guess which of the places a token may be in was meant; the token itself is not printed (R8)."""
    environment = connection(tmp_path, stack, WRONG if place == "file" else stack.stack.operator_token)
    said = f"The token that was sent is from {tmp_path / 'connection.json'}"
    if place == "PENSTOCK_TOKEN":
        environment["PENSTOCK_TOKEN"] = WRONG
        said = "PENSTOCK_TOKEN: set it to a token of these services, or unset PENSTOCK_TOKEN to use the token of"
        said += f" {tmp_path}"
    elif place == "PENSTOCK_TOKEN_FILE":
        (tmp_path / "token").write_text(WRONG)
        environment["PENSTOCK_TOKEN_FILE"] = str(tmp_path / "token")
        said = f"from PENSTOCK_TOKEN_FILE ({tmp_path / 'token'})"
    elif place == "none":
        environment = {"PENSTOCK_DRIVER_ADDRESS": stack.ps.endpoints.driver}
        said = "No token was sent: set PENSTOCK_TOKEN"
    code, out, err = await asyncio.to_thread(invoke, "agents", environment=environment)
    assert code == console.REFUSED and said in err and WRONG not in err, (out, err)


@pytest.mark.parametrize(
    ("command", "whose", "said"),
    [
        (["dashboard"], "nobody's", "--no-token"),
        (["openenv", "serve"], "nobody's", "The token that was sent is from"),
        (["openenv", "serve"], "an observer's", "The token that was sent is from"),
    ],
)
async def test_public_listener_does_not_start_with_an_invalid_token(
    command: list[str], whose: str, said: str, stack: Running, tmp_path: Path
) -> None:
    """It would be its callers who found out, one by one."""
    environment = connection(tmp_path, stack, OBSERVER_TOKEN if whose == "an observer's" else WRONG)
    code, out, err = await asyncio.to_thread(invoke, *command, "--port", "0", environment=environment)
    assert code == console.REFUSED and said in err and not out, (out, err)


async def test_public_dashboard_starts_before_the_services(tmp_path: Path) -> None:
    """That nobody answers yet says nothing of the token."""
    environment = {**os.environ, "PENSTOCK_DRIVER_ADDRESS": "127.0.0.1:1", "PENSTOCK_SANDBOX_ADDRESS": "127.0.0.1:1"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli.main", "openenv", "serve", "--port", "0"),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert (await process.stdout.readline()).startswith(b"http://")
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = await process.communicate()
    assert process.returncode == 0 and b"no driver answers at 127.0.0.1:1 yet" in err, err


def test_a_dashboard_whose_services_are_not_up_says_so_and_goes_on(tmp_path: Path) -> None:
    """What ends it here is something else: an address that it may not have."""
    environment = {"PENSTOCK_DRIVER_ADDRESS": "127.0.0.1:1", "PENSTOCK_SANDBOX_ADDRESS": "127.0.0.1:1"}
    code, _, err = invoke("dashboard", "--host", "203.0.113.1", environment=environment)
    assert "no driver answers at 127.0.0.1:1 yet" in err and code == console.REFUSED, err
