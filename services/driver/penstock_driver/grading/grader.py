"""Grades a rollout: in the agent's sandbox, or in a fresh fork of the prepared state with the agent's changes.

`verifier` runs a verifier in a sandbox; this module brings the sandbox into the right state first, and records how the
rollout was graded.

Invariants: only files below declared directories reach the fork from the agent's sandbox (R76). That sandbox is
released whether or not the fork is ready, so graded rollouts never wait for each other's slots. In the agent's sandbox,
no verifier starts if a program that the agent had no permission to change has changed (R90). An agent's leftovers can
cost it its grade, as its own failure, but never count as an infrastructure failure.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import secrets
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final, cast

from penstock_chassis.errors import PermissionDenied, ResourceExhausted
from penstock_driver.domain.failures import OF_THE_SANDBOX, describe, of_the_agent
from penstock_driver.domain.ports import PathKind, Sandboxes, SandboxFacts
from penstock_driver.domain.rollout import (
    CARRY_S,
    Cause,
    Changes,
    CommandFinished,
    CopiedPath,
    Grading,
    Phase,
    Reward,
    RolloutFailed,
    Verifier,
    failed,
)
from penstock_driver.domain.validation import IN_MEMORY
from penstock_driver.grading import overlay, restore
from penstock_driver.grading.carried import Fetched, Work
from penstock_driver.grading.judge import JudgeAccess
from penstock_driver.grading.verifier import OUTPUT_LIMIT, verify

ROOT: Final = ("root", "0")
"""Users whose agents may change the system: grading those in place is the task's choice."""
MOST_PLAIN: Final = 256
"""How many directories of one prepared state are remembered as checked."""
TAKE_S: Final = 120.0
"""The part of CARRY_S for reading the agent's changes."""
DEFAULT_MAX_CHANGES_BYTES: Final = 1 << 30
SYSTEM: Final = (
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt/penstock", "/usr/bin", "/usr/sbin"),
    *("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/libexec", "/usr/local"),
)
"""Programs, libraries and settings that a verifier relies on and a non-root agent has no reason to change."""
_OF_THE_CONTAINER: Final = frozenset({"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab"})
"""Files that a container engine creates itself."""
_MAX_SYSTEM_BYTES: Final = 1 << 20
_IN_MEMORY_BYTES: Final = 64 << 10
"""How much of an agent's changes is kept in memory while they are copied: most agents change little."""
_MAX_REPORTED: Final = 500
"""How many bytes of its output are reported for a collect command that failed."""
_SMALL_BYTES: Final = 16 << 10
_FEW: Final = 16
"""A diff of at most so many bytes and deletions is read on the event loop, in less than about a millisecond."""


