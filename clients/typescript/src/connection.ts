/** The connection: what `connect` gives, with a client for rollouts, one for groups, and the gate. */

import { randomBytes } from "node:crypto";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { Driver, present } from "./driver.js";
import { Agents } from "./driver/agents.js";
import { Terminals } from "./driver/terminals.js";
import { type ConnectOptions, type Endpoints, resolve, type ServiceName } from "./endpoints.js";
import type { ModelCall } from "./calls.js";
import { ConfigurationError } from "./errors.js";
import type { LeaseOptions } from "./gate/pulls.js";
import type { Outcome as OutcomeMessage, RolloutSummary } from "./gen/penstock/driver/v1/rollout_pb.js";
import type { RolloutFilterSchema } from "./gen/penstock/driver/v1/rollout_service_pb.js";
import { OperationsService, type ServerInfo } from "./gen/penstock/ops/v1/operations_service_pb.js";
import type { Trajectory as TrajectoryMessage } from "./gen/penstock/trajectory/v1/trajectory_pb.js";
import { type Abortable, GroupHandle, RolloutHandle } from "./handles.js";
import { Inference } from "./inference.js";
import {
  type Group,
  groupFrom,
  type Outcome,
  outcomeFrom,
  type Rollout,
  rolloutFrom,
  type Trajectory,
  trajectoryFrom,
} from "./results.js";
import { Service } from "./rpc.js";
import { requireNode } from "./runtime.js";
import { Sandboxes } from "./sandboxes/sandboxes.js";
import { Gate, type InterceptSession, type Selector, type SessionOptions } from "./sessions.js";
import { type RolloutOptions, specOf, type Task } from "./tasks.js";
import { duration } from "./wire.js";

/** A create: the driver checks what can be checked before it answers. */
const CREATE_MS = 120_000;

export interface CreateRolloutOptions extends RolloutOptions, Abortable {
  /** Chosen by you; absent = assigned. */
  readonly rolloutId?: string;
}

export interface CreateGroupOptions extends RolloutOptions, Abortable {
  /** Chosen by you, at most 120 characters; its rollouts are GROUP_ID-INDEX. Absent = assigned. */
  readonly groupId?: string;
  /** Further rollouts started at once, so that n results come although some fail. */
  readonly spares?: number;
  /** Results with which the group counts as complete. Default n. */
  readonly quorum?: number;
  /** What the others get from the quorum-th result on; absent = they are waited for. */
  readonly stragglerGraceMs?: number;
}

/** Every condition that is given must match. */
export interface RolloutFilter extends Abortable {
  readonly runId?: string;
  readonly groupId?: string;
  readonly labels?: Readonly<Record<string, string>>;
  readonly ended?: boolean;
  readonly taskId?: string;
  readonly agent?: string;
}

export interface ExportOptions extends Omit<RolloutFilter, "ended"> {
  /** With the agent's request bodies. */
  readonly bodies?: boolean;
  /** With the alternatives of sampled tokens: 8 bytes for each. */
  readonly top?: boolean;
}

/** `ps.rollouts`. */
export class Rollouts {
  readonly #driver: Driver;

  constructor(driver: Driver) {
    this.#driver = driver;
  }

