"""Every pair of a class and a message that services and client declare."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.unit.values.messages import messages

import penstock.client
import penstock.values
import penstock_driver.clients
import penstock_driver.wire
import penstock_inference.rpc
import penstock_interception.rpc
import penstock_interception.wire
import penstock_sandbox.rpc
from penstock.values import functions
from penstock.values.fields import ValueMismatch

DECLARING = (
    penstock.client,
    penstock_driver.clients,
    penstock_driver.wire,
    penstock_inference.rpc,
    penstock_interception.rpc,
    penstock_interception.wire,
    penstock_sandbox.rpc,
)
"""Packages whose modules declare pairs."""
for package in DECLARING:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
penstock.values.check()

Pair = tuple[type, Descriptor]
WITHHELD: Mapping[str, Mapping[str, Any]] = {"penstock_sandbox.domain.model.Command": {"secret_env": {}}}
"""Fields that are never written, and what they are when read again."""

READ_FROM_DISK = frozenset({"penstock_driver.domain.rollout.Failure", "penstock_driver.domain.rollout.Outcome"})
"""What a driver reads only where a driver wrote it: there no enum is unset, and no rule of the domain is broken."""


def named(pair: Pair) -> str:
    return f"{pair[0].__module__}.{pair[0].__qualname__}"


def declared(functions: Iterable[Pair]) -> list[Pair]:
    """The pairs of the product, not those of other tests."""
    return sorted((pair for pair in functions if pair[0].__module__.startswith("penstock")), key=named)


BOTH_WAYS = [
    pair
    for pair in declared(functions._readers.keys() & functions._writers.keys())
    if "__eq__" in vars(pair[0])  # trajectories have arrays: tests/unit/tables compares all that an export has of them
]


@pytest.mark.requirement("R63", "R64")
@pytest.mark.parametrize("pair", BOTH_WAYS, ids=named)
@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_value_that_is_written_and_read_again_is_the_same(pair: Pair, data: st.DataObject) -> None:
    """No field is lost or changed on the way, and unset stays unset."""
    read, write = functions._readers[pair], functions._writers[pair]
    try:
        value: Any = read(data.draw(messages(pair[1])))
    except (ValueMismatch, KeyError, ValueError):
        assume(named(pair) not in READ_FROM_DISK)
        raise
    assert read(write(value)) == replace(value, **WITHHELD.get(named(pair), {}))


@pytest.mark.requirement("R64")
def test_services_and_client_declare_their_pairs() -> None:
    """What the test above is repeated for is not nothing."""
    owners = {pair[0].__module__.split(".")[0] for pair in declared([*functions._readers, *functions._writers])}
    services = {f"penstock_{name}" for name in ("driver", "inference", "interception", "sandbox")}
    assert owners == {"penstock", "penstock_codec"} | services
    assert len(BOTH_WAYS) > 10
