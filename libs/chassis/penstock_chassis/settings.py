"""The settings that every service has, and how they are read.

A service starts from one `ServiceSettings` (its own subclass). Each setting is looked up in flags, then in the
environment (`PENSTOCK_<SERVICE>_<NAME>`), then in the service's table of the TOML file that `PENSTOCK_CONFIG` names,
then its default applies. An unknown key is refused in any of them.

Secrets are `SecretStr`: they have no flag (R1: an argv is public), are never printed, and blank ones are refused (R3).
The defaults bind loopback; anything wider needs TLS and a token (R9).
"""

import argparse
import ipaddress
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import from_json, to_json
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from penstock.values.similar_names import did_you_mean, did_you_mean_option
from penstock_chassis.auth import is_namespace
from penstock_chassis.errors import InvalidArgument, Violation
from penstock_chassis.homes import Home, open_home, valid_name
from penstock_chassis.limits import READER_S
from penstock_chassis.validation import violations_of

_ADDRESS = re.compile(r"[^\s/]+:[0-9]{1,5}")

CONFIG_VARIABLE = "PENSTOCK_CONFIG"
"""Environment variable that names the TOML file; it has one table per service, such as `[sandbox]`."""

CALL_QUEUES = "queues of calls, one call taken from each at a time; the kernel assigns each connection to one of them"
"""What the setting `call_queues` is."""


