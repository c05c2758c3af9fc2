/** Handles: one rollout, one group. They hold no connection of their own and may be made anew at any time (`attach`). */

import type { ModelCall } from "./calls.js";
import { type Driver, present, type TrajectoryOptions, watched } from "./driver.js";
import {
  eventFrom,
  type Group,
  groupFrom,
  type Rollout,
  type RolloutEvent,
  type RolloutResult,
  rolloutFrom,
  type Trajectory,
} from "./results.js";
import type { InterceptSession, Selector } from "./sessions.js";

export interface Abortable {
  readonly signal?: AbortSignal;
}

export interface CallsOptions extends Abortable {
  /** Most calls held at once. Default 64. */
  readonly credits?: number;
  /** The newest weights that the trainer has. */
  readonly policyVersion?: number;
}

const CANCEL_MS = 120_000;

/** One rollout: `events`, `result`, `trajectory`, `calls`, `cancel`, `delete`. */
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

  /** Its events with a sequence number greater than `after`, the past ones first, until its end. Taken up again where it breaks. */
  events({ after = 0, signal }: Abortable & { readonly after?: number } = {}): AsyncGenerator<RolloutEvent, void> {
    const { service, client } = this.#driver;
    const { rolloutId } = this;
    let position = BigInt(after);
    return watched(service, async function* (sign) {
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
      return false;
    }, signal);
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

  /** The model calls of this rollout, until it has ended. Calls wait at the gate, so none is missed. */
  calls(options: CallsOptions = {}): ServedCalls {
    const ended = (signal: AbortSignal) => this.#driver.wait(this.rolloutId, signal);
    return new ServedCalls(this.#driver, { rolloutIds: [this.rolloutId] }, ended, options);
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
    const { service, client } = this.#driver;
    const positions: Record<string, bigint> = {};
    const handle = this;
    return watched(service, async function* (sign) {
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
    }, signal);
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
    const session = await this.#session?.catch(() => undefined); // `next` has told why there is none
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
