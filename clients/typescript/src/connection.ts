/** The connection: what `connect` gives, with a client for rollouts, one for groups, and the gate. */

import type { MessageInitShape } from "@bufbuild/protobuf";
import { Cluster, ofSeveral } from "./cluster.js";
import { type Driver, present, requestId } from "./driver.js";
import { Agents } from "./driver/agents.js";
import type { RolloutChanges } from "./driver/changes.js";
import { Drivers } from "./driver/drivers.js";
import { changesOfAll, newestFirst, oneAfterAnother } from "./driver/merging.js";
import { Runs } from "./driver/runs.js";
import { Terminals } from "./driver/terminals.js";
import { type ConnectOptions, type Endpoints, resolve, type ServiceName } from "./endpoints.js";
import type { ModelCall } from "./calls.js";
import { ConfigurationError } from "./errors.js";
import type { LeaseOptions } from "./gate/pulls.js";
import type { Outcome as OutcomeMessage } from "./gen/penstock/driver/v1/rollout_pb.js";
import type { ExportTrajectoriesRequestSchema, RolloutFilterSchema } from "./gen/penstock/driver/v1/rollout_service_pb.js";
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
  readonly #drivers: Drivers;

  constructor(drivers: Drivers) {
    this.#drivers = drivers;
  }

  /**
   * Starts a rollout, at one of the drivers.
   *
   * Rejects with InvalidArgument: `violations` name the fields; NotFound AGENT_UNKNOWN; Unavailable: a service that it needs.
   */
  async create(task: Task, agent: string, options: CreateRolloutOptions = {}): Promise<RolloutHandle> {
    const { signal, rolloutId = "" } = options;
    const request = { requestId: requestId(), spec: specOf(task, agent, options), rolloutId };
    const make = ({ service, client }: Driver, repeatable: true | "unlessDraining") =>
      service.call((call) => client.createRollout(request, call), { signal, timeoutMs: CREATE_MS, repeatable });
    const [driver, answer] = await this.#drivers.create(rolloutId, make, signal);
    return new RolloutHandle(driver, rolloutFrom(present(answer.rollout)));
  }

  /** A rollout as it stands. Rejects with NotFound ROLLOUT_UNKNOWN. */
  async get(rolloutId: string, options: Abortable = {}): Promise<Rollout> {
    return (await this.attach(rolloutId, options)).info;
  }

  /** A handle of a rollout that was started elsewhere. */
  async attach(rolloutId: string, { signal }: Abortable = {}): Promise<RolloutHandle> {
    return new RolloutHandle(...(await this.#drivers.having(rolloutId, (driver, how) => driver.get(rolloutId, signal, how), signal)));
  }

  /** Rollouts of all drivers, newest first. Rejects with Unavailable, after those of all others, where a driver is away. */
  async *list({ signal, ...conditions }: RolloutFilter = {}): AsyncGenerator<Rollout, void> {
    const filter = filterOf(conditions);
    const drivers = await this.#drivers.all(signal);
    const lists = drivers.map(({ service, client }) =>
      service.pages(
        (pageToken, call) => client.listRollouts({ filter, pageToken }, call),
        ({ rollouts }) => rollouts.map(rolloutFrom),
        signal,
        ofSeveral(drivers),
      ),
    );
    yield* newestFirst(lists, ({ message }) => message.createTime);
  }

  /**
   * States of rollouts of all drivers, first of all that match, then of each that changes, without end. Drivers that do not answer
   * are named in `away`, and watched again. Where the only one or all of them went away, the watch rejects with Unavailable: the
   * first messages of a new one have all that was missed.
   */
  watch({ signal, endedLimit, intervalMs, ...conditions }: WatchOptions = {}): AsyncGenerator<RolloutChanges, void> {
    const request = { filter: filterOf(conditions), endedLimit, interval: duration(intervalMs) };
    async function* of({ service, client }: Driver, ended: AbortSignal): AsyncGenerator<RolloutChanges, void> {
      for await (const message of service.stream((call) => client.watchRollouts(request, call), ended)) {
        const { rollouts, goneRolloutIds: gone, snapshotComplete: complete } = message;
        yield { rollouts, gone, complete, away: [] };
      }
    }
    const watched = (driver: Driver) => ({
      address: driver.service.address,
      name: driver.name,
      changes: (ended: AbortSignal) => of(driver, ended),
    });
    return changesOfAll(async (looking) => (await this.#drivers.all(looking)).map(watched), signal, endedLimit);
  }

  /**
   * The trajectories of all ended rollouts that match, with their outcomes, driver by driver. Not taken up again where it breaks.
   * Rejects with Unavailable, after those of all others, where a driver is away.
   */
  async *export(options: ExportOptions = {}): AsyncGenerator<{ trajectory: Trajectory; outcome: Outcome }, void> {
    const { signal, bodies = false, top = false, ...conditions } = options;
    const request = { filter: filterOf(conditions), includeBodies: bodies, includeTop: top };
    yield* oneAfterAnother((await this.#drivers.all(signal)).map((driver) => exported(driver, request, signal)));
  }
}

/** What one driver exports. */
async function* exported(
  { service, client }: Driver,
  request: MessageInitShape<typeof ExportTrajectoriesRequestSchema>,
  signal: AbortSignal | undefined,
): AsyncGenerator<{ trajectory: Trajectory; outcome: Outcome }, void> {
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

/** `ps.groups`. */
export class Groups {
  readonly #drivers: Drivers;

  constructor(drivers: Drivers) {
    this.#drivers = drivers;
  }

  /**
   * Starts n rollouts of one spec, which share one prepared state, at one of the drivers.
   *
   * @param n wanted results, 1 to 256.
   */
  async create(task: Task, agent: string, n: number, options: CreateGroupOptions = {}): Promise<GroupHandle> {
    const { signal, groupId = "" } = options;
    const grace = duration(options.stragglerGraceMs);
    const request = {
      requestId: requestId(),
      spec: specOf(task, agent, options),
      size: n,
      spares: options.spares ?? 0,
      quorum: options.quorum,
      groupId,
      stragglers: grace && { grace },
    };
    const make = ({ service, client }: Driver, repeatable: true | "unlessDraining") =>
      service.call((call) => client.createGroup(request, call), { signal, timeoutMs: CREATE_MS, repeatable });
    const [driver, answer] = await this.#drivers.create(groupId, make, signal);
    return new GroupHandle(driver, groupFrom(present(answer.group)));
  }

  /** A handle of a group that was started elsewhere. Rejects with NotFound GROUP_UNKNOWN. */
  async attach(groupId: string, { signal }: Abortable = {}): Promise<GroupHandle> {
    return new GroupHandle(...(await this.#drivers.having(groupId, (driver, how) => driver.getGroup(groupId, signal, how), signal)));
  }

  /** Groups of all drivers, newest first; rejects as the list of rollouts. */
  async *list({ signal, runId }: Abortable & { readonly runId?: string } = {}): AsyncGenerator<Group, void> {
    const drivers = await this.#drivers.all(signal);
    const lists = drivers.map(({ service, client }) =>
      service.pages(
        (pageToken, call) => client.listGroups({ runId, pageToken }, call),
        ({ groups }) => groups.map(groupFrom),
        signal,
        ofSeveral(drivers),
      ),
    );
    yield* newestFirst(lists, ({ message }) => message.createTime);
  }
}

/** The services; closed with `close()`, or by `await using`. It connects with its first calls. */
export class Penstock {
  readonly rollouts: Rollouts;
  readonly groups: Groups;
  readonly runs: Runs;
  readonly agents: Agents;
  readonly terminals: Terminals;
  readonly sandboxes: Sandboxes;
  readonly #endpoints: Endpoints;
  readonly #services = new Map<ServiceName, Service>();
  readonly #cluster: Cluster;
  readonly #gate: Gate;
  #inference: Inference | undefined;

  constructor(endpoints: Endpoints) {
    this.#endpoints = endpoints;
    this.#cluster = new Cluster(endpoints, (kind) => this.service(kind));
    this.#gate = new Gate(this.#cluster, this.service("interception"));
    const drivers = new Drivers(this.#cluster, this.#gate);
    this.rollouts = new Rollouts(drivers);
    this.groups = new Groups(drivers);
    this.runs = new Runs(this.#cluster);
    this.agents = new Agents(this.service("driver"), this.#cluster);
    this.terminals = new Terminals(drivers);
    this.sandboxes = new Sandboxes(this.#cluster, endpoints);
  }

  /** Generate, render, new weights, adapters. Throws ConfigurationError NO_INFERENCE: what this connects to has no inference service. */
  get inference(): Inference {
    if (!this.#endpoints.addresses.inference) {
      const message = "These services have no inference service: start one with `penstock up --model-dir DIR`";
      throw new ConfigurationError(message, { reason: "NO_INFERENCE" });
    }
    this.#inference ??= new Inference(this.service("inference"), this.#cluster);
    return this.#inference;
  }

  /** One service, for what has no name here: `ps.service("sandbox").client(SandboxService)`, with the generated `SandboxService`. */
  service(name: ServiceName): Service {
    const service = this.#services.get(name) ?? new Service(name, this.#endpoints);
    this.#services.set(name, service);
    return service;
  }

  /**
   * A trainer's session at all gates, for the calls that match every condition given; close it, or `await using` it.
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
    this.#cluster.close();
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
