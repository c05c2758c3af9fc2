/** Sandboxes of your own, without agents or models. */

import { randomBytes } from "node:crypto";
import type { MessageInitShape } from "@bufbuild/protobuf";
import type { Client } from "@connectrpc/connect";
import { present } from "../driver.js";
import { checked, type Endpoints } from "../endpoints.js";
import { FailedPrecondition, type PenstockError, Unavailable } from "../errors.js";
import type { RunResult } from "../gen/penstock/sandbox/v1/process_service_pb.js";
import type { Backend, DataPlane, Sandbox, SandboxSpecSchema } from "../gen/penstock/sandbox/v1/sandbox_pb.js";
import {
  type ForkSandboxesRequestSchema,
  SandboxService,
  type Snapshot,
} from "../gen/penstock/sandbox/v1/sandbox_service_pb.js";
import type { Abortable } from "../handles.js";
import { Service } from "../rpc.js";
import { type Command, commandOf, type Files, filesOf } from "../tasks.js";
import { duration } from "../wire.js";
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

/** `ps.sandboxes`. */
export class Sandboxes {
  readonly service: Service;
  readonly client: Client<typeof SandboxService>;
  readonly #endpoints: Endpoints;
  /** Services of sandboxes that live elsewhere. */
  readonly #planes = new Set<Service>();

  constructor(service: Service, endpoints: Endpoints) {
    this.service = service;
    this.client = service.client(SandboxService);
    this.#endpoints = endpoints;
  }

  /**
   * Makes a sandbox; fulfilled when it is ready. It lives until `delete`, or until its lease ends.
   *
   * Rejects with FailedPrecondition CAPABILITY_MISSING, BACKEND_UNAVAILABLE; NotFound SNAPSHOT_UNKNOWN; ResourceExhausted
   * SANDBOX_LIMIT, OWNER_LIMIT.
   */
  async create(spec: SandboxSpec = {}, { signal }: Abortable = {}): Promise<SandboxHandle> {
    const request = { requestId: randomBytes(16).toString("hex"), spec: specOfSandbox(spec) };
    const answer = await this.service.call((call) => this.client.createSandbox(request, call), {
      signal,
      timeoutMs: CREATE_MS,
      repeatable: true,
    });
    return this.#handle(present(answer.sandbox), answer.dataPlane);
  }

  /** A handle of a sandbox that was made elsewhere. Rejects with NotFound SANDBOX_UNKNOWN. */
  async attach(sandboxId: string, { signal }: Abortable = {}): Promise<SandboxHandle> {
    const options = { signal, repeatable: true };
    const found = await this.service.call((call) => this.client.getSandbox({ sandboxId }, call), options);
    const where = await this.service.call((call) => this.client.getDataPlane({ sandboxId }, call), options);
    return this.#handle(present(found.sandbox), where.dataPlane);
  }

  /** Sandboxes with all these labels, newest first. */
  list(options: Abortable & { readonly labels?: Readonly<Record<string, string>> } = {}): AsyncGenerator<Sandbox, void> {
    const { labels, signal } = options;
    return this.service.pages(
      (pageToken, call) => this.client.listSandboxes({ labels: { ...labels }, pageToken }, call),
      ({ sandboxes }) => sandboxes,
      signal,
    );
  }

  /** The service's backends and what each can do on its machine. */
  async backends({ signal }: Abortable = {}): Promise<readonly Backend[]> {
    const options = { signal, repeatable: true };
    return (await this.service.call((call) => this.client.listBackends({}, call), options)).backends;
  }

  /**
   * The snapshot of a sandbox with these files after this setup; made once and shared by all callers.
   *
   * Rejects with FailedPrecondition SETUP_FAILED, with the end of the command's output; CAPABILITY_MISSING.
   */
  async prepare(
    spec: SandboxSpec = {},
    options: Abortable & { readonly files?: Files; readonly setup?: readonly Command[] } = {},
  ): Promise<Snapshot> {
    const { files, setup = [], signal } = options;
    const request = { spec: { sandbox: specOfSandbox(spec), files: filesOf(files), setup: setup.map(commandOf) } };
    let ran: RunResult | undefined;
    try {
      for await (const { event } of this.service.stream((call) => this.client.prepareSnapshot(request, call), signal)) {
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

  /** Makes `count` sandboxes (1 to 256) from a snapshot, in the order in which they are ready. Rejects with NotFound SNAPSHOT_UNKNOWN. */
  fork(snapshotId: string, count: number, options: ForkOptions = {}): AsyncGenerator<Fork, void> {
    return this.forks({ case: "snapshotId", value: snapshotId }, count, options);
  }

  /** The snapshots that exist, newest first. */
  snapshots({ signal }: Abortable = {}): AsyncGenerator<Snapshot, void> {
    return this.service.pages(
      (pageToken, call) => this.client.listSnapshots({ pageToken }, call),
      ({ snapshots }) => snapshots,
      signal,
    );
  }

  /** Deletes a snapshot; sandboxes made from it live on. May be repeated. */
  async deleteSnapshot(snapshotId: string, { signal }: Abortable = {}): Promise<void> {
    const options = { signal, timeoutMs: DELETE_MS, repeatable: true };
    await this.service.call((call) => this.client.deleteSnapshot({ snapshotId }, call), options);
  }

  /** For the handles: the children of a snapshot or of a live sandbox. */
  async *forks(source: Source, count: number, { child = {}, signal }: ForkOptions): AsyncGenerator<Fork, void> {
    const request = { requestId: randomBytes(16).toString("hex"), source, count, spec: specOfSandbox(child) };
    for await (const answer of this.service.stream((call) => this.client.forkSandboxes(request, call), signal)) {
      const { index, result } = answer;
      if (result.case === "failure") {
        const { reason, message, retriable } = result.value;
        const kind = retriable ? Unavailable : FailedPrecondition;
        yield { index, failure: new kind(message, { reason }) };
      } else {
        const message = present(result.case === "sandbox" ? result.value : undefined);
        yield { index, sandbox: this.#handle(message, answer.dataPlane) };
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

  #handle(message: Sandbox, plane: DataPlane | undefined): SandboxHandle {
    if (plane === undefined) {
      return new SandboxHandle(this, message, this.service);
    }
    const { addresses, tls } = this.#endpoints;
    const token = { token: plane.token || undefined, origin: "the sandbox service, with this sandbox" };
    const service = new Service("sandbox", checked({ ...addresses, sandbox: plane.address }, token, tls));
    this.#planes.add(service);
    return new SandboxHandle(this, message, service);
  }
}

export interface ForkOptions extends Abortable {
  /** Lease, labels, network and further environment of the children. */
  readonly child?: SandboxSpec;
}

type Source = NonNullable<MessageInitShape<typeof ForkSandboxesRequestSchema>["source"]>;
