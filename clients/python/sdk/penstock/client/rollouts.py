"""Rollouts and groups: started, listed, exported. What is done with one is done through its handle."""

import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any, Final, TypedDict, TypeVar, Unpack, overload

from penstock.client import results, tasks, wire, wire_results, wire_specs
from penstock.client.chat import Sampling
from penstock.client.driver import Driver
from penstock.client.errors import InvalidArgument
from penstock.client.handles import GroupHandle, RolloutHandle
from penstock.client.trajectories import Trajectory
from penstock.driver.v1 import rollout_pb2
from penstock.driver.v1 import rollout_service_pb2 as pb
from penstock.trajectory.v1 import trajectory_pb2

_D = TypeVar("_D", tasks.SandboxChoice, tasks.Limits, tasks.Budgets)

CREATE_TIMEOUT_S: Final = 120.0
"""Seconds that a create may take: the driver checks what can be checked before it answers."""


class RolloutOptions(TypedDict, total=False):
    """What a rollout may be told beside its task; see each value's class. It comes before what the task says."""

    mode: tasks.Mode | str
    """Default: interception_gate."""
    source: tasks.ModelSource
    """Who answers where the trainer does not, and whose tokenizer is used. Default: the default inference service."""
    options: Mapping[str, Any]
    """Options of the agent's spec, when `agent` is a name."""
    skip_permissions: bool
    """Whether the agent's permission prompts are skipped, when `agent` is a name."""
    sandbox: tasks.SandboxChoice
    limits: tasks.Limits
    budgets: tasks.Budgets
    policy: tasks.PolicyConstraint
    run_id: str
    run_budgets: tasks.RunBudgets
    """Of all rollouts with this run_id; the first that gives them fixes them."""
    token_terms: tasks.TokenTerms
    labels: Mapping[str, str]
    seed: int
    """For the agent's option `seed`; in a group, seed + index."""
    sampling: Sampling
    """Replaces, field by field, what the agent asks for."""
    max_attempts: int
    """How often it may be tried in all, where a failure says nothing about the policy; 1 to 10, default 1."""


def spec(task: tasks.Task, agent: str | tasks.AgentChoice, options: RolloutOptions) -> rollout_pb2.RolloutSpec:
    """The proto of all that defines a rollout."""
    given = set(options) - set(RolloutOptions.__annotations__)
    if given:
        raise TypeError(f"unknown options: {', '.join(sorted(given))}")
    if isinstance(agent, str):
        agent = tasks.AgentChoice(
            name=agent,
            options=options.get("options", {}),
            skip_permissions=options.get("skip_permissions", False),
        )
    elif "options" in options or "skip_permissions" in options:
        raise TypeError("options and skip_permissions are given with the agent's name, or in the AgentChoice")
    message = rollout_pb2.RolloutSpec(
        task=wire_specs.task(task),
        agent=wire_specs.agent(agent),
        mode=wire_specs.mode(options.get("mode", tasks.Mode.INTERCEPTION_GATE)),
        run_id=options.get("run_id"),
        labels={**task.labels, **options.get("labels", {})},
        seed=options.get("seed"),
        sampling_override=wire.sampling_to(options.get("sampling")),
        max_attempts=options.get("max_attempts"),
    )
    if "source" in options:
        message.source.CopyFrom(wire_specs.source(options["source"]))
    sandbox = sandbox_of(task, options.get("sandbox"))
    if sandbox is not None:
        message.sandbox.CopyFrom(wire_specs.sandbox_choice(sandbox))
    limits = over(options.get("limits"), task.limits)
    if limits is not None:
        message.limits.CopyFrom(wire_specs.limits(limits))
    budgets = over(options.get("budgets"), task.budgets)
    if budgets is not None:
        message.budgets.CopyFrom(wire_specs.budgets(budgets))
    if "run_budgets" in options:
        message.run_budgets.CopyFrom(wire_specs.run_budgets(options["run_budgets"]))
    if "token_terms" in options:
        message.token_terms.CopyFrom(wire_specs.token_terms(options["token_terms"]))
    if "policy" in options:
        message.policy.CopyFrom(wire_specs.policy(options["policy"]))
    return message


def sandbox_of(task: tasks.Task, given: tasks.SandboxChoice | None) -> tasks.SandboxChoice | None:
    """The sandbox that is asked for, with what the task says where nothing else is. Raises `TASK_IMAGE`."""
    sandbox = over(given, task.sandbox)
    if task.build is not None and (sandbox is None or not sandbox.image):
        raise InvalidArgument(
            f"{task.task_id} brings a Dockerfile: give penstock.client.images.with_image(task)", reason="TASK_IMAGE"
        )
    return sandbox


