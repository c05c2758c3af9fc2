"""Settings: where they come from, what is refused, what is printed."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from penstock_chassis.errors import InvalidArgument
from penstock_chassis.settings import ServiceSettings

TOKEN = "correct-horse-battery"


class ValveSettings(ServiceSettings):
    """A service's settings as a service would write them."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_VALVE_")

    port: int = Field(7799, ge=0, le=65535, description="port to listen on")
    upstreams: tuple[str, ...] = Field((), description="addresses that may be named")
    vendor_key: SecretStr | None = Field(None, description="key of a vendor")
    logins: dict[str, SecretStr] = Field(default_factory=dict, description="passwords by host")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)
    monkeypatch.setenv("PENSTOCK_VALVE_OPERATOR_TOKEN", TOKEN)
    return monkeypatch


@pytest.fixture
def file(tmp_path: Path, environment: pytest.MonkeyPatch) -> Callable[[str], None]:
    def write(text: str) -> None:
        path = tmp_path / "penstock.toml"
        path.write_text(text, encoding="utf-8")
        environment.setenv("PENSTOCK_CONFIG", str(path))

    return write


def refusal(argv: list[str]) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        ValveSettings.load(argv)
    assert caught.value.reason == "SETTINGS_INVALID"
    return caught.value


@pytest.mark.requirement("R9")
def test_defaults_bind_loopback_only(tmp_path: Path) -> None:
    settings = ValveSettings.load([])
    assert (settings.host, settings.port) == ("127.0.0.1", 7799)
    assert settings.state_dir == tmp_path / "penstock" / "valve"


