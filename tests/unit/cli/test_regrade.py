"""What `penstock regrade` says of what it has done."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.commands.grades import regrade
from penstock.cli.commands.grades.chosen import Chosen, Which
from penstock.client import PenstockError, Regraded
from penstock.client.errors import Unavailable

AWAY = Unavailable("driver d1 is away", reason="DRIVER_AWAY")


async def _regrade_all(*_: object, **__: object) -> AsyncIterator[Regraded]:
    rollout: Any = SimpleNamespace(rollout_id="r1")
    yield Regraded(rollout, None, PenstockError("it is gone", reason="END_STATE_GONE"))
    raise AWAY


@asynccontextmanager
async def _services(**_: object) -> AsyncIterator[Any]:
    yield SimpleNamespace(rollouts=SimpleNamespace(regrade_all=_regrade_all))


async def _chosen(*_: object) -> Chosen:
    return Chosen(Which(run_id="run"), 2)


@pytest.mark.requirement("R122")
@pytest.mark.parametrize("as_json", [False, True])
def test_what_was_graded_is_summed_up_also_where_a_driver_is_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    """The rollouts of the other drivers have their grades: whoever asked is told so, and then of the error."""
    monkeypatch.setattr(regrade, "services", _services)
    monkeypatch.setattr(regrade, "chosen", _chosen)
    with pytest.raises(SystemExit) as ended:
        regrade.regrade("run", as_json=as_json)
    said = capsys.readouterr()
    assert ended.value.code not in (0, 1) and "driver d1 is away" in said.err
    if as_json:
        last = json.loads(said.out.splitlines()[-1])
        assert (last["graded"], last["errors"]) == (0, {"END_STATE_GONE": 1})
    else:
        assert "0 rollouts graded" in said.out and "END_STATE_GONE" in said.err
