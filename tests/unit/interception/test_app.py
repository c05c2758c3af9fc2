"""How the service says where its ingress is."""

from __future__ import annotations

import socket

import pytest

from penstock_chassis.errors import FailedPrecondition
from penstock_interception import app
from penstock_interception.settings import InterceptionSettings

_SETTING = "tls:interception@{address}:7780"


async def reached(address: str, listening: str = "0.0.0.0:7780") -> str:
    return await app._reached(InterceptionSettings.model_construct(ingress_address=address), listening)


async def test_a_replica_puts_its_own_address_into_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.2")
    assert await reached(_SETTING) == "tls:interception@127.0.0.2:7780"
    monkeypatch.setattr(socket, "gethostname", lambda: "::1")
    assert await reached(_SETTING) == "tls:interception@[::1]:7780"
    assert await reached("tls:gate.example:7780") == "tls:gate.example:7780"


async def test_a_machine_whose_name_has_no_address_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "nobody.invalid")
    with pytest.raises(FailedPrecondition, match="set ingress_address without it") as caught:
        await reached(_SETTING)
    assert caught.value.reason == "OWN_ADDRESS_UNKNOWN"


async def test_port_0_becomes_the_port_that_the_kernel_chose() -> None:
    assert await reached("tls:gate@gate.example:0", "127.0.0.1:41234") == "tls:gate@gate.example:41234"