def over(given: _D | None, of_task: _D | None) -> _D | None:
    """What a rollout is told, and field by field what its task says where the rollout says nothing."""
    if given is None or of_task is None:
        return given or of_task
    said = {item.name: value for item in fields(given) if (value := getattr(given, item.name)) != item.default}
    return replace(of_task, **said)


class RolloutsClient:
    """`ps.rollouts`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @overload
    async def create(
        self,
        task: tasks.Task,
        agent: str | tasks.AgentChoice,
        *,
        n: None = None,
        rollout_id: str = "",
        **options: Unpack[RolloutOptions],
    ) -> RolloutHandle: ...

    @overload
    async def create(
        self,
        task: tasks.Task,
        agent: str | tasks.AgentChoice,
        *,
        n: int,
        rollout_id: str = "",
        **options: Unpack[RolloutOptions],
    ) -> GroupHandle: ...

    async def create(
        self,
        task: tasks.Task,
        agent: str | tasks.AgentChoice,
        *,
        n: int | None = None,
        rollout_id: str = "",
        **options: Unpack[RolloutOptions],
    ) -> RolloutHandle | GroupHandle:
        """Starts a rollout, or with `n` a group of n, and returns at once.

        Args:
            task: what to do.
            agent: a registered agent's name, or a choice with options.
            n: makes it a group, as `ps.groups.create`.
            rollout_id: chosen by you; empty = assigned.
            **options: see `RolloutOptions`.

        Raises:
            InvalidArgument: `violations` name the fields.
            NotFound: `AGENT_UNKNOWN`.
            Unavailable: a service that it needs cannot be reached; `reason` says which.
        """
        if n is not None:
            return await _create_group(self._driver, task, agent, n, group_id=rollout_id, **options)
        request = pb.CreateRolloutRequest(
            request_id=secrets.token_hex(16), spec=spec(task, agent, options), rollout_id=rollout_id
        )
        answer = await self._driver.service.call(
            self._driver.stub.CreateRollout, request, timeout=CREATE_TIMEOUT_S, repeatable=True
        )
        return RolloutHandle(self._driver, wire_results.rollout(answer.rollout))

    async def get(self, rollout_id: str) -> results.Rollout:
        """A rollout as it stands. Raises NotFound `ROLLOUT_UNKNOWN`."""
        return await self._driver.get(rollout_id)

    async def attach(self, rollout_id: str) -> RolloutHandle:
        """A handle of a rollout that was started elsewhere. Raises NotFound `ROLLOUT_UNKNOWN`."""
        return RolloutHandle(self._driver, await self.get(rollout_id))

    async def list(
        self,
        *,
        run_id: str | None = None,
        group_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        ended: bool | None = None,
        task_id: str | None = None,
        agent: str | None = None,
    ) -> AsyncGenerator[results.Rollout, None]:
        """Rollouts that match every condition given, newest first."""
        request = pb.ListRolloutsRequest(filter=_filter(run_id, group_id, labels, ended, task_id, agent))
        async for page in self._driver.service.pages(self._driver.stub.ListRollouts, request):
            for item in page.rollouts:
                yield wire_results.rollout(item)

    async def watch(
        self,
        *,
        run_id: str | None = None,
        group_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        ended: bool | None = None,
        task_id: str | None = None,
        agent: str | None = None,
        ended_limit: int | None = None,
        interval: float | None = None,
    ) -> AsyncGenerator[results.RolloutChanges, None]:
        """How the rollouts that match stand, a line each: first those that are there, then those that change. Endless.

        A message without anything comes where nothing changes. What breaks is not taken up again: watching anew begins
        with everything that was missed.

        Args:
            run_id, group_id, labels, ended, task_id, agent: as in `list`.
            ended_limit: how many that ended before are told, the newest; 0 to 10,000, None = 1,000.
            interval: seconds between two messages with changes at least; 0.1 to 60, None = 0.25.

        Raises:
            Unavailable: the driver went away.
            Unsupported: an older driver, which cannot tell of all at once.
        """
        request = pb.WatchRolloutsRequest(
            filter=_filter(run_id, group_id, labels, ended, task_id, agent),
            ended_limit=ended_limit,
            interval=wire.duration(interval),
        )
        async with aclosing(self._driver.service.stream(self._driver.stub.WatchRollouts, request)) as messages:
            async for message in messages:
                yield results.RolloutChanges(
                    rollouts=tuple(wire_results.summary(item) for item in message.rollouts),
                    gone=tuple(message.gone_rollout_ids),
                    complete=message.snapshot_complete,
                )

    async def trajectory(self, rollout_id: str, *, samples_only: bool = False, bodies: bool = False) -> Trajectory:
        """See `RolloutHandle.trajectory`."""
        return await self._driver.trajectory(rollout_id, samples_only=samples_only, bodies=bodies)

    async def export(
        self,
        *,
        run_id: str | None = None,
        group_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        task_id: str | None = None,
        agent: str | None = None,
        bodies: bool = False,
    ) -> AsyncGenerator[tuple[Trajectory, results.Outcome], None]:
        """The trajectories of every ended rollout that matches, one after another."""
        request = pb.ExportTrajectoriesRequest(
            filter=_filter(run_id, group_id, labels, None, task_id, agent), include_bodies=bodies
        )
        whole: trajectory_pb2.Trajectory | None = None
        outcome = rollout_pb2.Outcome()
        async with aclosing(self._driver.service.stream(self._driver.stub.ExportTrajectories, request)) as fragments:
            async for fragment in fragments:
                part = fragment.trajectory
                if whole is not None and part.rollout_id and part.rollout_id != whole.rollout_id:
                    yield wire_results.trajectory(whole), wire_results.outcome(outcome)
                    whole = None
                if whole is None:
                    whole, outcome = trajectory_pb2.Trajectory(), fragment.outcome
                whole.MergeFrom(part)
        if whole is not None:
            yield wire_results.trajectory(whole), wire_results.outcome(outcome)


class GroupsClient:
    """`ps.groups`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def create(
        self,
        task: tasks.Task,
        agent: str | tasks.AgentChoice,
        n: int,
        *,
        spares: int = 0,
        quorum: int | None = None,
        straggler_grace: float | None = None,
        group_id: str = "",
        **options: Unpack[RolloutOptions],
    ) -> GroupHandle:
        """Starts n rollouts of one spec, which share one prepared state, and returns at once.

        Args:
            task: what to do.
            agent: a registered agent's name, or a choice with options.
            n: wanted results, 1 to 256.
            spares: further rollouts started at once, so that n results come although some fail.
            quorum: results with which the group counts as complete; None = n.
            straggler_grace: seconds that the others get from the quorum-th result on; None = they are waited for.
            group_id: chosen by you, at most 120 characters; its rollouts are GROUP_ID-INDEX. Empty = assigned.
            **options: see `RolloutOptions`.

        Raises:
            As `ps.rollouts.create`.
        """
        return await _create_group(
            self._driver,
            task,
            agent,
            n,
            spares=spares,
            quorum=quorum,
            straggler_grace=straggler_grace,
            group_id=group_id,
            **options,
        )

    async def attach(self, group_id: str) -> GroupHandle:
        """A handle of a group that was started elsewhere. Raises NotFound `GROUP_UNKNOWN`."""
        return GroupHandle(self._driver, await self._driver.get_group(group_id))

    async def list(self, *, run_id: str | None = None) -> AsyncGenerator[results.Group, None]:
        """Groups, newest first."""
        request = pb.ListGroupsRequest(run_id=run_id)
        async for page in self._driver.service.pages(self._driver.stub.ListGroups, request):
            for item in page.groups:
                yield wire_results.group(item)


