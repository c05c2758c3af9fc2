"""LoRA adapters in force, and the versions that an inference server still needs.

For the server each version is a separate adapter (another name, another number), so a completion in flight keeps the
version with which it began while new ones use the next. A replaced version is dropped after its last user.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Violation
from penstock_inference.domain.namespaces import parted
from penstock_inference.engines.optional_features import AdapterInfo, AdapterSource


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """One version of one adapter, as the server knows it."""

    info: AdapterInfo
    number: int
    directory: Path
    users: int = 0
    replaced: bool = False
    owns_directory: bool = False

    def keep_files(self, directory: Path) -> None:
        """Use links to its files, in a new directory, from now on. Raises OSError, and leaves nothing there then."""
        directory.mkdir()
        try:
            for file in self.directory.iterdir():
                try:
                    os.link(file, directory / file.name)
                except OSError:  # a file system without links
                    shutil.copyfile(file, directory / file.name)
        except OSError:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self.directory, self.owns_directory = directory, True

    def remove_files(self) -> None:
        """Remove the files that are only its own."""
        if self.owns_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def versioned_name(self) -> str:
        """The adapter's name at the server, of this load alone: the version's older load may still be in use."""
        return f"{self.info.name}@{self.info.policy_version}#{self.number}"


@dataclass(slots=True)
class AdapterTable:
    """Adapters by name, at most `limit` at once, with those that are being loaded.

    `rank_setting` names what sets `max_rank`, for messages. `limit_each` is the most of one namespace.
    """

    limit: int
    max_rank: int
    rank_setting: str = "max_adapter_rank"
    limit_each: int | None = None
    _in_force: dict[str, LoadedAdapter] = field(default_factory=dict)
    _loading: dict[int, str] = field(default_factory=dict)
    """The names of versions that are not in force yet, by number."""
    _numbers: int = 0

    def __iter__(self) -> Iterator[LoadedAdapter]:
        return iter(sorted(self._in_force.values(), key=lambda adapter: adapter.info.name))

    def get(self, name: str) -> LoadedAdapter:
        """Raises InvalidArgument for an unknown name."""
        if name not in self._in_force:
            namespace, shown = parted(name)
            known = ", ".join(sorted(one for of, one in map(parted, self._in_force) if of == namespace)) or "none"
            raise InvalidArgument(
                f"there is no adapter {shown!r}; loaded: {known}",
                reason="ADAPTER_UNKNOWN",
                violations=[Violation("adapter", f"is not loaded; loaded: {known}")],
            )
        return self._in_force[name]

    def in_force(self, name: str) -> LoadedAdapter | None:
        """The version in force, if any."""
        return self._in_force.get(name)

    def prepare(self, source: AdapterSource) -> LoadedAdapter:
        """Make a new version, for `put` or `give_up`. Raises the errors of `optional.Adapters.load_adapter`."""
        older = self._in_force.get(source.name)
        if older is not None and source.policy_version <= older.info.policy_version:
            raise FailedPrecondition(
                f"version {source.policy_version} of adapter {parted(source.name)[1]!r} is not newer than "
                f"{older.info.policy_version}, which is in force",
                reason="POLICY_VERSION_NOT_NEWER",
                metadata={"policy_version": str(older.info.policy_version)},
            )
        if older is None:
            self._check_room(source.name)
        rank = _rank(source.directory / "adapter_config.json")
        if rank > self.max_rank:
            raise adapter_invalid(f"has rank {rank}; at most {self.max_rank} ({self.rank_setting})")
        self._numbers += 1
        self._loading[self._numbers] = source.name
        return LoadedAdapter(AdapterInfo(source.name, source.policy_version, rank), self._numbers, source.directory)

    def _check_room(self, name: str) -> None:
        others = {*self._in_force, *self._loading.values()} - {name}
        namespace, _ = parted(name)
        held = sum(parted(other)[0] == namespace for other in others)
        if self.limit_each is not None and held >= self.limit_each:
            raise ResourceExhausted(
                f"{held} adapters of the namespace {namespace} are loaded, or being loaded, which is the maximum "
                "(max_adapters_per_namespace): unload one",
                reason="ADAPTER_LIMIT",
            )
        if len(others) >= self.limit:
            raise ResourceExhausted(
                f"{self.limit} adapters are loaded, or being loaded, which is the maximum (max_adapters): unload one",
                reason="ADAPTER_LIMIT",
            )

    def put(self, adapter: LoadedAdapter) -> LoadedAdapter | None:
        """Put it in force; return the version that it replaced."""
        self._loading.pop(adapter.number, None)
        older = self._in_force.get(adapter.info.name)
        self._in_force[adapter.info.name] = adapter
        if older is not None:
            older.replaced = True
        return older

    def give_up(self, adapter: LoadedAdapter) -> None:
        """Forget a version whose load has failed. The server may have it: it is to be dropped there."""
        self._loading.pop(adapter.number, None)
        adapter.replaced = True

    def remove(self, name: str) -> LoadedAdapter | None:
        adapter = self._in_force.pop(name, None)
        if adapter is not None:
            adapter.replaced = True
        return adapter


def adapter_invalid(text: str) -> InvalidArgument:
    """The error for an adapter that does not fit."""
    return InvalidArgument(
        f"the adapter {text}", reason="ADAPTER_INVALID", violations=[Violation("adapter_config_json", text)]
    )


def _rank(path: Path) -> int:
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise adapter_invalid("has no adapter_config.json, or it is not JSON") from error
    rank = config.get("r") if isinstance(config, dict) else None
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise adapter_invalid("has no rank (r), a whole number of at least 1")
    if config.get("peft_type", "LORA") != "LORA":
        raise adapter_invalid(f"has the type {config['peft_type']!r}; only LORA is supported")
    return rank
