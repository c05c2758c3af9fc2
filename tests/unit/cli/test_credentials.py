"""`penstock credentials`: what it makes holds, is closed to others, and is not made twice."""

import os
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.commands.credentials import extend
from penstock.cli.main import app
from penstock.client import Tls
from penstock.client.transport.endpoints import SERVICES, resolve
from penstock_chassis.settings import CONFIG_VARIABLE, ServiceSettings
from penstock_driver.settings import DriverSettings
from penstock_interception.settings import InterceptionSettings
from penstock_sandbox.settings import SandboxSettings

SETTINGS: dict[str, type[ServiceSettings]] = {
    "driver": DriverSettings,
    "interception": InterceptionSettings,
    "sandbox": SandboxSettings,
}


def made(place: Path, *more: str, code: int = 0) -> Path:
    """Runs the command."""
    done = CliRunner().invoke(app, ["credentials", str(place), *more])
    assert done.exit_code == code, done.output
    return place


def handshake(place: Path, service: str, name: str, authority: Path) -> None:
    """A TLS handshake as strict as it comes, in memory. Raises ssl.SSLError where the certificate does not hold."""
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(place / f"{service}.pem", place / f"{service}.key")
    calling = ssl.create_default_context(cafile=str(authority))
    calling.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = calling.wrap_bio(to_client, to_server, server_hostname=name)
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    pending = [client, server]
    while pending:
        end = pending.pop(0)
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            pending.append(end)


