"""The part of a task file about its rollouts: image, sandbox, limits, budgets, labels.

The keys are those of the client's classes (`SandboxChoice`, `Limits`, `Budgets`); times are seconds, sizes bytes or
texts such as `2GiB`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from penstock.client.tasks.field_types import (
    Count,
    Environment,
    LabelKey,
    LabelValue,
    LargeCount,
    Limit,
    Period,
    Seconds,
    not_json,
)
from penstock.client.tasks.named_files import Beside
from penstock.client.tasks.spec import (
    Allowlist,
    Budgets,
    CallRate,
    Limits,
    Network,
    OpenNetwork,
    Resources,
    SandboxChoice,
)
from penstock.client.tasks.strict_model import Place, Strict

_UNITS: Final = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def _size(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", value.strip().upper())
    if found is None:
        raise ValueError("must be a number of bytes, or a text such as 512MiB or 2GB")
    return int(float(found[1]) * _UNITS[found[2] or ""])


_SIZE_SCHEMA: Final = WithJsonSchema(
    {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^[0-9.]+ *[KMG]?i?B?$"}]}
)
Size = Annotated[LargeCount, BeforeValidator(_size), _SIZE_SCHEMA]
_SmallSize = Annotated[Count, BeforeValidator(_size), _SIZE_SCHEMA]


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


class AllowlistTable(Strict):
    """`sandbox.setup_network`, where it is not the word `open`."""

    hosts: list[str] = Field(min_length=1)
    ports: list[Annotated[int, Field(ge=1, le=65535)]] = Field(default_factory=list)


class SandboxTable(Strict):
    """`sandbox`."""

    backend: str = ""
    image: str = ""
    resources: ResourcesTable | None = None
    setup_network: Literal["open"] | AllowlistTable | None = None
    user: str = ""
    own_kernel: bool = False

    def made(self, image: str) -> SandboxChoice:
        """Returns the value; `image` comes from the short key."""
        network: Network | None = None
        if isinstance(self.setup_network, AllowlistTable):
            network = Allowlist(hosts=self.setup_network.hosts, ports=self.setup_network.ports)
        elif self.setup_network is not None:
            network = OpenNetwork()
        return SandboxChoice(
            backend=self.backend,
            image=image or self.image,
            resources=None if self.resources is None else self.resources.made(),
            setup_network=network,
            user=self.user,
            own_kernel=self.own_kernel,
        )


class LimitsTable(Strict):
    """`limits`."""

    prepare: Limit | None = None
    setup: Limit | None = None
    agent: Limit | None = None
    verify: Limit | None = None

    def made(self) -> Limits:
        """Returns the value."""
        return Limits(prepare=self.prepare, setup=self.setup, agent=self.agent, verify=self.verify)


class CallRateTable(Strict):
    """`budgets.call_rate`."""

    calls: Count
    period: Period = 1.0
    burst: Count | None = None


class BudgetsTable(Strict):
    """`budgets`."""

    max_calls: Count | None = None
    max_prompt_tokens: LargeCount | None = None
    max_completion_tokens: LargeCount | None = None
    max_total_tokens: LargeCount | None = None
    max_tokens_per_call: Count | None = None
    max_request_bytes: Size | None = None
    max_request_bytes_per_call: _SmallSize | None = None
    call_timeout: Seconds | None = None
    wall_time: Seconds | None = None
    call_rate: CallRateTable | None = None
    max_tool_calls: Count | None = None

    def made(self) -> Budgets:
        """Returns the value."""
        plain = {item.name: getattr(self, item.name) for item in fields(Budgets) if item.name != "call_rate"}
        rate = self.call_rate
        return Budgets(
            **plain,
            call_rate=None if rate is None else CallRate(calls=rate.calls, period=rate.period, burst=rate.burst),
        )


class RolloutKeys(Strict):
    """The keys that a task file and the defaults of a task set have in common."""

    image: str = Field("", description="The sandbox's image; short for sandbox.image.")
    sandbox: SandboxTable | None = Field(
        None, description="The sandbox that the task needs, within the operator's policy."
    )
    limits: LimitsTable | None = Field(None, description="Seconds for each part of a rollout.")
    budgets: BudgetsTable | None = Field(None, description="Limits of a rollout at the gate.")
    labels: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, description="Labels of the task's rollouts, to find them by."
    )
    env: Environment = Field(default_factory=dict, description="Environment of setup and agent, not of the verifier.")
    metadata: dict[str, Any] = Field(default_factory=dict, description="Any values; they are copied to the trajectory.")
    keep_diff: bool = Field(
        False, description="Keep the agent's changes in its working directory as the artifact changes.diff."
    )
    keep_files: bool = Field(
        False, description="Keep the small files of the working directory at the end, as artifacts files/PATH."
    )

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], beside: Beside | None) -> Iterator[tuple[Place, str]]:
        """Refuses an image given twice, and metadata that JSON cannot represent."""
        sandbox = value.get("sandbox")
        if value.get("image") and isinstance(sandbox, Mapping) and sandbox.get("image"):
            yield ("image",), "set image or sandbox.image"
        yield from not_json(value.get("metadata"), ("metadata",))
