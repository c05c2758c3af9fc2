/** Handles: one rollout, one group. They hold no connection of their own and may be made anew at any time (`attach`). */

import type { MessageInitShape } from "@bufbuild/protobuf";
import type { ModelCall } from "./calls.js";
import { type Driver, present, requestId, type TrajectoryOptions, watched } from "./driver.js";
import type { MessageSchema } from "./gen/penstock/chat/v1/chat_pb.js";
import { Role } from "./gen/penstock/chat/v1/chat_pb.js";
import { Replay } from "./gen/penstock/driver/v1/rollout_pb.js";
import {
  type Annotation,
  annotationTo,
  eventFrom,
  type Grade,
  type Group,
  gradeFrom,
  groupFrom,
  type Rollout,
  type RolloutEvent,
  type RolloutResult,
  rolloutFrom,
  type Trajectory,
} from "./results.js";
import type { InterceptSession, Selector } from "./sessions.js";
import { type Verifier, verifierOf } from "./tasks.js";
import { duration } from "./wire.js";

export interface Abortable {
  readonly signal?: AbortSignal;
}

export interface CallsOptions extends Abortable {
  /** Most calls held at once. Default 64. */
  readonly credits?: number;
  /** The newest weights that the trainer has. */
  readonly policyVersion?: number;
}

export interface BranchOptions extends Abortable {
  /** What the call is answered in all branches, instead of being sampled: a text, or an assistant's message. It is never trained. */
  readonly answer?: string | MessageInitShape<typeof MessageSchema>;
  /** Of the branches. Default: assigned. */
  readonly groupId?: string;
  /** Whether the branches train what their parent sampled too. */
  readonly trainPrefix?: boolean;
  /** What becomes of a branch whose agent asks something else before the call. Default "exact": it fails. */
  readonly replay?: "exact" | "until_divergence";
  /** Seed of the first branch's calls, 0 or more; each further branch has it plus its index. Absent: all have the parent's, if any. */
  readonly seed?: bigint | number;
}

const CANCEL_MS = 120_000;
const PAUSE_MS = 60_000;
const BRANCH_MS = 120_000;
const ANNOTATE_MS = 300_000;
const REGRADE_MS = 3_600_000;

export interface RegradeOptions extends Abortable {
  /** Of the grade: 1 to 64 letters, digits, "-", "_" and ".", not "first". Absent = from the verifier's SHA-256. */
  readonly name?: string;
}

/** One rollout: `events`, `result`, `trajectory`, `image`, `calls`, `branch`, `regrade`, `annotate`, `pause`, `resume`, `cancel`, `delete`. */
export class RolloutHandle {
  readonly #driver: Driver;
  /** As it was last reported. */
  info: Rollout;

  constructor(driver: Driver, info: Rollout) {
    this.#driver = driver;
    this.info = info;
  }

  get rolloutId(): string {
    return this.info.rolloutId;
  }

  /** The rollout as it stands. */
  async refresh({ signal }: Abortable = {}): Promise<Rollout> {
    this.info = await this.#driver.get(this.rolloutId, signal);
    return this.info;
  }

  /**
   * Its events with a sequence number greater than `after`, the past ones first, until its end; none, at once, where an ended one has
   * none. Taken up again where it breaks.
   */
  events({ after = 0, signal }: Abortable & { readonly after?: number } = {}): AsyncGenerator<RolloutEvent, void> {
    const driver = this.#driver;
    const { rolloutId } = this;
    let position = BigInt(after);
    return watched(driver.service, async function* (sign) {
      const { service, client } = driver; // each time: it may be at another address by now
      const request = { rolloutId, afterSequence: position };
      for await (const { message } of service.stream((options) => client.watchRollout(request, options), signal)) {
        sign();
        if (message.case === "event") {
          position = message.value.sequence;
          yield eventFrom(message.value);
          if (message.value.event.case === "ended") {
            return true;
          }
        }
      }
      // The driver itself ended the stream: it sends nothing more where the end is not after `position`.
      const { rollout } = await service.call((options) => client.getRollout({ rolloutId }, options), { signal, repeatable: true });
      return rollout?.outcome !== undefined && position >= rollout.lastSequence;
    }, signal, driver.follow);
  }

  /** Waits until it has ended; says how. Its trajectory is `trajectory()`. */
  async result({ signal }: Abortable = {}): Promise<RolloutResult> {
    this.info = await this.#driver.wait(this.rolloutId, signal);
    return { rollout: this.info, outcome: present(this.info.outcome), trajectory: undefined };
  }

