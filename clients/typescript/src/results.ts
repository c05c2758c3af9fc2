/** How a rollout or a group stands, what happens in it, how it ended, and what there is to learn from. */

import { fromBinary, type JsonObject, type MessageInitShape, mergeFromBinary, toBinary } from "@bufbuild/protobuf";
import { type TopLogprobs, topOf } from "./completions.js";
import { LogprobsModeSchema } from "./gen/penstock/chat/v1/completion_pb.js";
import {
  type RolloutEvent as EventMessage,
  FailureCauseSchema,
  type Failure as FailureMessage,
  type Grade as GradeMessage,
  type Group as GroupMessage,
  type Outcome as OutcomeMessage,
  PartySchema,
  PhaseSchema,
  type Rollout as RolloutMessage,
} from "./gen/penstock/driver/v1/rollout_pb.js";
import {
  type Annotation as AnnotationMessage,
  type AnnotationSchema,
  CallClassSchema,
  GradeSchema,
  type Sample as SampleMessage,
  type Trajectory as TrajectoryMessage,
  TrajectorySchema,
} from "./gen/penstock/trajectory/v1/trajectory_pb.js";
import { bytesOf, logprobs, time, tokenIds, word } from "./wire.js";

/** A reward, made inside the environment; finite, within [rangeMin, rangeMax]. */
export interface Reward {
  readonly value: number;
  readonly rangeMin: number;
  readonly rangeMax: number;
  readonly components: Readonly<Record<string, number>>;
}

/** Why a rollout did not complete. `infrastructure` and `model` say nothing about the policy: keep them out of a baseline. */
export interface Failure {
  /** infrastructure, task, agent, timeout, budget, verifier, model or cancelled. */
  readonly cause: string;
  /** Stable, in UPPER_SNAKE. */
  readonly reason: string;
  readonly message: string;
  readonly retriable: boolean;
  readonly phase: string | undefined;
  /** agent, task, verifier, sandbox, gate, engine, operator, budget or driver; absent: an older driver. */
  readonly causedBy: string | undefined;
}

/** How a rollout ended. No `failure` = it completed; no `reward` = not graded, which is not zero. */
export interface Outcome {
  readonly failure: Failure | undefined;
  readonly reward: Reward | undefined;
  /** As it travelled: the agent's exit, how it was graded. */
  readonly message: OutcomeMessage;
}

/** A rollout as the driver reported it. */
export interface Rollout {
  readonly rolloutId: string;
  readonly groupId: string | undefined;
  readonly index: number;
  /** queued, preparing, configuring, setting_up, running, verifying, collecting or ended. */
  readonly phase: string;
  readonly outcome: Outcome | undefined;
  readonly agent: string;
  readonly taskId: string;
  readonly labels: Readonly<Record<string, string>>;
  readonly createTime: Date | undefined;
  readonly endTime: Date | undefined;
  readonly message: RolloutMessage;
}

/** What a verifier gave an ended rollout. */
export interface Grade {
  /** Unique in its rollout; "first" is the one with which it ended. */
  readonly name: string;
  /** When the verifier ended. */
  readonly time: Date | undefined;
  /** Absent = the verifier gave none; `failure` says why. */
  readonly reward: Reward | undefined;
  readonly failure: Failure | undefined;
  /** As it travelled: how it was graded, with the verifier's output. */
  readonly message: GradeMessage;
}

/** A group as the driver reported it. */
export interface Group {
  readonly groupId: string;
  readonly size: number;
  readonly rolloutIds: readonly string[];
  readonly endedCount: number;
  readonly ended: boolean;
  readonly complete: boolean;
  /** Those whose results count. */
  readonly resultRolloutIds: readonly string[];
  readonly message: GroupMessage;
}

/** One thing that happened in a rollout; `sequence` counts from 1 without gaps. */
export interface RolloutEvent {
  readonly sequence: number;
  readonly rolloutId: string;
  readonly time: Date | undefined;
  /** What it says: `{case: "phaseChanged" | "agentEvent" | ... | "ended", value}`; its case is undefined for what is newer than this client. */
  readonly event: EventMessage["event"];
}