class Grader:
    """Grades one rollout. Call `save_baseline` before the agent starts, then `collect`, `take` and `put` for a fresh
    fork, `grade`, `close`.

    Copied files are kept in temporary files in `spool`, at most `max_bytes` of each kind.
    """

    def __init__(
        self,
        sandboxes: Sandboxes,
        verifier: Verifier,
        *,
        spool: Path | None,
        max_bytes: int,
        verifier_sha256: str = "",
    ) -> None:
        self._sandboxes = sandboxes
        self._verifier = verifier
        self._spool = spool
        self._max_bytes = max_bytes
        self._copies = tuple(replace(copied, path=posixpath.normpath(copied.path)) for copied in verifier.copies)
        self._kept: restore.Baseline | None = None
        self._layer: BinaryIO | None = None
        self._layer_begin = 0
        self.grading = Grading(bool(verifier.fresh_fork), len(verifier.commands), verifier_sha256=verifier_sha256)

    async def save_baseline(self, sandbox: SandboxFacts, plain: set[str]) -> None:
        """Save the paths to restore from the agent's sandbox before the agent starts. RolloutFailed (TASK).

        A fresh fork still has them, so that nothing is saved for it: only the paths to take are checked. Those
        that are in `plain` were found in order in the state that the sandbox is a fork of; others are added to it.
        """
        if self._verifier.fresh_fork:  # bad paths are reported before the agent has worked
            roots, copies = self._roots(sandbox), [copied.path for copied in self._copies]
            await self._refuse_links(sandbox, [root for root in roots if root not in plain], _invalid)
            await self._refuse_links(sandbox, [path for path in copies if path not in plain], _not_copied)
            plain.update([*roots, *copies][: max(0, MOST_PLAIN - len(plain))])
            return
        try:
            async with asyncio.timeout(CARRY_S):
                await self._keep(sandbox)
        except TimeoutError:
            message = f"the paths to restore could not be read in {CARRY_S:g} s"
            raise failed(Cause.TASK, "RESTORE_TOO_LARGE", message, Phase.CONFIGURING) from None

    @property
    def needs_baseline(self) -> bool:
        """Whether something is saved from the agent's sandbox before the agent starts."""
        return bool(self._verifier.restore) and not self._verifier.fresh_fork

    async def collect(self, sandbox: SandboxFacts, limit_s: float, report: Callable[[str], None]) -> None:
        """Run the commands that write what is then taken, and kill what they leave. Whatever ends them is only
        reported, but for what becomes of the sandbox; RolloutFailed (AGENT).
        """
        for index, command in enumerate(self._verifier.collect):
            if limit_s <= 0.0:
                report(f"collect commands of the verifier from {index} on were not run: those before took all the time")
                return
            process_id = f"collect-{index}-{secrets.token_hex(4)}"
            given_s = self._verifier.command_timeout_s if command.timeout_s is None else command.timeout_s
            bounded = replace(command, timeout_s=min(given_s, limit_s))
            with of_the_agent():
                result = await self._sandboxes.run(
                    sandbox.sandbox_id, process_id, bounded, OUTPUT_LIMIT, kill_all_after=True
                )
                if not result.exit.all_killed:
                    await self._sandboxes.kill(sandbox.sandbox_id, process_id, everything=True)
            if not result.exit.ok:
                printed = (result.stderr or result.stdout)[-_MAX_REPORTED:].decode("utf-8", "replace").strip()
                report(f"collect command {index} of the verifier failed: {describe(result.exit)}: {printed}")
            limit_s -= result.exit.duration_s

    async def take(self, sandbox: SandboxFacts) -> None:
        """Fetch the agent's changes. RolloutFailed (AGENT, CHANGES_TOO_LARGE)."""
        roots = self._roots(sandbox)
        try:
            async with asyncio.timeout(TAKE_S):
                await self._take(sandbox, roots)
        except TimeoutError:  # the agent chooses their number
            raise _too_large(f"they could not be read in {TAKE_S:g} s") from None
        except overlay.TooManyChanges as error:
            raise _too_large(str(error)) from error

    async def _take(self, sandbox: SandboxFacts, roots: list[str]) -> None:
        with ExitStack() as files:
            diff, deleted, size = files.enter_context(self._temporary()), list[str](), 0
            with of_the_agent():
                try:
                    if roots:
                        deleted += await self._sandboxes.diff(sandbox.sandbox_id, roots, diff, self._max_bytes)
                    size = diff.tell()
                    copied = list[overlay.Copied]()
                    for given in self._copies:
                        tar = files.enter_context(self._temporary())
                        copied.append(await self._copied(sandbox, given, tar, self._max_bytes - size))
                        size += tar.tell()
                        tar.seek(0)
                except ResourceExhausted as error:
                    raise _too_large(error.message) from error
            diff.seek(0)
            self._layer = self._temporary()
            work = (diff if roots else None, deleted, roots, self._layer, copied)
            if size <= _SMALL_BYTES and len(deleted) <= _FEW:
                taken = overlay.layer(*work)
            else:
                taken = await asyncio.to_thread(overlay.layer, *work)
        self.grading = replace(self.grading, changes=taken)

    async def _copied(self, sandbox: SandboxFacts, given: CopiedPath, tar: BinaryIO, room: int) -> overlay.Copied:
        """Read what the agent's sandbox has at a path. ResourceExhausted if it is too large."""
        kind = await self._sandboxes.kind(sandbox.sandbox_id, given.path)
        if kind not in (PathKind.FILE, PathKind.DIRECTORY):
            return overlay.Copied(given.path, is_left_out=kind is not None)
        await self._sandboxes.read_tree(sandbox.sandbox_id, given.path, tar, max(0, room))
        return overlay.Copied(given.path, tar, is_directory=kind is PathKind.DIRECTORY, exclude=given.exclude)

    def taken(self, artifacts: Sequence[Fetched]) -> tuple[Work, int]:
        """What was taken, with the agent's `artifacts`, and the layer's size in bytes."""
        assert self._layer is not None
        assert self.grading.changes is not None
        size = self._layer.seek(0, os.SEEK_END)
        self._layer.seek(0)
        return Work(self.grading.changes, artifacts, self._layer), size

    def end_state(self) -> tuple[Changes, BinaryIO]:
        """What was taken or given, to be read from its current position."""
        assert self._layer is not None
        assert self.grading.changes is not None
        self._layer.seek(self._layer_begin)
        return self.grading.changes, self._layer

    def give(self, work: Work) -> None:
        """Go on with what an earlier driver process had taken."""
        self._layer, self._layer_begin = work.layer, work.layer.tell()
        self.grading = replace(self.grading, changes=work.changes)

    async def put(self, fork: SandboxFacts) -> None:
        """Put the changes into a fresh fork. RolloutFailed (AGENT, CHANGES_TOO_LARGE)."""
        await self._keep(fork)
        taken = self.grading.changes
        assert self._layer is not None
        assert taken is not None
        if not (taken.entries or taken.removed or taken.left_out or self._copies):
            return
        self._layer.seek(self._layer_begin)
        with of_the_agent():
            try:
                async with asyncio.timeout(CARRY_S):
                    await self._empty(fork)
                    await self._sandboxes.put_layer(fork.sandbox_id, "/", self._layer)
            except ResourceExhausted as error:
                raise _too_large(error.message) from error
            except TimeoutError:
                raise _too_large(f"they could not be written in {CARRY_S:g} s") from None

    async def _empty(self, fork: SandboxFacts) -> None:
        """Empty the directories of the fork where something is copied whole. They stay: one may be a mount."""
        found = {}
        for copied in self._copies:
            if await self._sandboxes.kind(fork.sandbox_id, copied.path) is PathKind.DIRECTORY:
                found[copied.path] = await self._sandboxes.entries(fork.sandbox_id, copied.path, overlay.MAX_ENTRIES)
        if not any(found.values()):
            return
        with self._temporary() as layer:
            await asyncio.to_thread(overlay.emptying, found, layer)
            layer.seek(0)
            await self._sandboxes.put_layer(fork.sandbox_id, "/", layer)

    async def grade(
        self, sandbox: SandboxFacts, record: Callable[[CommandFinished], None], judge: JudgeAccess | None = None
    ) -> Reward:
        """Restore the baseline, run the verifier and return its reward; RolloutFailed when it gives none."""

        def report(event: CommandFinished) -> None:
            self.grading = replace(self.grading, commands=(*self.grading.commands, event))
            record(event)

        if self._kept is not None:
            with of_the_agent():
                restored = await self._kept.put_back(self._sandboxes, sandbox.sandbox_id, self._spool)
            self.grading = replace(self.grading, restored=restored)
        return await verify(
            self._sandboxes,
            sandbox.sandbox_id,
            sandbox.workdir,
            self._verifier,
            report,
            takes_files=sandbox.takes_files,
            judge=judge,
        )

    def close(self) -> None:
        """Remove the temporary files; idempotent."""
        if self._kept is not None:
            self._kept.close()
        if self._layer is not None:
            with suppress(OSError):  # as in Baseline.close
                self._layer.close()

    def _temporary(self) -> BinaryIO:
        """A file in memory, which moves to the spool when it grows; close it."""
        spool = None if self._spool is None else str(self._spool)
        file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES, dir=spool)  # noqa: SIM115 - the caller's
        return cast("BinaryIO", file)

    async def _keep(self, sandbox: SandboxFacts) -> None:
        if self._verifier.restore:
            patterns = restore.expanded(self._verifier.restore, sandbox.home, sandbox.workdir)
            self._kept = await restore.Baseline.keep(
                self._sandboxes, sandbox.sandbox_id, patterns, self._spool, self._max_bytes
            )

    def _roots(self, sandbox: SandboxFacts) -> list[str]:
        """The absolute directories whose changes are copied; RolloutFailed (TASK; CHANGES_UNBOUNDED,
        CHANGES_BELOW_INVALID).
        """
        if not self._verifier.takes_changes:
            return []
        given = self._verifier.changes_below or (sandbox.workdir,)
        roots = [posixpath.normpath(posixpath.join(sandbox.workdir, path)) for path in given]
        if any(root.strip("/") == "" for root in roots):
            message = "the working directory is the root: name the directories to grade in verifier.changes_below"
            raise failed(Cause.TASK, "CHANGES_UNBOUNDED", message, Phase.CONFIGURING)
        for root in roots:
            if (top := root.split("/")[1]) in IN_MEMORY:
                raise _invalid(root, f"/{top} is memory, and what is there is in no fork; use a directory elsewhere")
        return roots

    async def _refuse_links(
        self, sandbox: SandboxFacts, roots: Iterable[str], refusal: Callable[[str, str], RolloutFailed]
    ) -> None:
        """Check that no path to take lies behind a link, where a diff shows nothing. Raises what `refusal` makes."""
        seen: dict[str, PathKind | None] = {}
        for root in roots:
            path = ""
            for name in root.split("/")[1:]:
                path = f"{path}/{name}"
                if path not in seen:
                    try:
                        seen[path] = await self._sandboxes.kind(sandbox.sandbox_id, path)
                    except PermissionDenied as error:
                        if error.reason in OF_THE_SANDBOX:
                            raise
                        seen[path] = None  # the agent cannot go there either
                if seen[path] is PathKind.SYMLINK:
                    raise refusal(root, f"{path} is a link, and changes are found where it leads; name that directory")
                if seen[path] is not PathKind.DIRECTORY:
                    break


