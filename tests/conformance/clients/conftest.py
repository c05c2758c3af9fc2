"""One real stack for all cases and languages, behind a network that can fail; one process for each language."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import trustme
from tests.conformance.clients.odd_engine import odd_engine
from tests.conformance.clients.odd_services import empty_server, odd_driver
from tests.conformance.clients.proxies import Proxy
from tests.conformance.clients.subjects import SUBJECTS, Subject
from tests.conformance.clients.world import SERVICES, WRONG_TOKEN, World
from tests.support.services.restarting import restartable

from penstock_chassis.auth import Role
from penstock_inference.testing import open_inference, random_config, random_tensors, write_model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """The services, with a proxy before each, and the odd ones."""
    folder = tmp_path_factory.mktemp("clients")
    authority = trustme.CA()
    ca, other_ca = folder / "ca.pem", folder / "other-ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    other_authority = trustme.CA()
    other_authority.cert_pem.write_to_path(str(other_ca))
    async with AsyncExitStack() as stack:
        running, services = await stack.enter_async_context(restartable(folder))
        proxies = {name: await stack.enter_async_context(Proxy(running.stack.address(name))) for name in SERVICES}
        # Bound and not listening: it refuses connections, and no server of another test gets its port.
        nobody = stack.enter_context(socket.socket())
        nobody.bind(("127.0.0.1", 0))
        odd, odd_address = await stack.enter_async_context(odd_driver())
        tls, tls_address = await stack.enter_async_context(odd_driver(_credentials(authority)))
        home, home_address = await stack.enter_async_context(odd_driver())
        tls_home, tls_home_address = await stack.enter_async_context(odd_driver(_credentials(authority)))
        stranger, stranger_address = await stack.enter_async_context(odd_driver(_credentials(other_authority)))
        odd.homes = tls.homes = {
            "home": home_address,
            "tls-home": tls_home_address,
            "stranger": stranger_address,
            # Leads to this machine, and is no address of it that a client may trust to do so.
            "far": home_address.replace("127.0.0.1", "0.0.0.0"),
            "path": f"unix:{folder}/socket",
            "itself": odd_address,
        }
        content = {
            "version": 1,
            "pid": None,
            "addresses": {name: proxy.address for name, proxy in proxies.items()},
            "token": services.trainer_token,
        }
        files = {"ca": ca, "other-ca": other_ca}
        kinds = {"connection": (content, 0o600), "open-connection": (content, 0o644)}
        kinds["stale-connection"] = ({**content, "token": WRONG_TOKEN}, 0o600)
        for name, (told, mode) in kinds.items():
            files[name] = folder / f"{name}.json"
            files[name].write_text(json.dumps(told))
            files[name].chmod(mode)
        config = random_config("qwen3", eos_token_id=None)
        tiny = write_model(folder / "tiny", config, random_tensors(config))
        weights = folder / "weights"
        weights.mkdir()
        tokens = {Role.TRAINER: services.trainer_token}
        opening = open_inference(tiny, folder / "engine", tokens=tokens, weights_dir=weights)
        engine = await stack.enter_async_context(opening)
        addresses = {
            "odd-engine": await stack.enter_async_context(odd_engine()),
            "engine": engine.address,
            "odd": odd_address,
            "odd-tls": tls_address,
            "empty": await stack.enter_async_context(empty_server()),
            "nobody": f"127.0.0.1:{nobody.getsockname()[1]}",
        }
        odds = {"odd": odd, "odd-tls": tls, "home": home, "tls-home": tls_home, "stranger": stranger}
        for name, credentials, listed in (
            ("odd-listing", None, odd.homes["far"]),
            ("odd-listing-tls", _credentials(authority), tls_home_address),
        ):
            odds[name], addresses[name] = await stack.enter_async_context(odd_driver(credentials))
            odds[name].drivers = {"listed": listed}
        world = World(running, services, proxies, odd, addresses, files, odds, tmp_path_factory.mktemp("fleet"))
        stack.push_async_callback(world.close)
        yield world


def _credentials(authority: trustme.CA) -> grpc.ServerCredentials:
    certificate = authority.issue_cert("localhost")
    pair = certificate.private_key_pem.bytes(), certificate.cert_chain_pems[0].bytes()
    return grpc.ssl_server_credentials([pair])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject_of(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Callable[[str], Awaitable[Subject]]]:
    """Starts a language's subject, once; at the end each has to end in order."""
    started: dict[str, Subject] = {}

    async def of(language: str) -> Subject:
        if language not in started:
            stderr: Path = tmp_path_factory.mktemp(language) / "stderr"
            started[language] = await Subject.start(language, SUBJECTS[language](), stderr)
        return started[language]

    yield of
    for subject in started.values():
        await subject.end()
