"""Where the services are found, and whom a token is sent to."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from penstock.client import ConfigurationError, Endpoints, Penstock, Tls, connect
from penstock.client.transport.endpoints import (
    DEFAULT_PORTS,
    connection_file,
    of_state_dir,
    read_connection,
    resolve,
    write_connection,
)


@pytest.mark.requirement("R9")
def test_endpoints_default_to_the_loopback_ports() -> None:
    """Loopback by default."""
    found = resolve()
    assert (found.sandbox, found.driver) == ("127.0.0.1:7701", "127.0.0.1:7702")
    assert (found.interception, found.inference, found.token) == ("127.0.0.1:7703", "127.0.0.1:7704", None)


def test_the_environment_comes_before_the_connection_file_and_the_caller_before_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One declared order."""
    write_connection(connection_file(), Endpoints(driver="127.0.0.1:9", token="file"), pid=os.getpid())
    assert (resolve().driver, resolve().token) == ("127.0.0.1:9", "file")
    monkeypatch.setenv("PENSTOCK_TOKEN", "environment")
    assert (resolve().driver, resolve().token) == ("127.0.0.1:9", "environment")
    monkeypatch.setenv("PENSTOCK_DRIVER_ADDRESS", "127.0.0.1:8")
    assert resolve().driver == "127.0.0.1:8"
    said = resolve({"driver": "127.0.0.1:7"}, "said")
    assert (said.driver, said.token) == ("127.0.0.1:7", "said")


@pytest.mark.requirement("R11")
def test_the_connection_files_token_goes_to_no_address_that_the_environment_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A key is sent only to the address that it was configured for."""
    write_connection(connection_file(), Endpoints(token="file"), pid=os.getpid())
    monkeypatch.setenv("PENSTOCK_DRIVER_ADDRESS", "127.0.0.1:8")
    assert resolve().token is None


def test_a_connection_file_names_the_dashboard_of_its_services() -> None:
    """By which commands link to a page; files of earlier versions name none."""
    write_connection(connection_file(), Endpoints(token="t", dashboard="http://127.0.0.1:1/"), pid=None)
    assert resolve().dashboard == "http://127.0.0.1:1/"
    write_connection(connection_file(), Endpoints(token="t"), pid=None)
    assert b"dashboard" not in connection_file().read_bytes() and resolve().dashboard == ""


def test_the_file_of_a_stack_that_is_gone_is_not_believed() -> None:
    """A kill -9 leaves the file behind; its token is for nobody any more."""
    write_connection(connection_file(), Endpoints(token="file"), pid=2**22 + 1)
    assert resolve().token is None


@pytest.mark.requirement("R125")
def test_a_connection_file_of_another_machine_is_believed() -> None:
    """Nodes of a job share the file's directory: a process id means nothing on the other nodes."""
    gone = 2**22 + 1
    addresses = {service: f"10.0.0.1:{port}" for service, port in DEFAULT_PORTS.items() if service != "inference"}
    tls = Tls(Path("ca.pem"))
    written = Endpoints(**addresses, inference="", token="file", tls=tls, discover=True)
    write_connection(connection_file(), written, pid=gone)
    content = orjson.loads(connection_file().read_bytes())
    assert content["host"] == os.uname().nodename
    connection_file().write_bytes(orjson.dumps({**content, "host": "another-node"}))
    assert resolve().token == "file"
    found = of_state_dir(connection_file().parent)
    assert found is not None and found.token == "file"
    del content["host"]  # as earlier versions wrote it
    connection_file().write_bytes(orjson.dumps(content))
    assert resolve().token is None and of_state_dir(connection_file().parent) is None
    write_connection(connection_file(), Endpoints(token="file"), pid=None)
    assert "host" not in orjson.loads(connection_file().read_bytes())


@pytest.mark.requirement("R11", "R125")
@pytest.mark.parametrize("local", ["127.0.0.1:7703", "[::1]:7703", "localhost:7703", "unix:/run/gate", None])
def test_a_connection_file_with_addresses_that_only_another_machine_reaches_is_void(local: str | None) -> None:
    """Home directories on NFS: the process that listens at that address here must not get the token."""
    addresses = {service: f"10.0.0.1:{port}" for service, port in DEFAULT_PORTS.items()}
    written = Endpoints(**addresses, token="file", tls=Tls(Path("ca.pem")), discover=True)
    write_connection(connection_file(), written, pid=os.getpid())
    content = {**orjson.loads(connection_file().read_bytes()), "host": "another-node"}
    del content["addresses"]["interception"]  # absent = the default, on loopback
    if local is not None:
        content["addresses"]["interception"] = local
    connection_file().write_bytes(orjson.dumps(content))
    assert resolve().token is None and of_state_dir(connection_file().parent) is None
    assert "another machine" in resolve().token_advice


