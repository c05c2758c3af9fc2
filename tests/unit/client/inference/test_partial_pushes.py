"""Which engines a partial push goes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from penstock.client.errors import EnginesFailed, FailedPrecondition, Unavailable
from penstock.client.inference.engines import Done, Engine, Engines
from penstock.client.transport.rpc import Service


@dataclass(frozen=True)
class At(Engine):
    """An engine whose version is at hand; None = it does not answer."""

    has: list[int | None] = field(default_factory=lambda: [4])

    async def version(self) -> int:
        if (has := self.has[0]) is None:
            raise Unavailable("away")
        return has


class Listed(Engines):
    """Engines that a gate lists."""

    def __init__(self, live: Sequence[Engine], away: Sequence[str] = ()) -> None:
        self._live, self._away = live, away
        self._base, self._pushed = None, -1

    async def _found(self) -> tuple[Sequence[Engine], Sequence[str]]:
        return self._live, self._away


def at(name: str, version: int | None) -> At:
    return At(name, cast(Service, None), None, [version])


async def push(engines: Listed, version: int) -> Done:
    async def one(engine: Engine) -> Any:
        cast(At, engine).has[0] = version
        return version

    return await engines.push_partial(version, one)


@pytest.mark.requirement("R87")
async def test_a_partial_push_is_repeated_once_engines_answer_again() -> None:
    """While nobody answers, nothing is decided about the version that it is made for."""
    live = [at("e0", None), at("e1", None)]
    engines = Listed(live)
    with pytest.raises(Unavailable):
        await push(engines, 5)
    for engine in live:
        engine.has[0] = 4
    assert set((await push(engines, 5)).answers) == {"e0", "e1"}


@pytest.mark.requirement("R87")
async def test_an_engine_that_lost_its_weights_gets_no_part_of_the_next() -> None:
    """The only one left has version 0 again; the other tensors of version 4 are at the engine that is away."""
    engines = Listed([at("e0", 0)], ["e1"])
    engines.pushed(4)
    with pytest.raises(FailedPrecondition) as refused:
        await push(engines, 5)
    assert refused.value.reason == "BASE_VERSION_DIFFERS"


@pytest.mark.requirement("R87")
async def test_an_engine_of_unknown_version_is_asked_again_and_not_pushed_blindly() -> None:
    silent = at("e1", None)
    with pytest.raises(EnginesFailed) as failed:
        await push(Listed([at("e0", 4), silent]), 5)
    assert set(failed.value.failures) == {"e1"} and silent.has == [None]
