/** One sandbox: its commands, its files, its forks, its deletion. */

import { createHash, randomBytes } from "node:crypto";
import type { MessageInitShape } from "@bufbuild/protobuf";
import type { Client } from "@connectrpc/connect";
import { present } from "../driver.js";
import { DataLoss } from "../errors.js";
import { type FileInfo, FileService, type WriteFileRequestSchema } from "../gen/penstock/sandbox/v1/file_service_pb.js";
import type { Process, RunResult } from "../gen/penstock/sandbox/v1/process_service_pb.js";
import { ProcessService } from "../gen/penstock/sandbox/v1/process_service_pb.js";
import type { NetworkPolicySchema, Sandbox } from "../gen/penstock/sandbox/v1/sandbox_pb.js";
import type { GetStatsResponse } from "../gen/penstock/sandbox/v1/sandbox_service_pb.js";
import type { Abortable } from "../handles.js";
import type { Service } from "../rpc.js";
import { type Command, commandOf } from "../tasks.js";
import { duration, time } from "../wire.js";
import { ProcessHandle } from "./processes.js";
import type { Fork, ForkOptions, SandboxNode, Sandboxes } from "./sandboxes.js";

const CHUNK_BYTES = 256 * 1024;
const DELETE_MS = 60_000;

/** The files that differ from a sandbox's base. */
export interface Diff {
  /** A POSIX pax archive of those that are new or changed; every pipe, socket or device is a pipe in it. */
  readonly tar: Uint8Array;
  /** Absolute. Bytes that are not UTF-8 are replaced. */
  readonly deletedPaths: readonly string[];
}

export interface RunOptions extends Abortable {
  /** Written to the command's standard input, which is then closed. */
  readonly stdin?: Uint8Array | string;
  /** Of each output, half of it the end. Default 1 MiB, at most 10 MiB. */
  readonly outputLimitBytes?: number;
}

export interface StartOptions extends Abortable {
  /** Whether `write` will be used; else standard input is empty. */
  readonly stdin?: boolean;
  /** A terminal of this size: one output, and standard input is the terminal. */
  readonly pty?: { readonly rows: number; readonly columns: number };
  /** Kept of each output, from its beginning. Default 64 MiB. */
  readonly outputLimitBytes?: number;
}

/**
 * One sandbox. It lives until `delete` (or `await using`), or until its lease ends.
 *
 * Its methods reject with NotFound SANDBOX_UNKNOWN; FailedPrecondition SANDBOX_LOST, SANDBOX_PAUSED.
 */
export class SandboxHandle {
  readonly #sandboxes: Sandboxes;
  readonly #home: SandboxNode;
  readonly #data: Service;
  readonly #processes: Client<typeof ProcessService>;
  readonly #files: Client<typeof FileService>;
  /** As it was when the handle was made: backend, home, working directory. */
  readonly info: Sandbox;

  /** @param home the service that made it. @param data where its processes and files are served. */
  constructor(sandboxes: Sandboxes, home: SandboxNode, info: Sandbox, data: Service) {
    this.#sandboxes = sandboxes;
    this.#home = home;
    this.#data = data;
    this.#processes = data.client(ProcessService);
    this.#files = data.client(FileService);
    this.info = info;
  }

  get sandboxId(): string {
    return this.info.sandboxId;
  }

  /** Runs a small command to its end. One that times out exits as TIMED_OUT; aborting kills it. Not repeated. */
  async run(command: Command, { stdin = "", outputLimitBytes, signal }: RunOptions = {}): Promise<RunResult> {
    const request = {
      sandboxId: this.sandboxId,
      command: commandOf(command),
      stdin: bytesOf(stdin),
      outputLimitBytes: outputLimitBytes === undefined ? undefined : BigInt(outputLimitBytes),
      processId: randomBytes(16).toString("hex"),
    };
    const answer = await this.#data.call((call) => this.#processes.run(request, call), { signal, timeoutMs: 0 });
    return present(answer.result);
  }