@pytest.mark.requirement("R125")
def test_a_connection_file_of_another_machine_that_is_malformed_is_refused() -> None:
    """It may have been meant for this machine."""
    write_connection(connection_file(), Endpoints(token="file"), pid=os.getpid())
    content = orjson.loads(connection_file().read_bytes())
    connection_file().write_bytes(orjson.dumps({**content, "host": "another-node", "addresses": "10.0.0.1"}))
    with pytest.raises(ConfigurationError):
        resolve()


@pytest.mark.requirement("R1")
def test_the_connection_file_is_readable_by_its_owner_only_and_refused_otherwise() -> None:
    """No secret where others can read it."""
    file = connection_file()
    write_connection(file, Endpoints(token="secret"), pid=os.getpid())
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        resolve()


@pytest.mark.requirement("R1")
@pytest.mark.parametrize(
    ("owner", "user", "mode", "taken"),
    [
        (0, 1000, 0o400, True),
        (0, 1000, 0o440, True),
        (0, 1000, 0o640, True),
        (0, 1000, 0o460, False),
        (0, 1000, 0o444, False),
        (0, 0, 0o400, True),
        (0, 0, 0o440, True),
        (0, 0, 0o460, False),
        (0, 0, 0o444, False),
        (1000, 1000, 0o600, True),
        (1000, 1000, 0o440, False),
        (1001, 1000, 0o400, False),
    ],
)
def test_a_file_of_root_may_be_readable_by_a_group(
    owner: int, user: int, mode: int, monkeypatch: pytest.MonkeyPatch, *, taken: bool
) -> None:
    """So Kubernetes mounts a Secret for a pod with `fsGroup`, on a volume where nobody can change it."""
    file = connection_file()
    write_connection(file, Endpoints(token="secret"), pid=None)
    file.chmod(mode)
    found = list(file.stat())
    found[stat.ST_UID] = owner
    monkeypatch.setattr(Path, "stat", lambda _: os.stat_result(found))
    monkeypatch.setattr(os, "getuid", lambda: user)
    if taken:
        assert read_connection(file).token == "secret"
    else:
        with pytest.raises(ConfigurationError) as refused:
            read_connection(file)
        assert refused.value.reason == "CONNECTION_FILE_OPEN"


@pytest.mark.requirement("R8", "R9")
@pytest.mark.parametrize("target", ["10.0.0.1", "gate.example", "::2"])
def test_a_token_is_never_sent_in_clear_beyond_this_machine(target: str) -> None:
    """In clear a token travels on loopback only."""
    with pytest.raises(ConfigurationError, match="in clear"):
        resolve(target, "token")
    assert resolve(target, "token", Tls()).token == "token"
    assert resolve(target).token is None


@pytest.mark.requirement("R8", "R9")
def test_the_callers_token_and_certificates_replace_those_of_endpoints() -> None:
    """They are the caller's arguments, whatever the target is; the token still travels in clear on loopback only."""
    near, far = Endpoints(token="own", token_origin="a file"), Endpoints(driver="10.0.0.1:9")
    found = resolve(near, "given")
    assert (found.token, found.token_origin) == ("given", Endpoints().token_origin)
    assert resolve(near) == near
    tls = Tls(Path("ca.pem"))
    found = resolve(far, "given", tls)
    assert (found.token, found.tls, found.driver) == ("given", tls, far.driver)
    assert resolve(Endpoints(tls=tls)).tls == tls
    with pytest.raises(ConfigurationError, match="in clear"):
        resolve(far, "given")


@pytest.mark.requirement("R3")
@pytest.mark.parametrize("token", ["", " ", "x ", "a\nb", "é"])
def test_a_blank_or_broken_token_is_refused(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ever authorised by an empty secret."""
    monkeypatch.setenv("PENSTOCK_TOKEN", token)
    with pytest.raises(ConfigurationError, match="token"):
        resolve()


def test_a_token_may_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newline at its end is an editor's."""
    (tmp_path / "token").write_text("abc\n")
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(tmp_path / "token"))
    assert resolve().token == "abc"


