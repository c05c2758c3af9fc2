"""Trajectories: calls, branches, samples, reward and grade. All values; times are UTC."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.client.types.chat import Completion, Logprobs, LogprobsMode, Sampling, TokenIds, Tool, VersionSpan


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward, computed inside the environment; finite, within [range_min, range_max]."""

    value: float
    range_min: float = 0.0
    range_max: float = 1.0
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplayOrigin:
    """The call for which a replayed completion was sampled, with its rollout and attempt (from 1)."""

    rollout_id: str
    attempt: int
    call_id: str


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """The call of another rollout, the parent, at which a branch begins to differ.

    `answer_given`: the call has an answer that the branch's creator gave. `train_prefix`: the branch trains the turns
    that its parent sampled too. `seed`: of the group's first branch, each further one has the seed plus its index;
    None = they have the parent's seed, if any.
    """

    parent_rollout_id: str
    call_id: str
    call_index: int
    answer_given: bool = False
    train_prefix: bool = False
    seed: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One model call of an agent.

    `replayed_from` is set if its completion was not sampled for it, but replayed. `branch_point` is True for the one
    call at which a branch leaves its parent. `given`: the creator of this branch, or of one that it comes from, gave
    the answer, and nobody sampled it.

    The prompt is the first `prompt_shared_count` tokens of the parent's prompt and completion, then
    `prompt_suffix_token_ids`; `Trajectory.prompt_of` assembles it. `state` is queued, leased, dispatched, delivered,
    failed, cancelled or expired; `call_class` main, sub_agent, compaction, title, probe or edit. `sampled_count` is the
    number of sampled tokens, set even if the tokens themselves were left out. `chain_sha256` is the rollout's hash
    chain after the call, `chain_index` its position in it: None unless delivered.
    """

    call_id: str
    rollout_id: str
    index: int
    state: str
    dialect: str
    call_class: str
    branch_id: str
    parent_call_id: str | None
    prompt_shared_count: int
    prompt_suffix_token_ids: TokenIds
    prompt_count: int
    completion: Completion | None
    sampled_count: int
    capture_level: str
    sampling_requested: Sampling
    normalisations: tuple[str, ...]
    tools: tuple[Tool, ...]
    tools_sha256: bytes
    request_body: bytes = field(repr=False)
    request_body_sha256: bytes
    model_requested: str
    http_attempts: int
    leases: int
    injected: bool
    answerer: str
    end_reason: str
    receive_time: datetime | None
    lease_time: datetime | None
    end_time: datetime | None
    chain_sha256: bytes = b""
    chain_index: int | None = None
    replayed_from: ReplayOrigin | None = None
    branch_point: bool = False
    given: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedToolCall:
    """A call of a host tool, as the gate recorded it.

    Attributes:
        index: position among the rollout's host tool calls, from 0.
        state: delivered (it has a result or a tool error), failed, cancelled or expired; queued or leased while open.
        arguments_json: as the agent gave them.
        is_error: whether the tool reported an error.
        result_json: the result; empty without one, and when the trajectory was read without bodies.
        result_bytes: length of it.
        replayed_from: set if the result was replayed, and no host got the call: the call for which a host gave it.
    """

    tool_call_id: str
    index: int
    name: str
    state: str
    arguments_json: str
    is_error: bool
    result_json: str
    result_sha256: bytes
    result_bytes: int
    end_reason: str
    receive_time: datetime | None
    end_time: datetime | None
    replayed_from: ReplayOrigin | None = None


@dataclass(frozen=True, slots=True)
class Branch:
    """A path through the graph of calls."""

    branch_id: str
    branch_class: str
    fork_call_id: str | None
    shared_count: int
    call_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """Tokens [start, end) of a sample were sampled by one call.

    `untrained_reason` is why they are masked; empty where they are trained: SHARED (another sample trains them),
    PARENT (the rollout of which this one is a branch trains them), TRUNCATED, BUDGET, INJECTED, NO_LOGPROBS, PARTIAL,
    UNUSABLE, or CLASS_ and a class that is not trained.
    """

    call_id: str
    start: int
    end: int
    untrained_reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A training sample: one token sequence, root to leaf of a branch.

    Attributes:
        input_ids: int32, shape (n,).
        loss_mask: bool, shape (n,): True exactly on sampled tokens that may be trained.
        logprobs: float32, shape (n,): finite and <= 0 where the mask is True, else 0.0; None = the source gave none.
        versions: over the sampled tokens; gaps are context.
        turns: the call that sampled each token span.
        prompt_count: tokens before the first sampled one.
        weight: this sample's share of its rollout's loss; the weights of a rollout add up to 1.
        truncated: the last turn was cut by a limit.
        top_token_ids, top_logprobs: alternatives, int32 and float32, shape (loss_mask.sum(), k): a row per token whose
            mask is True, in order, as in `Completion`. None = no trained turn has any, or they were left out.
        parent_rollout_id, branch_call_id: of a branch: the parent, and its call at which they part. The turns before it
            are the parent's, token for token. Empty = no branch.
        advantages: float32, shape (n,): of each token, 0.0 where the mask is False. None = not estimated; services do
            not, `RolloutCredit.annotated` does.
    """

    sample_id: str
    branch_id: str
    input_ids: TokenIds
    loss_mask: NDArray[np.bool_]
    logprobs: Logprobs | None
    logprobs_mode: LogprobsMode
    versions: tuple[VersionSpan, ...]
    turns: tuple[TurnSpan, ...]
    prompt_count: int
    weight: float
    branch_class: str
    truncated: bool
    top_token_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None
    parent_rollout_id: str = ""
    branch_call_id: str = ""
    advantages: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding from grading a trajectory. `severity` is info, warning or fatal."""

    severity: str
    reason: str
    message: str
    call_id: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """A whole trajectory. `grade` is exact, usable or unusable; `samples` are the training samples."""

    rollout_id: str
    group_id: str | None
    run_id: str | None
    group_index: int | None
    labels: Mapping[str, str]
    task_id: str
    agent: str
    agent_spec_sha256: str
    calls: tuple[Call, ...]
    branches: tuple[Branch, ...]
    samples: tuple[Sample, ...]
    reward: Reward | None
    grade: str
    findings: tuple[Finding, ...]
    capture_level: str
    tokenizer_sha256: bytes
    chat_template_sha256: bytes
    chain_sha256: bytes
    create_time: datetime | None
    end_time: datetime | None
    duration: float | None
    task_metadata: Mapping[str, Any]
    failure_cause: str
    failure_caused_by: str
    failure_reason: str
    host_tool_calls: tuple[RecordedToolCall, ...] = ()
    namespace: str = "default"
    attempt: int = 0
    """The attempt at the rollout that it is of, from 1; 0 = unknown."""
    branched_from: BranchPoint | None = None
    """Where it leaves its parent; None = it is no branch."""
    judge_calls: tuple[Call, ...] = ()
    """Calls of its verifier to the judge, in none of the samples; their parents are among them."""

    def prompt_of(self, call_id: str) -> TokenIds:
        """Returns the whole prompt of a call, assembled from its parents'.

        Raises:
            KeyError: the trajectory has no such call (it was read with samples only, for example).
        """
        calls = {call.call_id: call for call in self.calls}
        line = [calls[call_id]]
        while line[-1].parent_call_id is not None and line[-1].prompt_shared_count:
            line.append(calls[line[-1].parent_call_id])
        prompt = line[-1].prompt_suffix_token_ids
        for parent, child in zip(reversed(line), list(reversed(line))[1:], strict=False):
            sampled = parent.completion.token_ids if parent.completion is not None else None
            whole = prompt if sampled is None else np.concatenate((prompt, sampled))
            prompt = np.concatenate((whole[: child.prompt_shared_count], child.prompt_suffix_token_ids))
        return prompt
