/**
 * Calls to one service: its connections, its token, deadlines, retries, typed errors.
 *
 * A call is repeated only when it failed because the service was not there and repeating it is harmless: reads, and creates that
 * carry a request id. The delay grows with jitter; a service's RetryInfo is obeyed.
 */

import { readFileSync } from "node:fs";
import { connect as connectSocket } from "node:net";
import { setTimeout as sleep } from "node:timers/promises";
import type { DescService } from "@bufbuild/protobuf";
import { type CallOptions, type Client, createClient, type Interceptor, type Transport } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import { type Endpoints, type ServiceName, tokenAdvice } from "./endpoints.js";
import { Cancelled, ConfigurationError, type PenstockError, Unavailable } from "./errors.js";
import { following, homeOf } from "./homes.js";
import { Pool } from "./pool.js";
import { routing } from "./routes.js";
import { VERSION } from "./runtime.js";
import { fromTransport, type SentToken } from "./statuses.js";

/** Largest message either way, as the services have it. */
export const MAX_MESSAGE_BYTES = 64 * 1024 * 1024;

/** Most other services that one client follows HOME_ELSEWHERE to. */
const MAX_HOMES = 256;

const ATTEMPTS = 5;
/** No attempt is begun later than this: whoever asks hears soon that a service is away. */
const PATIENCE_MS = 10_000;

/** Growing delays between attempts: 0.1 s, doubled up to 5 s, each drawn from its upper half. */
export class Backoff {
  #attempt = 0;

  /** After a success: the next delay is short again. */
  reset(): void {
    this.#attempt = 0;
  }

  /** Milliseconds to wait before the next attempt; a service's own wish is honoured. */
  next(error?: PenstockError): number {
    const ceiling = Math.min(5000, 100 * 2 ** this.#attempt);
    this.#attempt = Math.min(this.#attempt + 1, 16);
    return Math.max(ceiling * (0.5 + Math.random() / 2), error?.retryAfterMs ?? 0);
  }
}

/** Waits; rejects with the signal's reason when it is aborted. */
export async function pause(milliseconds: number, signal?: AbortSignal): Promise<void> {
  signal?.throwIfAborted();
  try {
    await sleep(milliseconds, undefined, signal === undefined ? {} : { signal });
  } catch (error) {
    signal?.throwIfAborted();
    throw error;
  }
}

export interface UnaryOptions {
  readonly signal?: AbortSignal | undefined;
  /** For each attempt; 0 = no limit. Default 30 s. */
  readonly timeoutMs?: number;
  /** Whether it may be tried again, for ten seconds at most, when the service is not there. */
  readonly repeatable?: boolean;
}

/** One service as the client sees it. It connects with its first call. */
export class Service {
  /** For people. */
  readonly peer: string;
  readonly #sent: SentToken;
  readonly #endpoints: Endpoints;
  readonly #connections: Pool[] = [];
  readonly #homes = new Map<string, Transport>();
  readonly #transport: Transport;
  readonly #closed = new AbortController();

  constructor(name: ServiceName, endpoints: Endpoints) {
    const address = endpoints.addresses[name];
    this.peer = `the ${name} service at ${address}`;
    this.#sent = { origin: endpoints.tokenOrigin, advice: () => tokenAdvice(endpoints) };
    this.#endpoints = endpoints;
    this.#transport = following(this.#open(address), (error) => this.#home(homeOf(error, address, endpoints)));
  }