/** Tokens [start, end) were sampled by the weights of `policyVersion`. */
export interface VersionSpan {
  readonly policyVersion: number;
  readonly start: number;
  readonly end: number;
}

/** Tokens [start, end) of a sample were sampled by one call; `untrainedReason` says why they are masked, empty where they are not. */
export interface TurnSpan {
  readonly callId: string;
  readonly start: number;
  readonly end: number;
  readonly untrainedReason: string;
  /** The turn's own, by the verifier; absent = it has none, which is not zero. */
  readonly reward: number | undefined;
  /** The policy that sampled them, of which their versions are; empty = the rollout has one. */
  readonly policyId: string;
}

/** What a trainer eats: one token sequence, root to leaf of a branch. The arrays are of one length. */
export interface Sample {
  readonly sampleId: string;
  readonly branchId: string;
  readonly inputIds: Int32Array;
  /** 1 exactly on sampled tokens that may be trained. */
  readonly lossMask: Uint8Array;
  /** Finite and <= 0 where the mask is 1, else 0; absent where the source gave none. */
  readonly logprobs: Float32Array | undefined;
  readonly logprobsMode: string;
  /** Over the sampled tokens; gaps are context. */
  readonly versions: readonly VersionSpan[];
  readonly turns: readonly TurnSpan[];
  /** Tokens before the first sampled one. */
  readonly promptCount: number;
  /** Share of its rollout's loss; the weights of a rollout's samples of one policy add up to 1. */
  readonly weight: number;
  readonly branchClass: string;
  /** The last turn was cut by a limit. */
  readonly truncated: boolean;
  /** Alternatives of the tokens whose mask is 1, in order, and of no others; absent where there are none or they were not asked for. */
  readonly top: TopLogprobs | undefined;
  /** The verifier's for each token, 0 where it gave none; absent = it gave none for any. Where the mask is 1, each is there once. */
  readonly tokenRewards: Float32Array | undefined;
  /**
   * The only policy whose tokens are trained here; empty = the rollout has one. A branch has a sample for each of its trained
   * policies, with the same tokens.
   */
  readonly policyId: string;
}

/**
 * What somebody outside the environment says about a trajectory: a judge, a critic, a person. It never changes the reward. A later
 * one of the same name, author and call replaces it.
 */
export interface Annotation {
  /** What is judged: 1 to 128 characters. */
  readonly name: string;
  /** Who judged, such as a judge's model and version: 1 to 128 characters. */
  readonly author: string;
  /** The call that it is about; absent = the whole trajectory. */
  readonly callId?: string | undefined;
  /** Finite; absent = no number. */
  readonly value?: number | undefined;
  /** Finite, one for each token of the call's completion; needs `callId`. */
  readonly tokenValues?: ArrayLike<number> | undefined;
  /** What else the author says, at most 64 KiB as JSON. */
  readonly details?: JsonObject | undefined;
}

/** A whole trajectory. `message` has the calls, branches and findings as they travelled. */
export interface Trajectory {
  readonly rolloutId: string;
  readonly samples: readonly Sample[];
  /** exact, usable or unusable; `message.findings` say why. */
  readonly grade: string;
  readonly reward: Reward | undefined;
  /** What judges outside say, in the order of creation. */
  readonly annotations: readonly Annotation[];
  readonly message: TrajectoryMessage;
}

/** An ended rollout, with its trajectory where that was asked for and exists. */
export interface RolloutResult {
  readonly rollout: Rollout;
  readonly outcome: Outcome;
  readonly trajectory: Trajectory | undefined;
}

export function outcomeFrom(message: OutcomeMessage): Outcome {
  return { failure: message.failure && failureFrom(message.failure), reward: message.reward, message };
}