  /** Starts a process; fulfilled when it runs. A program that cannot be started exits as START_FAILED. */
  async start(command: Command, options: StartOptions = {}): Promise<ProcessHandle> {
    const { stdin = false, pty, outputLimitBytes, signal } = options;
    const request = {
      sandboxId: this.sandboxId,
      processId: randomBytes(16).toString("hex"),
      command: commandOf(command),
      stdin,
      pty,
      outputLimitBytes: outputLimitBytes === undefined ? undefined : BigInt(outputLimitBytes),
    };
    const { process } = await this.#data.call((call) => this.#processes.startProcess(request, call), { signal, repeatable: true });
    return new ProcessHandle(this.#data, this.sandboxId, request.processId, process?.stdinOffset);
  }

  /** A handle of a process that was started before. */
  process(processId: string): ProcessHandle {
    return new ProcessHandle(this.#data, this.sandboxId, processId);
  }

  /** Its processes, newest first. */
  processes({ signal }: Abortable = {}): AsyncGenerator<Process, void> {
    const { sandboxId } = this;
    return this.#data.pages(
      (pageToken, call) => this.#processes.listProcesses({ sandboxId, pageToken }, call),
      ({ processes }) => processes,
      signal,
    );
  }

  /** A file's content. Rejects with NotFound FILE_NOT_FOUND; DataLoss DIGEST_MISMATCH: it was damaged on the way. */
  async readFile(path: string, { signal }: Abortable = {}): Promise<Uint8Array> {
    const request = { sandboxId: this.sandboxId, path };
    const parts = await this.#data.collect((call) => this.#files.readFile(request, call), signal);
    return whole(
      path,
      parts.map(({ event }) => (event.case === "chunk" ? event.value : undefined)),
      parts.map(({ event }) => (event.case === "sha256" ? event.value : undefined)),
    );
  }

  /**
   * Writes a whole file at once and makes its parent directories; only the signal ends it early.
   * The mode is permission bits, default 0o644.
   */
  async writeFile(
    path: string,
    content: Uint8Array | string,
    { mode, signal }: Abortable & { readonly mode?: number } = {},
  ): Promise<void> {
    const data = bytesOf(content);
    const { sandboxId } = this;
    const sha256 = createHash("sha256").update(data).digest();
    async function* frames(): AsyncGenerator<MessageInitShape<typeof WriteFileRequestSchema>, void> {
      yield { frame: { case: "start", value: { sandboxId, path, mode } } };
      for (const value of chunks(data)) {
        yield { frame: { case: "chunk", value } };
      }
      yield { frame: { case: "end", value: { sha256 } } };
    }
    await this.#data.push((call) => this.#files.writeFile(frames(), call), { signal, timeoutMs: 0 });
  }

  /**
   * A directory as a tar (POSIX pax), of at most `maxBytes` (default 1 GiB).
   *
   * Rejects with ResourceExhausted TREE_TOO_LARGE; FailedPrecondition FILE_REPLACED; DataLoss DIGEST_MISMATCH.
   */
  async readTree(path: string, { maxBytes, signal }: Abortable & { readonly maxBytes?: number } = {}): Promise<Uint8Array> {
    const request = { sandboxId: this.sandboxId, path, maxBytes: whole64(maxBytes) };
    const parts = await this.#data.collect((call) => this.#files.readTree(request, call), signal);
    return whole(
      path,
      parts.map(({ event }) => (event.case === "tarChunk" ? event.value : undefined)),
      parts.map(({ event }) => (event.case === "sha256" ? event.value : undefined)),
    );
  }

  /**
   * Unpacks a tar into a directory, which is made where it is missing; only the signal ends it early.
   *
   * Rejects with InvalidArgument TAR_MEMBER_REFUSED.
   */
  async writeTree(path: string, tar: Uint8Array, { signal }: Abortable = {}): Promise<void> {
    const { sandboxId } = this;
    const sha256 = createHash("sha256").update(tar).digest();
    async function* frames() {
      yield { frame: { case: "start" as const, value: { sandboxId, path } } };
      for (const value of chunks(tar)) {
        yield { frame: { case: "tarChunk" as const, value } };
      }
      yield { frame: { case: "end" as const, value: { sha256 } } };
    }
    await this.#data.push((call) => this.#files.writeTree(frames(), call), { signal, timeoutMs: 0 });
  }

  /** A directory's entries, sorted by name. */
  files(path = ".", { signal }: Abortable = {}): AsyncGenerator<FileInfo, void> {
    const { sandboxId } = this;
    return this.#data.pages(
      (pageToken, call) => this.#files.list({ sandboxId, path, pageToken }, call),
      ({ entries }) => entries,
      signal,
    );
  }

  /** The metadata of a file; symbolic links are not followed. Rejects with NotFound FILE_NOT_FOUND. */
  async stat(path: string, { signal }: Abortable = {}): Promise<FileInfo> {
    const request = { sandboxId: this.sandboxId, path };
    const answer = await this.#data.call((call) => this.#files.stat(request, call), { signal, repeatable: true });
    return present(answer.info);
  }

  /** Makes a directory and its parents; one that exists is a success. */
  async makeDirectory(path: string, { signal }: Abortable = {}): Promise<void> {
    const request = { sandboxId: this.sandboxId, path };
    await this.#data.call((call) => this.#files.makeDirectory(request, call), { signal, repeatable: true });
  }

  /** Removes a file or, recursively, a directory; a missing path is a success. Rejects with FailedPrecondition DIRECTORY_NOT_EMPTY. */
  async remove(path: string, options: Abortable & { readonly recursive?: boolean } = {}): Promise<void> {
    const { recursive = false, signal } = options;
    const request = { sandboxId: this.sandboxId, path, recursive };
    await this.#data.call((call) => this.#files.remove(request, call), { signal, repeatable: true });
  }

  /** Extends its lease to this long from now. @returns the end that was granted: the operator's max_lifetime_s may come first. */
  async renew(leaseMs: number, { signal }: Abortable = {}): Promise<Date> {
    const { service, client } = this.#home;
    const request = { sandboxId: this.sandboxId, lease: duration(leaseMs) };
    const answer = await service.call((call) => client.renewLease(request, call), { signal, repeatable: true });
    return present(time(answer.expireTime));
  }

