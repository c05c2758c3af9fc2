"""`penstock drain`: makes a service take no new work, and waits until nothing runs there."""

import asyncio
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from penstock.cli.connections.options import AsJson, StateDir
from penstock.cli.connections.service_selection import running
from penstock.cli.terminal.console import FAILED, OK, emit, err, out, run, usage_error
from penstock.client import Penstock, PenstockError, connect
from penstock.client.transport.endpoints import SERVICES, ServiceName

_WORK: Final = {
    "sandbox": "sandboxes",
    "driver": "rollouts and terminals",
    "interception": "open rollouts",
    "inference": "requests",
}


@dataclass(frozen=True, slots=True)
class _Target:
    """The service to drain, as the connection has it, and what people call it."""

    ps: Penstock
    service: ServiceName
    kind: str
    name: str

    @property
    def title(self) -> str:
        return f"{self.kind} service {self.name or self.ps.endpoints.address(self.service)}"


def drain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A kind (sandbox, driver, interception, inference), a service's own name, or its HOST:PORT.",
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
        async with connect(replace(endpoints, sandbox=name) if is_address else endpoints) as ps:
            target = await _found(ps, name, is_address=is_address)
            if undo:
                await ps.operations.undrain(target.service)
                return _said(target, as_json, "takes new work again", draining=False, running=None, drained=False)
            return await _drained(target, wait, timeout, as_json)

    run(work())


async def _found(ps: Penstock, name: str, *, is_address: bool) -> _Target:
    if is_address or name in SERVICES:
        service: ServiceName = "sandbox" if is_address else next(one for one in SERVICES if one == name)
        info = await ps.operations.server_info(service)
        return _Target(ps, service, info.service, info.name)
    known = []
    for service in SERVICES:
        if not ps.endpoints.address(service):
            continue
        try:
            info = await ps.operations.server_info(service)
        except PenstockError:
            continue
        if info.name == name:
            return _Target(ps, service, info.service, name)
        known.append(info.name or info.service)
    names = ", ".join(known) or "none"
    return usage_error(
        f"no service of this connection ({ps.endpoints.origin}) has the name {name!r}; it has: {names}."
        " Give the address instead, HOST:PORT as in the driver's list of members"
    )


async def _drained(target: _Target, wait: bool, timeout: float | None, as_json: bool) -> int:
    operations, loop = target.ps.operations, asyncio.get_running_loop()
    until = None if timeout is None else loop.time() + timeout
    state = await operations.drain(target.service)
    work = _WORK.get(target.kind, "pieces of work")
    while wait and not state.drained and (until is None or loop.time() < until):
        err.print(f"{escape(target.title)} takes no new work; {state.running} {work} run there")
        left = None if until is None else max(1.0, until - loop.time())
        state = await operations.drain(target.service, wait=True, timeout=left)
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
                "address": target.ps.endpoints.address(target.service),
                **facts,
            }
        )
    else:
        out.print(escape(f"{target.title} {text}"), soft_wrap=True)
    return OK