@pytest.mark.parametrize(
    "target", ["", "http://x", "host:7702", {"driver": "host"}, {"driver": "host:0"}, {"gate": "127.0.0.1:1"}]
)
def test_invalid_address_is_refused_by_name(target: str | dict[str, str]) -> None:
    """An address that does not hold is an error before anything is called."""
    with pytest.raises(ConfigurationError):
        connect(target)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"addresses": 3, "token": null}', b"\xff"])
def test_a_broken_connection_file_is_named(tmp_path: Path, content: bytes) -> None:
    """The error names the file and what to do."""
    file = tmp_path / "connection.json"
    file.touch(0o600)
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"connection\.json"):
        read_connection(file)


@pytest.mark.requirement("R8")
def test_a_token_is_in_no_printed_form() -> None:
    """No credential in logs."""
    assert "secret" not in repr(Endpoints(token="secret"))


@pytest.mark.requirement("R9")
def test_the_ca_comes_from_the_environment_or_the_connection_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token travels beyond this machine when there is a CA to verify the other side by."""
    file = tmp_path / "connection.json"
    write_connection(file, Endpoints(driver="10.0.0.1:9", token="file", tls=Tls(Path("ca.pem"))), pid=None)
    monkeypatch.setenv("PENSTOCK_CONNECTION", str(file))
    found = resolve()
    assert (found.driver, found.token, found.tls) == ("10.0.0.1:9", "file", Tls(tmp_path / "ca.pem"))
    assert read_connection(file, tls=Tls()).tls == Tls()
    monkeypatch.setenv("PENSTOCK_DRIVER_ADDRESS", "10.0.0.2:9")
    monkeypatch.setenv("PENSTOCK_TOKEN", "environment")
    with pytest.raises(ConfigurationError, match="in clear"):
        resolve()
    monkeypatch.setenv("PENSTOCK_CA_FILE", "/elsewhere/ca.pem")
    assert resolve().tls == Tls(Path("/elsewhere/ca.pem"))


def test_no_driver_is_asked_for_others_unless_a_program_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not where the environment says so: the token would go where nobody sent it."""
    assert resolve({"driver": "127.0.0.1:7"}).discover
    assert not resolve({"sandbox": "127.0.0.1:7"}).discover
    monkeypatch.setenv("PENSTOCK_DISCOVER", "False")
    assert not resolve({"driver": "127.0.0.1:7"}).discover
    monkeypatch.setenv("PENSTOCK_DISCOVER", "perhaps")
    with pytest.raises(ConfigurationError, match="PENSTOCK_DISCOVER") as refused:
        resolve()
    assert refused.value.reason == "DISCOVER"


def test_absent_connection_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever names a file means it: the defaults would be refused, and for another reason."""
    monkeypatch.setenv("PENSTOCK_CONNECTION", str(tmp_path / "nosuch.json"))
    with pytest.raises(ConfigurationError, match=r"names .*nosuch.json, which does not") as told:
        resolve()
    assert told.value.reason == "CONNECTION_FILE_ABSENT"
    assert resolve("127.0.0.1", "token").token == "token", "what the caller says comes first"


def test_caller_without_a_token_is_pointed_to_the_state_directory() -> None:
    """`penstock up --state-dir DIR` writes its file there, where no command looks by itself."""
    advice = resolve().token_advice
    assert "--state-dir" in advice and f"The default is {connection_file()}, which does not exist" in advice


@pytest.mark.parametrize(
    ("absent", "clients"),
    [
        ("sandbox", {"sandboxes", "toolboxes"}),
        ("driver", {"rollouts", "groups", "agents", "terminals"}),
        ("interception", {"gate"}),
    ],
)
async def test_a_connection_without_a_service_has_the_other_clients(absent: str, clients: set[str]) -> None:
    """What needs the service says so; what does not works."""
    everything = {"sandboxes", "toolboxes", "rollouts", "groups", "agents", "terminals", "gate", "operations"}
    async with Penstock(replace(Endpoints(), **{absent: ""})) as ps:  # type: ignore[arg-type]
        assert {name for name in everything if hasattr_of(ps, name)} == everything - clients
        for name in clients:
            with pytest.raises(ConfigurationError, match=f"no {absent} service") as caught:
                getattr(ps, name)
            assert caught.value.reason == "NO_SERVICE"
        if absent == "interception":
            with pytest.raises(ConfigurationError):
                ps.intercept()
        with pytest.raises(AttributeError):
            ps.rolouts  # type: ignore[attr-defined]  # noqa: B018


def hasattr_of(ps: Penstock, name: str) -> bool:
    """Whether a connection has a client."""
    try:
        getattr(ps, name)
    except ConfigurationError:
        return False
    return True
