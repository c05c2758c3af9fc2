/** A process in a sandbox: it runs on when nobody watches it, and no byte of its output is lost. */

import type { MessageInitShape } from "@bufbuild/protobuf";
import type { Client } from "@connectrpc/connect";
import { longPoll, present, watched } from "../driver.js";
import { Unavailable } from "../errors.js";
import {
  type Exit,
  OutputStream,
  ProcessService,
  type WatchProcessResponse,
  type WriteStdinRequestSchema,
} from "../gen/penstock/sandbox/v1/process_service_pb.js";
import type { Abortable } from "../handles.js";
import { Repeats, type Service } from "../rpc.js";
import { bytesOf, chunks } from "./sandbox.js";

const STDIN_MS = 300_000;

/** A chunk of output, a gap where output was discarded, or the exit, which is the last. */
export type Output = Extract<WatchProcessResponse["event"], { readonly case: "chunk" | "gap" | "exit" }>;

/** Its methods reject with NotFound PROCESS_UNKNOWN; FailedPrecondition SANDBOX_LOST, SANDBOX_PAUSED. */
export class ProcessHandle {
  readonly #service: Service;
  readonly #client: Client<typeof ProcessService>;
  readonly #where: { readonly sandboxId: string; readonly processId: string };
  /** Accepted bytes of standard input; undefined = the process has to be asked: another handle may have written, or a write broke. */
  #written: bigint | undefined;

  /** @param written of its standard input so far; undefined = not known. */
  constructor(service: Service, sandboxId: string, processId: string, written?: bigint) {
    this.#service = service;
    this.#client = service.client(ProcessService);
    this.#where = { sandboxId, processId };
    this.#written = written;
  }

  get processId(): string {
    return this.#where.processId;
  }

  /** Its output from the beginning, and its exit as the last. Goes on where it was when the stream breaks. */
  output({ signal }: Abortable = {}): AsyncGenerator<Output, void> {
    const service = this.#service;
    const client = this.#client;
    const where = this.#where;
    const at = new Map<OutputStream, bigint>();
    return watched(
      service,
      async function* (sign) {
        const stdoutOffset = at.get(OutputStream.STDOUT) ?? 0n;
        const stderrOffset = at.get(OutputStream.STDERR) ?? 0n;
        const request = { ...where, stdoutOffset, stderrOffset };
        for await (const { event } of service.stream((call) => client.watchProcess(request, call), signal)) {
          sign();
          if (event.case === "chunk") {
            at.set(event.value.stream, event.value.offset + BigInt(event.value.data.length));
          } else if (event.case === "gap") {
            at.set(event.value.stream, event.value.end);
          } else if (event.case !== "exit") {
            continue; // the process itself, which comes first, and heartbeats
          }
          yield event;
          if (event.case === "exit") {
            return true;
          }
        }
        return false;
      },
      signal,
    );
  }

  /** How it ended, when it has. */
  async wait({ signal }: Abortable = {}): Promise<Exit> {
    return longPoll(
      this.#service,
      async (options) =>
        (await this.#service.call((call) => this.#client.waitProcess(this.#where, call), options)).process?.exit,
      signal,
    );
  }

  /**
   * Writes to standard input, which stays open; with `last` it is closed then. A broken write is taken up where it was, so
   * that no byte is written twice. One write at a time; one after a failed one goes on after what was accepted of that.
   *
   * Rejects with FailedPrecondition STDIN_CLOSED, STDIN_NOT_OPEN.
   */
  async write(content: Uint8Array | string, options: Abortable & { readonly last?: boolean } = {}): Promise<void> {
    const { last = false, signal } = options;
    const start = { ...this.#where, offset: this.#written ?? (await this.#accepted(signal)) };
    this.#written = undefined; // not known, where this fails
    async function* frames(): AsyncGenerator<MessageInitShape<typeof WriteStdinRequestSchema>, void> {
      yield { frame: { case: "start", value: start } };
      for (const value of chunks(bytesOf(content))) {
        yield { frame: { case: "data", value } };
      }
      if (last) {
        yield { frame: { case: "end", value: {} } };
      }
    }
    const repeats = new Repeats(this.#service);
    for (;;) {
      try {
        const unary = { signal, timeoutMs: STDIN_MS };
        this.#written = (await this.#service.push((call) => this.#client.writeStdin(frames(), call), unary)).offset;
        return;
      } catch (error) {
        if (!(error instanceof Unavailable)) {
          throw error;
        }
        await repeats.pause(error, signal);
      }
    }
  }

  async #accepted(signal: AbortSignal | undefined): Promise<bigint> {
    const options = { signal, repeatable: true };
    return present((await this.#service.call((call) => this.#client.getProcess(this.#where, call), options)).process).stdinOffset;
  }

  /** Sends a signal (its POSIX number) to the process's group; one that has ended is a success. */
  async signal(number: number, { signal }: Abortable = {}): Promise<void> {
    const request = { ...this.#where, signal: number };
    await this.#service.call((call) => this.#client.signalProcess(request, call), { signal });
  }

  /** Kills it and all its descendants; fulfilled when they are dead. May be repeated. */
  async kill({ signal }: Abortable = {}): Promise<Exit> {
    const options = { signal, repeatable: true };
    return present((await this.#service.call((call) => this.#client.killProcess(this.#where, call), options)).exit);
  }
}