async def _create_group(
    driver: Driver,
    task: tasks.Task,
    agent: str | tasks.AgentChoice,
    n: int,
    *,
    spares: int = 0,
    quorum: int | None = None,
    straggler_grace: float | None = None,
    group_id: str = "",
    **options: Unpack[RolloutOptions],
) -> GroupHandle:
    """See `GroupsClient.create`."""
    request = pb.CreateGroupRequest(
        request_id=secrets.token_hex(16),
        spec=spec(task, agent, options),
        size=n,
        spares=spares,
        quorum=quorum,
        group_id=group_id,
    )
    if straggler_grace is not None:
        request.stragglers.CopyFrom(rollout_pb2.StragglerPolicy(grace=wire.duration(straggler_grace)))
    answer = await driver.service.call(driver.stub.CreateGroup, request, timeout=CREATE_TIMEOUT_S, repeatable=True)
    return GroupHandle(driver, wire_results.group(answer.group))


def _filter(
    run_id: str | None,
    group_id: str | None,
    labels: Mapping[str, str] | None,
    ended: bool | None,
    task_id: str | None,
    agent: str | None,
) -> pb.RolloutFilter:
    return pb.RolloutFilter(
        run_id=run_id, group_id=group_id, labels=labels or {}, ended=ended, task_id=task_id, agent=agent
    )