async def check_system(sandboxes: Sandboxes, sandbox: SandboxFacts, spool: Path | None) -> None:
    """Check that the agent's sandbox still has its prepared system. RolloutFailed (GRADING_BLOCKED)."""
    own = (sandbox.workdir, sandbox.home)
    looked_at = [path for path in SYSTEM if not any(f"{place}/".startswith(f"{path}/") for place in own)]
    with tempfile.TemporaryFile(dir=spool) as diff:
        with of_the_agent():
            try:
                async with asyncio.timeout(TAKE_S):
                    deleted = await sandboxes.diff(sandbox.sandbox_id, looked_at, diff, _MAX_SYSTEM_BYTES)
            except TimeoutError:  # as for its changes: the time depends on the number of files
                message = f"the system that its verifier would run on could not be searched in {TAKE_S:g} s"
                raise failed(Cause.AGENT, "GRADING_BLOCKED", message, Phase.VERIFYING) from None
        diff.seek(0)
        changed = [*deleted, *await asyncio.to_thread(overlay.files_of, diff)]
    if foreign := sorted(set(changed) - _OF_THE_CONTAINER):
        message = f"the agent changed the system that its verifier would run on: {foreign[0]!a}"
        if len(foreign) > 1:
            message += f" and {len(foreign) - 1} more"
        raise failed(Cause.AGENT, "GRADING_BLOCKED", message, Phase.VERIFYING)


def _invalid(root: str, why: str) -> RolloutFailed:
    message = f"verifier.changes_below (by default the working directory) has {root}, where no change is seen: {why}"
    return failed(Cause.TASK, "CHANGES_BELOW_INVALID", message, Phase.CONFIGURING)


def _not_copied(path: str, why: str) -> RolloutFailed:
    message = f"verifier.copies has {path}, which cannot be copied: {why}"
    return failed(Cause.TASK, "COPIES_INVALID", message, Phase.CONFIGURING)


def _too_large(what: str) -> RolloutFailed:
    return failed(Cause.AGENT, "CHANGES_TOO_LARGE", f"the agent's changes cannot be copied: {what}", Phase.VERIFYING)