class NamespaceSettings(BaseModel):
    """A namespace: the tokens of those who work in it, and how much it may hold at once.

    `quota` is of what the service counts: rollouts that run and, apart from them, open terminals (driver), open
    rollouts (gate), sandboxes (sandbox), requests that are served (inference). `weight` is the
    namespace's share of the driver's slots against that of others while rollouts of both wait. The default namespace
    has the tokens of `trainer_token` and `observer_token` beside these.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    trainer_token: SecretStr | None = None
    observer_token: SecretStr | None = None
    quota: int | None = Field(None, ge=1)
    weight: float = Field(1.0, ge=0.001, le=1000)

    @field_validator("*")
    @classmethod
    def _secrets_are_not_blank(cls, value: Any) -> Any:
        return refuse_blank(value) if isinstance(value, SecretStr) else value


class ServiceSettings(BaseSettings):
    """Base of each service's settings.

    A subclass sets its port's default and `model_config = SettingsConfigDict(env_prefix="PENSTOCK_SANDBOX_")`; the
    prefix also names the table in the file (`[sandbox]`) and the state directory.
    """

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        validate_default=True,
        env_ignore_empty=False,
        enable_decoding=False,  # lists and tables are decoded by `_decoded`, whose errors name the setting
    )

    name: str = Field(
        "", description="this service's name among those of its kind; default: made once, kept in state_dir"
    )
    peers: dict[str, str] = Field(
        {},
        description="addresses (host:port) of other services of this kind by name, for callers who need them",
    )
    host: str = Field("127.0.0.1", description="address to listen on; other than loopback needs TLS and a token")
    port: int = Field(0, ge=0, le=65535, description="port to listen on; 0 lets the kernel choose")
    operator_token: SecretStr | None = Field(None, description="bearer token of operators, for all methods")
    trainer_token: SecretStr | None = Field(None, description="bearer token of trainers")
    observer_token: SecretStr | None = Field(None, description="bearer token of observers, for read-only methods")
    namespaces: dict[str, NamespaceSettings] = Field(
        {}, description="by name: trainer_token, observer_token, quota and weight of a team (docs/guides/teams.md)"
    )
    anonymous: bool = Field(
        False, description="serve callers without a token as operator; only on loopback, for tests and experiments"
    )
    tls_cert: Path | None = Field(None, description="PEM file with the server's certificate chain")
    tls_key: Path | None = Field(None, description="PEM file with the certificate's private key")
    tls_client_ca: Path | None = Field(
        None, description="PEM file with a CA; if set, clients must present a certificate that it signed"
    )
    max_streams: int = Field(256, ge=8, le=100_000, description="concurrent calls on one connection; further ones wait")
    max_connections: int = Field(
        1_000, ge=8, le=1_000_000, description="concurrent connections; at most half of the open-file limit (ulimit -n)"
    )
    call_queues: int = Field(1, ge=1, le=16, description=CALL_QUEUES)
    reader_timeout_s: float = Field(
        READER_S, ge=1, le=86_400, description="seconds after which a stream whose messages are not read is ended"
    )
    state_dir: Path = Field(Path(), description="directory of this service's state; the default is per user")
    state_dir_shared: bool = Field(
        False,
        description="replicas of this service share state_dir: each takes it, or the first of its subdirectories "
        "replica-1, replica-2, ... that no other uses",
    )
    journal_sync: Literal["normal", "full"] = Field(
        "normal", description="full: an acknowledged write also survives a loss of power, at one fsync per commit"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level logged")
    log_format: Literal["json", "console"] = Field("json", description="json lines, or text for people")
    drain_s: float = Field(
        0.0,
        ge=0,
        le=86_400,
        description="seconds that a stop waits for what runs (docs/guides/cluster.md) and refuses new work",
    )
    stop_s: float = Field(
        10.0, ge=0, le=3600, description="seconds that open calls have to end when the service stops, after drain_s"
    )
    metrics_host: str = Field("127.0.0.1", description="address to serve metrics on; as for host")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port to serve Prometheus metrics on; 0 lets the kernel choose, unset: none"
    )
    otlp_endpoint: str = Field(
        "", pattern=r"^(|https?://[^/\s]+/?)$", description="OTLP endpoint for traces, over gRPC: http(s)://host:4317"
    )
    otlp_token: SecretStr | None = Field(None, description="bearer token for otlp_endpoint")
    otlp_ca: Path | None = Field(None, description="PEM file with the CA of otlp_endpoint")
    trace_ratio: float = Field(1.0, ge=0, le=1, description="share of the traces started here that are kept")
    parent_pid: int | None = Field(
        None, ge=1, description="process id of the parent; the service stops when it ends (Linux)"
    )
    restarts: int = Field(0, ge=0, description="how often the supervisor has restarted this service")
    last_end: str = Field("", description="how the previous process ended, as reported by the supervisor")

    @field_validator("*", mode="before")
    @classmethod
    def _decoded(cls, value: Any, info: ValidationInfo) -> Any:
        """Decodes lists and tables, which are JSON in flags and in the environment."""
        if not isinstance(value, str) or not _is_composite(cls.model_fields[str(info.field_name)]):
            return value
        try:
            return from_json(value)
        except ValueError:
            raise ValueError("must be JSON") from None

    @field_validator("*")
    @classmethod
    def _secrets_are_not_blank(cls, value: Any) -> Any:
        return refuse_blank(value) if isinstance(value, SecretStr) else value

    @field_validator("name")
    @classmethod
    def _name_is_valid(cls, value: str) -> str:
        return valid_name(value)

    @field_validator("peers")
    @classmethod
    def _peers_are_valid(cls, value: dict[str, str]) -> dict[str, str]:
        for name, address in value.items():
            if not name or not valid_name(name) or not _ADDRESS.fullmatch(address):
                raise ValueError(f"{name!r}: names a service (a-z, 0-9, -) and its address as host:port")
        return value

    @field_validator("state_dir")
    @classmethod
    def _state_dir_is_absolute(cls, value: Path) -> Path:
        return value.absolute()  # what is in it is named to programs that run elsewhere

    @model_validator(mode="before")
    @classmethod
    def _default_state_dir(cls, values: dict[str, Any]) -> dict[str, Any]:
        if "state_dir" not in values:
            values = {**values, "state_dir": default_state_dir() / cls.table()}
        return values

    @model_validator(mode="after")
    def _safe_to_listen(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        if self.otlp_ca is not None and self.otlp_endpoint.startswith("http://"):
            raise ValueError(
                "otlp_ca has no effect with an http:// otlp_endpoint, where spans are sent in cleartext: use "
                "https://, or unset otlp_ca"
            )
        if wrong := sorted(name for name in self.namespaces if not is_namespace(name)):
            raise ValueError(
                f"namespaces: {', '.join(wrong)}: a name has 1 to 63 of a-z, 0-9 and -, the first a letter or digit"
            )
        secrets = [self.operator_token, self.trainer_token, self.observer_token]
        secrets += [secret for one in self.namespaces.values() for secret in (one.trainer_token, one.observer_token)]
        tokens = [secret.get_secret_value() for secret in secrets if secret]
        if len(set(tokens)) != len(tokens):
            raise ValueError("two roles or namespaces have the same token: set a different one for each")
        if is_loopback(self.host) and self.operator_token is None and not self.anonymous:
            raise ValueError(
                f"no operator_token is set ({self.env_name('operator_token')}); make one with `openssl rand -hex "
                "32`, or start everything with `penstock up`, which sets it"
            )
        for name, host in (("host", self.host), ("metrics_host", self.metrics_host)):
            if not is_loopback(host) and (self.tls_cert is None or self.operator_token is None or self.anonymous):
                raise ValueError(
                    f"{name} {host} is reachable from outside this machine: that needs tls_cert, tls_key and"
                    f" operator_token, and no anonymous; or keep {name} at 127.0.0.1"
                )
        return self

    def home(self) -> Home:
        """Returns who this service is; keeps its name in the state directory."""
        return open_home(self.table(), self.name, self.peers, self.state_dir)

    @classmethod
    def load(cls, argv: Sequence[str] | None = None) -> Self:
        """Reads flags (`argv`, by default the process's own), environment and file.

        Raises:
            InvalidArgument: `SETTINGS_INVALID`, with a violation for each invalid setting; values are not repeated,
                since they may be secrets.
            SystemExit: `--help` was given, or a flag is unknown.
        """
        return cls._load(cls._parse(argv))

    @classmethod
    def _load(cls, flags: Mapping[str, Any]) -> Self:
        unknown = cls._unknown_variables(os.environ) + cls._unknown_keys(_read_table(cls.table()))
        if unknown:
            raise _invalid(unknown)
        try:
            return cls(**flags)
        except ValidationError as error:
            raise _invalid(violations_of(error, "settings")) from None

    @classmethod
    def table(cls) -> str:
        """Returns the name of the service's table in the file, from the prefix: `PENSTOCK_SANDBOX_` gives `sandbox`."""
        return (cls.model_config.get("env_prefix") or "").removeprefix("PENSTOCK_").rstrip("_").lower() or "service"

    @classmethod
    def env_name(cls, field: str) -> str:
        """Returns the environment variable of a setting."""
        return f"{cls.model_config.get('env_prefix') or ''}{field}".upper()

    def quotas(self) -> dict[str, int]:
        """Returns the quotas of the namespaces that have one."""
        return {name: one.quota for name, one in self.namespaces.items() if one.quota is not None}

    def weights(self) -> dict[str, float]:
        """Returns the weight of each namespace that is configured."""
        return {name: one.weight for name, one in self.namespaces.items()}

    def public(self) -> dict[str, Any]:
        """Returns all settings as JSON values, secrets masked: for the log at start."""
        return self.model_dump(mode="json")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags before environment before file; no .env file is ever read."""
        table = _read_table(cls.table())
        return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=table)

    @classmethod
    def _unknown_variables(cls, environment: Mapping[str, str]) -> list[Violation]:
        prefix = (cls.model_config.get("env_prefix") or "").upper()
        if not prefix:
            return []
        known = {cls.env_name(name) for name in cls.model_fields}
        # A client's variable for this service's address, often set in the shell that starts the service.
        known.add(f"{prefix}ADDRESS")
        return [
            Violation(name, "no such setting" + did_you_mean(name.upper(), known))
            for name in sorted(environment)
            if name.upper().startswith(prefix) and name.upper() not in known
        ]

    @classmethod
    def _unknown_keys(cls, table: Mapping[str, Any]) -> list[Violation]:
        return [
            Violation(name, "no such setting" + did_you_mean(name, cls.model_fields))
            for name in table
            if name not in cls.model_fields
        ]

    @classmethod
    def _parse(cls, argv: Sequence[str] | None) -> dict[str, Any]:
        parser = argparse.ArgumentParser(
            prog=f"penstock-{cls.table()}",
            description=f"Each setting is also an environment variable, and a key of [{cls.table()}] in the TOML file"
            f" that {CONFIG_VARIABLE} names. Flags override the environment, which overrides the file.",
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        secrets: list[str] = []
        flags: list[str] = []
        for name, info in cls.model_fields.items():
            if _is_secret(info):
                secrets.append(f"  {cls.env_name(name)}: {info.description or name}")
                continue
            flag = "--" + name.replace("_", "-")
            flags.append(flag)
            text = f"{info.description or name} [{cls.env_name(name)}{_default(info)}]".replace("%", "%%")
            if info.annotation is bool:
                parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, help=text)
                flags.append("--no-" + flag.removeprefix("--"))
            else:
                parser.add_argument(flag, dest=name, metavar="VALUE", help=text)
        if secrets:
            parser.epilog = "Secrets have no flag, since an argv is public:\n" + "\n".join(secrets)
            parser.formatter_class = argparse.RawDescriptionHelpFormatter
        given, unknown = parser.parse_known_args(argv)
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{did_you_mean_option(unknown[0], flags)}")
        return vars(given)


def is_loopback(host: str) -> bool:
    """True when only this machine can reach an address: 127.0.0.0/8, ::1 and the name localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def refuse_blank(value: SecretStr | None) -> SecretStr | None:
    """Returns a secret unchanged; refuses one that is blank, has outer whitespace or cannot go into a header (R3).

    For `field_validator`s of services that have secrets of their own.

    Raises:
        ValueError: states what is wrong without repeating the value.
    """
    if value is None:
        return None
    text = value.get_secret_value()
    if not text.strip():
        raise ValueError("a secret must not be blank; unset it for none")
    if text != text.strip() or not text.isascii() or not text.isprintable():
        raise ValueError("a secret must be printable ASCII without whitespace around it")
    return value


def default_state_dir() -> Path:
    """Returns the default state directory: `$XDG_STATE_HOME/penstock`, or `~/.local/state/penstock`."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "penstock"


def _read_table(name: str) -> dict[str, Any]:
    file = os.environ.get(CONFIG_VARIABLE)
    if not file:
        return {}
    try:
        content = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise _invalid([Violation(CONFIG_VARIABLE, f"cannot be read: {error.strerror}")]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        # The parser's message can quote the line, and the line can contain a token.
        raise _invalid([Violation(CONFIG_VARIABLE, "is not valid TOML in UTF-8")]) from None
    stray = [key for key, value in content.items() if not isinstance(value, dict)]
    if stray:
        raise _invalid(Violation(key, "is outside a table: move it under [<service>]") for key in stray)
    table: dict[str, Any] = content.get(name, {})
    return table


def _invalid(violations: typing.Iterable[Violation]) -> InvalidArgument:
    found = tuple(violations)
    text = "; ".join(f"{item.field}: {item.description}" for item in found)
    return InvalidArgument(f"Invalid settings: {text}", reason="SETTINGS_INVALID", violations=found)


def _is_secret(info: FieldInfo) -> bool:
    return _holds_secret(info.annotation)


def _holds_secret(annotation: Any) -> bool:
    """Whether values of a type are, or have in them, secrets: also those of a table or of a model's fields."""
    if annotation is SecretStr:
        return True
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return any(map(_is_secret, annotation.model_fields.values()))
    return any(map(_holds_secret, typing.get_args(annotation)))


def _is_composite(info: FieldInfo) -> bool:
    composites = (list, tuple, dict, set, frozenset)
    return any(typing.get_origin(item) in composites for item in _alternatives(info.annotation))


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the type itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _default(info: FieldInfo) -> str:
    """Returns the default for the help text, in the syntax of flags and environment; empty where there is none."""
    if info.is_required() or info.default_factory is not None or info.default in (None, "", (), Path()):
        return ""
    value = info.default
    return f"; default {value if isinstance(value, str | Path) else to_json(value).decode()}"
