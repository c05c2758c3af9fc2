/** The driver's RPCs as the handles use them: reads, waits and watches that outlast a restart, trajectories. */

import type { Client } from "@connectrpc/connect";
import { DeadlineExceeded, FailedPrecondition, isBroken, type PenstockError, Unavailable } from "./errors.js";
import { RolloutService } from "./gen/penstock/driver/v1/rollout_service_pb.js";
import {
  type Group,
  groupFrom,
  type Rollout,
  type RolloutResult,
  rolloutFrom,
  type Trajectory,
  trajectoryFrom,
} from "./results.js";
import { Backoff, type Service, type UnaryOptions } from "./rpc.js";
import type { Gate } from "./sessions.js";

const WAIT_MS = 30_000;
const PATIENCE_MS = 60_000;

/**
 * How long a watch that broke is taken up again: for a minute from the first failure after the last sign of the driver. What
 * the caller does between two messages takes nothing of it.
 */
export class Patience {
  readonly #service: Service;
  readonly #backoff = new Backoff();
  readonly #early = new Backoff();
  /** When it broke; undefined = not since the last sign. */
  #broke: number | undefined;

  constructor(service: Service) {
    this.#service = service;
  }

  /** The driver answered. */
  sign(): void {
    this.#backoff.reset();
    this.#broke = undefined;
  }

  /**
   * Waits before what was asked at `asked` is asked again, though the driver answered: not where it held the question as
   * long as it should, and longer each time where it answers at once.
   */
  async askAgain(asked: number, signal?: AbortSignal): Promise<void> {
    if (performance.now() - asked > WAIT_MS / 2) {
      this.#early.reset();
    } else {
      await this.#service.pause(this.#early.next(), signal);
    }
  }

  /** Waits before the next attempt; throws `error` when it is enough. */
  async pause(error: PenstockError, signal?: AbortSignal): Promise<void> {
    this.#broke ??= performance.now();
    if (performance.now() - this.#broke > PATIENCE_MS) {
      throw error;
    }
    await this.#service.pause(this.#backoff.next(error), signal);
  }
}

export interface TrajectoryOptions {
  /** Without calls and branches: what a trainer in a hurry wants. */
  readonly samplesOnly?: boolean;
  /** With the agent's request bodies. */
  readonly bodies?: boolean;
  /** With the alternatives of sampled tokens: 8 bytes for each. */
  readonly top?: boolean;
  readonly signal?: AbortSignal | undefined;
}

export class Driver {
  readonly client: Client<typeof RolloutService>;

  constructor(
    readonly service: Service,
    readonly gate: Gate,
  ) {
    this.client = service.client(RolloutService);
  }

  async get(rolloutId: string, signal?: AbortSignal): Promise<Rollout> {
    const answer = await this.service.call((options) => this.client.getRollout({ rolloutId }, options), {
      signal,
      repeatable: true,
    });
    return rolloutFrom(present(answer.rollout));
  }

  async getGroup(groupId: string, signal?: AbortSignal): Promise<Group> {
    const answer = await this.service.call((options) => this.client.getGroup({ groupId }, options), {
      signal,
      repeatable: true,
    });
    return groupFrom(present(answer.group));
  }

  /** A rollout when it has ended. */
  async wait(rolloutId: string, signal?: AbortSignal): Promise<Rollout> {
    return longPoll(this.service, async (options) => {
      const { rollout } = await this.service.call((call) => this.client.waitRollout({ rolloutId }, call), options);
      return rollout?.outcome === undefined ? undefined : rolloutFrom(rollout);
    }, signal);
  }

  /** A group when all of its rollouts have ended. */
  async waitGroup(groupId: string, signal?: AbortSignal): Promise<Group> {
    return longPoll(this.service, async (options) => {
      const { group } = await this.service.call((call) => this.client.waitGroup({ groupId }, call), options);
      return group?.ended ? groupFrom(group) : undefined;
    }, signal);
  }

  /** An ended rollout's trajectory. */
  async trajectory(rolloutId: string, options: TrajectoryOptions = {}): Promise<Trajectory> {
    const { samplesOnly = false, bodies: includeBodies = false, top: includeTop = false, signal } = options;
    const request = { rolloutId, samplesOnly, includeBodies, includeTop };
    const fragments = await this.service.collect((call) => this.client.getTrajectory(request, call), signal);
    return trajectoryFrom(fragments.map((fragment) => present(fragment.trajectory)));
  }

  /** An ended rollout with its trajectory, undefined where the gate was never opened. */
  async result(rolloutId: string, options: TrajectoryOptions): Promise<RolloutResult> {
    const rollout = await this.get(rolloutId, options.signal);
    const outcome = present(rollout.outcome);
    try {
      return { rollout, outcome, trajectory: await this.trajectory(rolloutId, options) };
    } catch (error) {
      if (error instanceof FailedPrecondition && error.reason === "TRAJECTORY_ABSENT") {
        return { rollout, outcome, trajectory: undefined };
      }
      throw error;
    }
  }
}

/**
 * What `watch` yields, begun anew wherever it broke.
 *
 * @param watch one stream of it; calls `sign` for every message, and returns whether that was all.
 */
export async function* watched<A>(
  service: Service,
  watch: (sign: () => void) => AsyncGenerator<A, boolean>,
  signal?: AbortSignal,
): AsyncGenerator<A, void> {
  const patience = new Patience(service);
  for (;;) {
    let error: PenstockError = new Unavailable(`${service.peer} ended the stream`, { reason: "STREAM_ENDED" });
    try {
      if (yield* watch(() => patience.sign())) {
        return;
      }
    } catch (broken) {
      if (!isBroken(broken)) {
        throw broken;
      }
      error = broken;
    }
    await patience.pause(error, signal);
  }
}

/** What is waited for, asked again and again, however often the service restarts meanwhile. */
export async function longPoll<A>(
  service: Service,
  ask: (options: UnaryOptions) => Promise<A | undefined>,
  signal: AbortSignal | undefined,
): Promise<A> {
  const patience = new Patience(service);
  for (;;) {
    const asked = performance.now();
    try {
      const answer = await ask({ signal, timeoutMs: WAIT_MS });
      if (answer !== undefined) {
        return answer;
      }
      patience.sign();
      await patience.askAgain(asked, signal);
    } catch (error) {
      // A poll that is not answered in its time says no more than a service that is away.
      if (!(error instanceof Unavailable || error instanceof DeadlineExceeded)) {
        throw error;
      }
      await patience.pause(error, signal);
    }
  }
}

/** A message that every service of ours puts in. */
export function present<T>(message: T | undefined): T {
  if (message === undefined) {
    throw new Unavailable("The service's answer is empty: is it one of Penstock's?", { reason: "PROTOCOL" });
  }
  return message;
}
