"""The part of `penstock doctor` that asks a running inference service for its model.

An engine for another endpoint may have nothing to serve yet: then the reason is the finding.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.cli.commands.doctor.findings import Finding, of_error
from penstock.cli.connections.service_selection import running
from penstock.client import PenstockError, connect
from penstock.client.inference.engine_info import EngineInfo
from penstock.client.transport.endpoints import DEFAULT_PORTS, Endpoints

_NAME: Final = "inference service"
_CALL_S: Final = 5.0
_DEFAULT: Final = f"127.0.0.1:{DEFAULT_PORTS['inference']}"
"""The default address: no service need listen there."""


def look_at_inference(state_dir: Path | None = None) -> list[Finding]:
    """Returns one finding if an inference service is configured or answers at its default address; otherwise none."""
    try:
        endpoints = running(state_dir)
    except PenstockError:
        return []  # the check of the sandbox service reports it
    if not endpoints.inference:
        return []
    details = {"address": endpoints.inference}
    try:
        return [asyncio.run(_asked(endpoints, details))]
    except PenstockError as error:
        if endpoints.inference == _DEFAULT and error.reason.startswith("TRANSPORT_"):
            return []
        return [of_error(_NAME, endpoints.inference, error, endpoints.origin, details)]
    except (OSError, TimeoutError) as error:
        if endpoints.inference == _DEFAULT:
            return []
        return [of_error(_NAME, endpoints.inference, error, endpoints.origin, details)]


async def _asked(endpoints: Endpoints, details: Mapping[str, str | bool]) -> Finding:
    async with asyncio.timeout(_CALL_S):
        host, _, port = endpoints.inference.rpartition(":")
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()
        async with connect(endpoints) as ps:
            info = await ps.inference.info()
    return finding(info, details)


def finding(info: EngineInfo, details: Mapping[str, str | bool]) -> Finding:
    """The served model, and whether its rollouts can be trained on."""
    gives = "text alone"
    if "token_ids" in info.capabilities:
        gives = "token ids"
        gives += f" and {info.logprobs_mode.value} logprobs" if "logprobs" in info.capabilities else " without logprobs"
    found = f"at {details['address']}; {info.engine} ({info.engine_version}) serves {info.model}: {gives}"
    trains = {"token_ids", "logprobs"} <= info.capabilities
    advice = "" if trains else "rollouts through it are for evaluation only: they have nothing to train on"
    return Finding(_NAME, True, False, found, advice, {**details, "engine": info.engine, "trainable": trains})
