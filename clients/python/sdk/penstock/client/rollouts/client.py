"""Rollouts and groups: creating, listing, exporting. Everything else is done through their handles."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

from penstock.client.errors import InvalidArgument, PenstockError
from penstock.client.rollouts.assays import Assays
from penstock.client.rollouts.driver_rpc import CREATE_TIMEOUT_S, Driver, Drivers
from penstock.client.rollouts.handles import (
    GroupHandle,
    RolloutHandle,
    annotate_request,
    branch_request,
    regrade_request,
)
from penstock.client.rollouts.merging import Watched, changes_of_all
from penstock.client.tasks import spec as tasks
from penstock.client.tasks.task import Task
from penstock.client.transport.lists import newest_first, one_after_another
from penstock.client.types import results
from penstock.client.types.chat import Message, Sampling
from penstock.client.types.trajectories import Annotation, Trajectory
from penstock.client.wire import chat, specs
from penstock.client.wire import results as wire_results
from penstock.driver.v1 import rollout_pb2
from penstock.driver.v1 import rollout_service_pb2 as pb
from penstock.trajectory.v1 import trajectory_pb2

_D = TypeVar("_D", tasks.SandboxChoice, tasks.Limits, tasks.Budgets)


class RolloutOptions(TypedDict, total=False):
    """The options of a rollout beside its task; see each value's class. They take precedence over the task's."""

    mode: tasks.Mode | str
    """Default: interception_gate."""
    source: tasks.ModelSource
    """Answers calls that the trainer does not, and has the tokenizer. Default: the default inference service."""
    options: Mapping[str, Any]
    """Options of the agent's spec, when `agent` is a name."""
    skip_permissions: bool
    """Whether the agent's permission prompts are skipped, when `agent` is a name."""
    sandbox: tasks.SandboxChoice
    limits: tasks.Limits
    budgets: tasks.Budgets
    policy: tasks.PolicyConstraint
    models: Sequence[tasks.RolloutModel]
    """Several models, or policies, that answer the rollout's calls by name, turn or class. Default: the task's, else
    one, `source`."""
    run_id: str
    run_budgets: tasks.RunBudgets
    """For all rollouts with this run_id; fixed by the first rollout that sets them."""
    token_terms: tasks.AgentKeyTerms
    labels: Mapping[str, str]
    seed: int
    """For the agent's option `seed`; in a group, seed + index."""
    sampling: Sampling
    """Overrides, field by field, the agent's sampling."""
    max_attempts: int
    """Maximum attempts, where a failure says nothing about the policy; 1 to 10, default 1."""
    replay: tasks.Replay | Literal["off", "until_divergence", "exact"]
    """What a further attempt does with the last one's answers; default until_divergence."""
    require_assay: Assays
    """Results of `penstock tasks assay`: a task without a passing one is refused (`ASSAY_REQUIRED`)."""
    keep_end_state: bool
    """Whether the agent's work is kept, for `regrade`; default: the task's, else if it is graded in a fresh fork."""
    user: tasks.User
    """Sends the agent further instructions once it has ended; default: the task's, else nobody."""


def spec(task: Task, agent: str | tasks.AgentChoice, options: RolloutOptions) -> rollout_pb2.RolloutSpec:
    """Returns the proto with everything that defines a rollout."""
    given = set(options) - set(RolloutOptions.__annotations__)
    if given:
        raise TypeError(f"unknown options: {', '.join(sorted(given))}")
    if "require_assay" in options:
        options["require_assay"].require(task)
    if isinstance(agent, str):
        agent = tasks.AgentChoice(
            name=agent,
            options=options.get("options", {}),
            skip_permissions=options.get("skip_permissions", False),
        )
    elif "options" in options or "skip_permissions" in options:
        raise TypeError("set options and skip_permissions with the agent's name, or in the AgentChoice")
    if task.mcp_servers:
        agent = replace(agent, mcp_servers=[*task.mcp_servers, *agent.mcp_servers])
    message = rollout_pb2.RolloutSpec(
        task=specs.task(task),
        agent=specs.agent(agent),
        mode=specs.mode(options.get("mode", tasks.Mode.INTERCEPTION_GATE)),
        run_id=options.get("run_id"),
        labels={**task.labels, **options.get("labels", {})},
        seed=options.get("seed"),
        sampling_override=chat.sampling_to(options.get("sampling")),
        max_attempts=options.get("max_attempts"),
        replay=specs.replay(options["replay"]) if "replay" in options else rollout_pb2.REPLAY_UNSPECIFIED,
        keep_end_state=options.get("keep_end_state", task.keep_end_state),
        models=map(specs.model, options.get("models", task.models)),
    )
    if "source" in options:
        message.source.CopyFrom(specs.source(options["source"]))
    sandbox = sandbox_of(task, options.get("sandbox"))
    if sandbox is not None:
        message.sandbox.CopyFrom(specs.sandbox_choice(sandbox))
    limits = over(options.get("limits"), task.limits)
    if limits is not None:
        message.limits.CopyFrom(specs.limits(limits))
    budgets = over(options.get("budgets"), task.budgets)
    if budgets is not None:
        message.budgets.CopyFrom(specs.budgets(budgets))
    if (user := options.get("user", task.user)) is not None:
        message.user.CopyFrom(specs.user(user))
    if "run_budgets" in options:
        message.run_budgets.CopyFrom(specs.run_budgets(options["run_budgets"]))
    if "token_terms" in options:
        message.token_terms.CopyFrom(specs.token_terms(options["token_terms"]))
    if "policy" in options:
        message.policy.CopyFrom(specs.policy(options["policy"]))
    return message


