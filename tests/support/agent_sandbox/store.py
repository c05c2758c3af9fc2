"""Objects with versions, and the log of their changes that watches read, as an API server has them."""

from __future__ import annotations

import asyncio
import copy
import datetime
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A change of one object, as it was afterwards (for DELETED: before)."""

    version: int
    kind: str
    plural: str
    object: Object


class Store:
    """Everything of one namespace; keys are (plural, name)."""

    def __init__(self) -> None:
        self.version = 1
        self._objects: dict[tuple[str, str], Object] = {}
        self._log: list[Change] = []
        self._compacted = 0
        self._changed = asyncio.Event()

    def get(self, plural: str, name: str) -> Object | None:
        """An object, or None; a copy."""
        return copy.deepcopy(self._objects.get((plural, name)))

    def all(self, plural: str) -> list[Object]:
        """Copies of all of one kind, by name."""
        return [copy.deepcopy(one) for (kind, _), one in sorted(self._objects.items()) if kind == plural]

    def create(self, plural: str, made: Mapping[str, Any]) -> Object:
        """A new object; KeyError if there is one of this name."""
        key = plural, made["metadata"]["name"]
        if key in self._objects:
            raise KeyError(key)
        stored = copy.deepcopy(dict(made))
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        stored["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now, "generation": 1}
        return self._put("ADDED", plural, stored)

    def change(self, plural: str, name: str, how: Callable[[Object], None]) -> Object | None:
        """Changes an object that is there."""
        stored = self.get(plural, name)
        if stored is None:
            return None
        before = copy.deepcopy(stored.get("spec"))
        how(stored)
        if stored.get("spec") != before:
            stored["metadata"]["generation"] += 1
        return self._put("MODIFIED", plural, stored)

    def remove(self, plural: str, name: str) -> None:
        """Removes an object, if it is there."""
        stored = self._objects.pop((plural, name), None)
        if stored is not None:
            self._record("DELETED", plural, stored)

    def compact(self) -> None:
        """Forgets the log: a watch from any version so far is too old, whether it runs or begins."""
        self.version += 1
        self._compacted = self.version
        self._log.clear()
        self._wake()

    async def changes(self, plural: str, version: int) -> AsyncIterator[Change | None]:
        """Changes after a version as they come; None at a silence. Raises LookupError if that is too old."""
        while True:
            if version < self._compacted:
                raise LookupError(version)
            changed = self._changed
            for change in [one for one in self._log if one.version > version]:
                version = change.version
                if change.plural == plural:
                    yield change
            if changed.is_set():
                continue
            try:
                async with asyncio.timeout(0.5):
                    await changed.wait()
            except TimeoutError:
                yield None

    def _put(self, kind: str, plural: str, stored: Object) -> Object:
        self._objects[plural, stored["metadata"]["name"]] = stored
        self._record(kind, plural, stored)
        return copy.deepcopy(stored)

    def _record(self, kind: str, plural: str, stored: Object) -> None:
        self.version += 1
        stored["metadata"]["resourceVersion"] = str(self.version)
        self._log.append(Change(self.version, kind, plural, copy.deepcopy(stored)))
        self._wake()

    def _wake(self) -> None:
        # Every watch waits for an event of its own, so that none clears another's.
        self._changed.set()
        self._changed = asyncio.Event()