  /** A client of one of its RPC services. */
  client<S extends DescService>(description: S): Client<S> {
    return createClient(description, this.#transport);
  }

  /** What a failed call of this service stands for; one whose token it does not take says where that is from. */
  failure(thrown: unknown): unknown {
    if (this.#closed.signal.aborted) {
      return this.#closed.signal.reason;
    }
    return fromTransport(thrown, this.peer, this.#sent);
  }

  /** Closes the connections; calls that are open, and waits between two of them, reject with Cancelled. */
  close(): void {
    this.#closed.abort(new Cancelled("The client is closed", { reason: "TRANSPORT_CANCELLED" }));
    for (const connections of this.#connections) {
      connections.abort();
    }
  }

  /** Waits; rejects with the signal's reason when it is aborted, and with Cancelled when the service is closed. */
  async pause(milliseconds: number, signal?: AbortSignal): Promise<void> {
    const closed = this.#closed.signal;
    await pause(milliseconds, signal === undefined ? closed : AbortSignal.any([signal, closed]));
  }

  /** One unary call. Rejects with a PenstockError, or with the signal's reason. */
  async call<A>(
    method: (options: CallOptions) => Promise<A>,
    { signal, timeoutMs = 30_000, repeatable = false }: UnaryOptions = {},
  ): Promise<A> {
    const options: CallOptions = { timeoutMs, ...(signal && { signal }) };
    return repeatable ? this.repeat(() => this.#once(method, options), signal) : this.#once(method, options);
  }

  /** The messages of one server stream; leaving it early cancels the call. Not repeated. */
  async *stream<A>(method: (options: CallOptions) => AsyncIterable<A>, signal?: AbortSignal): AsyncGenerator<A, void> {
    this.#closed.signal.throwIfAborted();
    const left = new AbortController();
    const either = signal === undefined ? left.signal : AbortSignal.any([signal, left.signal]);
    try {
      yield* method({ signal: either });
    } catch (error) {
      signal?.throwIfAborted();
      throw this.failure(error);
    } finally {
      left.abort();
    }
  }

  /** All messages of a short server stream; repeated as a read when the service is not there. */
  async collect<A>(method: (options: CallOptions) => AsyncIterable<A>, signal?: AbortSignal): Promise<A[]> {
    return this.repeat(() => Array.fromAsync(this.stream(method, signal)), signal);
  }

  /** The items of a list, page by page, each asked for when it is needed. */
  async *pages<A extends { readonly nextPageToken: string }, T>(
    method: (pageToken: string, options: CallOptions) => Promise<A>,
    items: (page: A) => readonly T[],
    signal?: AbortSignal,
  ): AsyncGenerator<T, void> {
    for (let pageToken = ""; ; ) {
      const page = await this.call((call) => method(pageToken, call), { signal, repeatable: true });
      yield* items(page);
      if (!page.nextPageToken) {
        return;
      }
      pageToken = page.nextPageToken;
    }
  }

  /** What `attempt` gives; done again, from its beginning, when the service is not there. */
  async repeat<A>(attempt: () => Promise<A>, signal?: AbortSignal): Promise<A> {
    const backoff = new Backoff();
    const until = performance.now() + PATIENCE_MS;
    for (let number = 1; ; number++) {
      try {
        return await attempt();
      } catch (error) {
        if (!(error instanceof Unavailable) || number === ATTEMPTS) {
          throw error;
        }
        const delay = backoff.next(error);
        if (performance.now() + delay > until) {
          throw error;
        }
        await this.pause(delay, signal);
      }
    }
  }

  #open(address: string): Transport {
    const { namespace, token } = this.#endpoints;
    const { baseUrl, options } = dialled(address, this.#endpoints);
    // The services allow a ping every 10 s; a dead peer is noticed in 40 s. A connection without calls is not pinged but proved with
    // the next one: its timer would outlive a connection that broke under a call, and throw where nobody catches (connect 2.2).
    const pings = { pingIntervalMs: 30_000, pingTimeoutMs: 10_000, pingIdleConnection: false };
    const connections = new Pool(() => new Http2SessionManager(baseUrl, pings, options));
    this.#connections.push(connections);
    const authorise: Interceptor = (next) => (request) => {
      request.header.set("user-agent", `penstock-typescript/${VERSION}`);
      if (token !== undefined) {
        request.header.set("authorization", `Bearer ${token}`);
      }
      if (namespace !== undefined) {
        request.header.set("x-penstock-namespace", namespace);
      }
      return next(request);
    };
    return createGrpcTransport({
      baseUrl,
      sessionManager: connections,
      interceptors: [authorise, routing],
      acceptCompression: [],
      readMaxBytes: MAX_MESSAGE_BYTES,
      writeMaxBytes: MAX_MESSAGE_BYTES,
    });
  }

  #home(address: string | undefined): Transport | undefined {
    if (address === undefined || this.#closed.signal.aborted) {
      return undefined;
    }
    let home = this.#homes.get(address);
    if (home === undefined && this.#homes.size < MAX_HOMES) {
      home = this.#open(address);
      this.#homes.set(address, home);
    }
    return home;
  }

  async #once<A>(method: (options: CallOptions) => Promise<A>, options: CallOptions): Promise<A> {
    options.signal?.throwIfAborted();
    this.#closed.signal.throwIfAborted();
    try {
      return await method(options);
    } catch (error) {
      options.signal?.throwIfAborted();
      throw this.failure(error);
    }
  }
}

type SessionOptions = NonNullable<ConstructorParameters<typeof Http2SessionManager>[2]>;

function dialled(address: string, { tls }: Endpoints): { baseUrl: string; options: SessionOptions } {
  const options: SessionOptions & Record<string, unknown> = {};
  if (tls !== undefined) {
    for (const [option, file] of [
      ["ca", tls.caFile],
      ["cert", tls.certFile],
      ["key", tls.keyFile],
    ] as const) {
      if (file !== undefined) {
        options[option] = read(file);
      }
    }
  }
  if (!address.startsWith("unix:")) {
    return { baseUrl: `${tls === undefined ? "http" : "https"}://${address}`, options };
  }
  const path = address.slice("unix:".length);
  return { baseUrl: "http://localhost", options: { ...options, createConnection: () => connectSocket(path) } };
}

function read(file: string): Buffer {
  try {
    return readFileSync(file);
  } catch (error) {
    throw new ConfigurationError(`${file} cannot be read: ${(error as Error).message}`, {
      reason: "TLS_FILE",
      cause: error,
    });
  }
}
