"""The services: status, diagnosis, agents."""

from dataclasses import asdict
from typing import Annotated, Any, Final

from pydantic import Field

from penstock.assistant.answers import Answer
from penstock.assistant.context import Context
from penstock.assistant.paging import page
from penstock.assistant.tools.base import Arguments, Cursor, Limit, Tool
from penstock.client import PenstockError

_GAUGES: Final = 40
_TROUBLES: Final = 20


class _Status(Arguments):
    gauges: Annotated[bool, Field(description="With the services' counters, such as rollouts by state.")] = False


class _Doctor(Arguments):
    patience: Annotated[float, Field(ge=0, le=86_400, description="Seconds that something may wait.")] = 60.0


class _Agents(Arguments):
    limit: Limit = 50
    cursor: Cursor = ""


async def _status(context: Context, given: _Status) -> Answer:
    endpoints = context.endpoints()
    diagnosis = await context.examine(endpoints, 60.0)
    services = []
    for status in diagnosis.services:
        row: dict[str, Any] = {
            "service": status.service,
            "address": status.address,
            "version": status.version,
            "up_seconds": round(status.up, 1),
            "loop_lag_seconds": round(status.loop_lag, 4),
            "resident_bytes": status.resident_bytes,
        }
        if given.gauges:
            row["gauges"] = dict(list(status.gauges.items())[:_GAUGES])
        services.append(row)
    facts: dict[str, Any] = {
        "services": services,
        "healthy": diagnosis.healthy,
        "troubles": len(diagnosis.troubles),
        "addresses_from": endpoints.origin,
        "dashboard": endpoints.dashboard or None,
    }
    if endpoints.inference:
        facts["engine"] = await _engine(context)
    if diagnosis.troubles:
        facts["next"] = "`doctor` names the troubles, and what to do"
    return Answer(facts)


async def _engine(context: Context) -> dict[str, Any] | None:
    async with context.connected() as ps:
        try:
            info = await ps.inference.info()
        except PenstockError:
            return None  # `doctor` has the reason
    return {"engine": info.engine, "model": info.model, "policy_version": info.policy_version}


async def _doctor(context: Context, given: _Doctor) -> Answer:
    diagnosis = await context.examine(context.endpoints(), given.patience)
    return Answer(
        {
            "healthy": diagnosis.healthy,
            "answering": [status.service for status in diagnosis.services],
            "total": len(diagnosis.troubles),
            "troubles": [asdict(trouble) for trouble in diagnosis.troubles[:_TROUBLES]],
        }
    )


async def _agents(context: Context, given: _Agents) -> Answer:
    async with context.connected() as ps:
        found = [agent async for agent in ps.agents.list()]
    rows = page(
        found,
        lambda agent: (0.0, agent.name),
        lambda agent: {
            "agent": agent.name,
            "version": agent.version,
            "description": agent.description,
            "dialects": list(agent.dialects),
            "built_in": agent.built_in,
        },
        given.cursor,
        given.limit,
    )
    return Answer(rows.facts("agents"))


SERVICES: Final = (
    Tool(
        "status",
        "Which services run: versions, addresses, uptime, the engine's model and policy version.",
        _Status,
        _status,
    ),
    Tool("doctor", "What is wrong with the services, the gravest first, and what to do about it.", _Doctor, _doctor),
    Tool("agents", "The agents that can run rollouts.", _Agents, _agents),
)
