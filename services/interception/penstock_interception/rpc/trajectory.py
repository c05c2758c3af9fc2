"""Calls, branches, samples and trajectories as messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace

from penstock.chat.v1 import completion_pb2
from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate_pb2
from penstock.trajectory.v1 import trajectory_pb2 as pb
from penstock_chassis import times
from penstock_interception.calls import Call, CallState, Mode, Rollout, RolloutState
from penstock_interception.capture import Capture, CaptureLevel, Finding, Grade, Severity, level_of
from penstock_interception.completions import Completion
from penstock_interception.conversation import Conversation
from penstock_interception.graph import Branch, CallClass, Sample
from penstock_interception.rpc import convert, terms

FRAGMENT_BYTES = 4 << 20

MODES = {
    Mode.BLACK_BOX: interception_pb2.MODE_BLACK_BOX,
    Mode.TRANSPARENT_PROXY: interception_pb2.MODE_TRANSPARENT_PROXY,
    Mode.INTERCEPTION_GATE: interception_pb2.MODE_INTERCEPTION_GATE,
}

_LEVELS = {
    CaptureLevel.NONE: pb.CAPTURE_LEVEL_NONE,
    CaptureLevel.TEXT: pb.CAPTURE_LEVEL_TEXT,
    CaptureLevel.TOKENS: pb.CAPTURE_LEVEL_TOKENS,
    CaptureLevel.TOKENS_AND_LOGPROBS: pb.CAPTURE_LEVEL_TOKENS_AND_LOGPROBS,
}
_GRADES = {Grade.EXACT: pb.GRADE_EXACT, Grade.USABLE: pb.GRADE_USABLE, Grade.UNUSABLE: pb.GRADE_UNUSABLE}
_SEVERITIES = {
    Severity.INFO: pb.Finding.SEVERITY_INFO,
    Severity.WARNING: pb.Finding.SEVERITY_WARNING,
    Severity.FATAL: pb.Finding.SEVERITY_FATAL,
}
_STATES = {
    RolloutState.OPEN: gate_pb2.GATE_ROLLOUT_STATE_OPEN,
    RolloutState.EXHAUSTED: gate_pb2.GATE_ROLLOUT_STATE_EXHAUSTED,
    RolloutState.CLOSED: gate_pb2.GATE_ROLLOUT_STATE_CLOSED,
}


def call_to(
    call: Call,
    *,
    state: CallState | None = None,
    call_class: CallClass | None = None,
    conversation: Conversation | None = None,
    body: bytes = b"",
) -> pb.Call:
    """A call. Tokens are in it when its conversation is given, else their counts; `state` overrides what it is now."""
    arrival, prompt = call.arrival, call.prompt
    message = pb.Call(
        call_id=call.id,
        rollout_id=call.rollout.id,
        index=call.index,
        state=convert.STATES[state or call.state],
        dialect=convert.DIALECTS[arrival.dialect],
        capture_level=_LEVELS[level_of(call)],
        sampling_requested=convert.sampling_to(call.sampling),
        normalisations=arrival.normalisations,
        request_body=body,
        request_body_sha256=arrival.body_sha256,
        model_requested=arrival.model_requested,
        agent_session=dict(arrival.agent_session),
        http_attempts=call.http_attempts,
        leases=call.leases,
        injected=call.injected,
        receive_time=times.timestamp(call.received),
        chain_sha256=call.chain_sha256,
        end_reason=call.end_reason,
        tools_sha256=arrival.tools_sha256,
    )
    if prompt is not None:
        message.branch_id = prompt.branch_id
        message.prompt_shared_count = prompt.shared_count
        message.prompt_count = prompt.count
        message.call_class = convert.CLASSES[call_class or prompt.call_class]
        if prompt.parent_call_id is not None:
            message.parent_call_id = prompt.parent_call_id
    if call.leased_at is not None:
        message.lease_time.CopyFrom(times.timestamp(call.leased_at))
    if call.ended_at is not None and call.state.terminal:
        message.end_time.CopyFrom(times.timestamp(call.ended_at))
    if call.answerer is not None:
        message.answerer = convert.ANSWERERS[call.answerer]
    if call.chain_index is not None:
        message.chain_index = call.chain_index
    if conversation is not None:
        node = conversation.graph.calls.get(call.id)
        if node is not None:
            message.prompt_suffix_token_ids = convert.ids_to(node.suffix)
        if call.completion is not None and call.state is CallState.DELIVERED:
            message.completion.CopyFrom(convert.completion_to(call.completion, call.message))
    elif call.completion is not None and (state or call.state) is CallState.DELIVERED:
        message.completion.CopyFrom(_summary_to(call.completion))
    return message


def _summary_to(completion: Completion) -> completion_pb2.Completion:
    """A completion without its tokens and its message: how many there are, from which weights, and why it ended."""
    message = convert.completion_to(replace(completion, tokens=None), None)
    if (tokens := completion.tokens) is not None:
        message.span.count = int(tokens.ids.size)
        message.span.logprobs_mode = convert.mode_to(tokens.logprobs_mode)
        message.span.versions.extend(convert.versions_to(tokens.versions))
    return message


def rollout_to(rollout: Rollout) -> gate_pb2.GateRollout:
    """A rollout as the gate sees it."""
    opening, totals = rollout.opening, rollout.totals
    message = gate_pb2.GateRollout(
        rollout_id=rollout.id,
        group_id=opening.group_id,
        run_id=opening.run_id,
        labels=dict(opening.labels),
        mode=MODES[opening.mode],
        state=_STATES[rollout.state],
        model_name=opening.model_name or rollout.facts.model,
        create_time=times.timestamp(rollout.created),
        totals=gate_pb2.CallTotals(
            calls=totals.calls,
            open=totals.open,
            delivered=totals.delivered,
            failed=totals.failed,
            cancelled=totals.cancelled,
            expired=totals.expired,
            prompt_tokens=totals.prompt_tokens,
            completion_tokens=totals.completion_tokens,
            last_failure_reason=totals.last_failure_reason,
            last_failure_retriable=totals.last_failure_retriable,
            last_unanswered=totals.last_unanswered,
            request_bytes=totals.request_bytes,
            refused=totals.refused,
        ),
        exhausted_budget=rollout.exhausted_budget,
        paused_time=times.duration(rollout.paused_s),
        tokens=terms.tokens_to(rollout) if rollout.state is not RolloutState.CLOSED else (),
    )
    if rollout.closed is not None:
        message.close_time.CopyFrom(times.timestamp(rollout.closed))
    return message


async def fragments(
    captured: Capture, conversation: Conversation, body_of: Callable[[str], Awaitable[bytes]] | None
) -> AsyncIterator[pb.Trajectory]:
    """The trajectory in fragments that merge; a call or a sample is never split."""
    fragment = _head(captured)
    size = 0
    tools_told: set[bytes] = set()
    for call in captured.calls:
        body = await body_of(call.id) if body_of is not None else b""
        item = call_to(call, call_class=captured.classes.get(call.id), conversation=conversation, body=body)
        if call.arrival.tools_sha256 and call.arrival.tools_sha256 not in tools_told:
            tools_told.add(call.arrival.tools_sha256)
            item.tools.extend(convert.tool_to(tool) for tool in conversation.tools.get(call.arrival.tools_sha256, ()))
        if size and size + item.ByteSize() > FRAGMENT_BYTES:
            yield fragment
            fragment, size = pb.Trajectory(), 0
        size += item.ByteSize()
        fragment.calls.append(item)
    for sample in captured.samples:
        made = _sample_to(sample)
        if size and size + made.ByteSize() > FRAGMENT_BYTES:
            yield fragment
            fragment, size = pb.Trajectory(), 0
        size += made.ByteSize()
        fragment.samples.append(made)
    yield fragment


def _head(captured: Capture) -> pb.Trajectory:
    rollout, opening = captured.rollout, captured.rollout.opening
    facts = rollout.facts
    head = pb.Trajectory(
        rollout_id=rollout.id,
        group_id=opening.group_id,
        run_id=opening.run_id,
        group_index=opening.group_index,
        labels=dict(opening.labels),
        branches=list(_branches_to(captured)),
        grade=_GRADES[captured.grade] if captured.grade is not None else pb.GRADE_UNSPECIFIED,
        findings=[_finding_to(finding) for finding in captured.findings],
        capture_level=_LEVELS[captured.level],
        tokenizer_sha256=bytes.fromhex(facts.tokenizer_sha256),
        chat_template_sha256=bytes.fromhex(facts.template_sha256),
        chain_sha256=captured.chain_sha256,
        create_time=times.timestamp(rollout.created),
        task_id=opening.task_id or "",
    )
    if rollout.closed is not None:
        head.end_time.CopyFrom(times.timestamp(rollout.closed))
    return head


def _branches_to(captured: Capture) -> Iterator[pb.Branch]:
    for branch in captured.branches:
        yield _branch_to(branch)


def _branch_to(branch: Branch) -> pb.Branch:
    return pb.Branch(
        branch_id=branch.branch_id,
        branch_class=convert.CLASSES[branch.call_class],
        fork_call_id=branch.fork_call_id,
        shared_count=branch.shared_count,
        call_ids=branch.call_ids,
        reason=branch.reason,
    )


def _sample_to(sample: Sample) -> pb.Sample:
    return pb.Sample(
        sample_id=sample.sample_id,
        branch_id=sample.branch_id,
        count=int(sample.input_ids.size),
        input_ids=convert.ids_to(sample.input_ids),
        loss_mask=sample.loss_mask.tobytes(),
        logprobs=sample.logprobs.astype("<f4", copy=False).tobytes(),
        logprobs_mode=convert.mode_to(sample.logprobs_mode),
        versions=convert.versions_to(sample.versions),
        turns=[
            pb.TurnSpan(call_id=turn.call_id, start=turn.start, end=turn.end, untrained_reason=turn.untrained)
            for turn in sample.turns
        ],
        prompt_count=sample.prompt_count,
        weight=sample.weight,
        branch_class=convert.CLASSES[sample.call_class],
        truncated=sample.truncated,
    )


def _finding_to(finding: Finding) -> pb.Finding:
    return pb.Finding(
        severity=_SEVERITIES[finding.severity],
        reason=finding.reason,
        message=finding.message,
        call_id=finding.call_id,
    )
