"""The gate by single requests: rollouts for agents of one's own, agent keys, recorded calls, leases."""

import asyncio
import secrets
import socket
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Final, Self

from penstock.client.errors import DeadlineExceeded, NotFound, PenstockError, Unavailable
from penstock.client.intercept.calls import ModelCall
from penstock.client.intercept.leases import check_size, rejection
from penstock.client.intercept.session import Selector, selector_to
from penstock.client.intercept.stream import announced
from penstock.client.tasks import spec as tasks
from penstock.client.transport.cluster import Cluster
from penstock.client.transport.rpc import MAX_MESSAGE_BYTES, Service
from penstock.client.types import gate
from penstock.client.types.chat import Sampling
from penstock.client.types.trajectories import Call, Trajectory
from penstock.client.wire import chat, results, specs
from penstock.client.wire import gate as wire
from penstock.interception.v1 import intercept_service_pb2, intercept_service_pb2_grpc
from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock.interception.v1 import rollout_gate_service_pb2_grpc as pb_grpc
from penstock.trajectory.v1 import trajectory_pb2

_OPEN_S: Final = 60.0
"""Seconds that opening may take: the gate checks the model source first."""
_LEASE_WAIT_S: Final = 20.0
_PAGE_BYTES: Final = 8 << 20
_SETTLE_S: Final = 10.0
"""Timeout for a gate that is asked what it has leased to a request that was cancelled."""


class LeasedCall(ModelCall):
    """A call that was leased without a session: its answers are single requests, its lease ends unless extended."""

    def __init__(self, service: Service, message: intercept_service_pb2.ModelCall) -> None:
        super().__init__(message, self._complete)
        self._service = service
        self._stub = intercept_service_pb2_grpc.InterceptServiceStub(service.channel)

    async def extend(self) -> bool:
        """Extends the lease by its original length; returns False if it has ended."""
        lease_id = self._message.lease_id
        request = intercept_service_pb2.CompleteCallsRequest(extend_lease_ids=[lease_id])
        answer = await self._service.call(self._stub.CompleteCalls, request, repeatable=True)
        if lease_id not in answer.lost_lease_ids:
            return True
        self.end("LEASE_LOST")
        return False

    async def _complete(self, result: intercept_service_pb2.CallResult) -> None:
        result.lease_id = self._message.lease_id
        check_size(result)
        request = intercept_service_pb2.CompleteCallsRequest(results=[result])
        # An equal result is accepted again, so that a repeat is harmless.
        answer = await self._service.call(self._stub.CompleteCalls, request, repeatable=True)
        for message in answer.acknowledged.rejected:
            error = rejection(message)
            if not error.retryable:
                self.end(error.reason)
            raise error
        self.end("ANSWERED")


class GateRolloutHandle:
    """A rollout opened by this program, for an agent that it runs itself. `async with` closes it at the end."""

    def __init__(self, client: "GateClient", answer: pb.OpenRolloutResponse) -> None:
        self._client = client
        self.info: gate.GateRollout = wire.rollout(answer.rollout)
        """The rollout as last reported."""
        self.token: str = answer.token
        """Its agent key: the agent's bearer token, x-api-key or x-goog-api-key, for this rollout only."""
        self.ingress_address: str = answer.ingress_address
        """The ingress for a sandbox's `OneEndpoint`: `host:port`, or `tls:host:port`."""
        self.paths: Mapping[str, str] = {
            chat.word(trajectory_pb2.Dialect, item.dialect, "DIALECT_"): item.base_path for item in answer.endpoints
        }
        """Base path of each dialect (chat_completions, responses, messages, generate_content), for SDKs' base URLs."""
        self.host_tools: tuple[str, ...] = tuple(answer.host_tools)
        """Names of the host tools that it is offered."""
        self.mcp_path: str = answer.mcp_path
        """Path of the host tools' MCP server (streamable HTTP)."""

    def __repr__(self) -> str:
        return f"GateRolloutHandle({self.rollout_id}, {self.info.state})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def rollout_id(self) -> str:
        """The rollout's id."""
        return self.info.rollout_id

    def base_url(self, dialect: str = "chat_completions") -> str:
        """Returns the base URL for an SDK of a dialect, as seen from the ingress's own network.

        Raises:
            KeyError: the rollout was not opened for this dialect.
        """
        address = self.ingress_address.removeprefix("tls:")
        return f"{'http' if address == self.ingress_address else 'https'}://{address}{self.paths[dialect]}"

    async def refresh(self) -> gate.GateRollout:
        """Fetches its current state."""
        self.info = await self._client.get(self.rollout_id)
        return self.info

    async def capture(self, *, bodies: bool = False, top: bool = False) -> Trajectory:
        """Returns its trajectory so far; graded once it is closed. Arguments as for `ps.gate.capture`."""
        return await self._client.capture(self.rollout_id, bodies=bodies, top=top)

    async def issue_key(
        self, terms: tasks.AgentKeyTerms | None = None, *, retire_others_after: float | None = None
    ) -> gate.IssuedKey:
        """Issues another agent key; see `ps.gate.issue_key`."""
        return await self._client.issue_key(self.rollout_id, terms, retire_others_after=retire_others_after)

    async def close(self, reason: str = "AGENT_EXITED") -> gate.GateRollout:
        """Closes it: its keys become void, its open calls are cancelled; the capture stays. Idempotent."""
        self.info = await self._client.close(self.rollout_id, reason)
        return self.info

    async def delete(self) -> None:
        """Deletes it with its capture. Idempotent."""
        await self._client.delete(self.rollout_id)