function failureFrom(message: FailureMessage): Failure {
  return {
    cause: word(FailureCauseSchema, message.cause),
    reason: message.reason,
    message: message.message,
    retriable: message.retriable,
    phase: message.phase ? word(PhaseSchema, message.phase) : undefined,
    causedBy: message.causedBy ? word(PartySchema, message.causedBy) : undefined,
  };
}

export function gradeFrom(message: GradeMessage): Grade {
  const { name, reward, failure } = message;
  return { name, time: time(message.time), reward, failure: failure && failureFrom(failure), message };
}

export function rolloutFrom(message: RolloutMessage): Rollout {
  return {
    rolloutId: message.rolloutId,
    groupId: message.groupId,
    index: message.index,
    phase: word(PhaseSchema, message.phase),
    outcome: message.outcome && outcomeFrom(message.outcome),
    agent: message.spec?.agent?.name ?? "",
    taskId: message.spec?.task?.taskId ?? "",
    labels: message.spec?.labels ?? {},
    createTime: time(message.createTime),
    endTime: time(message.endTime),
    message,
  };
}

export function groupFrom(message: GroupMessage): Group {
  const { groupId, size, rolloutIds, endedCount, ended, complete, resultRolloutIds } = message;
  return { groupId, size, rolloutIds, endedCount, ended, complete, resultRolloutIds, message };
}

export function eventFrom(message: EventMessage): RolloutEvent {
  return {
    sequence: Number(message.sequence),
    rolloutId: message.rolloutId,
    time: time(message.time),
    event: message.event,
  };
}

function sampleFrom(message: SampleMessage): Sample {
  return {
    sampleId: message.sampleId,
    branchId: message.branchId,
    inputIds: tokenIds(message.inputIds),
    lossMask: message.lossMask,
    logprobs: message.logprobs.length > 0 ? logprobs(message.logprobs) : undefined,
    logprobsMode: word(LogprobsModeSchema, message.logprobsMode),
    versions: message.versions.map(({ policyVersion, start, end }) => ({
      policyVersion: Number(policyVersion),
      start,
      end,
    })),
    turns: message.turns.map(({ callId, start, end, untrainedReason, reward, policyId }) => ({
      callId,
      start,
      end,
      untrainedReason,
      reward,
      policyId,
    })),
    promptCount: message.promptCount,
    weight: message.weight,
    branchClass: word(CallClassSchema, message.branchClass),
    truncated: message.truncated,
    top: topOf(message),
    tokenRewards: message.tokenRewards.length > 0 ? logprobs(message.tokenRewards) : undefined,
    policyId: message.policyId,
  };
}

function annotationFrom({ name, author, callId, value, tokenValues, details }: AnnotationMessage): Annotation {
  return { name, author, callId, value, tokenValues: tokenValues.length > 0 ? logprobs(tokenValues) : undefined, details };
}

/** An annotation as it travels. */
export function annotationTo(annotation: Annotation): MessageInitShape<typeof AnnotationSchema> {
  const { name, author, callId, value, tokenValues, details } = annotation;
  return {
    name,
    author,
    ...(callId !== undefined && { callId }),
    ...(value !== undefined && { value }),
    ...(tokenValues !== undefined && { tokenValues: bytesOf(Float32Array.from(tokenValues)) }),
    ...(details !== undefined && { details }),
  };
}

/** A trajectory, of all its fragments. */
export function trajectoryFrom(fragments: readonly TrajectoryMessage[]): Trajectory {
  const [first, ...others] = fragments;
  let message = first;
  if (message === undefined || others.length > 0) {
    message = fromBinary(TrajectorySchema, new Uint8Array());
    for (const fragment of fragments) {
      mergeFromBinary(TrajectorySchema, message, toBinary(TrajectorySchema, fragment));
    }
  }
  return {
    rolloutId: message.rolloutId,
    samples: message.samples.map(sampleFrom),
    grade: word(GradeSchema, message.grade),
    reward: message.reward,
    annotations: message.annotations.map(annotationFrom),
    message,
  };
}
