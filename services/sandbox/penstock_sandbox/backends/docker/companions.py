"""Companions: containers beside a sandbox's, in its network, such as the database of a task.

Purpose: they join the network namespace of the sandbox's container, so the sandbox's policy holds for them too and no
network is made; the hosts file of that container, which the daemon gives them too, has their names.

Invariants
- Nothing of a companion is in the sandbox but its listeners: files, processes and limits are its own. The sandbox's
  programs can pass it theirs by abstract sockets, so what joins the network later is a container of its own.
- A failed or cancelled start removes all of them.
- They begin after the sandbox's own listeners, which therefore keep their ports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, Violation
from penstock_sandbox.backends.docker import container
from penstock_sandbox.backends.docker.cleanup.reaper import SANDBOX, Owner, Reaper
from penstock_sandbox.backends.docker.engine.daemon import Daemon
from penstock_sandbox.backends.docker.engine.errors import Json, Refused
from penstock_sandbox.backends.docker.images import account_files
from penstock_sandbox.backends.docker.images.account_files import Ids
from penstock_sandbox.backends.docker.images.images import Images
from penstock_sandbox.backends.docker.options import DockerOptions
from penstock_sandbox.backends.images.additions import RESERVED
from penstock_sandbox.domain.model import Companion, HealthCheck

# The longest pause between two runs of a health check.
_PAUSE_S: Final = 1.0
# For all companions of a sandbox together.
_MOST_S: Final = 600.0
_LAST_LINES: Final = 20
_LAST_BYTES: Final = 2000
_SHOWN_OUTPUT: Final = 500
_NO_CHECK: Final = HealthCheck()


@dataclass(frozen=True, slots=True)
class Planned:
    """A companion whose image is there: the image's id, the ids that it runs as, its check, and whether the image
    declares one."""

    spec: Companion
    image: str
    ids: Ids
    check: HealthCheck
    declares_check: bool


class Companions:
    """Starts the companions of one daemon's sandboxes. ``seccomp_profile``: as ``seccomp.offered`` returns it."""

    def __init__(
        self,
        options: DockerOptions,
        daemon: Daemon,
        owner: Owner,
        reaper: Reaper,
        images: Images,
        seccomp_profile: str,
    ) -> None:
        self._seccomp_profile = seccomp_profile
        self._options = options
        self._daemon = daemon
        self._owner = owner
        self._reaper = reaper
        self._images = images

    async def plan(self, companions: Sequence[Companion], *, root: bool) -> tuple[Planned, ...]:
        """Pulls their images. ``root``: whether they may run as root.

        Raises as ``Images.ready``, FailedPrecondition (CAPABILITY_MISSING, COMPANION_FAILED) and InvalidArgument
        (USER_UNKNOWN, USER_RESERVED).
        """
        found = []
        for index, spec in enumerate(companions):
            image = await self._images.inspected(spec.image, f"spec.companions[{index}].image")
            config = image.get("Config") or {}
            user = spec.user or str(config.get("User") or "")
            try:
                ids = await self._images.ids(image, user)
            except Refused as error:
                raise _failed(spec.name, f"its image cannot be used: {error.what}") from error
            ids = _allowed(spec, f"spec.companions[{index}].user", ids, user, root=root)
            declared = declared_check(config)
            declares = bool(config.get("Healthcheck"))
            found.append(Planned(spec, str(image["Id"]), ids, spec.health_check or declared, declares))
        return tuple(found)

    async def start(
        self, sandbox_id: str, sandbox: str, planned: Sequence[Planned], mounts: Sequence[Json] = ()
    ) -> tuple[str, ...]:
        """Starts them in their order; returns the names of their containers when all are healthy.

        ``sandbox`` is the id of the sandbox's container, ``mounts`` those of its names. Raises FailedPrecondition
        (COMPANION_FAILED).
        """
        names = tuple(container_name(sandbox_id, one.spec.name) for one in planned)
        tasks: dict[str, asyncio.Task[None]] = {}
        for one, name in zip(planned, names, strict=True):
            before = [tasks[other] for other in one.spec.after]
            start = self._start(sandbox_id, sandbox, one, name, before, mounts)
            tasks[one.spec.name] = asyncio.create_task(start, name=f"start-{name}")
        try:
            async with asyncio.timeout(_MOST_S):
                for done in asyncio.as_completed(tasks.values()):
                    await done
            for one, name in zip(planned, names, strict=True):
                await self._check_runs(one, name)
        except BaseException as error:
            late = ", ".join(name for name, task in tasks.items() if not task.done())
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            await self.remove(names)
            if isinstance(error, TimeoutError):
                raise _failed(late, f"not healthy after {_MOST_S:g} s") from error
            raise
        return names

    async def remove(self, names: Sequence[str]) -> None:
        """Removes containers of companions, those that are not there included."""
        await asyncio.gather(*map(self._reaper.container, names))

    async def _start(
        self,
        sandbox_id: str,
        sandbox: str,
        one: Planned,
        name: str,
        before: Sequence[asyncio.Task[None]],
        mounts: Sequence[Json],
    ) -> None:
        if before:
            await asyncio.wait(before)
            if any(task.exception() is not None for task in before):
                return  # the caller raises that one
        labels = {**self._owner.labels("companion"), SANDBOX: sandbox_id}
        settings, host = container.companion(
            one.image,
            one.spec,
            labels,
            sandbox,
            one.ids,
            seccomp_profile=self._seccomp_profile,
            mounts=mounts,
            declares_check=one.declares_check,
            shm_bytes=self._options.tmp_bytes,
            runtime=self._options.runtime,
        )
        try:
            made = await self._daemon.create(name, settings, host)
            await account_files.complete(self._daemon, made)
            await self._daemon.start(made)
            if one.check.argv:
                await self._until_healthy(one, made)
        except Refused as error:
            raise _failed(one.spec.name, f"it cannot be started: {error.what}") from error

    # Health ------------------------------------------------------------------------------------------------------

    async def _until_healthy(self, one: Planned, made: str) -> None:
        check, loop = one.check, asyncio.get_running_loop()
        patience_s = check.start_period_s + check.retries * (check.interval_s + check.timeout_s)
        until = loop.time() + patience_s
        while True:
            problem = await self._probe(made, check)
            if problem is None:
                return
            await self._check_runs(one, made)
            if loop.time() >= until:
                what = f"it is not healthy after {patience_s:g} s; its check: {problem or 'failed'}"
                raise _failed(one.spec.name, what, await self._last_output(made))
            await asyncio.sleep(min(check.interval_s, _PAUSE_S))

    async def _probe(self, made: str, check: HealthCheck) -> str | None:
        """Runs a health check; returns None for success, else the end of its output."""
        output = b""
        try:
            async with asyncio.timeout(check.timeout_s), AsyncExitStack() as stack:
                execution = await self._daemon.execute(made, check.argv)
                pipes = await stack.enter_async_context(self._daemon.command(execution))
                async for piece in pipes.output():
                    output = (output + piece)[-_SHOWN_OUTPUT:]
                output += pipes.errors[-_SHOWN_OUTPUT:]
                code = await self._daemon.exit_code(execution)
        except TimeoutError:
            return f"it takes longer than {check.timeout_s:g} s"
        except Refused as error:
            # Also where the companion ended meanwhile, with which the engine forgets the command: the caller looks.
            return error.what
        return None if code == 0 else f"exit code {code}: {output.decode(errors='replace').strip()}"

    async def _check_runs(self, one: Planned, made: str) -> None:
        try:
            state = (await self._daemon.inspect(made))["State"]
            if not state["Running"]:
                why = " for its memory limit" if state["OOMKilled"] else ""
                what = f"it ended with exit code {state['ExitCode']}{why}"
                raise _failed(one.spec.name, what, await self._last_output(made))
        except Refused as error:
            raise _failed(one.spec.name, f"it is gone: {error.what}") from error

    async def _last_output(self, made: str) -> str:
        try:
            return await self._daemon.last_output(made, _LAST_LINES, _LAST_BYTES)
        except Refused as error:
            return f"(its output cannot be read: {error.what})"


