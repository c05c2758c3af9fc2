"""Lists of agents: each page begins after the last agent of the one before, whatever was registered meanwhile."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tests.unit.driver.conftest import Driver

from penstock.driver.v1 import agent_service_pb2 as pb
from penstock_chassis.errors import InvalidArgument
from penstock_driver.rpc.agent_service import AgentServicer


async def page(driver: Driver, token: str = "") -> tuple[list[str], str]:
    """The names of a page of two agents, and the token of the next one."""
    servicer = AgentServicer(driver.registry, driver.sandboxes)
    listed = await servicer.ListAgents(pb.ListAgentsRequest(page_size=2, page_token=token), cast(Any, None))
    return [agent.spec.name for agent in listed.agents], listed.next_page_token


@pytest.mark.requirement("R66")
async def test_pages_repeat_and_skip_no_agent_when_others_come_and_go(driver: Driver) -> None:
    base = driver.registry.get("default", "shell").spec
    for name in ("a1", "a2"):
        await driver.registry.register("default", base.model_copy(update={"name": name}))
    names = sorted(agent.spec.name for agent in driver.registry.agents("default"))
    first, token = await page(driver)
    assert first == names[:2] == ["a1", "a2"]
    await driver.registry.register("default", base.model_copy(update={"name": "a0"}))
    found = list(first)
    while token:
        more, token = await page(driver, token)
        await driver.registry.delete("default", "a1")
        found += more
    assert found == names


@pytest.mark.requirement("R66")
@pytest.mark.parametrize("token", ["2", "zz", "50", "ff", "-"])
async def test_a_token_of_another_list_is_refused(driver: Driver, token: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await page(driver, token)
    assert [one.field for one in refused.value.violations] == ["page_token"]