  /** What the ended rollout made. Rejects with FailedPrecondition: ROLLOUT_RUNNING; TRAJECTORY_ABSENT: the gate was never opened. */
  async trajectory(options: TrajectoryOptions = {}): Promise<Trajectory> {
    return this.#driver.trajectory(this.rolloutId, options);
  }

  /**
   * The file of one image of the ended rollout's prompts (`Media.sha256` of a call of `trajectory.message`). Rejects with NotFound
   * MEDIA_UNKNOWN; FailedPrecondition ROLLOUT_RUNNING, TRAJECTORY_ABSENT; DataLoss IMAGE_DAMAGED.
   */
  async image(sha256: Uint8Array, { signal }: Abortable = {}): Promise<Uint8Array> {
    return this.#driver.image(this.rolloutId, sha256, signal);
  }

  /**
   * Runs a verifier on the ended rollout's end state, in a sandbox of its own, and records a further grade; the first one stays as it
   * is. Fulfilled once the grade is on disk. A repeat with the same verifier and name gives the grade that is there.
   *
   * Rejects with AlreadyExists GRADE_EXISTS: the name is that of another verifier's grade; FailedPrecondition ROLLOUT_RUNNING,
   * END_STATE_GONE, SPEC_FORGOTTEN, REGRADE_FAILED; ResourceExhausted GRADE_LIMIT, REGRADE_LIMIT; Unavailable REGRADE_INTERRUPTED:
   * nothing was graded, and a repeat may succeed.
   *
   * @param verifier absent = the rollout's own.
   */
  async regrade(verifier?: Verifier, { name = "", signal }: RegradeOptions = {}): Promise<Grade> {
    const { service, client } = this.#driver;
    const request = { rolloutId: this.rolloutId, verifier: verifier && verifierOf(verifier), name };
    const answer = await service.call((options) => client.regradeRollout(request, options), {
      signal,
      timeoutMs: REGRADE_MS,
      repeatable: true,
    });
    return gradeFrom(present(answer.grade));
  }