  /**
   * Starts a rollout.
   *
   * Rejects with InvalidArgument: `violations` name the fields; NotFound AGENT_UNKNOWN; Unavailable: a service that it needs.
   */
  async create(task: Task, agent: string, options: CreateRolloutOptions = {}): Promise<RolloutHandle> {
    const { service, client } = this.#driver;
    const request = { requestId: requestId(), spec: specOf(task, agent, options), rolloutId: options.rolloutId ?? "" };
    const answer = await service.call((call) => client.createRollout(request, call), {
      signal: options.signal,
      timeoutMs: CREATE_MS,
      repeatable: true,
    });
    return new RolloutHandle(this.#driver, rolloutFrom(present(answer.rollout)));
  }

  /** A rollout as it stands. Rejects with NotFound ROLLOUT_UNKNOWN. */
  async get(rolloutId: string, { signal }: Abortable = {}): Promise<Rollout> {
    return this.#driver.get(rolloutId, signal);
  }

  /** A handle of a rollout that was started elsewhere. */
  async attach(rolloutId: string, options: Abortable = {}): Promise<RolloutHandle> {
    return new RolloutHandle(this.#driver, await this.get(rolloutId, options));
  }

  /** Rollouts, newest first. */
  list({ signal, ...conditions }: RolloutFilter = {}): AsyncGenerator<Rollout, void> {
    const { service, client } = this.#driver;
    return service.pages(
      (pageToken, call) => client.listRollouts({ filter: filterOf(conditions), pageToken }, call),
      ({ rollouts }) => rollouts.map(rolloutFrom),
      signal,
    );
  }

  /**
   * States of rollouts, first of all that match, then of each that changes, without end. A watch that broke is not taken up
   * again: the first messages of a new one have all that was missed.
   */
  async *watch({ signal, endedLimit, intervalMs, ...conditions }: WatchOptions = {}): AsyncGenerator<RolloutChanges, void> {
    const { service, client } = this.#driver;
    const request = { filter: filterOf(conditions), endedLimit, interval: duration(intervalMs) };
    for await (const message of service.stream((call) => client.watchRollouts(request, call), signal)) {
      const { rollouts, goneRolloutIds: gone, snapshotComplete: complete } = message;
      yield { rollouts, gone, complete };
    }
  }

  /** The trajectories of all ended rollouts that match, with their outcomes. Not taken up again where it breaks. */
  async *export(options: ExportOptions = {}): AsyncGenerator<{ trajectory: Trajectory; outcome: Outcome }, void> {
    const { signal, bodies = false, top = false, ...conditions } = options;
    const { service, client } = this.#driver;
    const request = { filter: filterOf(conditions), includeBodies: bodies, includeTop: top };
    let parts: TrajectoryMessage[] = [];
    let outcome: OutcomeMessage | undefined;
    const whole = () => ({ trajectory: trajectoryFrom(parts), outcome: outcomeFrom(present(outcome)) });
    for await (const part of service.stream((call) => client.exportTrajectories(request, call), signal)) {
      const trajectory = present(part.trajectory);
      if (parts[0] !== undefined && trajectory.rolloutId && trajectory.rolloutId !== parts[0].rolloutId) {
        yield whole();
        parts = [];
      }
      if (parts.length === 0) {
        outcome = part.outcome;
      }
      parts.push(trajectory);
    }
    if (parts.length > 0) {
      yield whole();
    }
  }
}

function filterOf({ labels, ...conditions }: RolloutFilter): MessageInitShape<typeof RolloutFilterSchema> {
  return { ...conditions, labels: { ...labels } };
}

/** Every condition that is given must match; see `RolloutFilter`. */
export interface WatchOptions extends RolloutFilter {
  /** How many of those that had ended before are given, the newest: 0 to 10,000. Default 1000. */
  readonly endedLimit?: number;
  /** Least time between two messages with changes: 100 ms to 1 min. Default 250. */
  readonly intervalMs?: number;
}

/** States of rollouts at one moment. */
export interface RolloutChanges {
  readonly rollouts: readonly RolloutSummary[];
  /** Those that were given and match no more, or were deleted. */
  readonly gone: readonly string[];
  /** True once all that existed at the start were given, this message included. */
  readonly complete: boolean;
}

/** `ps.groups`. */
export class Groups {
  readonly #driver: Driver;

  constructor(driver: Driver) {
    this.#driver = driver;
  }

  /**
   * Starts n rollouts of one spec, which share one prepared state.
   *
   * @param n wanted results, 1 to 256.
   */
  async create(task: Task, agent: string, n: number, options: CreateGroupOptions = {}): Promise<GroupHandle> {
    const { service, client } = this.#driver;
    const grace = duration(options.stragglerGraceMs);
    const request = {
      requestId: requestId(),
      spec: specOf(task, agent, options),
      size: n,
      spares: options.spares ?? 0,
      quorum: options.quorum,
      groupId: options.groupId ?? "",
      stragglers: grace && { grace },
    };
    const answer = await service.call((call) => client.createGroup(request, call), {
      signal: options.signal,
      timeoutMs: CREATE_MS,
      repeatable: true,
    });
    return new GroupHandle(this.#driver, groupFrom(present(answer.group)));
  }

  /** A handle of a group that was started elsewhere. Rejects with NotFound GROUP_UNKNOWN. */
  async attach(groupId: string, { signal }: Abortable = {}): Promise<GroupHandle> {
    return new GroupHandle(this.#driver, await this.#driver.getGroup(groupId, signal));
  }

  /** Groups, newest first. */
  list({ signal, runId }: Abortable & { readonly runId?: string } = {}): AsyncGenerator<Group, void> {
    const { service, client } = this.#driver;
    return service.pages(
      (pageToken, call) => client.listGroups({ runId, pageToken }, call),
      ({ groups }) => groups.map(groupFrom),
      signal,
    );
  }
}

/** The services; closed with `close()`, or by `await using`. It connects with its first calls. */
export class Penstock {
  readonly rollouts: Rollouts;
  readonly groups: Groups;
  readonly agents: Agents;
  readonly terminals: Terminals;
  readonly sandboxes: Sandboxes;
  readonly #endpoints: Endpoints;
  readonly #services = new Map<ServiceName, Service>();
  readonly #gate: Gate;
  #inference: Inference | undefined;

  constructor(endpoints: Endpoints) {
    this.#endpoints = endpoints;
    this.#gate = new Gate(this.service("interception"));
    const driver = new Driver(this.service("driver"), this.#gate);
    this.rollouts = new Rollouts(driver);
    this.groups = new Groups(driver);
    this.agents = new Agents(driver.service);
    this.terminals = new Terminals(driver.service);
    this.sandboxes = new Sandboxes(this.service("sandbox"), endpoints);
  }

  /** Generate, render, new weights, adapters. Throws ConfigurationError NO_INFERENCE: what this connects to has no inference service. */
  get inference(): Inference {
    if (!this.#endpoints.addresses.inference) {
      const message = "These services have no inference service: start one with `penstock up --model-dir DIR`";
      throw new ConfigurationError(message, { reason: "NO_INFERENCE" });
    }
    this.#inference ??= new Inference(this.service("inference"));
    return this.#inference;
  }

  /** One service, for what has no name here: `ps.service("sandbox").client(SandboxService)`, with the generated `SandboxService`. */
  service(name: ServiceName): Service {
    const service = this.#services.get(name) ?? new Service(name, this.#endpoints);
    this.#services.set(name, service);
    return service;
  }

  /**
   * A trainer's session, for the calls that match every condition given; close it, or `await using` it.
   *
   * Open it before the rollouts start or later: calls wait at the gate. The signal ends the opening.
   */
  async intercept(options: SessionOptions & Abortable = {}): Promise<InterceptSession> {
    return this.#gate.open(options, options.signal);
  }

  /**
   * Leases calls without a session, for programs that would rather not hold a stream; empty where none came in time. Answer each
   * before its lease ends. Repeated while the gate is away, and leases no call twice.
   */
  async leaseCalls(options: LeaseOptions & Selector = {}): Promise<ModelCall[]> {
    return this.#gate.lease(options);
  }

  /** Extends the leases of calls of `leaseCalls` by their length. @returns those whose leases have ended. */
  async extendLeases(calls: readonly ModelCall[], options: Abortable = {}): Promise<ModelCall[]> {
    return this.#gate.extend(calls, options);
  }

  /** The revision of the contract that a service serves, its features, and its limits. */
  async serverInfo(name: ServiceName, { signal }: Abortable = {}): Promise<ServerInfo> {
    const service = this.service(name);
    const client = service.client(OperationsService);
    const answer = await service.call((call) => client.getServerInfo({}, call), { signal, repeatable: true });
    return present(answer.server);
  }

  /** Closes sessions in order, then the connections; calls that are open end. */
  async close(): Promise<void> {
    await this.#gate.close();
    this.sandboxes.close();
    for (const service of this.#services.values()) {
      service.close();
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }
}

/** Where the services are: `endpoints.ts` says in which order that is looked for. Throws ConfigurationError. */
export function connect(options: ConnectOptions = {}): Penstock {
  requireNode();
  return new Penstock(resolve(options));
}

function requestId(): string {
  return randomBytes(16).toString("hex");
}
