/** Sandboxes of your own, without agents or models. */

import { randomBytes } from "node:crypto";
import { create, type MessageInitShape, toBinary } from "@bufbuild/protobuf";
import type { Client } from "@connectrpc/connect";
import { type Cluster, type Member, ofSeveral } from "../cluster.js";
import { present } from "../driver.js";
import { newestFirst } from "../driver/merging.js";
import type { Endpoints } from "../endpoints.js";
import { FailedPrecondition, type PenstockError, Unavailable } from "../errors.js";
import type { RunResult } from "../gen/penstock/sandbox/v1/process_service_pb.js";
import type { Backend, DataPlane, Sandbox, SandboxSpecSchema } from "../gen/penstock/sandbox/v1/sandbox_pb.js";
import {
  CreateSandboxRequestSchema,
  type CreateSandboxResponse,
  type ForkSandboxesRequestSchema,
  type PrepareSnapshotRequest,
  PrepareSnapshotRequestSchema,
  SandboxService,
  type Snapshot,
} from "../gen/penstock/sandbox/v1/sandbox_service_pb.js";
import type { Abortable } from "../handles.js";
import type { Service } from "../rpc.js";
import { type Command, commandOf, type Files, filesOf } from "../tasks.js";
import { duration } from "../wire.js";
import { dataPlane } from "./planes.js";
import { SandboxHandle } from "./sandbox.js";

const CREATE_MS = 300_000;
const DELETE_MS = 60_000;
/** Most of a failed setup command's output in the error, in bytes. */
const NOTE_BYTES = 2000;

/** A sandbox; every field is optional, and those of the proto are as its comments say. */
export type SandboxSpec = Omit<Exclude<MessageInitShape<typeof SandboxSpecSchema>, { $typeName: string }>, "lease"> & {
  /** How long it lives without `renew`. Default 15 min. */
  readonly leaseMs?: number;
};

/** One child of a fork: a sandbox, or why there is none (Unavailable where trying again may help). */
export type Fork = { readonly index: number } & (
  | { readonly sandbox: SandboxHandle; readonly failure?: never }
  | { readonly sandbox?: never; readonly failure: PenstockError }
);

export function specOfSandbox({ leaseMs, ...rest }: SandboxSpec): MessageInitShape<typeof SandboxSpecSchema> {
  return { ...rest, lease: duration(leaseMs) };
}

/** One sandbox service. */
export interface SandboxNode {
  readonly service: Service;
  readonly client: Client<typeof SandboxService>;
}

/** `ps.sandboxes`: of all sandbox services that the driver lists. */
export class Sandboxes {
  readonly #cluster: Cluster;
  readonly #endpoints: Endpoints;
  /** Services of sandboxes that live elsewhere. */
  readonly #planes = new Set<Service>();

  constructor(cluster: Cluster, endpoints: Endpoints) {
    this.#cluster = cluster;
    this.#endpoints = endpoints;
  }

  /**
   * Makes a sandbox; fulfilled when it is ready. The services take turns; one with toolboxes is at the connection's service, which has
   * them, one of a snapshot at the snapshot's. It lives until `delete`, or until its lease ends.
   *
   * Rejects with FailedPrecondition CAPABILITY_MISSING, BACKEND_UNAVAILABLE; NotFound SNAPSHOT_UNKNOWN; ResourceExhausted
   * SANDBOX_LIMIT, OWNER_LIMIT.
   */
  async create(spec: SandboxSpec = {}, { signal }: Abortable = {}): Promise<SandboxHandle> {
    const request = create(CreateSandboxRequestSchema, { requestId: randomBytes(16).toString("hex"), spec: specOfSandbox(spec) });
    const make = (member: Member, repeatable: true | "unlessDraining") => {
      const { service, client } = nodeOf(member);
      return service.call((call) => client.createSandbox(request, call), { signal, timeoutMs: CREATE_MS, repeatable });
    };
    const base = request.spec?.base?.base;
    let member: Member;
    let answer: CreateSandboxResponse;
    if (request.spec?.toolboxIds.length) {
      member = this.#cluster.given("sandbox");
      answer = await make(member, true);
    } else if (base?.case === "snapshotId") {
      member = await this.#cluster.home("sandbox", base.value, signal);
      answer = await make(member, true);
    } else {
      [member, answer] = await this.#cluster.create("sandbox", "", make, signal);
    }
    return this.#handle(nodeOf(member), present(answer.sandbox), answer.dataPlane);
  }

