"""`RolloutGateService`: translates requests into calls on the domain."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TypeVar

import grpc
import structlog
from google.protobuf.message import Message as ProtoMessage

from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock.interception.v1 import rollout_gate_service_pb2_grpc as pb_grpc
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis import auth
from penstock_chassis.auth import Owned, Role
from penstock_chassis.errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied, Violation
from penstock_chassis.validation import check_request_id, foreign_page_token, invalid_field, page_size
from penstock_codec import ControlTokens
from penstock_codec.chat import Sampling
from penstock_codec.parsers import GRAMMARS
from penstock_interception.domain.budgets import RunBudgets
from penstock_interception.domain.calls import (
    AgentHints,
    BranchPoint,
    CallerUpstream,
    CodecChoice,
    Dialect,
    InferenceRef,
    Mode,
    NamedUpstream,
    PolicyBounds,
    RolloutSpec,
    RolloutState,
    Source,
    TokenizerRef,
)
from penstock_interception.domain.state import Rollout
from penstock_interception.gate.events import CallChange, Change
from penstock_interception.ingress.dialects.base import DialectCodec
from penstock_interception.ingress.mcp import server
from penstock_interception.ingress.user_calls import UserCalls
from penstock_interception.interceptor import Interceptor
from penstock_interception.rollouts.trajectory import capture
from penstock_interception.rpc import budgets_and_keys, tools, trajectory
from penstock_interception.rpc.models import bounds_from, models_from
from penstock_interception.rpc.watch_gate import interval_from, snapshot_to
from penstock_interception.status.gate_snapshot import take_snapshot
from penstock_interception.wire import convert

_log = structlog.get_logger(__name__)

T = TypeVar("T")

HEARTBEAT_S = 10.0
MAX_LABELS = 64
_BEFORE_ALL = -1
"""A position before that of every call: a capture after it has all calls, and no samples."""
_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}")
_ENDINGS = {".judge": "judge_of", ".user": "user_of"}
"""How the ids end that drivers give to judges and users, and the field that names their rollout."""
_CONTROL_TOKENS = {
    interception_pb2.CONTROL_TOKENS_UNSPECIFIED: ControlTokens.PLAIN,
    interception_pb2.CONTROL_TOKENS_PLAIN: ControlTokens.PLAIN,
    interception_pb2.CONTROL_TOKENS_PARSE: ControlTokens.PARSE,
}
_MODES = {value: key for key, value in trajectory.MODES.items()}
SERVICE = "penstock.interception.v1.RolloutGateService"
register_gate = pb_grpc.add_RolloutGateServiceServicer_to_server


class RolloutGateServicer(pb_grpc.RolloutGateServiceServicer):
    """See protos/penstock/interception/v1/rollout_gate_service.proto."""

    def __init__(
        self,
        interceptor: Interceptor,
        dialects: Sequence[DialectCodec],
        ingress_address: Callable[[], str],
        stopping: asyncio.Event,
        home: str = "",
        unreachable_inference: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """`unreachable_inference` returns the names of the inference services and pools that do not answer."""
        self._home = home
        self._unreachable_inference = unreachable_inference
        self._interceptor = interceptor
        self._registry = interceptor.registry
        self._keys = interceptor.agent_keys
        self._dialects = {dialect.dialect: dialect for dialect in dialects}
        self._user_calls = UserCalls(interceptor, self._dialects)
        self._ingress_address = ingress_address
        self._stopping = stopping

    async def CheckSource(  # noqa: N802
        self, request: pb.CheckSourceRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.CheckSourceResponse:
        source, caller_key = _source_from(request.source)
        spec = RolloutSpec(
            request_id="",
            rollout_id=request.rollout_id,
            mode=_mode_from(request.mode),
            source=source,
            group_id=request.group_id if request.HasField("group_id") else None,
            run_id=request.run_id if request.HasField("run_id") else None,
            labels=tuple(sorted(request.labels.items())),
            run_budgets=_run_budgets_from(request),
            namespace=auth.caller().home,
            models=models_from(request, PolicyBounds(), _source_from),
        )
        resolved = await self._interceptor.rollouts.check(spec, caller_key)
        offered = [tool.name for tool in self._interceptor.tools.offered_to(spec)]
        return pb.CheckSourceResponse(model_name=resolved.facts.model, host_tools=offered)

    async def OpenRollout(  # noqa: N802
        self, request: pb.OpenRolloutRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.OpenRolloutResponse:
        spec, caller_key = spec_from(request, self._dialects)
        if spec.keep_capture and auth.caller().role is not Role.OPERATOR:
            raise PermissionDenied(
                "keep_capture holds the operator's disk: only the operator's token may set it.", reason="OPERATOR_ONLY"
            )
        rollout = await self._interceptor.rollouts.open(spec, caller_key)
        spoken = spec.dialects or tuple(self._dialects)
        return pb.OpenRolloutResponse(
            rollout=trajectory.rollout_to(rollout, self._home),
            ingress_address=self._ingress_address(),
            endpoints=[
                pb.DialectEndpoint(
                    dialect=convert.DIALECTS[dialect], base_path=self._dialects[dialect].base_path(rollout.id)
                )
                for dialect in spoken
            ],
            token=self._keys.first_text(rollout),
            host_tools=[tool.name for tool in self._interceptor.tools.of(rollout.id)],
            mcp_path=f"/rollout/{rollout.id}{server.PATH}",
        )

    async def LoadRecording(  # noqa: N802
        self, request: pb.LoadRecordingRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.LoadRecordingResponse:
        rollout = self._registry.rollout(request.rollout_id)
        if request.recorded_rollout_id:
            check_id("recorded_rollout_id", request.recorded_rollout_id)
        if request.recorded_attempt < 0:
            raise invalid_field("recorded_attempt", "at least 1, or 0 for 1")
        origin = (request.recorded_rollout_id or rollout.id, max(1, request.recorded_attempt))
        count = await self._interceptor.replays.load(
            rollout, request.calls, origin, exact=request.exact, tools=request.host_tool_calls
        )
        return pb.LoadRecordingResponse(calls=count)

    async def AskUser(  # noqa: N802
        self, request: pb.AskUserRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.AskUserResponse:
        rollout = self._registry.rollout(request.rollout_id)
        call_id, text = await self._user_calls.ask(rollout, request.body)
        return pb.AskUserResponse(text=text, call_id=call_id)

    async def HoldCalls(  # noqa: N802
        self, request: pb.HoldCallsRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.HoldCallsResponse:
        rollout = self._registry.rollout(request.rollout_id)
        await self._interceptor.hold_calls(rollout, held=request.held)
        return pb.HoldCallsResponse(rollout=trajectory.rollout_to(rollout, self._home))

    async def CloseRollout(  # noqa: N802
        self, request: pb.CloseRolloutRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.CloseRolloutResponse:
        rollout = await self._interceptor.rollouts.close(
            request.rollout_id, request.reason or "CLOSED", capture_stored=request.capture_stored
        )
        return pb.CloseRolloutResponse(rollout=trajectory.rollout_to(rollout, self._home))

    async def DeleteRollout(  # noqa: N802
        self, request: pb.DeleteRolloutRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.DeleteRolloutResponse:
        await self._interceptor.rollouts.delete(request.rollout_id)
        return pb.DeleteRolloutResponse()

    async def IssueToken(  # noqa: N802
        self, request: pb.IssueTokenRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.IssueTokenResponse:
        check_request_id(request.request_id)
        wanted = budgets_and_keys.key_terms_from(request.terms, "terms")
        retire = budgets_and_keys.delay_from(request, "retire_others_after")
        rollout = self._registry.rollout(request.rollout_id)
        key = await self._keys.issue(rollout, request.request_id, wanted, retire)
        return pb.IssueTokenResponse(token=self._keys.text(rollout, key), info=budgets_and_keys.key_to(key))

    async def RevokeTokens(  # noqa: N802
        self, request: pb.RevokeTokensRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.RevokeTokensResponse:
        ids = budgets_and_keys.key_ids_from(request.token_ids)
        grace = budgets_and_keys.delay_from(request, "grace") or 0.0
        rollout = self._registry.rollout(request.rollout_id)
        await self._keys.revoke(rollout, ids, grace)
        return pb.RevokeTokensResponse(tokens=budgets_and_keys.keys_to(rollout))

    async def GetRollout(  # noqa: N802
        self, request: pb.GetRolloutRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.GetRolloutResponse:
        return pb.GetRolloutResponse(
            rollout=trajectory.rollout_to(self._registry.rollout(request.rollout_id), self._home)
        )

    async def ListRollouts(  # noqa: N802
        self, request: pb.ListRolloutsRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.ListRolloutsResponse:
        wanted, scope = set(request.labels.items()), auth.caller().scope(request.all_namespaces)
        found = [
            rollout
            for rollout in self._registry.rollouts()
            if wanted.issubset(rollout.spec.labels)
            and scope in (None, rollout.spec.namespace)
            and not (request.open_only and rollout.state is RolloutState.CLOSED)
        ]
        found.sort(key=lambda rollout: (-rollout.created, rollout.id))
        page, token = paged(found, request.page_size, request.page_token, _position)
        return pb.ListRolloutsResponse(
            rollouts=[trajectory.rollout_to(item, self._home) for item in page], next_page_token=token
        )

    async def GetCapture(  # noqa: N802
        self, request: pb.GetCaptureRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> AsyncIterator[pb.GetCaptureResponse]:
        rollout = self._captured(request.rollout_id)
        conversation = await self._interceptor.conversations.of(rollout)
        after = request.after_index if request.HasField("after_index") else None
        captured = capture(rollout, conversation, after_index=after, include_top=request.include_top)
        body_of = self._interceptor.store.body if request.include_bodies else None
        async for fragment in trajectory.fragments(captured, conversation, body_of, include_top=request.include_top):
            yield pb.GetCaptureResponse(trajectory=fragment)
        tools_after = request.after_tool_call_index if request.HasField("after_tool_call_index") else None
        if tools_after is not None or after is None:
            for record in await self._interceptor.store.tools.calls_of(rollout.id, after_index=tools_after):
                item = tools.record_to(record, bodies=request.include_bodies)
                yield pb.GetCaptureResponse(trajectory=trajectory_pb2.Trajectory(host_tool_calls=[item]))
        for beside in self._registry.beside(rollout.id) if after is None else ():
            conversation = await self._interceptor.conversations.of(beside)
            captured = capture(beside, conversation, after_index=_BEFORE_ALL, include_top=request.include_top)
            async for asked in trajectory.fragments(captured, conversation, body_of, include_top=request.include_top):
                is_judge = bool(beside.spec.judge_of)
                part = trajectory_pb2.Trajectory()
                (part.judge_calls if is_judge else part.user_calls).extend(asked.calls)
                yield pb.GetCaptureResponse(trajectory=part)

    async def WatchCalls(  # noqa: N802
        self, request: pb.WatchCallsRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> AsyncIterator[pb.WatchCallsResponse]:
        watched, labels = frozenset(request.rollout_ids), set(request.labels.items())
        if request.driver_id and auth.caller().role is Role.OBSERVER:
            raise PermissionDenied("An observer holds no leases: leave driver_id out.", reason="ROLE_NOT_ALLOWED")
        holder = _leaseholder(request.driver_id)
        found_by_id = bool(watched) and auth.caller().namespace is None
        scope = None if found_by_id else auth.caller().scope(request.all_namespaces)
        for rollout_id in watched:
            self._registry.rollout(rollout_id)
        changes = self._interceptor.events
        at = request.after_sequence if request.HasField("after_sequence") else changes.last
        if at > changes.last or at < changes.oldest_resumable:
            raise FailedPrecondition(
                "Changes after this sequence are no longer kept: watch without a position.", reason="SEQUENCE_UNKNOWN"
            )
        with self._interceptor.drivers.held(holder):
            yield pb.WatchCallsResponse(started=pb.WatchCallsResponse.WatchStarted(sequence=at))
            while not self._stopping.is_set():
                found = changes.after(at)
                if found is None:
                    raise FailedPrecondition(
                        "The watch fell behind the kept changes: open another one.", reason="SEQUENCE_UNKNOWN"
                    )
                for change in found:
                    at = change.sequence
                    spec = change.rollout.spec
                    if (watched and spec.rollout_id not in watched) or not labels.issubset(spec.labels):
                        continue
                    if scope not in (None, spec.namespace):
                        continue
                    if request.ended_only and isinstance(change, CallChange) and not change.state.terminal:
                        continue
                    yield _change_to(change)
                    if len(watched) == 1 and not isinstance(change, CallChange):
                        return
                if found:
                    continue
                if len(watched) == 1 and self._over(next(iter(watched))):
                    return
                if not await changes.wait(at, HEARTBEAT_S, ended_only=request.ended_only):
                    yield pb.WatchCallsResponse(heartbeat=pb.WatchCallsResponse.WatchHeartbeat())

    async def WatchGate(  # noqa: N802
        self, request: pb.WatchGateRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> AsyncIterator[pb.WatchGateResponse]:
        interval, scope = interval_from(request), auth.caller().scope(request.all_namespaces)
        while not self._stopping.is_set():
            yield snapshot_to(
                take_snapshot(self._registry.rollouts(), self._registry.sessions(), scope),
                self._interceptor.clock.wall(),
                self._unreachable_inference(),
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._stopping.wait()

    def _captured(self, rollout_id: str) -> Rollout:
        """Raises NotFound: ROLLOUT_UNKNOWN, CAPTURE_DISCARDED."""
        lost = self._registry.kept_captures.discarded(rollout_id)
        if lost is not None and self._registry.find(rollout_id) is None:
            at = datetime.fromtimestamp(lost.at, UTC).isoformat(timespec="seconds")
            raise NotFound(
                f"This capture was deleted at {at}: its driver had not exported it, and it was beyond"
                f" this gate's limit of {lost.why} on captures that are kept.",
                reason="CAPTURE_DISCARDED",
            )
        return self._registry.rollout(rollout_id)

    def _over(self, rollout_id: str) -> bool:
        rollout = self._registry.find(rollout_id)
        return rollout is None or rollout.state is RolloutState.CLOSED


def owned(interceptor: Interceptor) -> Mapping[str, Owned]:
    """Whose the rollouts are that requests name."""

    async def of_rollout(rollout_id: str) -> str | None:
        rollout = interceptor.registry.find(rollout_id)
        if rollout is not None:
            return rollout.spec.namespace
        discarded = interceptor.registry.kept_captures.discarded(rollout_id)
        return None if discarded is None else discarded.namespace

    one = Owned(("rollout_id",), of_rollout)
    methods = (
        "LoadRecording",
        "AskUser",
        "HoldCalls",
        "CloseRollout",
        "DeleteRollout",
        "IssueToken",
        "RevokeTokens",
        "GetRollout",
        "GetCapture",
    )
    several = Owned(("rollout_ids",), of_rollout)
    return {f"{SERVICE}/WatchCalls": several, **{f"{SERVICE}/{method}": one for method in methods}}


def spec_from(request: pb.OpenRolloutRequest, known: dict[Dialect, DialectCodec]) -> tuple[RolloutSpec, str | None]:
    """Returns the rollout's spec and the caller's key. Raises InvalidArgument that names the field."""
    check_request_id(request.request_id)
    check_id("rollout_id", request.rollout_id)
    _check_ending(request)
    mode = _mode_from(request.mode)
    if len(request.labels) > MAX_LABELS:
        raise invalid_field("labels", f"at most {MAX_LABELS}")
    dialects = []
    for index, number in enumerate(request.dialects):
        dialect = convert.DIALECTS_BACK.get(number)
        if dialect is None or dialect not in known:
            raise invalid_field(f"dialects[{index}]", "not spoken here")
        dialects.append(dialect)
    source, caller_key = _source_from(request.source)
    hints = request.hints
    policy = _policy_from(request.policy)
    if request.models and request.model_name:
        raise invalid_field("model_name", "not allowed with models, which have names")
    override = convert.sampling_from(request.sampling_override) if request.HasField("sampling_override") else Sampling()
    spec = RolloutSpec(
        request_id=request.request_id,
        rollout_id=request.rollout_id,
        mode=mode,
        source=source,
        group_id=request.group_id if request.HasField("group_id") else None,
        run_id=request.run_id if request.HasField("run_id") else None,
        labels=tuple(sorted(request.labels.items())),
        dialects=tuple(dialects),
        budgets=budgets_and_keys.budgets_from(request.budgets),
        model_name=request.model_name,
        hints=AgentHints(
            tuple(hints.title_system_prompts),
            tuple(hints.compaction_system_prompts),
            tuple(name.lower() for name in hints.session_headers),
            tuple(hints.volatile_line_patterns),
        ),
        policy=policy,
        task_id=request.task_id if request.HasField("task_id") else None,
        group_index=request.group_index if request.HasField("group_index") else None,
        sampling_override=override,
        run_budgets=_run_budgets_from(request),
        token_terms=budgets_and_keys.key_terms_from(request.token_terms, "token_terms"),
        namespace=auth.caller().home,
        driver_id=_leaseholder(request.driver_id),
        keep_capture=request.keep_capture,
        attempt=_attempt_from(request),
        branched_from=_branch_from(request),
        judge_of=_beside_of(request, "judge_of"),
        user_of=_beside_of(request, "user_of"),
        models=models_from(request, policy, _source_from),
    )
    return spec, caller_key


def _check_ending(request: pb.OpenRolloutRequest) -> None:
    """Keeps the ids that drivers give to judges and users free for them: a rollout that took another team's would
    prevent that team's grade. Raises InvalidArgument.
    """
    for ending, name in _ENDINGS.items():
        beside: str = getattr(request, name)
        if request.rollout_id.endswith(ending) and not (beside and request.rollout_id == beside + ending):
            raise invalid_field("rollout_id", f"ends with {ending} only where it is {name} and that ending")


def _beside_of(request: pb.OpenRolloutRequest, name: str) -> str:
    """Returns the rollout of which it is the judge or the user, by the name of that field."""
    rollout_id: str = getattr(request, name)
    if not rollout_id:
        return ""
    check_id(name, rollout_id)
    if request.judge_of and request.user_of:
        raise invalid_field("user_of", "not allowed with judge_of")
    if request.mode != interception_pb2.MODE_TRANSPARENT_PROXY:
        raise invalid_field("mode", f"needs MODE_TRANSPARENT_PROXY with {name}")
    for field in ("run_id", "branched_from"):
        if request.HasField(field):
            raise invalid_field(field, f"not allowed with {name}")
    if request.models:
        raise invalid_field("models", f"not allowed with {name}")
    return rollout_id


def _branch_from(request: pb.OpenRolloutRequest) -> BranchPoint | None:
    if not request.HasField("branched_from"):
        return None
    given = request.branched_from
    check_id("branched_from.parent_rollout_id", given.parent_rollout_id)
    check_id("branched_from.call_id", given.call_id)
    return BranchPoint(
        given.parent_rollout_id,
        given.call_id,
        given.call_index,
        given.answer_given,
        given.train_prefix,
        given.seed if given.HasField("seed") else None,
    )


def check_id(name: str, value: str) -> None:
    """Raises InvalidArgument for an invalid identifier."""
    if not _ID.fullmatch(value):
        raise invalid_field(name, "an identifier: 1 to 128 of a-z A-Z 0-9 _ . -, the first a letter or digit")


def paged(items: Sequence[T], size: int, token: str, position: Callable[[T], str]) -> tuple[Sequence[T], str]:
    """Returns one page of an ordered list; the token names the last item of the previous page."""
    count = page_size(size)
    start = 0
    if token:
        start = next((index + 1 for index, item in enumerate(items) if position(item) == token), -1)
        if start < 0:
            raise foreign_page_token()
    page = items[start : start + count]
    more = start + count < len(items)
    return page, position(page[-1]) if more and page else ""


def _position(rollout: Rollout) -> str:
    return rollout.id


def _mode_from(value: interception_pb2.Mode.ValueType) -> Mode:
    mode = _MODES.get(value)
    if mode is None:
        raise invalid_field("mode", "unspecified")
    return mode


def _source_from(source: interception_pb2.ModelSource) -> tuple[Source, str | None]:
    choice = _choice_from(source)
    match source.WhichOneof("source"):
        case "upstream":
            if choice != CodecChoice():
                field = "tool_call_parser" if choice.parser else "control_tokens"
                raise invalid_field(f"source.{field}", "not allowed for an upstream, which makes its own prompts")
            upstream = source.upstream
            if upstream.WhichOneof("endpoint") == "caller":
                return CallerUpstream(upstream.caller.base_url, upstream.model), upstream.caller.api_key or None
            return NamedUpstream(upstream.name, upstream.model), None
        case "tokenizer":
            return TokenizerRef(source.tokenizer.name, codec=choice), None
        case "inference":
            return InferenceRef(source.inference.name, source.inference.adapter, codec=choice), None
    return InferenceRef(codec=choice), None


def _choice_from(source: interception_pb2.ModelSource) -> CodecChoice:
    control_tokens = _CONTROL_TOKENS.get(source.control_tokens)
    if control_tokens is None:
        raise invalid_field("source.control_tokens", "not a known value")
    if source.tool_call_parser and source.tool_call_parser not in GRAMMARS:
        known = f"there are: {', '.join(sorted(GRAMMARS))}"
        raise InvalidArgument(
            f"No parser is called {source.tool_call_parser!r}; {known}.",
            reason="PARSER_UNKNOWN",
            violations=[Violation("source.tool_call_parser", known)],
        )
    return CodecChoice(source.tool_call_parser, control_tokens)


def _run_budgets_from(request: pb.OpenRolloutRequest | pb.CheckSourceRequest) -> RunBudgets | None:
    if not request.HasField("run_budgets"):
        return None
    if not request.run_id:
        raise invalid_field("run_budgets", "needs run_id")
    return budgets_and_keys.run_budgets_from(request.run_budgets)


def _attempt_from(request: pb.OpenRolloutRequest) -> int:
    if request.attempt < 0:
        raise invalid_field("attempt", "at least 1, or 0 for 1")
    return max(1, request.attempt)


def _policy_from(policy: interception_pb2.PolicyVersionConstraint) -> PolicyBounds:
    if policy.HasField("max_staleness") and policy.max_staleness < 0:
        raise invalid_field("policy.max_staleness", "not negative")
    return bounds_from(policy)


def _leaseholder(driver_id: str) -> str:
    """Whose leases these are. Drivers have the operator's token; what another caller names so is its namespace's own:
    no team keeps the rollouts of a lost driver open by naming it.
    """
    if not driver_id:
        return ""
    check_id("driver_id", driver_id)
    caller = auth.caller()
    return driver_id if caller.role is Role.OPERATOR else f"{caller.home}/{driver_id}"


def _change_to(change: Change) -> pb.WatchCallsResponse:
    if isinstance(change, CallChange):
        try:
            call = trajectory.call_to(change.call, state=change.state)
        except Exception:  # noqa: BLE001 - logged; a driver watches all of its rollouts by one stream
            _log.exception("a change cannot be written", call_id=change.call.id, rollout_id=change.rollout.id)
            call = trajectory.bare_call_to(change.call, change.state)
        changed = pb.WatchCallsResponse.CallChanged(sequence=change.sequence, call=call)
        return pb.WatchCallsResponse(changed=changed)
    closed = pb.WatchCallsResponse.RolloutClosed(
        sequence=change.sequence, rollout_id=change.rollout.id, reason=change.reason
    )
    return pb.WatchCallsResponse(closed=closed)
