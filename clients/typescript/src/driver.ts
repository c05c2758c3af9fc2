/** The driver's RPCs as the handles use them: reads, waits and watches that outlast a restart, trajectories. */

import { createHash, randomBytes } from "node:crypto";
import type { MessageInitShape } from "@bufbuild/protobuf";
import type { Client } from "@connectrpc/connect";
import type { Cluster } from "./cluster.js";
import {
  DataLoss,
  DeadlineExceeded,
  FailedPrecondition,
  isBroken,
  NotFound,
  type PenstockError,
  Unavailable,
} from "./errors.js";
import type { TokenTensor } from "./gen/penstock/chat/v1/completion_pb.js";
import { type GetTensorRequestSchema, RolloutService } from "./gen/penstock/driver/v1/rollout_service_pb.js";
import type { Trajectory as TrajectoryMessage } from "./gen/penstock/trajectory/v1/trajectory_pb.js";
import {
  type Group,
  groupFrom,
  type Rollout,
  type RolloutResult,
  rolloutFrom,
  type Trajectory,
  trajectoryFrom,
} from "./results.js";
import { Backoff, type Repeatable, type Service, type UnaryOptions } from "./rpc.js";
import type { Gate } from "./sessions.js";

type Holder = NonNullable<MessageInitShape<typeof GetTensorRequestSchema>["holder"]>;

const GET_MS = 30_000;
const WAIT_MS = 30_000;
/** Of an ended rollout's result: thousands of rollouts may end at once. */
const RESULT_MS = 300_000;
const PATIENCE_MS = 60_000;
/** Reasons by which a driver does not know what is waited for. */
const UNKNOWN: ReadonlySet<string> = new Set(["ROLLOUT_UNKNOWN", "GROUP_UNKNOWN"]);

/** Goes to where a service is by now. */
export type Follow = (signal?: AbortSignal) => Promise<void>;

/**
 * How long a watch that broke is taken up again: for a minute from the first failure after the last sign of the driver. What
 * the caller does between two messages takes nothing of it.
 */
export class Patience {
  readonly #service: Service;
  readonly #follow: Follow | undefined;
  readonly #backoff = new Backoff();
  readonly #early = new Backoff();
  /** When it broke; undefined = not since the last sign. */
  #broke: number | undefined;
  #wasAway = false;

  /** @param follow is awaited before each further attempt: the service may be at another address by now. */
  constructor(service: Service, follow?: Follow) {
    this.#service = service;
    this.#follow = follow;
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
    this.#wasAway = true;
    this.#broke ??= performance.now();
    if (performance.now() - this.#broke > PATIENCE_MS) {
      throw error;
    }
    await this.#service.pause(this.#backoff.next(error), signal);
    await this.#follow?.(signal);
  }

  /**
   * HOME_LOST instead of an error by which a driver that was away does not know what it had before. Running rollouts are never
   * deleted, so its state is gone: its disk is a new one.
   */
  explained(error: unknown): unknown {
    if (!this.#wasAway || !(error instanceof NotFound) || !UNKNOWN.has(error.reason)) {
      return error;
    }
    const message = `${error.message}, which it had before it was away: its state is lost. Create it again`;
    return new NotFound(message, { reason: "HOME_LOST", metadata: error.metadata, cause: error });
  }
}

export interface TrajectoryOptions {
  /** Without calls and branches: what a trainer in a hurry wants. */
  readonly samplesOnly?: boolean;
  /** With the agent's request bodies. */
  readonly bodies?: boolean;
  /** With the alternatives of sampled tokens: 8 bytes for each. */
  readonly top?: boolean;
  /** With the rows of the tensors of calls and samples, such as routed experts: `data` of each in `message`. */
  readonly tensors?: boolean;
  /** With the files of the images of calls and samples: `data` of each in `message`. */
  readonly images?: boolean;
  readonly signal?: AbortSignal | undefined;
}

export class Driver {
  #service: Service;
  #client: Client<typeof RolloutService>;

  constructor(
    service: Service,
    readonly gate: Gate,
    /** Its own, where it is known. */
    readonly name = "",
    /** Says where the driver of this name is by now. */
    readonly cluster?: Cluster,
  ) {
    this.#service = service;
    this.#client = service.client(RolloutService);
  }

  get service(): Service {
    return this.#service;
  }

  get client(): Client<typeof RolloutService> {
    return this.#client;
  }

  /**
   * Goes to another address, if the other drivers list this one there: it was started again elsewhere. Rejects with ConfigurationError
   * MEMBER_NOT_TRUSTED: the token must not be sent there.
   */
  readonly follow: Follow = async (signal) => {
    if (this.cluster === undefined || this.name === "") {
      return;
    }
    const members = await this.cluster.members("driver", { signal });
    const now = members.find(({ name }) => name === this.name)?.service;
    if (now !== undefined && now.address !== this.#service.address) {
      this.#service = now;
      this.#client = now.client(RolloutService);
    }
  };

  async get(
    rolloutId: string,
    signal?: AbortSignal,
    repeatable: Repeatable = true,
    timeoutMs = GET_MS,
  ): Promise<Rollout> {
    const answer = await this.service.call((options) => this.client.getRollout({ rolloutId }, options), {
      signal,
      repeatable,
      timeoutMs,
    });
    return rolloutFrom(present(answer.rollout));
  }

