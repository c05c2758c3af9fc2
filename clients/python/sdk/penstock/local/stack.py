"""The four services as processes on this machine: for one person, a demo, a test.

`LocalStack` starts the installed services (found, never imported) in the order inference, interception, sandbox,
driver, and stops them in reverse; `penstock.local.processes` has how they are started, restarted and stopped.
"""

import secrets
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from penstock.client.errors import ConfigurationError
from penstock.client.transport.endpoints import (
    CONNECTION_FILE,
    DEFAULT_INGRESS_PORT,
    DEFAULT_PORTS,
    Endpoints,
    ServiceName,
)
from penstock.client.transport.endpoints import (
    state_dir as default_state_dir,
)
from penstock.local.processes import DRAIN_S, START_TIMEOUT_S, ServiceProcesses, StackFailed, bound_port
from penstock.local.supervision import MAX_RESTARTS, ServiceRestart

__all__ = ["DRAIN_S", "FIXED_PORTS", "START_TIMEOUT_S", "LocalStack", "StackFailed", "UpstreamEndpoint"]

FIXED_PORTS: Final[Mapping[str, int]] = MappingProxyType(
    {**{str(name): port for name, port in DEFAULT_PORTS.items()}, "ingress": DEFAULT_INGRESS_PORT}
)
"""The default ports, for `LocalStack(ports=FIXED_PORTS)`; without it free ones are used."""


@dataclass(frozen=True, slots=True)
class UpstreamEndpoint:
    """An OpenAI-compatible endpoint that rollouts may name; the key is sent to this address only."""

    base_url: str
    api_key: str = field(default="", repr=False)


class LocalStack(ServiceProcesses):
    """`async with LocalStack(model_dir=...) as stack: async with connect(stack.endpoints) as ps: ...`

    Args:
        model_dir: the model to serve; None = no inference service.
        engine: of the inference service: numpy, scripted, ...
        engine_options: of the engine, for example `{"script": "turns.yaml"}`.
        upstreams: endpoints that rollouts may name.
        tokenizers: directories with a tokenizer that rollouts may name.
        ports: by service, and `ingress`; absent = a free one.
        state_dir: the services' state; None = `$XDG_STATE_HOME/penstock`. One stack at a time.
        log_dir: their logs; None = `logs` in the state directory.
        settings: further settings by service, as in their own files.
        start_timeout: seconds for each service to become ready.
        max_restarts: how often a service that died is restarted within ten minutes; 0 = a death ends the stack.
        on_restart: called when a service died and is about to be restarted, and when it is back; absent = logged.
        takes_up: whether it goes on with rollouts that an earlier stack left, which end with it if they have not
            ended before; False = it does not start where there are some, and they stay as they are.

    Raises:
        ConfigurationError: `ROLLOUTS_LEFT`, there are some.
    """

    def __init__(
        self,
        *,
        model_dir: Path | str | None = None,
        engine: str = "numpy",
        engine_options: Mapping[str, str] = MappingProxyType({}),
        upstreams: Mapping[str, UpstreamEndpoint] = MappingProxyType({}),
        tokenizers: Mapping[str, Path | str] = MappingProxyType({}),
        ports: Mapping[str, int] = MappingProxyType({}),
        state_dir: Path | str | None = None,
        log_dir: Path | str | None = None,
        settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        start_timeout: float = START_TIMEOUT_S,
        max_restarts: int = MAX_RESTARTS,
        on_restart: Callable[[ServiceRestart], None] | None = None,
        takes_up: bool = True,
    ) -> None:
        super().__init__(
            state_dir=state_dir or default_state_dir(),
            log_dir=log_dir,
            start_timeout=start_timeout,
            max_restarts=max_restarts,
            on_restart=on_restart,
        )
        # Absolute like the rest: the services read them from files in another directory.
        self._model_dir = None if model_dir is None else Path(model_dir).absolute()
        self._engine = engine
        self._engine_options = engine_options
        self._upstreams = upstreams
        self._tokenizers = {name: Path(path).absolute() for name, path in tokenizers.items()}
        self._ports = ports
        self._more_settings = settings
        self._takes_up = takes_up
        self.connection_file = self.state_dir / CONNECTION_FILE
        """Where `penstock up` writes how clients reach the services."""
        self.operator_token = secrets.token_hex(32)
        """The token that may call everything."""
        self.trainer_token = secrets.token_hex(32)
        """The token for a trainer in another process or language."""

    def _prepare(self) -> None:
        super()._prepare()
        # Before any service runs: the end of the sandbox service alone would end what it keeps for them.
        if not self._takes_up and (left := _unended(Path(self.settings_of("driver")["state_dir"]) / "driver.db")):
            what = "1 rollout has" if left == 1 else f"{left} rollouts have"
            raise ConfigurationError(
                f"{what} not ended in {self.state_dir}, whose services were killed. Services for this command only "
                "would end them with it: start `penstock up` first, with the options that it had. It goes on with "
                "them, and answers this command. If they are of no use any more, stop it: that ends them.",
                reason="ROLLOUTS_LEFT",
            )

    @property
    def services(self) -> Sequence[ServiceName]:
        """The services of this stack, in starting order."""
        first: tuple[ServiceName, ...] = () if self._model_dir is None else ("inference",)
        return (*first, "interception", "sandbox", "driver")

    @property
    def endpoints(self) -> Endpoints:
        """For `connect`: the bound addresses, with the operator's token."""
        addresses: dict[ServiceName, str] = {"inference": "", **self._addresses}
        return Endpoints(
            **addresses,
            token=self.operator_token,
            tls=None,
            discover=True,
            origin="this process's own services",
        )

    def settings_of(self, service: ServiceName) -> dict[str, Any]:
        """See ServiceProcesses."""
        table: dict[str, Any] = {
            "port": bound_port(self._addresses.get(service), self._ports.get(service, 0)),
            "operator_token": self.operator_token,
            "trainer_token": self.trainer_token,
            "state_dir": str(self.state_dir / service),
        }
        match service:
            case "inference":
                table["model_dir"] = str(self._model_dir)
                table["engine"] = self._engine
                table["engine_options"] = dict(self._engine_options)
            case "interception":
                table["ingress_port"] = bound_port(self.ingress_address, self._ports.get("ingress", 0))
                table["inference_address"] = self._addresses.get("inference", "")
                if "inference" in self._addresses:
                    table["inference_token"] = self.operator_token
                table["upstreams"] = {
                    key: {"base_url": item.base_url, **({"api_key": item.api_key} if item.api_key else {})}
                    for key, item in self._upstreams.items()
                }
                table["tokenizers"] = {key: str(path) for key, path in self._tokenizers.items()}
            case "sandbox":
                table["allowed_upstreams"] = [self.ingress_address]
            case "driver":
                table["drain_s"] = DRAIN_S
                table["sandbox_address"] = self._addresses.get("sandbox", "")
                table["sandbox_token"] = self.operator_token
                table["interception_address"] = self._addresses.get("interception", "")
                table["interception_token"] = self.operator_token
        return table | dict(self._more_settings.get(service, {}))


def _unended(journal: Path) -> int:
    """Returns how many rollouts a driver that does not run has left; 0 also where its journal cannot be read.

    The driver then says what is wrong with it.
    """
    if not journal.exists():
        return 0
    try:
        with closing(sqlite3.connect(f"{journal.as_uri()}?mode=ro", uri=True)) as connection:
            (count,) = connection.execute("SELECT COUNT(*) FROM rollouts WHERE end_time IS NULL").fetchone()
    except sqlite3.Error:
        return 0
    return int(count)
