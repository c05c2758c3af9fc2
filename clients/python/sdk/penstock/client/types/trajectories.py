"""Trajectories: calls, branches, samples, reward and grade. All values; times are UTC."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.client.errors import InvalidArgument
from penstock.client.types.chat import (
    Completion,
    Logprobs,
    LogprobsMode,
    PromptImage,
    Sampling,
    TokenIds,
    TokenTensor,
    Tool,
    VersionSpan,
)
from penstock.values.token_tensors import ROUTED_EXPERTS


@dataclass(frozen=True, slots=True)
class TurnReward:
    """The reward of one turn: of what the model answered to one call. Finite; `Reward`'s range does not bound it.

    Attributes:
        value: None = the turn has rewards of tokens or components only.
        token_values: one for each token of the call's completion; None = none.
    """

    call_id: str
    value: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    token_values: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward, computed inside the environment; finite, within [range_min, range_max].

    `turns` are the rewards of single turns, in the order of their calls. `value` is not computed from them.
    """

    value: float
    range_min: float = 0.0
    range_max: float = 1.0
    components: Mapping[str, float] = field(default_factory=dict)
    turns: tuple[TurnReward, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Annotation:
    """What somebody outside the environment says about a trajectory: a judge, a critic, a person.

    It never changes the reward. A later one of the same name, author and call replaces it.

    Attributes:
        name: what is judged, such as "helpfulness": 1 to 128 characters.
        author: who judged, such as a judge's model and version: 1 to 128 characters.
        call_id: the call that it is about; None = the whole trajectory.
        value: finite; None = no number.
        token_values: float32, shape (m,), finite, one for each of the m tokens of the call's completion; needs
            `call_id`. Any array-like is taken. None = none.
        details: what else the author says, at most 64 KiB as JSON.
        create_time: set by the driver.
        chain_sha256: `Trajectory.chain_sha256` of what was judged; empty = not stated. Another trajectory's is refused.
    """

    name: str
    author: str
    call_id: str | None = None
    value: float | None = None
    token_values: NDArray[np.float32] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    create_time: datetime | None = None
    chain_sha256: bytes = b""


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
    chain after the call, `chain_index` its position in it: None unless delivered. `policy_id` is the policy that it was
    for, of which its versions are; empty = the rollout has one. With several models `model_name` is the name of the one
    that it was chosen for (empty = it has none), and `trained` whether tokens of that policy may be trained; both None
    with one, and where no model was chosen.
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
    policy_id: str = ""
    model_name: str | None = None
    trained: bool | None = None
    images: tuple[PromptImage, ...] = ()
    """Images of the prompt that the parent's prompt does not have; their bytes only if they were asked for."""


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
    PARENT (the rollout of which this one is a branch trains them), MODEL_UNTRAINED (`RolloutModel.trained`),
    OTHER_POLICY (they are not of the sample's policy), TRUNCATED, BUDGET, INJECTED, NO_LOGPROBS, PARTIAL, UNUSABLE, or
    CLASS_ and a class that is not trained. `reward` is the turn's own, finite; None = it has none, which is not zero.
    `policy_id` is the policy that sampled them, of which their versions are; empty = the rollout has one.
    """

    call_id: str
    start: int
    end: int
    untrained_reason: str = ""
    reward: float | None = None
    policy_id: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A training sample: one token sequence, root to leaf of a branch.

    Attributes:
        input_ids: int32, shape (n,).
        loss_mask: bool, shape (n,): True exactly on sampled tokens that may be trained.
        logprobs: float32, shape (n,): finite and <= 0 where the mask is True, else 0.0; None = the source gave none.
        versions: over the sampled tokens; gaps are context. Where turns are of several policies, each is of its turn's.
        turns: the call that sampled each token span.
        prompt_count: tokens before the first sampled one.
        weight: this sample's share of its rollout's loss; the weights of a rollout's samples of one policy add up to 1.
        truncated: the last turn was cut by a limit.
        top_token_ids, top_logprobs: alternatives, int32 and float32, shape (loss_mask.sum(), k): a row per token whose
            mask is True, in order, as in `Completion`. None = no trained turn has any, or they were left out.
        parent_rollout_id, branch_call_id: of a branch: the parent, and its call at which they part. The turns before it
            are the parent's, token for token. Empty = no branch.
        advantages: float32, shape (n,): of each token, 0.0 where the mask is False. None = not estimated; services do
            not, `RolloutCredit.annotated` does.
        token_rewards: float32, shape (n,): the verifier's for each token, 0.0 where it gave none. None = it gave none
            for any. A turn that several samples have, has them in each: multiply by the mask to count each once.
        tensors: those of its calls, joined, with positions in `input_ids`; their rows only if they were asked for.
        images: those of its prompts, in the order of their tokens; their bytes only if they were asked for.
        policy_id: the only policy whose tokens are trained here; empty = the rollout has one. A branch has a sample for
            each of its trained policies, with the same tokens.
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
    token_rewards: NDArray[np.float32] | None = None
    tensors: tuple[TokenTensor, ...] = ()
    images: tuple[PromptImage, ...] = ()
    policy_id: str = ""

    def __len__(self) -> int:
        return len(self.input_ids)

    def routed_experts(self, fill: int | None = None) -> NDArray[Any] | None:
        """Returns the experts of each token but the last, which was not computed: (n - 1, layers, experts per token).

        Args:
            fill: the id for tokens whose routing was not captured; None = that is an error. A negative one makes the
                type signed.

        Returns:
            None: no call asked for them, or its engine had none.

        Raises:
            InvalidArgument: `TENSOR_LEFT_OUT`, the trajectory was read without `tensors=True`; `TENSOR_GAP`, tokens
                have no row; `TENSOR_SHAPE`, calls have rows of several shapes.
        """
        found = sorted((one for one in self.tensors if one.name == ROUTED_EXPERTS), key=lambda one: one.start)
        if not found:
            return None
        if len({one.shape[1:] for one in found}) > 1:
            raise InvalidArgument(f"{self.sample_id} has routed experts of several models", reason="TENSOR_SHAPE")
        covered = np.zeros(len(self) - 1, np.bool_)
        dtype = np.result_type(*(one.dtype for one in found), *([] if fill is None or fill >= 0 else [np.int8]))
        experts = np.full((len(self) - 1, *found[0].shape[1:]), fill or 0, dtype)
        for one in found:
            if one.rows is None:
                raise InvalidArgument(
                    f"{self.sample_id} was read without its routed experts: read it with tensors=True",
                    reason="TENSOR_LEFT_OUT",
                )
            experts[one.start : one.end] = one.rows
            covered[one.start : one.end] = True
        if fill is None and not covered.all():
            first = int(np.flatnonzero(~covered)[0])
            raise InvalidArgument(
                f"{int((~covered).sum())} tokens of {self.sample_id} have no routed experts, the first at {first}: "
                "pass `fill`, or leave the sample out",
                reason="TENSOR_GAP",
            )
        return experts

    @property
    def turn_rewards(self) -> NDArray[np.float64]:
        """The reward of each turn, as in `turns`: float64, shape (len(turns),); NaN = the turn has none."""
        return np.array([math.nan if turn.reward is None else turn.reward for turn in self.turns], np.float64)


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
    user_calls: tuple[Call, ...] = ()
    """Calls to the model that plays the user, in none of the samples; their parents are among them."""
    annotations: tuple[Annotation, ...] = ()
    """What judges outside say, in the order of creation."""

    def turn_values(self, sample: Sample, name: str, author: str) -> NDArray[np.float64]:
        """Returns what an author's annotations of one name say about each turn of one of the samples.

        Returns:
            float64, shape (len(sample.turns),): the values as in `sample.turns`; NaN = none.
        """
        values = {one.call_id: one.value for one in self._annotations(name, author) if one.value is not None}
        return np.array([values.get(turn.call_id, math.nan) for turn in sample.turns], np.float64)

    def token_values(self, sample: Sample, name: str, author: str) -> NDArray[np.float32] | None:
        """Returns what an author's annotations of one name say about each token of one of the samples.

        Returns:
            float32, shape (n,): 0.0 on tokens that nothing is said about, as all that were not sampled; None = on all.
        """
        found = np.zeros(len(sample), np.float32)
        given = {one.call_id: one.token_values for one in self._annotations(name, author)}
        spans = [(turn, values) for turn in sample.turns if (values := given.get(turn.call_id)) is not None]
        for turn, values in spans:
            found[turn.start : turn.end] = values[: turn.end - turn.start]
        return found if spans else None

    def _annotations(self, name: str, author: str) -> list[Annotation]:
        return [one for one in self.annotations if (one.name, one.author) == (name, author)]

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
