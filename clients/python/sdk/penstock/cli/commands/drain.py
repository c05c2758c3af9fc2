"""`penstock drain`: makes a service take no new work, and waits until nothing runs there."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from penstock.cli.connections.options import AsJson, StateDir
from penstock.cli.connections.service_selection import running
from penstock.cli.terminal.console import FAILED, OK, emit, err, out, run, usage_error
from penstock.client import Penstock, PenstockError, connect
from penstock.client.transport.endpoints import SERVICES, ServiceName
from penstock.values.similar_names import did_you_mean

_WORK: Final = {
    "sandbox": "sandboxes",
    "driver": "rollouts and terminals",
    "interception": "open rollouts",
    "inference": "requests",
}


@dataclass(frozen=True, slots=True)
class _Target:
    """The service to drain. `member` is its name in the driver's list; empty = it is the one of the connection."""

    ps: Penstock
    service: ServiceName
    kind: str
    name: str
    address: str
    member: str = ""

    @property
    def title(self) -> str:
        return f"{self.kind} service {self.name or self.address}"


def drain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A service's own name, as the driver lists it or with its kind (sandbox/n0); its HOST:PORT; or a kind "
            "(sandbox, driver, interception, inference) for the one of this connection.",
            show_default=False,
        ),
    ],
    wait: Annotated[bool, typer.Option("--wait", help="Return when nothing runs there any more.")] = False,
    timeout: Annotated[
        float | None, typer.Option(min=1.0, metavar="SECONDS", help="How long --wait waits; default: without limit.")
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Let it take new work again.")] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Take a service out: it gets no new work, and what runs there goes on. Needs the operator's token.

    Exit code 0: it drains (with --wait: nothing runs there, so it may be stopped; with --undo: it takes work again).
    1: after --timeout something still runs. The service drains until it is stopped or --undo.
    """
    if undo and wait:
        usage_error("--undo lets the service take work again, so there is nothing to wait for: leave out --wait")

    async def work() -> int:
        endpoints = running(state_dir)
        is_address = name.rpartition(":")[2].isdigit()
        # An address that the driver does not list is asked as it is given, whatever serves there.
        async with connect(replace(endpoints, sandbox=name) if is_address else endpoints) as ps:
            target = await _found(ps, name)
            if undo:
                await ps.operations.undrain(target.service, name=target.member)
                return _said(target, as_json, "takes new work again", draining=False, running=None, drained=False)
            return await _drained(target, wait, timeout, as_json)

    run(work())


async def _found(ps: Penstock, name: str) -> _Target:
    """The one service that NAME says. Ends the command where there is none, or more than one."""
    if name in SERVICES:
        return await _own(ps, next(one for one in SERVICES if one == name))
    listed, why = await _listed(ps)
    wanted = [one for one in listed if name in (one.member, one.address, f"{one.service}/{one.member}")]
    if not wanted and name.rpartition(":")[2].isdigit():
        return await _own(ps, "sandbox")
    known = [*listed]
    if not wanted:
        found = [one async for one in _answering(ps) if one.address not in {item.address for item in listed}]
        wanted = [one for one in found if name in (one.name, f"{one.service}/{one.name}")]
        known += found
    if len(wanted) == 1:
        return wanted[0]
    names = ", ".join(sorted(f"{one.service}/{one.name or one.address}" for one in wanted or known)) or "none"
    if wanted:
        return usage_error(f"{len(wanted)} services are called {name!r}: give one of {names}")
    meant = did_you_mean(name, _names(known)) or ";"
    return usage_error(
        f"no service of this connection ({ps.endpoints.origin}) has the name {name!r}{meant} there are: {names}{why}"
    )


def _names(targets: Sequence[_Target]) -> set[str]:
    """The names by which services may be given."""
    return {*SERVICES, *(name for one in targets for name in (one.name, f"{one.service}/{one.name}") if one.name)}


async def _own(ps: Penstock, service: ServiceName) -> _Target:
    info = await ps.operations.server_info(service)
    return _Target(ps, service, info.service, info.name, ps.endpoints.address(service))


async def _answering(ps: Penstock) -> AsyncIterator[_Target]:
    """The connection's own services, those that answer."""
    for service in SERVICES:
        if ps.endpoints.address(service):
            try:
                yield await _own(ps, service)
            except PenstockError:
                continue


async def _listed(ps: Penstock) -> tuple[list[_Target], str]:
    """What the driver lists; and why it may not be all, for people."""
    if not ps.endpoints.driver:
        return [], ""
    found: list[_Target] = []
    try:
        for service in SERVICES:
            members = await ps.operations.members(service)
            found += [_Target(ps, service, service, one.name, one.address, one.name) for one in members if one.name]
    except PenstockError as error:
        return found, f". The driver could not be asked for more: {error}"
    return found, ""


async def _drained(target: _Target, wait: bool, timeout: float | None, as_json: bool) -> int:
    operations, loop = target.ps.operations, asyncio.get_running_loop()
    until = None if timeout is None else loop.time() + timeout
    state = await operations.drain(target.service, name=target.member)
    work = _WORK.get(target.kind, "pieces of work")
    while wait and not state.drained and (until is None or loop.time() < until):
        err.print(f"{escape(target.title)} takes no new work; {state.running} {work} run there")
        left = None if until is None else max(1.0, until - loop.time())
        state = await operations.drain(target.service, name=target.member, wait=True, timeout=left)
    facts: dict[str, Any] = {"draining": True, "running": state.running, "drained": state.drained}
    if state.drained:
        return _said(target, as_json, "is drained: nothing runs there, so stop it now (SIGTERM)", **facts)
    if wait:
        _said(
            target,
            as_json,
            f"still has {state.running} {work}: wait longer, or stop it, which ends them (after its drain_s)",
            **facts,
        )
        return FAILED
    advice = "stop it when `penstock drain NAME --wait` returns, or let it take work again with --undo"
    return _said(target, as_json, f"takes no new work; {state.running} {work} run there. Next: {advice}", **facts)


def _said(target: _Target, as_json: bool, text: str, **facts: Any) -> int:
    if as_json:
        emit(
            {
                "service": target.kind,
                "name": target.name,
                "address": target.address,
                **facts,
            }
        )
    else:
        out.print(escape(f"{target.title} {text}"), soft_wrap=True)
    return OK
