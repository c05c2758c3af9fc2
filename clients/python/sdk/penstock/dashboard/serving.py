"""The dashboard as a server: the page, its calls, and the checks of requests.

Invariants: it listens on loopback unless it has a certificate (R9); a request whose Host or Origin is not the
dashboard's own is refused before anything else is read, so that no other site's page reaches it by a name of its own
(DNS rebinding).
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from penstock.client.errors import ConfigurationError
from penstock.client.transport.endpoints import DEFAULT_DASHBOARD_PORT, Endpoints, is_loopback
from penstock.dashboard import pages, slow_browsers
from penstock.dashboard.gateway import Bounds, Gateway

_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class Place:
    """The dashboard's listening address.

    Attributes:
        host: an address; other than loopback needs `cert` and `key`.
        port: 0 = a free one.
        names: further host names that browsers may use, beside loopback's and `host` itself.
        cert: PEM file with the certificate chain.
        key: PEM file with its private key.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_DASHBOARD_PORT
    names: Collection[str] = ()
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigurationError("Set a certificate and its key together.", reason="DASHBOARD_TLS")
        if self.cert is None and not is_loopback(self.host):
            raise ConfigurationError(
                f"{self.host} is reachable from outside this machine, and the page's token would be sent in "
                "cleartext: set a certificate and its key, or keep 127.0.0.1 and use `ssh -L`.",
                reason="DASHBOARD_TLS",
            )


@dataclass(frozen=True, slots=True)
class Dashboard:
    address: str
    """For example http://127.0.0.1:7790/"""

    def link(self, token: str | None) -> str:
        """Returns the address to open, with the token in the fragment, which no server sees."""
        return self.address if token is None else f"{self.address}#token={quote(token, safe='')}"


@asynccontextmanager
async def serve(
    endpoints: Endpoints, place: Place | None = None, *, static: Path = pages.STATIC, bounds: Bounds | None = None
) -> AsyncIterator[Dashboard]:
    """Serves the dashboard of some services while open. Their token is not used: each page brings its own.

    Raises:
        ConfigurationError: `DASHBOARD_NOT_BUILT`, `DASHBOARD_TLS`, `DASHBOARD_PORT`, `TOKEN_IN_CLEAR`.
    """
    place = place or Place()
    tls, assets = _tls(place), pages.load(static)
    bounds = bounds or Bounds()
    gateway = Gateway(endpoints, bounds)
    runner = web.AppRunner(
        _application(gateway, assets, {place.host, *place.names}, bounds.write_s),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=1.0,
    )
    try:
        await runner.setup()
        site = web.TCPSite(runner, place.host, place.port, ssl_context=tls, reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            raise ConfigurationError(
                f"The dashboard cannot listen on {place.host}:{place.port}: {error.strerror or error}. Choose another"
                " port (`--dashboard-port` of `penstock up`, `--port` of `penstock dashboard`; 0 = any free one).",
                reason="DASHBOARD_PORT",
            ) from None
        port = runner.addresses[0][1]
        host = f"[{place.host}]" if ":" in place.host else place.host
        yield Dashboard(f"{'http' if tls is None else 'https'}://{host}:{port}/")
    finally:
        await gateway.close()
        await runner.cleanup()


def _application(
    gateway: Gateway, assets: Mapping[str, pages.Asset], names: Collection[str], write_s: float
) -> web.Application:
    allowed = _LOOPBACK | {name.strip("[]").lower() for name in names}

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await answered(request, handler)
        try:  # here and not by the HTTP server, which would wait forever
            await response.prepare(request)
            await slow_browsers.taken(request, response.write_eof(), write_s)
        except ConnectionError as error:
            raise asyncio.CancelledError from error  # there is no one to answer
        return response

    async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
        hosts = request.headers.getall("host", [])
        host = _host_of(f"//{request.host}") if len(hosts) == 1 and "@" not in request.host else ""
        origin = request.headers.get("origin")
        if host not in allowed or (origin is not None and _authority(origin) != request.host.lower()):
            return web.Response(
                status=421, text="This is not a name of the dashboard: see --name of `penstock dashboard`.\n"
            )
        return await handler(request)

    async def page(request: web.Request) -> web.Response:
        asset = assets.get(request.match_info["path"])
        if asset is None:
            return web.Response(status=404, text="There is no such page; the dashboard is at /.\n")
        headers = {"cache-control": asset.cache_control, "etag": asset.etag}
        if request.headers.get("if-none-match") == asset.etag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=asset.body, headers={**headers, "content-type": asset.content_type})

    async def alive(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def shield(_request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(pages.HEADERS)
        response.headers["server"] = "penstock"

    app = web.Application(middlewares=[guard])
    app.on_response_prepare.append(shield)
    app.router.add_get("/health", alive)
    app.router.add_post("/rpc/{service}/{method}", gateway.handle)
    app.router.add_get("/{path:.*}", page)
    return app


def _tls(place: Place) -> ssl.SSLContext | None:
    if place.cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(place.cert, place.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"{place.cert} and its key cannot be used: {error}", reason="DASHBOARD_TLS") from None
    return context


def _host_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