  async getGroup(groupId: string, signal?: AbortSignal, repeatable: Repeatable = true): Promise<Group> {
    const answer = await this.service.call((options) => this.client.getGroup({ groupId }, options), {
      signal,
      repeatable,
    });
    return groupFrom(present(answer.group));
  }

  /** A rollout when it has ended. */
  async wait(rolloutId: string, signal?: AbortSignal): Promise<Rollout> {
    return longPoll(this.service, async (options) => {
      const { rollout } = await this.service.call((call) => this.client.waitRollout({ rolloutId }, call), options);
      return rollout?.outcome === undefined ? undefined : rolloutFrom(rollout);
    }, signal, this.follow);
  }

  /** A group when all of its rollouts have ended. */
  async waitGroup(groupId: string, signal?: AbortSignal): Promise<Group> {
    return longPoll(this.service, async (options) => {
      const { group } = await this.service.call((call) => this.client.waitGroup({ groupId }, call), options);
      return group?.ended ? groupFrom(group) : undefined;
    }, signal, this.follow);
  }

  /**
   * An ended rollout's trajectory. Rejects with DataLoss TENSOR_DAMAGED, IMAGE_DAMAGED: what came is not what its digest says; NotFound
   * MEDIA_UNKNOWN.
   */
  async trajectory(rolloutId: string, options: TrajectoryOptions = {}): Promise<Trajectory> {
    const { samplesOnly = false, bodies: includeBodies = false, top: includeTop = false, signal } = options;
    const request = { rolloutId, samplesOnly, includeBodies, includeTop };
    const fragments = await this.service.collect((call) => this.client.getTrajectory(request, call), signal);
    const whole = trajectoryFrom(fragments.map((fragment) => present(fragment.trajectory)));
    if (options.tensors) {
      await this.#addTensors(whole.message, signal);
    }
    if (options.images) {
      await this.#addImages(whole.message, signal);
    }
    return whole;
  }

  /** The file of one image of an ended rollout's prompts. Rejects with DataLoss IMAGE_DAMAGED; NotFound MEDIA_UNKNOWN. */
  async image(rolloutId: string, sha256: Uint8Array, signal?: AbortSignal): Promise<Uint8Array> {
    const request = { rolloutId, sha256 };
    const pieces = await this.service.collect((call) => this.client.getMedia(request, call), signal);
    const data = Buffer.concat(pieces.map(({ chunk }) => chunk));
    if (!isOf(data, sha256)) {
      throw new DataLoss(`An image of ${rolloutId} arrived damaged`, { reason: "IMAGE_DAMAGED" });
    }
    return data;
  }

  async #addImages({ rolloutId, calls, samples }: TrajectoryMessage, signal?: AbortSignal): Promise<void> {
    const files = new Map<string, Uint8Array>(); // each image once
    for (const media of [...calls, ...samples].flatMap((holder) => holder.media)) {
      const key = Buffer.from(media.sha256).toString("hex");
      media.data = files.get(key) ?? (await this.image(rolloutId, media.sha256, signal));
      files.set(key, media.data);
    }
  }

  async #addTensors({ rolloutId, calls, samples }: TrajectoryMessage, signal?: AbortSignal): Promise<void> {
    const rows = async (tensor: TokenTensor, holder: Holder) => {
      const { name, start } = tensor;
      const request = { rolloutId, name, start, holder };
      const pieces = await this.service.collect((call) => this.client.getTensor(request, call), signal);
      tensor.data = Buffer.concat(pieces.map((piece) => piece.tensor?.data ?? new Uint8Array()));
      if (!isOf(tensor.data, tensor.sha256)) {
        throw new DataLoss(`A tensor of ${rolloutId} arrived damaged`, { reason: "TENSOR_DAMAGED" });
      }
    };
    for (const { callId, completion } of calls) {
      for (const tensor of completion?.tensors ?? []) {
        await rows(tensor, { case: "callId", value: callId });
      }
    }
    for (const { sampleId, tensors } of samples) {
      for (const tensor of tensors) {
        await rows(tensor, { case: "sampleId", value: sampleId });
      }
    }
  }

  /** An ended rollout with its trajectory, undefined where the gate was never opened. */
  async result(rolloutId: string, options: TrajectoryOptions): Promise<RolloutResult> {
    const rollout = await this.get(rolloutId, options.signal, true, RESULT_MS);
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
  follow?: Follow,
): AsyncGenerator<A, void> {
  const patience = new Patience(service, follow);
  for (;;) {
    let error: PenstockError = new Unavailable(`${service.peer} ended the stream`, { reason: "STREAM_ENDED" });
    try {
      if (yield* watch(() => patience.sign())) {
        return;
      }
    } catch (broken) {
      if (!isBroken(broken)) {
        throw patience.explained(broken);
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
  follow?: Follow,
): Promise<A> {
  const patience = new Patience(service, follow);
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
        throw patience.explained(error);
      }
      await patience.pause(error, signal);
    }
  }
}

function isOf(data: Uint8Array, sha256: Uint8Array): boolean {
  return createHash("sha256").update(data).digest().equals(sha256);
}

/** An id for a creating request, used once. */
export function requestId(): string {
  return randomBytes(16).toString("hex");
}

/** A message that every service of ours puts in. */
export function present<T>(message: T | undefined): T {
  if (message === undefined) {
    throw new Unavailable("The service's answer is empty: is it one of Penstock's?", { reason: "PROTOCOL" });
  }
  return message;
}