class GateClient:
    """`ps.gate`: the interception service's rollouts, keys and calls, one request each.

    A trainer's loop uses `ps.intercept` or a handle's `calls()`, which reconnect and hold leases by heartbeats.
    """

    def __init__(self, service: Service, cluster: Cluster) -> None:
        self._service = service
        self._cluster = cluster
        self._stub = pb_grpc.RolloutGateServiceStub(service.channel)
        self._calls = intercept_service_pb2_grpc.InterceptServiceStub(service.channel)

    async def check_source(
        self,
        source: tasks.ModelSource | None = None,
        *,
        mode: tasks.Mode | str = tasks.Mode.INTERCEPTION_GATE,
        rollout_id: str = "",
        group_id: str | None = None,
        run_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        run_budgets: tasks.RunBudgets | None = None,
        models: Sequence[tasks.RolloutModel] = (),
    ) -> gate.SourceCheck:
        """Checks that a model source is reachable and suits the mode; opens nothing. The answer may be 2 s old.

        Args:
            source: None = the default inference service.
            mode: of the rollout that would be opened.
            rollout_id, group_id, run_id, labels: of that rollout, for the host tools that it would be offered.
            run_budgets: of its run, to be compared with those in force.
            models: its models, whose sources are checked too.

        Raises:
            Unavailable: `INFERENCE_UNREACHABLE`, `UPSTREAM_UNREACHABLE`.
            FailedPrecondition: `UPSTREAM_NOT_ALLOWED`, `UPSTREAM_UNKNOWN`, `UPSTREAM_KEY_REFUSED`,
                `MODEL_NOT_ALLOWED`, `INFERENCE_UNKNOWN`, `TOKENIZER_UNKNOWN`, `SOURCE_UNSUITABLE`,
                `TEMPLATE_UNSUPPORTED`, `RUN_BUDGETS_DIFFER`, `TOKENIZER_MISMATCH` (of a model).
            ResourceExhausted: `BUDGET_EXHAUSTED`, the run's.
        """
        request = pb.CheckSourceRequest(
            mode=specs.mode(mode),
            source=None if source is None else specs.source(source),
            rollout_id=rollout_id,
            group_id=group_id,
            run_id=run_id,
            labels=labels or {},
            run_budgets=None if run_budgets is None else specs.run_budgets(run_budgets),
            models=map(specs.model, models),
        )
        answer = await self._service.call(self._stub.CheckSource, request, timeout=_OPEN_S, repeatable=True)
        return wire.source_check(answer)

    async def open(
        self,
        *,
        rollout_id: str = "",
        mode: tasks.Mode | str = tasks.Mode.INTERCEPTION_GATE,
        source: tasks.ModelSource | None = None,
        group_id: str | None = None,
        group_index: int | None = None,
        run_id: str | None = None,
        task_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        dialects: Sequence[str] = (),
        budgets: tasks.Budgets | None = None,
        run_budgets: tasks.RunBudgets | None = None,
        model_name: str = "",
        hints: gate.CallHints | None = None,
        policy: tasks.PolicyConstraint | None = None,
        sampling: Sampling | None = None,
        token_terms: tasks.AgentKeyTerms | None = None,
        models: Sequence[tasks.RolloutModel] = (),
    ) -> GateRolloutHandle:
        """Opens a rollout for an agent that you run yourself: `async with await ps.gate.open() as rollout`.

        Give the agent `rollout.base_url(...)` and `rollout.token`. Its calls come to the sessions that select it.

        Args:
            rollout_id: chosen by you, never used before; empty = assigned.
            mode: what answers its calls, and what is captured.
            source: answers calls that the trainer does not; None = the default inference service.
            group_id, run_id, labels: for selectors of sessions, and for the trajectory.
            group_index, task_id: sent to the trainer with each call.
            dialects: that the agent may use; none = all.
            budgets: limits of this rollout.
            run_budgets: of its run; fixed by the first rollout that sets them.
            model_name: for the agent; empty = the source's own.
            hints: for recognising the agent's auxiliary calls.
            policy: which versions of the weights may answer.
            sampling: replaces, field by field, the agent's.
            token_terms: of the agent key.
            models: several models, or policies, that answer its calls; none = one, `source`. Without `model_name`.

        Raises:
            AlreadyExists: `ROLLOUT_EXISTS`.
            ResourceExhausted: `ROLLOUT_LIMIT`, with `retry_after`; `BUDGET_EXHAUSTED`, the run's.
            PenstockError: the errors of `check_source`.
        """
        request = pb.OpenRolloutRequest(
            request_id=secrets.token_hex(16),
            rollout_id=rollout_id or secrets.token_hex(8),
            group_id=group_id,
            run_id=run_id,
            labels=labels or {},
            mode=specs.mode(mode),
            source=None if source is None else specs.source(source),
            dialects=[chat.number(trajectory_pb2.Dialect, item, "DIALECT_") for item in dialects],
            budgets=None if budgets is None else specs.budgets(budgets),
            model_name=model_name,
            hints=None if hints is None else wire.hints(hints),
            policy=None if policy is None else specs.policy(policy),
            task_id=task_id,
            group_index=group_index,
            sampling_override=chat.sampling_to(sampling),
            run_budgets=None if run_budgets is None else specs.run_budgets(run_budgets),
            token_terms=None if token_terms is None else specs.token_terms(token_terms),
            models=map(specs.model, models),
        )
        answer = await self._service.call(self._stub.OpenRollout, request, timeout=_OPEN_S, repeatable=True)
        return GateRolloutHandle(self, answer)

    async def get(self, rollout_id: str) -> gate.GateRollout:
        """Returns a rollout as the gate sees it. Raises NotFound `ROLLOUT_UNKNOWN`."""
        request = pb.GetRolloutRequest(rollout_id=rollout_id)
        answer = await self._service.call(self._stub.GetRollout, request, repeatable=True)
        return wire.rollout(answer.rollout)

    async def list(
        self, *, labels: Mapping[str, str] | None = None, open_only: bool = False
    ) -> AsyncGenerator[gate.GateRollout, None]:
        """Yields the gate's rollouts with all these labels, newest first."""
        request = pb.ListRolloutsRequest(labels=labels or {}, open_only=open_only)
        async for page in self._service.pages(self._stub.ListRollouts, request):
            for item in page.rollouts:
                yield wire.rollout(item)

    async def close(self, rollout_id: str, reason: str = "") -> gate.GateRollout:
        """Closes a rollout: its keys become void, its open calls are cancelled; the capture stays. Idempotent.

        Args:
            rollout_id: opened by `open`; cancel one that the driver runs.
            reason: stable UPPER_SNAKE, sent to the holders of its calls.

        Raises:
            NotFound: `ROLLOUT_UNKNOWN`.
        """
        request = pb.CloseRolloutRequest(rollout_id=rollout_id, reason=reason)
        answer = await self._service.call(self._stub.CloseRollout, request, repeatable=True)
        return wire.rollout(answer.rollout)

    async def hold_calls(self, rollout_id: str, *, held: bool = True) -> gate.GateRollout:
        """Holds the calls of an open rollout until they are let go with `held=False`, also over a restart. Idempotent.

        None is leased or dispatched meanwhile, and its time limits stand still. A rollout of the driver is paused by
        its handle, which holds its sandbox too.

        Raises:
            NotFound: `ROLLOUT_UNKNOWN`.
            FailedPrecondition: `ROLLOUT_CLOSED`.
        """
        request = pb.HoldCallsRequest(rollout_id=rollout_id, held=held)
        answer = await self._service.call(self._stub.HoldCalls, request, repeatable=True)
        return wire.rollout(answer.rollout)

    async def delete(self, rollout_id: str) -> None:
        """Deletes a rollout and its capture, closed first if it is open. Idempotent."""
        request = pb.DeleteRolloutRequest(rollout_id=rollout_id)
        await self._service.call(self._stub.DeleteRollout, request, repeatable=True)

    async def issue_key(
        self,
        rollout_id: str,
        terms: tasks.AgentKeyTerms | None = None,
        *,
        retire_others_after: float | None = None,
    ) -> gate.IssuedKey:
        """Issues another agent key for an open rollout, with narrower scopes or because a key may have leaked.

        Args:
            rollout_id: of any rollout, the driver's too.
            terms: its scopes and lifetime (1 s to 1 year); None = all scopes, until the rollout's end.
            retire_others_after: seconds after which all other keys are void, 0 = at once; None = they stay valid.

        Raises:
            NotFound: `ROLLOUT_UNKNOWN`.
            FailedPrecondition: `ROLLOUT_CLOSED`.
            ResourceExhausted: `TOKEN_LIMIT`, a rollout has at most 256 keys in its life.
        """
        request = pb.IssueTokenRequest(
            request_id=secrets.token_hex(16),
            rollout_id=rollout_id,
            terms=None if terms is None else specs.token_terms(terms),
            retire_others_after=chat.duration(retire_others_after),
        )
        return wire.issued_key(await self._service.call(self._stub.IssueToken, request, repeatable=True))

    async def revoke_keys(
        self, rollout_id: str, key_ids: Sequence[str] = (), *, grace: float | None = None
    ) -> tuple[gate.AgentKey, ...]:
        """Makes agent keys void; the rollout stays open, and calls that were admitted go on. Idempotent.

        Args:
            rollout_id: of any rollout, the driver's too.
            key_ids: which; none = all.
            grace: seconds that they stay valid; None = void at once.

        Returns:
            All keys of the rollout, oldest first.

        Raises:
            NotFound: `ROLLOUT_UNKNOWN`, `TOKEN_UNKNOWN`.
        """
        request = pb.RevokeTokensRequest(rollout_id=rollout_id, token_ids=key_ids, grace=chat.duration(grace))
        answer = await self._service.call(self._stub.RevokeTokens, request, repeatable=True)
        return tuple(map(wire.agent_key, answer.tokens))

    async def capture(
        self,
        rollout_id: str,
        *,
        bodies: bool = False,
        top: bool = False,
        after_index: int | None = None,
        after_tool_call_index: int | None = None,
    ) -> Trajectory:
        """Returns a rollout's trajectory so far; it is graded once the rollout is closed.

        Args:
            rollout_id: of any rollout, the driver's too.
            bodies: with the agent's request bodies.
            top: with the rows of alternatives, 8 * k bytes per sampled token.
            after_index: only calls with a greater index, and no samples; for following an open rollout.
            after_tool_call_index: the same for calls of host tools.

        Raises:
            NotFound: `ROLLOUT_UNKNOWN`.
        """
        request = pb.GetCaptureRequest(
            rollout_id=rollout_id,
            include_bodies=bodies,
            include_top=top,
            after_index=after_index,
            after_tool_call_index=after_tool_call_index,
        )
        whole = trajectory_pb2.Trajectory()
        for fragment in await self._service.collect(self._stub.GetCapture, request, timeout=300.0):
            whole.MergeFrom(fragment.trajectory)
        return results.trajectory(whole)

    async def load_recording(
        self, rollout_id: str, of: str, *, attempt: int = 1, before: str = "", exact: bool = False
    ) -> int:
        """Has the recorded calls of one rollout answer the same prompts of another one, without sampling.

        The other one is open at this gate, and its agent has not called yet. A call whose prompt has the token ids of a
        recorded one is answered with the recorded tokens, each recorded call once; other calls are sampled.

        Args:
            rollout_id: the rollout whose calls are answered.
            of: the rollout whose calls are the recording; at this gate.
            attempt: the attempt at that rollout, from 1.
            before: only calls before this one, by its id; empty = all.
            exact: a call that differs from what was recorded at its place fails (`REPLAY_DIVERGED`).

        Returns:
            The number of recorded calls.

        Raises:
            NotFound: `ROLLOUT_UNKNOWN`; `CALL_UNKNOWN`, the recording has no call `before`.
            FailedPrecondition: `ROLLOUT_CLOSED`; `RECORDING_LATE`, the agent has called.
            ResourceExhausted: `RECORDING_LIMIT`.
            Unsupported: a gate that is older than this RPC.
        """
        capture = pb.GetCaptureRequest(rollout_id=of, include_top=True)
        calls: list[trajectory_pb2.Call] = []
        for fragment in await self._service.collect(self._stub.GetCapture, capture, timeout=300.0):
            calls += fragment.trajectory.calls
        if before:
            ends = [index for index, call in enumerate(calls) if call.call_id == before]
            if not ends:
                raise NotFound(f"The rollout {of} has no call {before}.", reason="CALL_UNKNOWN")
            calls = calls[: ends[0]]
        count = 0
        for page in _pages_of(calls):
            request = pb.LoadRecordingRequest(
                rollout_id=rollout_id, calls=page, recorded_rollout_id=of, recorded_attempt=attempt, exact=exact
            )
            answer = await self._service.call(self._stub.LoadRecording, request, timeout=_OPEN_S, repeatable=True)
            count = answer.calls
        return count

    async def watch_calls(
        self,
        rollout_ids: Sequence[str] = (),
        *,
        labels: Mapping[str, str] | None = None,
        after: int | None = None,
        ended_only: bool = False,
    ) -> AsyncGenerator[gate.GateEvent, None]:
        """Yields `WatchStarted`, then changes of calls and closed rollouts.

        It ends when a single watched rollout is closed. A broken stream is not resumed: watch again with `after` = the
        last sequence number.

        Args:
            rollout_ids: none = all.
            labels: of the rollouts.
            after: events after this sequence number; None = from now on.
            ended_only: only changes of calls into a terminal state.

        Raises:
            NotFound: `ROLLOUT_UNKNOWN`.
            FailedPrecondition: `SEQUENCE_UNKNOWN`, the position is older than the kept events.
        """
        request = pb.WatchCallsRequest(
            rollout_ids=rollout_ids, labels=labels or {}, after_sequence=after, ended_only=ended_only
        )
        async with aclosing(self._service.stream(self._stub.WatchCalls, request)) as messages:
            async for message in messages:
                event = wire.event(message)
                if event is not None:
                    yield event

    async def watch(self, interval: float | None = None) -> AsyncGenerator[gate.GateLoad, None]:
        """Yields the gate's load at each interval: 0.5 to 60 seconds, None = 1. Endless."""
        request = pb.WatchGateRequest(interval=chat.duration(interval))
        async with aclosing(self._service.stream(self._stub.WatchGate, request)) as messages:
            async for message in messages:
                yield wire.load(message)

    async def calls(self, rollout_id: str) -> AsyncGenerator[Call, None]:
        """Yields a rollout's calls in order of arrival, without tokens. Raises NotFound `ROLLOUT_UNKNOWN`."""
        request = intercept_service_pb2.ListCallsRequest(rollout_id=rollout_id)
        async for page in self._service.pages(self._calls.ListCalls, request):
            for item in page.calls:
                yield results.call(item)

    async def call(self, call_id: str, *, body: bool = False) -> gate.RecordedCall:
        """Returns one call with its tokens and whole prompt, and with `body` the request's. Raises NotFound
        `CALL_UNKNOWN`.
        """
        request = intercept_service_pb2.GetCallRequest(call_id=call_id, include_body=body)
        return wire.call(await self._service.call(self._calls.GetCall, request, repeatable=True))

    async def lease_calls(
        self,
        selector: Selector | None = None,
        *,
        max_calls: int = 1,
        wait: float | None = None,
        lease: float | None = None,
        messages: bool = False,
        bodies: bool = False,
        images: bool = False,
        policy_version: int | None = None,
        policies: Mapping[str, int] | None = None,
        identity: str = "",
    ) -> Sequence[LeasedCall]:
        """Waits for queued calls at all gates and leases them, without a session; none if none came in time.

        Args:
            selector: which calls; None = every one.
            max_calls: 1 to 256.
            wait: seconds to wait for the first one; None = 20.
            lease: seconds that a lease lasts unless the call is answered or extended, at most 1 h; None = 5 min.
            messages: whether calls carry messages and tools beside tokens.
            bodies: whether they carry the agent's request body.
            images: whether their images carry the files' bytes.
            policy_version: the newest weights that the trainer has.
            policies: the same by policy, where rollouts have several.
            identity: a name for people; empty = this machine's name.

        Raises:
            ResourceExhausted: `SESSION_LIMIT`.
        """
        patience = _LEASE_WAIT_S if wait is None else wait
        request = intercept_service_pb2.LeaseCallsRequest(
            request_id=secrets.token_hex(16),
            selector=selector_to(selector or Selector()),
            identity=identity or socket.gethostname(),
            max_calls=max_calls,
            wait=chat.duration(patience),
            lease=chat.duration(lease),
            view=intercept_service_pb2.CallView(messages=messages, body=bodies, media=images),
            policy_version=policy_version,
            policies=announced(policies or {}),
            max_message_bytes=MAX_MESSAGE_BYTES,
        )
        timeout = patience / 0.8 + 10.0  # the gate waits for at most 80 % of it
        gates = await self._gates()
        if len(gates) == 1:
            return await _lease(gates[0], request, timeout)
        return await _lease_at_any(gates, request, timeout)

    async def _gates(self) -> Sequence[Service]:
        """Returns the gates that can be reached, as far as the driver knows."""
        members = await self._cluster.members("interception", or_given=True)
        return [member.service for member in members if not member.is_lost] or [item.service for item in members]