  /** The model calls of this rollout, until it has ended. Calls wait at the gate, so none is missed. */
  calls(options: CallsOptions = {}): ServedCalls {
    const ended = (signal: AbortSignal) => this.#driver.wait(this.rolloutId, signal);
    return new ServedCalls(this.#driver, { rolloutIds: [this.rolloutId] }, ended, options);
  }

  /**
   * Starts n rollouts that continue this one from one of its calls. Calls before it are answered as they were, without sampling.
   *
   * @param call its id, or its index from 0.
   * @param n how many branches, 1 to 256.
   *
   * Rejects with NotFound CALL_UNKNOWN; FailedPrecondition CALL_UNANSWERED, TRAJECTORY_ABSENT or SPEC_FORGOTTEN.
   */
  async branch(call: string | number, n = 1, options: BranchOptions = {}): Promise<GroupHandle> {
    const { service, client } = this.#driver;
    const { answer, signal } = options;
    const text = (value: string) => ({
      role: Role.ASSISTANT,
      parts: [{ part: { case: "text" as const, value: { text: value } } }],
    });
    const request = {
      requestId: requestId(),
      rolloutId: this.rolloutId,
      call:
        typeof call === "string"
          ? { case: "callId" as const, value: call }
          : { case: "callIndex" as const, value: call },
      count: n,
      answer: typeof answer === "string" ? text(answer) : answer,
      groupId: options.groupId ?? "",
      trainPrefix: options.trainPrefix ?? false,
      replay: options.replay === "until_divergence" ? Replay.UNTIL_DIVERGENCE : Replay.EXACT,
      seed: options.seed === undefined ? undefined : BigInt(options.seed),
    };
    const made = await service.call((call) => client.branchRollout(request, call), {
      signal,
      timeoutMs: BRANCH_MS,
      repeatable: true,
    });
    return new GroupHandle(this.#driver, groupFrom(present(made.group)));
  }

  /**
   * Adds what somebody outside the environment says about the ended rollout's trajectory, 1 to 1024 annotations: all or none. They are
   * on disk when this is fulfilled; an equal one changes nothing. Rejects with NotFound CALL_UNKNOWN; InvalidArgument FIELD_INVALID;
   * FailedPrecondition ROLLOUT_RUNNING, TRAJECTORY_ABSENT; ResourceExhausted ANNOTATION_LIMIT.
   */
  async annotate(annotations: readonly Annotation[], { signal }: Abortable = {}): Promise<void> {
    const { service, client } = this.#driver;
    const request = { rolloutId: this.rolloutId, annotations: annotations.map(annotationTo) };
    await service.call((options) => client.annotateTrajectory(request, options), {
      signal,
      timeoutMs: ANNOTATE_MS,
      repeatable: true,
    });
  }

  /** Ends it: agent and sandbox are gone when this is fulfilled. One that has ended keeps its outcome. */
  async cancel(reason = "", { signal }: Abortable = {}): Promise<void> {
    const { service, client } = this.#driver;
    const request = { rolloutId: this.rolloutId, reason };
    const answer = await service.call((options) => client.cancelRollout(request, options), {
      signal,
      timeoutMs: CANCEL_MS,
      repeatable: true,
    });
    this.info = rolloutFrom(present(answer.rollout));
  }

  /**
   * Pauses it, in whatever phase it is: fulfilled once it is held. Its agent's sandbox is frozen, its calls wait at the gate, and its
   * time limits stand still; one that waits is not started; one that is being graded ends. Fulfilled with whether a sandbox is frozen.
   * Rejects with FailedPrecondition: ROLLOUT_ENDED; ResourceExhausted: PAUSE_LIMIT; Unavailable: PAUSE_PENDING, DRAINING.
   *
   * @param maxDurationMs after which it goes on; absent = as long as the operator allows.
   */
  async pause(reason = "", { maxDurationMs, signal }: Abortable & { maxDurationMs?: number } = {}): Promise<boolean> {
    const { service, client } = this.#driver;
    const request = { rolloutId: this.rolloutId, reason, maxDuration: duration(maxDurationMs) };
    const answer = await service.call((options) => client.pauseRollout(request, options), {
      signal,
      timeoutMs: PAUSE_MS,
      repeatable: true,
    });
    this.info = rolloutFrom(present(answer.rollout));
    return answer.sandboxPaused;
  }

  /** Ends its pause, if it has one: fulfilled once nothing holds it. */
  async resume({ signal }: Abortable = {}): Promise<void> {
    const { service, client } = this.#driver;
    const answer = await service.call((options) => client.resumeRollout({ rolloutId: this.rolloutId }, options), {
      signal,
      timeoutMs: PAUSE_MS,
      repeatable: true,
    });
    this.info = rolloutFrom(present(answer.rollout));
  }

  /** Removes the ended rollout with its events and trajectory. */
  async delete({ signal }: Abortable = {}): Promise<void> {
    const { service, client } = this.#driver;
    const request = { rolloutId: this.rolloutId };
    await service.call((options) => client.deleteRollout(request, options), { signal, repeatable: true });
  }
}

/** Rollouts of one spec: `calls`, `events`, `asEnded`, `results`, `cancel`, `delete`. */
export class GroupHandle {
  readonly #driver: Driver;
  /** As it was last reported. */
  info: Group;

  constructor(driver: Driver, info: Group) {
    this.#driver = driver;
    this.info = info;
  }

  get groupId(): string {
    return this.info.groupId;
  }

  /** Its rollouts, spares included. */
  get rolloutIds(): readonly string[] {
    return this.info.rolloutIds;
  }

  /** The group as it stands. */
  async refresh({ signal }: Abortable = {}): Promise<Group> {
    this.info = await this.#driver.getGroup(this.groupId, signal);
    return this.info;
  }

  /**
   * Events of all its rollouts, each one's in order, until all have ended. Taken up again where it breaks.
   *
   * @param options `summary`: phase changes and ends only.
   */
  events({
    summary = false,
    signal,
  }: Abortable & { readonly summary?: boolean } = {}): AsyncGenerator<RolloutEvent, void> {
    const driver = this.#driver;
    const positions: Record<string, bigint> = {};
    const handle = this;
    return watched(driver.service, async function* (sign) {
      const { service, client } = driver; // each time: it may be at another address by now
      const request = { groupId: handle.groupId, afterSequences: positions, summary };
      for await (const { message } of service.stream((options) => client.watchGroup(request, options), signal)) {
        sign();
        if (message.case === "group") {
          handle.info = groupFrom(message.value);
          if (handle.info.ended) {
            return true;
          }
        } else if (message.case === "event") {
          positions[message.value.rolloutId] = message.value.sequence;
          yield eventFrom(message.value);
        }
      }
      return false;
    }, signal, driver.follow);
  }

  /** Waits until all its rollouts have ended. */
  async wait({ signal }: Abortable = {}): Promise<Group> {
    this.info = await this.#driver.waitGroup(this.groupId, signal);
    return this.info;
  }

  /** Each rollout as it ends, with its trajectory (undefined where the gate was never opened), samples only unless asked otherwise. */
  async *asEnded({ samplesOnly = true, ...options }: TrajectoryOptions = {}): AsyncGenerator<RolloutResult, void> {
    const { signal } = options;
    for await (const { event, rolloutId } of this.events({ summary: true, ...(signal && { signal }) })) {
      if (event.case === "ended") {
        yield await this.#driver.result(rolloutId, { samplesOnly, ...options });
      }
    }
  }

  /** Waits for all; every rollout in the order of its index, failed ones included. Those that count: `info.resultRolloutIds`. */
  async results(options: TrajectoryOptions = {}): Promise<RolloutResult[]> {
    const byId = new Map<string, RolloutResult>();
    for await (const result of this.asEnded(options)) {
      byId.set(result.rollout.rolloutId, result);
    }
    return [...byId.values()].sort((one, other) => one.rollout.index - other.rollout.index);
  }

  /** The model calls of all its rollouts, until all have ended. For pauses, announcements and longer sessions: `ps.intercept`. */
  calls(options: CallsOptions = {}): ServedCalls {
    const ended = (signal: AbortSignal) => this.#driver.waitGroup(this.groupId, signal);
    return new ServedCalls(this.#driver, { groupId: this.groupId }, ended, options);
  }

  /** Ends all its rollouts. */
  async cancel(reason = "", { signal }: Abortable = {}): Promise<void> {
    const { service, client } = this.#driver;
    const answer = await service.call((options) => client.cancelGroup({ groupId: this.groupId, reason }, options), {
      signal,
      timeoutMs: CANCEL_MS,
      repeatable: true,
    });
    this.info = groupFrom(present(answer.group));
  }

  /** Pauses each of its rollouts that has not ended: see RolloutHandle.pause. */
  async pause(reason = "", { maxDurationMs, signal }: Abortable & { maxDurationMs?: number } = {}): Promise<void> {
    const { service, client } = this.#driver;
    const request = { groupId: this.groupId, reason, maxDuration: duration(maxDurationMs) };
    const answer = await service.call((options) => client.pauseGroup(request, options), {
      signal,
      timeoutMs: PAUSE_MS,
      repeatable: true,
    });
    this.info = groupFrom(present(answer.group));
  }

  /** Ends the pauses of its rollouts. */
  async resume({ signal }: Abortable = {}): Promise<void> {
    const { service, client } = this.#driver;
    const answer = await service.call((options) => client.resumeGroup({ groupId: this.groupId }, options), {
      signal,
      timeoutMs: PAUSE_MS,
      repeatable: true,
    });
    this.info = groupFrom(present(answer.group));
  }

  /** Removes the ended group with its rollouts. */
  async delete({ signal }: Abortable = {}): Promise<void> {
    const { service, client } = this.#driver;
    const request = { groupId: this.groupId };
    await service.call((options) => client.deleteGroup(request, options), { signal, repeatable: true });
  }
}

/** The calls of a session that is opened with the first of them, and lasts until the rollouts have ended or the loop is left. */
export class ServedCalls implements AsyncIterableIterator<ModelCall, undefined> {
  readonly #open: () => Promise<InterceptSession>;
  readonly #watch: () => Promise<unknown>;
  readonly #signal: AbortSignal | undefined;
  readonly #left = new AbortController();
  #session: Promise<InterceptSession> | undefined;
  #failure: unknown;

  constructor(
    driver: Driver,
    selector: Selector,
    ended: (signal: AbortSignal) => Promise<unknown>,
    { signal, ...options }: CallsOptions,
  ) {
    this.#signal = signal;
    const either = signal === undefined ? this.#left.signal : AbortSignal.any([signal, this.#left.signal]);
    this.#open = () => driver.gate.open({ ...selector, ...options }, either);
    this.#watch = () => ended(either);
  }

  async next(): Promise<IteratorResult<ModelCall, undefined>> {
    if (this.#left.signal.aborted) {
      return { done: true, value: undefined };
    }
    this.#session ??= this.#begin();
    try {
      const call = await (await this.#session).nextCall(this.#signal);
      if (call !== undefined) {
        return { done: false, value: call };
      }
    } catch (error) {
      await this.return();
      throw error;
    }
    await this.return();
    if (this.#failure !== undefined) {
      throw this.#failure;
    }
    return { done: true, value: undefined };
  }

  /** Leaves: calls that are not answered are queued again. */
  async return(): Promise<IteratorResult<ModelCall, undefined>> {
    this.#left.abort();
    const session = await this.#session?.catch(() => undefined); // `next` has thrown why there is none
    await session?.close();
    return { done: true, value: undefined };
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.return();
  }

  async #begin(): Promise<InterceptSession> {
    const session = await this.#open();
    this.#watch()
      .catch((error: unknown) => {
        this.#failure ??= this.#left.signal.aborted ? undefined : error;
      })
      .finally(() => session.finish());
    return session;
  }
}