def container_name(sandbox_id: str, companion: str) -> str:
    """Returns the name of a companion's container."""
    return f"penstock-{sandbox_id}-with-{companion}"


def declared_check(config: Json) -> HealthCheck:
    """Returns the check that an image declares."""
    declared = config.get("Healthcheck") or {}
    kind, *words = declared.get("Test") or ["NONE"]
    match kind:
        case "CMD" if words:
            argv = tuple(words)
        case "CMD-SHELL" if words:
            argv = (*(config.get("Shell") or ("/bin/sh", "-c")), words[0])
        case _:
            return _NO_CHECK
    return HealthCheck(
        argv,
        _seconds(declared, "Interval") or _NO_CHECK.interval_s,
        _seconds(declared, "Timeout") or _NO_CHECK.timeout_s,
        int(declared.get("Retries") or _NO_CHECK.retries),
        _seconds(declared, "StartPeriod"),
    )


def _seconds(declared: Json, name: str) -> float:
    return int(declared.get(name) or 0) / 1e9


def _allowed(spec: Companion, field: str, ids: Ids | None, user: str, *, root: bool) -> Ids:
    """Returns the ids of a companion's user. Raises as ``Companions.plan`` if it may not run as that one."""
    if ids is None:
        problem = f"the image {spec.image!r} has no user {user!r}, or not clearly one"
        raise InvalidArgument(problem, reason="USER_UNKNOWN", violations=[Violation(field, problem)])
    if ids.reserved:
        reserved = " and ".join(map(str, sorted(RESERVED)))
        problem = (
            f"the user {user!r} of the image {spec.image!r} has an id of Penstock's own ({reserved}): name another"
        )
        raise InvalidArgument(problem, reason="USER_RESERVED", violations=[Violation(field, problem)])
    if ids.uid == 0 and not root:
        raise FailedPrecondition(
            f"the companion {spec.name} is root: name another user of its image, or the operator must set "
            "docker_allow_root",
            reason="CAPABILITY_MISSING",
            metadata={"backend": "docker", "capabilities": "root", "companion": spec.name},
        )
    return ids


def _failed(name: str, what: str, output: str = "") -> FailedPrecondition:
    return FailedPrecondition(
        _shown(f"the companion {name} failed: {what}" + (f"; its last lines:\n{output}" if output else "")),
        reason="COMPANION_FAILED",
        metadata={"companion": name},
    )


def _shown(text: str) -> str:
    """Returns a text without what would steer a terminal or turn its direction: programs of an image wrote it."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text)
