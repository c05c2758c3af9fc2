"""Resources and companions of a sandbox, as a task file has them. Times are seconds, sizes bytes or texts."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from penstock.client.tasks.field_types import Count, Environment, LargeCount, Number, Plain
from penstock.client.tasks.named_files import Beside, dockerfile_problem
from penstock.client.tasks.spec import Companion, HealthCheck, Resources
from penstock.client.tasks.strict_model import Place, Strict
from penstock.sandbox.v1 import sandbox_pb2
from penstock.values import companions, to_proto

_UNITS: Final = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def _size(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", value.strip().upper())
    if found is None:
        raise ValueError("must be a number of bytes, or a text such as 512MiB or 2GB")
    amount = float(found[1]) * _UNITS[found[2] or ""]
    if not math.isfinite(amount):
        raise ValueError(f"{value[:20]}... is too large an amount")
    return int(amount)


_SIZE_SCHEMA: Final = WithJsonSchema(
    {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^[0-9.]+ *[KMG]?i?B?$"}]}
)
Size = Annotated[LargeCount, BeforeValidator(_size), _SIZE_SCHEMA]
SmallSize = Annotated[Count, BeforeValidator(_size), _SIZE_SCHEMA]


class ResourcesTable(Strict):
    """`sandbox.resources`."""

    cpu: Annotated[float | None, Field(gt=0, strict=False, allow_inf_nan=False)] = None
    memory_bytes: Size | None = None
    pids: Count | None = None
    disk_bytes: Size | None = None
    inodes: LargeCount | None = None

    def made(self) -> Resources:
        """Returns the value."""
        return Resources(
            cpu=self.cpu,
            memory_bytes=self.memory_bytes,
            pids=self.pids,
            disk_bytes=self.disk_bytes,
            inodes=self.inodes,
        )


class HealthCheckTable(Strict):
    """`sandbox.companions.health_check`."""

    argv: list[Plain]
    interval: Number = 30.0
    timeout: Number = 30.0
    retries: int = 3
    start_period: Number = 0.0

    def made(self) -> HealthCheck:
        """Returns the value."""
        return HealthCheck(
            argv=tuple(self.argv),
            interval=self.interval,
            timeout=self.timeout,
            retries=self.retries,
            start_period=self.start_period,
        )


class CompanionTable(Strict):
    """One of `sandbox.companions`."""

    name: str
    image: str = ""
    build: str | None = Field(None, description="Directory with the Dockerfile of its image.")
    aliases: list[str] = Field(default_factory=list, description="Further names of it.")
    entrypoint: list[Plain] = Field(default_factory=list)
    command: list[Plain] = Field(default_factory=list)
    env: Environment = Field(default_factory=dict, description="Not for secrets.")
    user: Plain = ""
    workdir: Plain = ""
    health_check: HealthCheckTable | None = None
    resources: ResourcesTable | None = None
    after: list[str] = Field(default_factory=list, description="Companions before it that must be healthy first.")

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], beside: Beside | None) -> Iterator[tuple[Place, str]]:
        """Of an image that is named and one that is built, there is one."""
        if value.get("image") and value.get("build"):
            yield ("build",), "set image or build"
        if isinstance(build := value.get("build"), str) and (problem := dockerfile_problem(beside, build)):
            yield ("build",), problem

    def made(self) -> Companion:
        """Returns the value, without an image where that is built."""
        return Companion(
            name=self.name,
            image=self.image,
            aliases=tuple(self.aliases),
            entrypoint=tuple(self.entrypoint),
            command=tuple(self.command),
            env=self.env,
            user=self.user,
            workdir=self.workdir,
            health_check=None if self.health_check is None else self.health_check.made(),
            resources=None if self.resources is None else self.resources.made(),
            after=tuple(self.after),
        )


def _possible(tables: list[CompanionTable]) -> list[CompanionTable]:
    made = [replace(table.made(), image=table.image or table.build or "") for table in tables[: companions.MOST + 1]]
    described = [to_proto(one, sandbox_pb2.Companion) for one in made]
    for place, problem in companions.problems(described):
        raise ValueError(f"{place} {problem}".strip())
    return tables


CompanionTables = Annotated[list[CompanionTable], AfterValidator(_possible)]
