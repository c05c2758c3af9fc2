"""A service as small as one can be, run as a process by test_run.py; what it does goes to standard output."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic_settings import SettingsConfigDict

from penstock_chassis.errors import FailedPrecondition
from penstock_chassis.health import Draining
from penstock_chassis.server import Service, run
from penstock_chassis.settings import ServiceSettings


class ValveSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_VALVE_")

    refuse: bool = False
    stuck_start: bool = False
    stuck_drain: bool = False
    busy: bool = False


@asynccontextmanager
async def build(settings: ValveSettings) -> AsyncIterator[Service]:
    if settings.refuse:
        raise FailedPrecondition("There is no water; open the sluice.", reason="NO_WATER")

    async def drain(seconds: float) -> None:
        print(f"draining {seconds:g}", flush=True)
        if settings.stuck_drain:
            await asyncio.get_running_loop().create_future()

    try:
        if settings.stuck_start:
            print("starting", flush=True)
            await asyncio.get_running_loop().create_future()
        yield Service(
            registrations=(),
            draining=Draining(lambda takes: print(f"takes {takes}", flush=True), lambda: int(settings.busy)),
            drain=drain,
            endpoints={"ingress": "127.0.0.1:7780"},
        )
    finally:
        print("closed", flush=True)


if __name__ == "__main__":
    run(ValveSettings, "valve", build)
