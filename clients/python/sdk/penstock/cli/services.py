"""Which services a command talks to: those that run, or its own for as long as it takes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.markup import escape

from penstock.cli.console import err
from penstock.client import Endpoints, Penstock, Unavailable, connect
from penstock.client.endpoints import of_state_dir, resolve
from penstock.client.stack import LocalStack, UpstreamEndpoint
from penstock.client.supervision import ServiceRestart


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What a stack of one's own serves."""

    model_dir: Path | None = None
    engine: str = "numpy"
    script: Path | None = None
    upstreams: Mapping[str, UpstreamEndpoint] = field(default_factory=dict)
    engine_options: Mapping[str, str] = field(default_factory=dict)
    engine_key: str = field(default="", repr=False)
    """Of the endpoint that the engine asks."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further settings by service."""

    @property
    def given(self) -> bool:
        """Whether the command line asks for an engine of its own."""
        return self.model_dir is not None or self.script is not None

    def stack(
        self,
        ports: Mapping[str, int],
        state_dir: Path | None,
        on_restart: Callable[[ServiceRestart], None] | None = None,
    ) -> LocalStack:
        """The services, not yet started."""
        options = dict(self.engine_options)
        if self.script is not None:
            options["script"] = str(self.script.absolute())
        settings = {name: dict(values) for name, values in self.settings.items()}
        if self.engine_key:
            settings.setdefault("inference", {})["upstream_api_key"] = self.engine_key
        return LocalStack(
            model_dir=None if self.model_dir is None else self.model_dir.absolute(),
            engine=self.engine,
            engine_options=options,
            settings=settings,
            upstreams=self.upstreams,
            ports=ports,
            state_dir=state_dir,
            on_restart=on_restart,
        )


def running(state_dir: Path | None) -> Endpoints:
    """Services that run: those of a state directory, or those that a client finds without one.

    Raises:
        Unavailable: `STACK_NOT_RUNNING`, nothing runs in the directory.
        ConfigurationError: what says where they are does not hold.
    """
    if state_dir is None:
        return resolve()
    found = of_state_dir(state_dir)
    if found is None:
        what = f"No services run in {state_dir}: `penstock up --state-dir {state_dir}` starts them"
        raise Unavailable(what, reason="STACK_NOT_RUNNING")
    return found


@asynccontextmanager
async def services(
    choice: ModelChoice | None = None,
    *,
    state_dir: Path | None = None,
    before_start: Callable[[], None] = lambda: None,
) -> AsyncIterator[Penstock]:
    """A client of the services that run; if none do, or an engine is asked for, of a stack that lasts for the block.

    With a `state_dir` those that run count only if they are its own. `before_start` may end the program before a stack
    is started.
    """
    choice = choice or ModelChoice()
    endpoints = None if choice.given else resolve() if state_dir is None else of_state_dir(state_dir)
    if endpoints is not None and (endpoints.origin != "the defaults" or await _answers(endpoints)):
        async with connect(endpoints) as ps:
            yield ps
        return
    before_start()
    where = "" if state_dir is None else f" in {state_dir}"
    why = "with its own engine" if choice.given else f"since none run{where} (`penstock up` keeps them running)"
    with err.status(f"starting services {why}"):
        stack = choice.stack({}, state_dir)
        await stack.__aenter__()
    try:
        err.print(f"[dim]services of this command's own, {escape(why)}; logs in {escape(str(stack.log_dir))}[/]")
        async with connect(stack.endpoints) as ps:
            yield ps
    except BaseException as error:
        await stack.__aexit__(type(error), error, error.__traceback__)
        raise
    else:
        await stack.__aexit__(None, None, None)


async def _answers(endpoints: Endpoints) -> bool:
    """Whether something listens where the driver would."""
    host, _, port = endpoints.driver.rpartition(":")
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