def sandbox_of(task: Task, given: tasks.SandboxChoice | None) -> tasks.SandboxChoice | None:
    """Returns the requested sandbox, completed from the task's. Raises `TASK_IMAGE`."""
    sandbox = over(given, task.sandbox)
    beside = () if sandbox is None else sandbox.companions
    unnamed = [one.name for one in beside if not one.image and one.name in task.companion_builds]
    if unnamed or (task.build is not None and (sandbox is None or not sandbox.image)):
        raise InvalidArgument(
            f"{task.task_id} has a Dockerfile: pass penstock.tasks.images.with_image(task)", reason="TASK_IMAGE"
        )
    return sandbox


def over(given: _D | None, of_task: _D | None) -> _D | None:
    """Merges field by field: the rollout's values, and the task's where the rollout has none."""
    if given is None or of_task is None:
        return given or of_task
    chosen = {item.name: value for item in fields(given) if (value := getattr(given, item.name)) != item.default}
    return replace(of_task, **chosen)


class RolloutsClient:
    """`ps.rollouts`."""

    def __init__(self, drivers: Drivers) -> None:
        self._drivers = drivers

    @overload
    async def create(
        self,
        task: Task,
        agent: str | tasks.AgentChoice,
        *,
        n: None = None,
        rollout_id: str = "",
        **options: Unpack[RolloutOptions],
    ) -> RolloutHandle: ...

    @overload
    async def create(
        self,
        task: Task,
        agent: str | tasks.AgentChoice,
        *,
        n: int,
        rollout_id: str = "",
        **options: Unpack[RolloutOptions],
    ) -> GroupHandle: ...

    async def create(
        self,
        task: Task,
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
            FailedPrecondition: `ASSAY_REQUIRED`.
            Unavailable: a service that it needs cannot be reached; see `reason`.
        """
        if n is not None:
            return await GroupsClient(self._drivers).create(task, agent, n, group_id=rollout_id, **options)
        request = pb.CreateRolloutRequest(
            request_id=secrets.token_hex(16), spec=spec(task, agent, options), rollout_id=rollout_id
        )
        driver, answer = await self._drivers.create(
            lambda driver, is_only: driver.service.call(
                driver.stub.CreateRollout,
                request,
                timeout=CREATE_TIMEOUT_S,
                repeatable=True,
                while_draining=is_only,
            ),
            rollout_id,
        )
        return RolloutHandle(driver, wire_results.rollout(answer.rollout))

    async def get(self, rollout_id: str) -> results.Rollout:
        """Fetches a rollout's current state. Raises NotFound `ROLLOUT_UNKNOWN`."""
        return (await self.attach(rollout_id)).info

    async def attach(self, rollout_id: str) -> RolloutHandle:
        """Returns a handle of a rollout that was started elsewhere. Raises NotFound `ROLLOUT_UNKNOWN`."""
        return RolloutHandle(*await self._drivers.having(rollout_id, lambda driver: driver.get(rollout_id)))

    async def branch(
        self,
        rollout_id: str,
        call: str | int,
        n: int = 1,
        *,
        answer: Message | str | None = None,
        group_id: str = "",
        train_prefix: bool = False,
        replay: tasks.Replay | Literal["exact", "until_divergence"] = "exact",
        seed: int | None = None,
    ) -> GroupHandle:
        """Starts n rollouts that continue another one, the parent, from one of its calls; returns at once.

        Their agents begin anew in sandboxes of their own. Calls before that call get the parent's answers, without
        sampling; that call and those after it are sampled. The parent runs or has ended.

        Args:
            rollout_id: the parent.
            call: a call's id, or its index from 0.
            n: how many branches, 1 to 256.
            answer: what that call is answered in all branches, instead of being sampled: an assistant's message, or its
                text. It is context, and never trained.
            group_id: of the branches, as in `ps.groups.create`.
            train_prefix: train what the parent sampled in each branch too.
            replay: what becomes of a branch whose agent asks something else before that call: `exact` fails it
                (`REPLAY_DIVERGED`), `until_divergence` lets it go on from there.
            seed: of the first branch's calls, 0 or more; each further branch has seed + index. None = each branch has
                the parent's seed: an engine that follows it gives all of them the same answers.

        Raises:
            PenstockError: as `ps.rollouts.create`, and:
            NotFound: `ROLLOUT_UNKNOWN`; `CALL_UNKNOWN`.
            FailedPrecondition: `CALL_UNANSWERED`: that call has no answer; `TRAJECTORY_ABSENT`: the parent's gate has
                forgotten it; `SPEC_FORGOTTEN`: its driver keeps its spec no more.
        """
        request = branch_request(
            rollout_id, call, n, answer=answer, group_id=group_id, train_prefix=train_prefix, replay=replay, seed=seed
        )
        return GroupHandle(*await self._drivers.having(rollout_id, lambda driver: driver.branch(request)))

    async def regrade(
        self, rollout_id: str, verifier: tasks.Verifier | None = None, *, name: str = ""
    ) -> results.Grade:
        """Runs a verifier on an ended rollout's end state, in a sandbox of its own, and records a further grade.

        The first grade stays as it is. Returns once the grade is on disk. A repeat with the same verifier and name
        returns the grade that is there.

        Args:
            rollout_id: an ended rollout whose end state is kept (option `keep_end_state`).
            verifier: None = the rollout's own.
            name: of the grade, 1 to 64 letters, digits, "-", "_" and ".", not "first"; empty = from the verifier's
                SHA-256.

        Raises:
            NotFound: `ROLLOUT_UNKNOWN`.
            AlreadyExists: `GRADE_EXISTS`: the name is that of another verifier's grade.
            FailedPrecondition: `ROLLOUT_RUNNING`; `END_STATE_GONE`; `SPEC_FORGOTTEN`; `REGRADE_FAILED`.
            ResourceExhausted: `GRADE_LIMIT`; `REGRADE_LIMIT`.
            Unavailable: `REGRADE_INTERRUPTED`: nothing was graded, and a repeat may succeed.
        """
        request = regrade_request(rollout_id, verifier, name)
        _, grade = await self._drivers.having(rollout_id, lambda driver: driver.regrade(request))
        return grade

    async def annotate(self, rollout_id: str, *annotations: Annotation) -> None:
        """Adds what somebody outside the environment says about an ended rollout's trajectory: all or none.

        Returns once they are on disk. An annotation of the same name, author and call replaces the earlier one; an
        equal one changes nothing, so a repeat is safe.

        Args:
            rollout_id: an ended rollout.
            annotations: 1 to 1024. A trajectory has at most 1024, and at most 64 MiB of them.

        Raises:
            NotFound: `ROLLOUT_UNKNOWN`; `CALL_UNKNOWN`.
            InvalidArgument: `FIELD_INVALID`; `TOKEN_VALUES`: not one dimension of numbers.
            FailedPrecondition: `ROLLOUT_RUNNING`; `TRAJECTORY_ABSENT`.
            ResourceExhausted: `ANNOTATION_LIMIT`.
            Unsupported: `RPC_NOT_SERVED`: the driver is of an earlier version.
        """
        request = annotate_request(rollout_id, annotations)
        await self._drivers.having(rollout_id, lambda driver: driver.annotate(request))

    async def regrade_all(
        self,
        verifier: tasks.Verifier | Mapping[str, tasks.Verifier] | None = None,
        *,
        name: str = "",
        concurrency: int = 16,
        run_id: str | None = None,
        group_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        task_id: str | None = None,
        agent: str | None = None,
    ) -> AsyncGenerator[results.Regraded, None]:
        """Grades all matching ended rollouts again; yields each as it is done, with its grade or its error.

        What was interrupted is gone on with by the same call: grades that are there are not made again.

        Args:
            verifier: one for all, or one for each task, by its id: rollouts of other tasks are left out. None = each
                rollout's own.
            name: as in `regrade`.
            concurrency: how many at once, at least 1; each has a sandbox meanwhile.
            run_id, group_id, labels, task_id, agent: as in `list`.

        Raises:
            Unavailable: a driver is away, as in `list`. It is raised after the grades of all other drivers' rollouts.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency: at least 1, not {concurrency}")

        async def one(rollout: results.Rollout, given: tasks.Verifier | None) -> results.Regraded:
            try:
                return results.Regraded(rollout, await self.regrade(rollout.rollout_id, given, name=name))
            except PenstockError as error:
                return results.Regraded(rollout, None, error)

        running: set[asyncio.Task[results.Regraded]] = set()
        away: PenstockError | None = None
        found = self.list(run_id=run_id, group_id=group_id, labels=labels, ended=True, task_id=task_id, agent=agent)
        try:
            try:
                async with aclosing(found):
                    async for rollout in found:
                        if isinstance(verifier, Mapping) and rollout.task_id not in verifier:
                            continue
                        given = verifier[rollout.task_id] if isinstance(verifier, Mapping) else verifier
                        running.add(asyncio.ensure_future(one(rollout, given)))
                        if len(running) >= concurrency:
                            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                            for task in done:
                                yield task.result()
            except PenstockError as error:
                away = error  # what the others have is graded first
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
            if away is not None:
                raise away
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def list(
        self,
        *,
        run_id: str | None = None,
        group_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        ended: bool | None = None,
        task_id: str | None = None,
        agent: str | None = None,
        all_namespaces: bool = False,
    ) -> AsyncGenerator[results.Rollout, None]:
        """Yields the rollouts of all drivers that match every given condition, newest first.

        `all_namespaces`: for an operator; without it those of the connection's namespace.

        Raises:
            Unavailable: a driver is away, which the message names. It is raised after the rollouts of all others.
        """
        chosen = _filter(run_id, group_id, labels, ended, task_id, agent, all_namespaces)

        async def of(driver: Driver) -> AsyncGenerator[results.Rollout, None]:
            async for page in driver.service.pages(driver.stub.ListRollouts, pb.ListRolloutsRequest(filter=chosen)):
                for item in page.rollouts:
                    yield wire_results.rollout(item)

        lists = [of(driver) for driver in await self._drivers.all()]
        async with aclosing(newest_first(lists, lambda rollout: rollout.create_time)) as found:
            async for rollout in found:
                yield rollout

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
        all_namespaces: bool = False,
    ) -> AsyncGenerator[results.RolloutChanges, None]:
        """Yields summaries of the matching rollouts: first all current ones, then changes. Endless.

        An empty message comes where nothing changes. They are of all drivers. While some do not answer, messages
        name them in `away`. When the only driver or all of them went away, the watch ends: a new one begins with
        everything that was missed.

        Args:
            run_id, group_id, labels, ended, task_id, agent, all_namespaces: as in `list`.
            ended_limit: how many already ended rollouts of each driver to include, the newest; 0 to 10,000, None =
                1,000.
            interval: minimum seconds between two messages with changes; 0.1 to 60, None = 0.25.

        Raises:
            Unavailable: the only driver, or every one, went away.
            Unsupported: an older driver without this RPC.
        """
        request = pb.WatchRolloutsRequest(
            filter=_filter(run_id, group_id, labels, ended, task_id, agent, all_namespaces),
            ended_limit=ended_limit,
            interval=chat.duration(interval),
        )

        async def of(driver: Driver) -> AsyncGenerator[results.RolloutChanges, None]:
            async with aclosing(driver.service.stream(driver.stub.WatchRollouts, request)) as messages:
                async for message in messages:
                    yield results.RolloutChanges(
                        rollouts=tuple(wire_results.summary(item) for item in message.rollouts),
                        gone=tuple(message.gone_rollout_ids),
                        complete=message.snapshot_complete,
                    )

        async def drivers() -> list[Watched]:
            return [
                Watched(driver.service.address, driver.name, partial(of, driver))
                for driver in await self._drivers.all()
            ]

        async with aclosing(changes_of_all(drivers, ended_limit)) as changes:
            async for change in changes:
                yield change

    async def trajectory(
        self,
        rollout_id: str,
        *,
        samples_only: bool = False,
        bodies: bool = False,
        top: bool = False,
        tensors: bool = False,
        images: bool = False,
        grade: str = "",
    ) -> Trajectory:
        """See `RolloutHandle.trajectory`."""
        _, found = await self._drivers.having(
            rollout_id,
            lambda driver: driver.trajectory(
                rollout_id,
                samples_only=samples_only,
                bodies=bodies,
                top=top,
                tensors=tensors,
                images=images,
                grade=grade,
            ),
        )
        return found

    async def export(
        self,
        *,
        run_id: str | None = None,
        group_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        task_id: str | None = None,
        agent: str | None = None,
        bodies: bool = False,
        top: bool = False,
        tensors: bool = False,
        images: bool = False,
        grade: str = "",
        all_namespaces: bool = False,
    ) -> AsyncGenerator[tuple[Trajectory, results.Outcome], None]:
        """Yields the trajectories of all matching ended rollouts; with request bodies, alternatives, the rows of
        tensors and the files of images if requested.

        `grade`: with the reward of the further grade of this name, or none. Outcomes are as they ended.

        Raises:
            Unavailable: a driver is away, which the message names. It is raised after the trajectories of all others.
        """
        request = pb.ExportTrajectoriesRequest(
            filter=_filter(run_id, group_id, labels, None, task_id, agent, all_namespaces),
            include_bodies=bodies,
            include_top=top,
            grade=grade,
        )
        exports = [_exported(driver, request, tensors=tensors, images=images) for driver in await self._drivers.all()]
        async with aclosing(one_after_another(exports)) as found:
            async for item in found:
                yield item


class GroupsClient:
    """`ps.groups`."""

    def __init__(self, drivers: Drivers) -> None:
        self._drivers = drivers

    async def create(
        self,
        task: Task,
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
            straggler_grace: seconds that the others get after the quorum-th result; None = no limit.
            group_id: chosen by you, at most 120 characters; its rollouts are GROUP_ID-INDEX. Empty = assigned.
            **options: see `RolloutOptions`.

        Raises:
            PenstockError: as `ps.rollouts.create`.
        """
        request = pb.CreateGroupRequest(
            request_id=secrets.token_hex(16),
            spec=spec(task, agent, options),
            size=n,
            spares=spares,
            quorum=quorum,
            group_id=group_id,
        )
        if straggler_grace is not None:
            request.stragglers.CopyFrom(rollout_pb2.StragglerPolicy(grace=chat.duration(straggler_grace)))
        driver, answer = await self._drivers.create(
            lambda driver, is_only: driver.service.call(
                driver.stub.CreateGroup, request, timeout=CREATE_TIMEOUT_S, repeatable=True, while_draining=is_only
            ),
            group_id,
        )
        return GroupHandle(driver, wire_results.group(answer.group))

    async def attach(self, group_id: str) -> GroupHandle:
        """Returns a handle of a group that was started elsewhere. Raises NotFound `GROUP_UNKNOWN`."""
        return GroupHandle(*await self._drivers.having(group_id, lambda driver: driver.get_group(group_id)))

    async def list(
        self, *, run_id: str | None = None, all_namespaces: bool = False
    ) -> AsyncGenerator[results.Group, None]:
        """Yields groups of all drivers, newest first; `all_namespaces` and errors as for rollouts."""

        async def of(driver: Driver) -> AsyncGenerator[results.Group, None]:
            request = pb.ListGroupsRequest(run_id=run_id, all_namespaces=all_namespaces)
            async for page in driver.service.pages(driver.stub.ListGroups, request):
                for item in page.groups:
                    yield wire_results.group(item)

        lists = [of(driver) for driver in await self._drivers.all()]
        async with aclosing(newest_first(lists, lambda group: group.create_time)) as found:
            async for group in found:
                yield group


async def _exported(
    driver: Driver, request: pb.ExportTrajectoriesRequest, *, tensors: bool, images: bool
) -> AsyncGenerator[tuple[Trajectory, results.Outcome], None]:
    whole: trajectory_pb2.Trajectory | None = None
    outcome = rollout_pb2.Outcome()
    async with aclosing(driver.service.stream(driver.stub.ExportTrajectories, request)) as fragments:
        async for fragment in fragments:
            part = fragment.trajectory
            if whole is not None and part.rollout_id and part.rollout_id != whole.rollout_id:
                if tensors:
                    await driver.add_tensors(whole)
                if images:
                    await driver.add_images(whole)
                yield wire_results.trajectory(whole), wire_results.outcome(outcome)
                whole = None
            if whole is None:
                whole, outcome = trajectory_pb2.Trajectory(), fragment.outcome
            whole.MergeFrom(part)
    if whole is not None:
        if tensors:
            await driver.add_tensors(whole)
        if images:
            await driver.add_images(whole)
        yield wire_results.trajectory(whole), wire_results.outcome(outcome)


def _filter(
    run_id: str | None,
    group_id: str | None,
    labels: Mapping[str, str] | None,
    ended: bool | None,
    task_id: str | None,
    agent: str | None,
    all_namespaces: bool,
) -> pb.RolloutFilter:
    return pb.RolloutFilter(
        run_id=run_id,
        group_id=group_id,
        labels=labels or {},
        ended=ended,
        task_id=task_id,
        agent=agent,
        all_namespaces=all_namespaces,
    )
