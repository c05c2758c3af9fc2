"""Calls, branches, samples and trajectories as messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Final

import numpy as np

from penstock.chat.v1 import completion_pb2
from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate_pb2
from penstock.trajectory.v1 import trajectory_pb2 as pb
from penstock.values import numbers, to_proto, token_tensors, writer
from penstock_chassis import times
from penstock_interception.domain import models
from penstock_interception.domain.calls import BranchPoint, CallState, Mode, RolloutState, Totals
from penstock_interception.domain.completions import Completion
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.graph import Branch, CallClass, Sample, TurnSpan
from penstock_interception.graph.values import little_endian
from penstock_interception.rollouts.conversations import Conversation
from penstock_interception.rollouts.trajectory import (
    Capture,
    CaptureLevel,
    Finding,
    Grade,
    first_divergence,
    is_given,
    level_of,
    notes_of,
)
from penstock_interception.rpc import budgets_and_keys
from penstock_interception.wire import convert

FRAGMENT_BYTES = 4 << 20
NOT_WRITTEN: Final = "a value of this call fits no field: only its ids, index, state and end reason are here"
"""The note of a call that `bare_call_to` wrote."""

MODES = numbers(Mode, interception_pb2.Mode)

_LEVELS = numbers(CaptureLevel, pb.CaptureLevel)
_GRADES = numbers(Grade, pb.Grade)
_STATES = numbers(RolloutState, gate_pb2.GateRolloutState)


def call_to(
    call: Call,
    *,
    state: CallState | None = None,
    call_class: CallClass | None = None,
    conversation: Conversation | None = None,
    body: bytes = b"",
    include_top: bool = False,
    tensor_data: bool = False,
) -> pb.Call:
    """Returns a call, with its tokens if `conversation` is given, else their counts. `state` overrides its state.

    `include_top`: with the rows of its tokens' alternatives. `tensor_data`: with those of its tensors.
    """
    request, prompt = call.request, call.prompt
    message = pb.Call(
        call_id=call.id,
        rollout_id=call.rollout.id,
        index=call.index,
        state=convert.STATES[state or call.state],
        dialect=convert.DIALECTS[request.dialect],
        capture_level=_LEVELS[level_of(call)],
        sampling_requested=convert.sampling_to(call.sampling),
        normalisations=notes_of(call),
        request_body=body,
        request_body_sha256=request.body_sha256,
        model_requested=request.model_requested,
        agent_session=dict(request.agent_session),
        http_attempts=call.http_attempts,
        leases=call.leases,
        injected=call.injected,
        receive_time=times.timestamp(call.received),
        chain_sha256=call.chain_sha256,
        end_reason=call.end_reason,
        tools_sha256=request.tools_sha256,
        policy_id=call.policy_id,
    )
    if call.of_model is not None:
        message.model_name = call.of_model.name
        message.trained = models.is_trained(call.rollout.spec, call.model, call.policy_id)
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
    if call.completion is not None and (origin := call.completion.origin) is not None and origin.rollout_id:
        message.replayed_from.rollout_id, message.replayed_from.attempt = origin.rollout_id, origin.attempt
        message.replayed_from.call_id = origin.call_id
    message.given = is_given(call)
    recording = call.rollout.recording
    message.branch_point = recording is not None and recording.point_call_id == call.id
    if call.chain_index is not None:
        message.chain_index = call.chain_index
    if conversation is not None:
        node = conversation.graph.calls.get(call.id)
        if node is not None:
            message.prompt_suffix_token_ids = convert.ids_to(node.suffix)
        media = node.media if node is not None else call.plan.new_media if call.plan is not None else ()
        message.media.extend(map(convert.media_to, media))
        if call.completion is not None and call.state is CallState.DELIVERED:
            completion = convert.completion_to(
                call.completion, call.message, include_top=include_top, tensor_data=tensor_data
            )
            message.completion.CopyFrom(completion)
    elif call.completion is not None and (state or call.state) is CallState.DELIVERED:
        message.completion.CopyFrom(_summary_to(call.completion))
    return message


def bare_call_to(call: Call, state: CallState) -> pb.Call:
    """Returns only what identifies a call and how it ended, for a stream that one call of many must not end."""
    return pb.Call(
        call_id=call.id,
        rollout_id=call.rollout.id,
        index=call.index,
        state=convert.STATES[state],
        end_reason=call.end_reason,
        normalisations=[NOT_WRITTEN],
    )


def _summary_to(completion: Completion) -> completion_pb2.Completion:
    """A completion without tokens and message: token counts, policy versions, sum of logprobs and finish reason."""
    message = convert.completion_to(replace(completion, tokens=None), None)
    if (tokens := completion.tokens) is not None:
        message.span.count = int(tokens.ids.size)
        message.span.logprobs_mode = convert.mode_to(tokens.logprobs_mode)
        if tokens.logprobs is not None:
            message.span.logprob_sum = float(tokens.logprobs.sum(dtype=np.float64))
        message.span.versions.extend(convert.versions_to(tokens.versions))
        if tokens.top is not None:
            message.span.top_count = tokens.top.count
    return message


def rollout_to(rollout: Rollout, home: str) -> gate_pb2.GateRollout:
    spec = rollout.spec
    message = gate_pb2.GateRollout(
        rollout_id=rollout.id,
        group_id=spec.group_id,
        run_id=spec.run_id,
        namespace=spec.namespace,
        labels=dict(spec.labels),
        mode=MODES[spec.mode],
        state=_STATES[rollout.state],
        model_name=models.names(spec, rollout.facts.model)[0],
        create_time=times.timestamp(rollout.created),
        totals=_totals_to(rollout.totals),
        home=home,
        exhausted_budget=rollout.exhausted_budget,
        close_reason=rollout.close_reason,
        paused_time=times.duration(rollout.paused_s),
        held=rollout.is_held,
        divergence=first_divergence(rollout),
        restored=rollout.restored,
        tokens=budgets_and_keys.keys_to(rollout) if rollout.state is not RolloutState.CLOSED else (),
    )
    if rollout.closed is not None:
        message.close_time.CopyFrom(times.timestamp(rollout.closed))
    return message


async def fragments(
    captured: Capture,
    conversation: Conversation,
    body_of: Callable[[str], Awaitable[bytes]] | None,
    *,
    include_top: bool = False,
) -> AsyncIterator[pb.Trajectory]:
    """Yields the trajectory in fragments that merge; a call or a sample is never split.

    `include_top`: calls have the rows of their tokens' alternatives.
    """
    fragment = _head(captured)
    branch = captured.rollout.spec.branched_from
    size = 0
    tools_sent: set[bytes] = set()
    for call in captured.calls:
        body = await body_of(call.id) if body_of is not None else b""
        item = call_to(
            call,
            call_class=captured.classes.get(call.id),
            conversation=conversation,
            body=body,
            include_top=include_top,
        )
        if call.request.tools_sha256 and call.request.tools_sha256 not in tools_sent:
            tools_sent.add(call.request.tools_sha256)
            item.tools.extend(convert.tool_to(tool) for tool in conversation.tools.get(call.request.tools_sha256, ()))
        if size and size + item.ByteSize() > FRAGMENT_BYTES:
            yield fragment
            fragment, size = pb.Trajectory(), 0
        size += item.ByteSize()
        fragment.calls.append(item)
    for sample in captured.samples:
        made = _sample_to(sample)
        if branch is not None:
            made.parent_rollout_id, made.branch_call_id = branch.parent_rollout_id, branch.call_id
        if size and size + made.ByteSize() > FRAGMENT_BYTES:
            yield fragment
            fragment, size = pb.Trajectory(), 0
        size += made.ByteSize()
        fragment.samples.append(made)
    yield fragment


def _head(captured: Capture) -> pb.Trajectory:
    rollout, spec = captured.rollout, captured.rollout.spec
    facts = rollout.facts
    head = pb.Trajectory(
        rollout_id=rollout.id,
        group_id=spec.group_id,
        run_id=spec.run_id,
        namespace=spec.namespace,
        group_index=spec.group_index,
        labels=dict(spec.labels),
        branches=map(_branch_to, captured.branches),
        grade=_GRADES[captured.grade] if captured.grade is not None else pb.GRADE_UNSPECIFIED,
        findings=map(_finding_to, captured.findings),
        capture_level=_LEVELS[captured.level],
        tokenizer_sha256=bytes.fromhex(facts.tokenizer_sha256),
        chat_template_sha256=bytes.fromhex(facts.template_sha256),
        chain_sha256=captured.chain_sha256,
        create_time=times.timestamp(rollout.created),
        task_id=spec.task_id or "",
    )
    if spec.branched_from is not None:
        head.branched_from.CopyFrom(to_proto(spec.branched_from, pb.BranchPoint))
    if rollout.closed is not None:
        head.end_time.CopyFrom(times.timestamp(rollout.closed))
    return head


_totals_to = writer(
    Totals,
    gate_pb2.CallTotals,
    left_out=("top_bytes", "calls_at_answer"),
    by={
        "open": lambda totals: totals.open,
        "replayed": lambda totals: totals.replayed.calls,
        "failures": lambda totals: [
            to_proto(one, gate_pb2.CallFailures) for one in sorted(totals.failures, key=lambda one: -one.calls)
        ],
    },
)
_branch_to = writer(Branch, pb.Branch, renamed={"call_class": "branch_class"})
_finding_to = writer(Finding, pb.Finding)
writer(BranchPoint, pb.BranchPoint)
writer(TurnSpan, pb.TurnSpan, renamed={"untrained": "untrained_reason"}, left_out=("reward",))
_sample_to = writer(
    Sample,
    pb.Sample,
    renamed={"call_class": "branch_class"},
    left_out=("modes_mixed", "top", "token_rewards"),  # rewards are the driver's
    by={
        "parent_rollout_id": lambda sample: "",
        "branch_call_id": lambda sample: "",
        "count": lambda sample: int(sample.input_ids.size),
        "input_ids": lambda sample: convert.ids_to(sample.input_ids),
        "loss_mask": lambda sample: sample.loss_mask.tobytes(),
        "logprobs": lambda sample: sample.logprobs.astype("<f4", copy=False).tobytes(),
        "top_token_ids": lambda sample: b"" if sample.top is None else convert.ids_to(sample.top.token_ids),
        "top_logprobs": lambda sample: b"" if sample.top is None else little_endian(sample.top.logprobs),
        "top_count": lambda sample: 0 if sample.top is None else sample.top.count,
        "tensors": lambda sample: [token_tensors.write(one, with_data=False) for one in sample.tensors],
        "media": lambda sample: [*map(convert.media_to, sample.media)],
    },
)