def test_a_relative_state_dir_is_below_the_working_directory(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    """Programs that run elsewhere are given paths in it."""
    environment.chdir(tmp_path)
    assert ValveSettings.load(["--state-dir", "here"]).state_dir == tmp_path / "here"


def test_flags_win_over_the_environment_and_it_over_the_file(
    environment: pytest.MonkeyPatch, file: Callable[[str], None]
) -> None:
    file("[valve]\nport = 1\nlog_level = 'debug'\nstop_s = 3\n[sandbox]\nanything = true\n")
    environment.setenv("PENSTOCK_VALVE_PORT", "2")
    environment.setenv("PENSTOCK_VALVE_LOG_LEVEL", "error")
    settings = ValveSettings.load(["--port", "3"])
    assert (settings.port, settings.log_level, settings.stop_s) == (3, "error", 3.0)


def test_lists_are_json_in_flags_and_environment(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("PENSTOCK_VALVE_UPSTREAMS", '["a", "b"]')
    assert ValveSettings.load([]).upstreams == ("a", "b")
    assert ValveSettings.load(["--upstreams", '["c"]']).upstreams == ("c",)
    assert refusal(["--upstreams", "c"]).violations[0].field == "upstreams"


def test_malformed_list_in_the_environment_is_refused_by_its_setting(environment: pytest.MonkeyPatch) -> None:
    """The refusal is like any other: it names the setting and repeats no value."""
    environment.setenv("PENSTOCK_VALVE_UPSTREAMS", TOKEN)
    error = refusal([])
    assert [violation.field for violation in error.violations] == ["upstreams"]
    assert TOKEN not in str(error)


def test_an_unknown_variable_is_refused_with_the_nearest_name(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("PENSTOCK_VALVE_PROT", "1")
    (violation,) = refusal([]).violations
    assert violation.field == "PENSTOCK_VALVE_PROT"
    assert "PENSTOCK_VALVE_PORT" in violation.description


def test_clients_address_variable_does_not_stop_the_service(
    environment: pytest.MonkeyPatch,
) -> None:
    environment.setenv("PENSTOCK_VALVE_ADDRESS", "127.0.0.1:1")
    ValveSettings.load([])


def test_an_unknown_key_in_the_file_is_refused_with_the_nearest_name(file: Callable[[str], None]) -> None:
    file("[valve]\nprot = 1\n")
    (violation,) = refusal([]).violations
    assert (violation.field, violation.description) == ("prot", "no such setting; did you mean port?")


def test_an_unknown_flag_is_refused_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        ValveSettings.load(["--prot", "1"])
    assert "unrecognized arguments: --prot 1; did you mean --port?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        ValveSettings.load(["--no-anonymus"])
    assert "did you mean --no-anonymous?" in capsys.readouterr().err


def test_a_key_outside_a_table_is_refused(file: Callable[[str], None]) -> None:
    file("port = 1\n")
    assert refusal([]).violations[0].field == "port"


def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ValveSettings.load(["--prot", "1"])
    assert "--prot" in capsys.readouterr().err


@pytest.mark.requirement("R8")
@pytest.mark.parametrize("content", [None, "[valve", f"[valve]\noperator_token = {TOKEN}"])
def test_an_unreadable_file_is_refused_without_quoting_it(
    content: str | None, tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    """A line of the file may hold a token."""
    path = tmp_path / "penstock.toml"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    environment.setenv("PENSTOCK_CONFIG", str(path))
    error = refusal([])
    assert error.violations[0].field == "PENSTOCK_CONFIG"
    assert TOKEN not in str(error)


@pytest.mark.requirement("R3")
@pytest.mark.parametrize("value", ["", " ", "\t", " x", "x ", "x\ny", "schlüssel", "a\x00b".replace("\x00", "\x7f")])
@pytest.mark.parametrize("name", ["OPERATOR_TOKEN", "TRAINER_TOKEN", "OBSERVER_TOKEN"])
def test_a_blank_or_malformed_token_is_refused_at_start(name: str, value: str, environment: pytest.MonkeyPatch) -> None:
    environment.setenv(f"PENSTOCK_VALVE_{name}", value)
    (violation,) = refusal([]).violations
    assert violation.field == name.lower()


def test_two_roles_with_one_token_are_refused(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("PENSTOCK_VALVE_TRAINER_TOKEN", TOKEN)
    assert TOKEN not in str(refusal([]))


def test_no_token_is_refused_unless_anonymous_is_asked_for(environment: pytest.MonkeyPatch) -> None:
    environment.delenv("PENSTOCK_VALVE_OPERATOR_TOKEN")
    assert "PENSTOCK_VALVE_OPERATOR_TOKEN" in str(refusal([]))
    assert ValveSettings.load(["--anonymous"]).anonymous


@pytest.mark.requirement("R9")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", "127.0.0.1.example.org", ""])
def test_a_wide_bind_without_tls_and_token_is_refused(host: str, environment: pytest.MonkeyPatch) -> None:
    assert "tls_cert" in str(refusal(["--host", host]))
    tls = ["--tls-cert", "a.pem", "--tls-key", "b.pem"]
    assert ValveSettings.load(["--host", host, *tls]).host == host
    refusal(["--host", host, "--anonymous", *tls])
    environment.delenv("PENSTOCK_VALVE_OPERATOR_TOKEN")
    refusal(["--host", host, *tls])


@pytest.mark.parametrize("argv", [["--tls-cert", "a"], ["--tls-key", "a"], ["--tls-client-ca", "a"]])
def test_half_a_tls_configuration_is_refused(argv: list[str]) -> None:
    refusal(argv)


@pytest.mark.requirement("R1")
def test_secrets_have_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """No secret in any process's argv, nor a table that has one in it."""
    for flag in ("--operator-token", "--vendor-key", "--logins", "--namespaces"):
        with pytest.raises(SystemExit):
            ValveSettings.load([flag, "{}"])
        assert f"unrecognized arguments: {flag}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        ValveSettings.load(["--help"])
    text = capsys.readouterr().out
    secrets = text.partition("Secrets have no flag")[2]
    assert all(f"PENSTOCK_VALVE_{name}:" in secrets for name in ("VENDOR_KEY", "LOGINS", "NAMESPACES"))
    assert "--state-dir" in text


@pytest.mark.requirement("R38")
def test_help_lists_each_settings_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Every timeout's default is documented; none is hidden."""
    with pytest.raises(SystemExit):
        ValveSettings.load(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "[PENSTOCK_VALVE_STOP_S; default 10.0]" in text
    assert "[PENSTOCK_VALVE_HOST; default 127.0.0.1]" in text
    assert "[PENSTOCK_VALVE_ANONYMOUS; default false]" in text
    assert "[PENSTOCK_VALVE_STATE_DIR]" in text, "no default that is known before the user is"


@pytest.mark.requirement("R8")
def test_settings_print_without_their_secrets(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("PENSTOCK_VALVE_VENDOR_KEY", "sk-test")
    settings = ValveSettings.load([])
    for text in (repr(settings), str(settings), str(settings.public())):
        assert TOKEN not in text
        assert "sk-test" not in text


@pytest.mark.requirement("R8")
def test_a_refused_value_is_not_repeated(environment: pytest.MonkeyPatch) -> None:
    """Somebody may have put a token into the wrong variable."""
    environment.setenv("PENSTOCK_VALVE_PORT", TOKEN)
    assert TOKEN not in str(refusal([]))


@pytest.mark.requirement("R11")
@pytest.mark.parametrize(("endpoint", "holds"), [("http://collector:4317", False), ("https://collector:4317", True)])
def test_authority_for_a_plaintext_collector_is_refused(endpoint: str, holds: bool) -> None:
    """Who names one means TLS; without it spans would go in clear and nobody would know."""
    argv = ["--otlp-endpoint", endpoint, "--otlp-ca", "ca.pem"]
    if holds:
        assert ValveSettings.load(argv).otlp_ca == Path("ca.pem")
    else:
        assert "otlp_ca" in refusal(argv).violations[0].description