  /** A handle of a sandbox that was made elsewhere. Rejects with NotFound SANDBOX_UNKNOWN. */
  async attach(sandboxId: string, { signal }: Abortable = {}): Promise<SandboxHandle> {
    const node = await this.#home(sandboxId, signal);
    const options = { signal, repeatable: true };
    const found = await node.service.call((call) => node.client.getSandbox({ sandboxId }, call), options);
    const where = await node.service.call((call) => node.client.getDataPlane({ sandboxId }, call), options);
    return this.#handle(node, present(found.sandbox), where.dataPlane);
  }

  /**
   * Sandboxes of all services with all these labels, newest first. Rejects with Unavailable, after those of all others, where a service
   * is away.
   */
  async *list(
    options: Abortable & { readonly labels?: Readonly<Record<string, string>> } = {},
  ): AsyncGenerator<Sandbox, void> {
    const { labels, signal } = options;
    const members = await this.#cluster.members("sandbox", { orGiven: true, signal });
    const lists = members.map(nodeOf).map(({ service, client }) =>
      service.pages(
        (pageToken, call) => client.listSandboxes({ labels: { ...labels }, pageToken }, call),
        ({ sandboxes }) => sandboxes,
        signal,
        ofSeveral(members),
      ),
    );
    yield* newestFirst(lists, ({ createTime }) => createTime);
  }