async def _lease(
    service: Service, request: intercept_service_pb2.LeaseCallsRequest, timeout: float
) -> list[LeasedCall]:
    stub = intercept_service_pb2_grpc.InterceptServiceStub(service.channel)
    answer = await service.call(stub.LeaseCalls, request, timeout=timeout, repeatable=True)
    return [LeasedCall(service, item) for item in answer.calls]


async def _lease_at_any(
    gates: Sequence[Service], request: intercept_service_pb2.LeaseCallsRequest, timeout: float
) -> list[LeasedCall]:
    """Asks all gates at once. When one has calls the others are asked no longer: what they have leased meanwhile is
    taken too, or put back where it is too much.
    """
    asked = {asyncio.create_task(_lease(service, request, timeout)): service for service in gates}
    given_up: list[Service] = []
    try:
        waiting = set(asked)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(_is_decisive(task) for task in done):
                break
        given_up = [asked[task] for task in waiting]
    finally:
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
    leased: list[LeasedCall] = []
    failures: list[BaseException] = []
    for task in asked:
        if task.cancelled():
            continue
        if (failure := task.exception()) is not None:
            failures.append(failure)
        else:
            leased += task.result()
    # The same request again: its answer has what the gate leased to it before it was cancelled.
    request.wait.FromNanoseconds(0)
    for service in given_up:
        with suppress(PenstockError):  # then the leases end
            known = {call.call_id for call in leased}
            leased += [call for call in await _lease(service, request, _SETTLE_S) if call.call_id not in known]
    if not leased and failures and (len(failures) == len(gates) or not all(map(_is_away, failures))):
        raise next((error for error in failures if not _is_away(error)), failures[0])
    for call in leased[request.max_calls :]:
        with suppress(PenstockError):  # then its lease ends
            await call.release()
    return leased[: request.max_calls]


def _is_decisive(task: asyncio.Task[list[LeasedCall]]) -> bool:
    """Whether the others need not be waited for: there are calls, or a gate refused."""
    failure = task.exception()
    return bool(task.result()) if failure is None else not _is_away(failure)


def _is_away(error: BaseException) -> bool:
    return isinstance(error, Unavailable | DeadlineExceeded)


def _pages_of(calls: Sequence[trajectory_pb2.Call]) -> Iterator[Sequence[trajectory_pb2.Call]]:
    """Parts of a list of calls that fit into messages."""
    page: list[trajectory_pb2.Call] = []
    size = 0
    for call in calls:
        if page and size + call.ByteSize() > _PAGE_BYTES:
            yield page
            page, size = [], 0
        page.append(call)
        size += call.ByteSize()
    if page:
        yield page
