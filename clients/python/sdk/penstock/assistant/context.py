"""What tools work with: the services, recordings, files of the directories that the user allowed."""

import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from penstock.analysis.recordings import Recording, of_rollout
from penstock.assistant.errors import ToolError
from penstock.assistant.redaction import Redactor, secrets_of
from penstock.client import Endpoints, Penstock, ServiceStatus, Trouble, connect
from penstock.client.tasks.named_files import CannotRead, regular
from penstock.client.types.results import RolloutChanges, RolloutSummary

MAX_ENDED: Final = 10_000
"""The driver's limit of ended rollouts in one list."""
MAX_FILE_BYTES: Final = 32 << 20

_RECORDINGS: Final = 2
"""Ended rollouts that stay in memory: an assistant pages through one."""
_MAX_ENTRIES: Final = 20_000
"""Directory entries that a search looks at."""
_MAX_DEPTH: Final = 4


class Diagnosis(Protocol):
    """What `penstock doctor --live` finds."""

    @property
    def services(self) -> Sequence[ServiceStatus]:
        """The services that answered."""

    @property
    def troubles(self) -> Sequence[Trouble]:
        """Problems, the gravest first."""

    @property
    def healthy(self) -> bool:
        """Whether nothing is grave."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Rollouts as they are now. `cut`: older ended ones are left out; `away`: drivers that do not answer."""

    rollouts: Sequence[RolloutSummary]
    cut: bool
    away: Sequence[str]

    def remarks(self) -> dict[str, object]:
        """Returns what an answer must state about what it lacks; nothing if it is whole."""
        found: dict[str, object] = {}
        if self.cut:
            found["left_out"] = f"ended rollouts before the newest {MAX_ENDED}: filter by run_id or group_id"
        if self.away:
            found["drivers_that_do_not_answer"] = list(self.away)
        return found


class Context:
    """Of one server. Connections live as long as a call: services may be started again between two calls."""

    def __init__(
        self,
        find: Callable[[], Endpoints],
        examine: Callable[[Endpoints, float], Awaitable[Diagnosis]],
        *,
        directories: Sequence[Path] = (),
        max_rollouts: int = 64,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """
        Args:
            find: finds the running services; it raises PenstockError.
            examine: looks for problems of services; the number is the seconds that something may wait.
            directories: where task files and reports are; nothing else is read.
            max_rollouts: how many rollouts this server may start in all.
            environment: whose secrets are taken out of answers.
        """
        self.find = find
        self.examine = examine
        self.directories = tuple(place.resolve() for place in directories)
        self.may_start = max_rollouts
        self._secrets = secrets_of(environment)
        self.redact = Redactor(self._secrets)
        self._recordings: OrderedDict[tuple[str, ...], Recording] = OrderedDict()

    def endpoints(self) -> Endpoints:
        """Returns the services as they run now; their token appears in no answer from then on."""
        found = self.find()
        if found.token and found.token not in self._secrets:
            self._secrets.append(found.token)
            self.redact = Redactor(self._secrets)
        return found

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Penstock]:
        """Yields a client of the services."""
        async with connect(self.endpoints()) as ps:
            yield ps

    async def snapshot(self, **conditions: object) -> Snapshot:
        """Returns the rollouts that match, as `ps.rollouts.watch` takes conditions; empty ones are left out."""
        chosen = {key: value for key, value in conditions.items() if value}
        found: dict[str, RolloutSummary] = {}
        away: tuple[str, ...] = ()
        async with self.connected() as ps:
            watch = ps.rollouts.watch(ended_limit=MAX_ENDED, **chosen)  # type: ignore[arg-type]
            async with aclosing(watch) as changes:
                async for change in changes:
                    away = _taken(change, found) or away
                    if change.complete:
                        break
        return Snapshot(list(found.values()), sum(item.ended for item in found.values()) >= MAX_ENDED, away)

    async def recording(self, rollout_id: str) -> Recording:
        """Returns a rollout with its calls, a running one with those so far. Raises NotFound."""
        endpoints = self.endpoints()
        key = (endpoints.driver, endpoints.namespace, endpoints.token or "", rollout_id)
        if (kept := self._recordings.get(key)) is not None:
            self._recordings.move_to_end(key)
            return kept
        async with self.connected() as ps:
            made = await of_rollout(ps, rollout_id, calls_so_far=True)
        if made.outcome is not None and made.turns:  # then nothing of it changes any more
            self._recordings[key] = made
            while len(self._recordings) > _RECORDINGS:
                self._recordings.popitem(last=False)
        return made

    def place(self, given: str) -> Path:
        """Returns the path of a file or directory that may be read, links followed. No hidden one may: keys are there.

        Raises:
            ToolError: `PATH_NOT_ALLOWED`; `PATH_UNKNOWN`.
        """
        inside = [
            path
            for directory in self.directories
            if (path := _resolved(directory, given)) is not None
            and path.is_relative_to(directory)
            and not any(part.startswith(".") for part in path.relative_to(directory).parts)
        ]
        found = next((path for path in inside if path.exists()), None)
        if found is not None:
            return found
        if inside:
            raise ToolError(
                f"path: there is no {given}",
                reason="PATH_UNKNOWN",
                advice="call `reports` for the files that are there",
            )
        allowed = ", ".join(map(str, self.directories)) or "none"
        raise ToolError(
            f"path: {given} is hidden, or in no directory that this server may read ({allowed})",
            reason="PATH_NOT_ALLOWED",
            advice="use a path in one of them, or ask the user to start the server with --files DIR",
        )

    def content(self, path: Path) -> bytes:
        """Returns a regular file's content.

        Raises:
            ToolError: `FILE_NOT_READ`.
        """
        try:
            return regular(path, MAX_FILE_BYTES)[0]
        except CannotRead as error:
            raise ToolError(f"path: {error}", reason="FILE_NOT_READ", advice="choose another file") from None

    def files(self) -> Iterator[Path]:
        """Yields the files below the allowed directories, without hidden ones and links."""
        left = _MAX_ENTRIES
        for directory in self.directories:
            for folder, below, names in os.walk(directory):
                here = Path(folder)
                depth = len(here.relative_to(directory).parts)
                below[:] = sorted(
                    name for name in below if depth < _MAX_DEPTH and not name.startswith(".") and name != "node_modules"
                )
                left -= len(names) + len(below)
                if left < 0:
                    return
                yield from (here / name for name in sorted(names) if not (here / name).is_symlink())


def _taken(change: RolloutChanges, found: dict[str, RolloutSummary]) -> tuple[str, ...]:
    found.update((item.rollout_id, item) for item in change.rollouts)
    for rollout_id in change.gone:
        found.pop(rollout_id, None)
    return change.away


def _resolved(directory: Path, given: str) -> Path | None:
    try:
        return (directory / given).resolve()
    except (OSError, ValueError):  # a loop of links, a null character
        return None