  /**
   * Restricts what it may reach; absent = nothing. Connections that are no longer allowed are cut.
   *
   * Rejects with FailedPrecondition POLICY_WIDER: a network can only be narrowed; CAPABILITY_MISSING.
   */
  async narrowNetwork(network?: MessageInitShape<typeof NetworkPolicySchema>, { signal }: Abortable = {}): Promise<void> {
    const { service, client } = this.#home;
    const request = {
      sandboxId: this.sandboxId,
      network: network ?? { policy: { case: "none" as const, value: {} } },
    };
    await service.call((call) => client.setNetworkPolicy(request, call), { signal, repeatable: true });
  }

  /** What it uses now and used at most; an absent figure is unknown to its backend. */
  async stats({ signal }: Abortable = {}): Promise<GetStatsResponse> {
    const { service, client } = this.#home;
    const request = { sandboxId: this.sandboxId };
    return service.call((call) => client.getStats(request, call), { signal, repeatable: true });
  }

  /** Freezes every process; fulfilled when all are frozen. Rejects with FailedPrecondition CAPABILITY_MISSING; Unavailable PAUSE_FAILED. */
  async pause({ signal }: Abortable = {}): Promise<void> {
    const { service, client } = this.#home;
    const request = { sandboxId: this.sandboxId };
    await service.call((call) => client.pauseSandbox(request, call), { signal, repeatable: true });
  }

  /** Thaws it. */
  async resume({ signal }: Abortable = {}): Promise<void> {
    const { service, client } = this.#home;
    const request = { sandboxId: this.sandboxId };
    await service.call((call) => client.resumeSandbox(request, call), { signal, repeatable: true });
  }

  /**
   * What differs from its base, in memory; the tar has at most `maxBytes` (default 1 GiB).
   *
   * Rejects with FailedPrecondition CAPABILITY_MISSING, FILE_REPLACED; ResourceExhausted TREE_TOO_LARGE; DataLoss DIGEST_MISMATCH.
   */
  async diff({ maxBytes, signal }: Abortable & { readonly maxBytes?: number } = {}): Promise<Diff> {
    const { service, client } = this.#home;
    const request = { sandboxId: this.sandboxId, maxBytes: whole64(maxBytes) };
    const parts = await service.collect((call) => client.diffSandbox(request, call), signal);
    const ends = parts.map(({ event }) => (event.case === "end" ? event.value : undefined));
    const tar = whole(
      "the diff",
      parts.map(({ event }) => (event.case === "tarChunk" ? event.value : undefined)),
      ends.map((end) => end?.sha256),
    );
    const decoder = new TextDecoder();
    const deletedPaths = ends.flatMap((end) =>
      end === undefined ? [] : [...end.deletedPaths, ...end.rawDeletedPaths.map((path) => decoder.decode(path))],
    );
    return { tar, deletedPaths };
  }

  /**
   * Makes `count` sandboxes (1 to 256) with its files of now, without its processes and /tmp, in the order in which they are ready.
   *
   * Rejects with FailedPrecondition CAPABILITY_MISSING: its backend cannot fork a live sandbox.
   */
  fork(count: number, options: ForkOptions = {}): AsyncGenerator<Fork, void> {
    return this.#sandboxes.forks(this.#home, { case: "sandboxId", value: this.sandboxId }, count, options);
  }

  /** Kills everything in it and removes it. May be repeated. */
  async delete({ signal }: Abortable = {}): Promise<void> {
    const { service, client } = this.#home;
    const request = { sandboxId: this.sandboxId };
    const options = { signal, timeoutMs: DELETE_MS, repeatable: true };
    try {
      await service.call((call) => client.deleteSandbox(request, call), options);
    } finally {
      this.#sandboxes.forget(this.#data);
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.delete();
  }
}

/** Content in pieces that the protocol takes. */
export function* chunks(content: Uint8Array): Generator<Uint8Array, void> {
  for (let start = 0; start < content.length; start += CHUNK_BYTES) {
    yield content.subarray(start, start + CHUNK_BYTES);
  }
}

/** Text in UTF-8; bytes as they are. */
export function bytesOf(content: Uint8Array | string): Uint8Array {
  return typeof content === "string" ? new TextEncoder().encode(content) : content;
}

function whole(
  what: string,
  parts: readonly (Uint8Array | undefined)[],
  digests: readonly (Uint8Array | undefined)[],
): Uint8Array {
  const content = Buffer.concat(parts.filter((part) => part !== undefined));
  const announced = digests.findLast((digest) => digest !== undefined);
  if (!createHash("sha256").update(content).digest().equals(announced ?? new Uint8Array())) {
    throw new DataLoss(`${what} arrived damaged: its digest differs`, { reason: "DIGEST_MISMATCH" });
  }
  return new Uint8Array(content.buffer, content.byteOffset, content.length);
}

function whole64(value: number | undefined): bigint | undefined {
  return value === undefined ? undefined : BigInt(value);
}