@pytest.mark.requirement("R9")
@pytest.mark.parametrize("service", SERVICES)
def test_each_service_s_certificate_holds_for_the_names_it_is_called_by(service: str, tmp_path: Path) -> None:
    """TLS between services and to clients, verified by one authority."""
    place = made(tmp_path / "c", "--host", "gate.example", "--host", "10.1.2.3")
    for name in (service, "localhost", "127.0.0.1", "::1", "gate.example", "10.1.2.3"):
        handshake(place, service, name, place / "ca.pem")
    for name in ("elsewhere.example", "10.1.2.4"):
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(place, service, name, place / "ca.pem")
    other = made(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(place, service, service, other / "ca.pem")


@pytest.mark.requirement("R1")
def test_credentials_are_private_and_the_authority_signs_no_more(tmp_path: Path) -> None:
    """No secret where others can read it, whatever this process's umask is."""
    before = os.umask(0)
    try:
        place = made(tmp_path / "c")
    finally:
        os.umask(before)
    assert place.stat().st_mode & 0o777 == 0o700
    for role in ("operator", "trainer", "observer"):
        assert (place / f"{role}.token").stat().st_mode & 0o077 == 0
    keys = sorted(path.name for path in place.glob("*.key"))
    assert keys == sorted(f"{service}.key" for service in (*SERVICES, "dashboard"))
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.requirement("R5")
@pytest.mark.parametrize("service", SETTINGS)
def test_a_service_takes_its_file_and_admits_the_three_roles(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token for each role, the same at every service."""
    place = made(tmp_path / "c")
    monkeypatch.setenv(CONFIG_VARIABLE, str(place / f"{service}.toml"))
    settings = SETTINGS[service].load([])
    for role in ("operator", "trainer", "observer"):
        token = getattr(settings, f"{role}_token")
        assert token.get_secret_value() == (place / f"{role}.token").read_text().strip()
    if isinstance(settings, DriverSettings):
        assert settings.sandbox_token == settings.interception_token == settings.operator_token
    if isinstance(settings, InterceptionSettings):
        assert settings.inference_token == settings.operator_token


@pytest.mark.requirement("R8", "R11")
def test_a_client_finds_the_services_by_the_connection_file_as_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TLS, with no more rights than a rollout needs, to the first name that was given."""
    place = made(tmp_path / "c", "--host", "gate.example", "--host", "10.1.2.3")
    monkeypatch.setenv("PENSTOCK_CONNECTION", str(place / "connection.json"))
    found = resolve()
    assert (found.driver, found.tls) == ("gate.example:7702", Tls(place / "ca.pem"))
    assert found.token == (place / "trainer.token").read_text().strip()


def test_existing_credentials_are_kept_unless_renewed(tmp_path: Path) -> None:
    """Running it again harms nobody."""
    place = made(tmp_path / "c")
    first = (place / "ca.pem").read_bytes()
    assert (made(place) / "ca.pem").read_bytes() == first
    assert (made(place, "--renew") / "ca.pem").read_bytes() != first
    assert list(tmp_path.iterdir()) == [place]


def test_a_directory_of_other_things_is_left_alone(tmp_path: Path) -> None:
    """Bad input: what it did not make it does not replace."""
    (tmp_path / "precious").write_text("")
    made(tmp_path, "--renew", code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    (tmp_path / "precious").unlink()
    made(tmp_path, "--host", "not a name\N{SNOWMAN}", code=2)


@pytest.mark.requirement("R107")
@pytest.mark.parametrize("service", SETTINGS)
def test_a_team_gets_tokens_of_its_namespace_and_a_connection_file(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each service accepts is what the team's files hold."""
    place = made(tmp_path / "c", "--namespace", "team-a", "--namespace", "team-b")
    monkeypatch.setenv(CONFIG_VARIABLE, str(place / f"{service}.toml"))
    accepted = SETTINGS[service].load([]).namespaces
    assert accepted.keys() == {"team-a", "team-b"}
    for team, own in accepted.items():
        assert own.trainer_token is not None and own.observer_token is not None
        token = own.trainer_token.get_secret_value()
        assert (place / f"{team}.trainer.token").read_text() == f"{token}\n"
        assert (place / f"{team}.observer.token").read_text() == f"{own.observer_token.get_secret_value()}\n"
        assert resolve(place / f"{team}.connection.json").token == token
    for wrong in ("Team", "default", "-a"):
        made(tmp_path / "none", "--namespace", wrong, code=2)


@pytest.mark.requirement("R107")
@pytest.mark.parametrize("service", SETTINGS)
def test_a_team_that_comes_later_changes_no_other_secret(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are added to what services accept, also after an operator's own lines."""
    place = made(tmp_path / "c", "--host", "gate.example", "--namespace", "team-a")
    settings = place / f"{service}.toml"
    settings.chmod(0o644)
    with settings.open("a") as file:
        file.write("quota = 7  # by hand")
    settings.chmod(0o444)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    made(place, "--add", "team-b", "--add", "team-c")
    after = {path.name: path.read_bytes() for path in place.iterdir()}
    for name, content in before.items():
        assert after[name].startswith(content) if name.endswith(".toml") else after[name] == content
    assert {name.split(".")[0] for name in after.keys() - before.keys()} == {"team-b", "team-c"}
    monkeypatch.setenv(CONFIG_VARIABLE, str(settings))
    accepted = SETTINGS[service].load([]).namespaces
    assert (set(accepted), accepted["team-a"].quota) == ({"team-a", "team-b", "team-c"}, 7)
    token = accepted["team-b"].trainer_token
    assert token is not None and (place / "team-b.trainer.token").read_text() == f"{token.get_secret_value()}\n"
    found = resolve(place / "team-b.connection.json")
    assert (found.token, found.driver, found.tls) == (
        token.get_secret_value(), "gate.example:7702", Tls(place / "ca.pem")
    )  # fmt: skip
    for path in place.iterdir():
        assert path.stat().st_mode & 0o077 == 0 or path.suffix in (".pem", ".key", ".toml") or path.stem == "scrape"
    assert (place.stat().st_mode & 0o777, list(tmp_path.iterdir())) == (0o700, [place])


def test_a_team_is_added_once_and_to_credentials_only(tmp_path: Path) -> None:
    """Nothing is changed by a request that cannot be met as a whole."""
    made(tmp_path / "absent", "--add", "team-b", code=2)
    place = made(tmp_path / "c", "--namespace", "team-a")
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    made(place, "--add", "team-b", "--add", "team-a", code=2)
    made(place, "--add", "team-b", "--renew", code=2)
    made(place, "--add", "default", code=2)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert sorted(tmp_path.iterdir()) == [place]


def test_two_teams_that_are_added_at_once_are_both_there(tmp_path: Path) -> None:
    place = made(tmp_path / "c")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: extend(place, [f"team-{number}"]), range(4)))
    assert len(list(place.glob("team-*.connection.json"))) == 4