  /** The backends of the connection's own service, and what each can do on its machine. */
  async backends({ signal }: Abortable = {}): Promise<readonly Backend[]> {
    const { service, client } = nodeOf(this.#cluster.given("sandbox"));
    return (await service.call((call) => client.listBackends({}, call), { signal, repeatable: true })).backends;
  }

  /**
   * The snapshot of a sandbox with these files after this setup; made once and shared by all callers, at one of the services.
   *
   * Rejects with FailedPrecondition SETUP_FAILED, with the end of the command's output; CAPABILITY_MISSING.
   */
  async prepare(
    spec: SandboxSpec = {},
    options: Abortable & { readonly files?: Files; readonly setup?: readonly Command[] } = {},
  ): Promise<Snapshot> {
    const { files, setup = [], signal } = options;
    const wanted = { sandbox: specOfSandbox(spec), files: filesOf(files), setup: setup.map(commandOf) };
    const request = create(PrepareSnapshotRequestSchema, { spec: wanted });
    if (request.spec?.sandbox?.toolboxIds.length) {
      return prepared(nodeOf(this.#cluster.given("sandbox")), request, signal);
    }
    // Every client prepares equal states at the same service.
    const key = Buffer.from(toBinary(PrepareSnapshotRequestSchema, request)).toString("hex");
    const make = (member: Member) => prepared(nodeOf(member), request, signal);
    const [, snapshot] = await this.#cluster.create("sandbox", key, make, signal);
    return snapshot;
  }

  /** Makes `count` sandboxes (1 to 256) from a snapshot, in the order in which they are ready. Rejects with NotFound SNAPSHOT_UNKNOWN. */
  async *fork(snapshotId: string, count: number, options: ForkOptions = {}): AsyncGenerator<Fork, void> {
    const node = await this.#home(snapshotId, options.signal);
    yield* this.forks(node, { case: "snapshotId", value: snapshotId }, count, options);
  }

  /** The snapshots of all services, newest first; rejects as the list of sandboxes. */
  async *snapshots({ signal }: Abortable = {}): AsyncGenerator<Snapshot, void> {
    const members = await this.#cluster.members("sandbox", { orGiven: true, signal });
    const lists = members.map(nodeOf).map(({ service, client }) =>
      service.pages(
        (pageToken, call) => client.listSnapshots({ pageToken }, call),
        ({ snapshots }) => snapshots,
        signal,
        ofSeveral(members),
      ),
    );
    yield* newestFirst(lists, ({ createTime }) => createTime);
  }

  /** Deletes a snapshot; sandboxes made from it live on. May be repeated. */
  async deleteSnapshot(snapshotId: string, { signal }: Abortable = {}): Promise<void> {
    const { service, client } = await this.#home(snapshotId, signal);
    const options = { signal, timeoutMs: DELETE_MS, repeatable: true };
    await service.call((call) => client.deleteSnapshot({ snapshotId }, call), options);
  }

  /** For the handles: the children of a snapshot or of a live sandbox. */
  async *forks(node: SandboxNode, source: Source, count: number, { child = {}, signal }: ForkOptions): AsyncGenerator<Fork, void> {
    const request = { requestId: randomBytes(16).toString("hex"), source, count, spec: specOfSandbox(child) };
    for await (const answer of node.service.stream((call) => node.client.forkSandboxes(request, call), signal)) {
      const { index, result } = answer;
      if (result.case === "failure") {
        const { reason, message, retriable } = result.value;
        const kind = retriable ? Unavailable : FailedPrecondition;
        yield { index, failure: new kind(message, { reason }) };
      } else {
        const message = present(result.case === "sandbox" ? result.value : undefined);
        yield { index, sandbox: this.#handle(node, message, answer.dataPlane) };
      }
    }
  }

  /** For the handles: a sandbox is gone, and so is the way to it. */
  forget(service: Service): void {
    if (this.#planes.delete(service)) {
      service.close();
    }
  }

  /** Closes the connections to sandboxes elsewhere. */
  close(): void {
    for (const service of this.#planes) {
      this.forget(service);
    }
  }

  async #home(id: string, signal: AbortSignal | undefined): Promise<SandboxNode> {
    return nodeOf(await this.#cluster.home("sandbox", id, signal));
  }

  #handle(node: SandboxNode, message: Sandbox, plane: DataPlane | undefined): SandboxHandle {
    if (plane === undefined) {
      return new SandboxHandle(this, node, message, node.service);
    }
    const service = dataPlane(node, this.#endpoints, message.sandboxId, plane);
    this.#planes.add(service);
    return new SandboxHandle(this, node, message, service);
  }
}

function nodeOf({ service }: Member): SandboxNode {
  return { service, client: service.client(SandboxService) };
}

async function prepared(
  { service, client }: SandboxNode,
  request: PrepareSnapshotRequest,
  signal: AbortSignal | undefined,
): Promise<Snapshot> {
  let ran: RunResult | undefined;
  try {
    for await (const { event } of service.stream((call) => client.prepareSnapshot(request, call), signal)) {
      if (event.case === "commandFinished") {
        ran = event.value.result;
      } else if (event.case === "snapshot") {
        return event.value;
      }
    }
  } catch (error) {
    if (!(error instanceof FailedPrecondition) || error.reason !== "SETUP_FAILED" || ran === undefined) {
      throw error;
    }
    const output = Buffer.concat([ran.stdout, ran.stderr]).subarray(-NOTE_BYTES).toString();
    const { reason, metadata } = error;
    throw new FailedPrecondition(`${error.message}\n${output}`.trimEnd(), { reason, metadata, cause: error });
  }
  throw new Unavailable("The service ended the preparation without a snapshot", { reason: "STREAM_ENDED" });
}

export interface ForkOptions extends Abortable {
  /** Lease, labels, network and further environment of the children. */
  readonly child?: SandboxSpec;
}

type Source = NonNullable<MessageInitShape<typeof ForkSandboxesRequestSchema>["source"]>;
