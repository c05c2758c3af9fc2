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
import {
  type CallOptions,
  type Client,
  createClient,
  createContextKey,
  createContextValues,
  type Interceptor,
  type Transport,
} from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import { type Endpoints, type ServiceName, tokenAdvice } from "./endpoints.js";
import { Cancelled, ConfigurationError, PenstockError, Unavailable } from "./errors.js";
import { following, homeOf } from "./homes.js";
import { Pool } from "./pool.js";
import { routing } from "./routes.js";
import { VERSION } from "./runtime.js";
import { fromTransport, type SentToken } from "./statuses.js";

/** Largest message either way, as the services have it. */
export const MAX_MESSAGE_BYTES = 64 * 1024 * 1024;

/** Most other services that one client follows HOME_ELSEWHERE to, or uses as members of a cluster. */
export const MAX_HOMES = 256;

const ATTEMPTS = 5;
/** No attempt is begun later than this: the caller learns soon that a service is away. */
const PATIENCE_MS = 10_000;
/**
 * For how long a call of a service that answered before is repeated while it cannot be reached: a restart under load takes longer
 * than a few attempts.
 */
const LONG_PATIENCE_MS = 60_000;
/** Reasons of a service that cannot be reached, and of a driver that stops and leaves what runs to its next process. */
const RESTARTING: ReadonlySet<string> = new Set(["TRANSPORT_UNAVAILABLE", "DRIVER_STOPPING"]);

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

/**
 * Whether a call may be tried again when the service is not there (see `Repeats`). "unlessDraining": not when it is there and drains.
 * "briefly": for a caller that asks others too, and has to learn soon that one is away, though it answered before.
 */
export type Repeatable = boolean | "unlessDraining" | "briefly";

export interface UnaryOptions {
  readonly signal?: AbortSignal | undefined;
  /** For each attempt; 0 = no limit. Default 30 s. */
  readonly timeoutMs?: number;
  /** Default false. */
  readonly repeatable?: Repeatable;
}

/** A token that ends: it is renewed before a call is made. */
export interface RenewedToken {
  /** As it is sent; undefined = none. */
  readonly text: string | undefined;
  renew(signal?: AbortSignal): Promise<void>;
}

/** Where a call's stream of requests is sent; absent = to the service itself. */
const HOME = createContextKey<Transport | undefined>(undefined);

/** Which one of a kind a service is, where it is not that of the endpoints. Its token is theirs: see `mayReceiveToken`. */
export interface MemberOf {
  readonly address?: string;
  /** Its own, for people. */
  readonly name?: string;
  /** The name in its certificate, where that is not its host. */
  readonly certifiedName?: string;
  /** In place of that of the endpoints. */
  readonly token?: RenewedToken;
}

/** One service as the client sees it. It connects with its first call; without an address its calls reject with NO_SERVICE. */
export class Service {
  readonly address: string;
  /** For people. */
  readonly peer: string;
  readonly #sent: SentToken;
  readonly #token: RenewedToken | undefined;
  readonly #certifiedName: string;
  readonly #endpoints: Endpoints;
  readonly #connections: Pool[] = [];
  readonly #homes = new Map<string, Transport>();
  readonly #transport: Transport;
  readonly #closed = new AbortController();
  /** Whether the service itself has answered a call: with a message, or with an error that has a reason, which nobody between has. */
  #hasAnswered = false;

  constructor(kind: ServiceName, endpoints: Endpoints, member: MemberOf = {}) {
    const address = member.address ?? endpoints.addresses[kind];
    this.address = address;
    this.#certifiedName = member.certifiedName ?? "";
    this.peer = `the ${kind} service ${member.name ? `${member.name} ` : ""}at ${address}`;
    this.#token = member.token;
    this.#sent = { origin: endpoints.tokenOrigin, advice: () => tokenAdvice(endpoints) };
    this.#endpoints = endpoints;
    this.#transport = address
      ? following(this.#open(address, this.#certifiedName), (error) => this.#homeOf(error), HOME)
      : nowhere(kind);
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
    const once = () => this.#once(method, options);
    return repeatable ? this.repeat(once, signal, repeatable) : once();
  }

  /**
   * One call with a stream of requests. Where another service is the home, all of them are sent there, once: the service that says so
   * has taken nothing of it.
   *
   * @param method makes the requests of each attempt anew.
   */
  async push<A>(method: (options: CallOptions) => Promise<A>, { signal, timeoutMs = 30_000 }: UnaryOptions = {}): Promise<A> {
    return this.#once((options) => this.#atHome(method, options), { timeoutMs, ...(signal && { signal }) });
  }

  /** Sends one request and gives one answer over a stream of both directions; as `push`. */
  async exchange<A>(method: (options: CallOptions) => AsyncIterable<A>, signal?: AbortSignal): Promise<A> {
    const left = new AbortController();
    const either = signal === undefined ? left.signal : AbortSignal.any([signal, left.signal]);
    const first = async (options: CallOptions): Promise<A> => {
      for await (const answer of method(options)) {
        return answer;
      }
      throw new Unavailable(`${this.peer} ended the stream`, { reason: "STREAM_ENDED" });
    };
    try {
      return await this.#once((options) => this.#atHome(first, options), { signal: either });
    } catch (error) {
      signal?.throwIfAborted();
      throw error;
    } finally {
      left.abort();
    }
  }

  /** The messages of one server stream; leaving it early cancels the call. Not repeated. */
  async *stream<A>(method: (options: CallOptions) => AsyncIterable<A>, signal?: AbortSignal): AsyncGenerator<A, void> {
    this.#closed.signal.throwIfAborted();
    await this.#token?.renew(signal);
    const left = new AbortController();
    const either = signal === undefined ? left.signal : AbortSignal.any([signal, left.signal]);
    try {
      for await (const message of method({ signal: either })) {
        this.#hasAnswered = true;
        yield message;
      }
    } catch (error) {
      signal?.throwIfAborted();
      throw this.#noteAnswer(this.failure(error));
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
    repeatable: Repeatable = true,
  ): AsyncGenerator<T, void> {
    for (let pageToken = ""; ; ) {
      const page = await this.call((call) => method(pageToken, call), { signal, repeatable });
      yield* items(page);
      if (!page.nextPageToken) {
        return;
      }
      pageToken = page.nextPageToken;
    }
  }

  /** What `attempt` gives; done again, from its beginning, when the service is not there. */
  async repeat<A>(attempt: () => Promise<A>, signal?: AbortSignal, how: Repeatable = true): Promise<A> {
    const repeats = new Repeats(this, how === "briefly");
    for (;;) {
      try {
        return await attempt();
      } catch (error) {
        if (!(error instanceof Unavailable) || (how === "unlessDraining" && error.reason === "DRAINING")) {
          throw error;
        }
        await repeats.pause(error, signal);
      }
    }
  }

  /** Whether the service itself has answered a call. */
  get hasAnswered(): boolean {
    return this.#hasAnswered;
  }

  #open(address: string, certifiedName = ""): Transport {
    const { namespace } = this.#endpoints;
    const { baseUrl, options } = dialled(address, this.#endpoints, certifiedName);
    // The services allow a ping every 10 s; a dead peer is noticed in 40 s. A connection without calls is not pinged but proved with
    // the next one: its timer would outlive a connection that broke under a call, and throw where nobody catches (connect 2.2).
    const pings = { pingIntervalMs: 30_000, pingTimeoutMs: 10_000, pingIdleConnection: false };
    const connections = new Pool(() => new Http2SessionManager(baseUrl, pings, options));
    this.#connections.push(connections);
    const authorise: Interceptor = (next) => (request) => {
      request.header.set("user-agent", `penstock-typescript/${VERSION}`);
      const token = this.#token === undefined ? this.#endpoints.token : this.#token.text;
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

  #homeOf(error: unknown): Transport | undefined {
    const address = homeOf(error, this.address, this.#endpoints);
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
    await this.#token?.renew(options.signal);
    try {
      const answer = await method(options);
      this.#hasAnswered = true;
      return answer;
    } catch (error) {
      options.signal?.throwIfAborted();
      throw this.#noteAnswer(this.failure(error));
    }
  }

  async #atHome<A>(method: (options: CallOptions) => Promise<A>, options: CallOptions): Promise<A> {
    try {
      return await method(options);
    } catch (error) {
      const home = this.#homeOf(error);
      if (home === undefined) {
        throw error;
      }
      return method({ ...options, contextValues: createContextValues().set(HOME, home) });
    }
  }

  #noteAnswer(error: unknown): unknown {
    this.#hasAnswered ||= error instanceof PenstockError && !error.reason.startsWith("TRANSPORT_") && error.reason !== "STREAM_ENDED";
    return error;
  }
}

/**
 * Bounds how often and how long one call is repeated. A service that answers so, and one that never answered, has five attempts within
 * ten seconds. One that answered before and cannot be reached now is tried for a minute from when that was seen.
 */
export class Repeats {
  readonly #service: Service;
  readonly #briefly: boolean;
  readonly #backoff = new Backoff();
  readonly #begun = performance.now();
  #broke: number | undefined;
  #short = 0;

  constructor(service: Service, briefly = false) {
    this.#service = service;
    this.#briefly = briefly;
  }

  /** Waits before the next attempt; rejects with the error itself where it is enough. */
  async pause(error: Unavailable, signal?: AbortSignal): Promise<void> {
    this.#broke ??= performance.now();
    let until = this.#broke + LONG_PATIENCE_MS;
    if (!RESTARTING.has(error.reason) || this.#briefly || !this.#service.hasAnswered) {
      this.#short += 1;
      until = this.#begun + PATIENCE_MS;
    }
    const delay = this.#backoff.next(error);
    if (this.#short === ATTEMPTS || performance.now() + delay > until) {
      throw error;
    }
    await this.#service.pause(delay, signal);
  }
}

/** Where calls of a service go that there is none of: each rejects, so that those of the other services work. */
function nowhere(kind: ServiceName): Transport {
  const fail = async (): Promise<never> => {
    throw new ConfigurationError(
      `This connection has no ${kind} service: give its address (PENSTOCK_${kind.toUpperCase()}_ADDRESS, or ${kind} of addresses)`,
      { reason: "NO_SERVICE" },
    );
  };
  return { unary: fail, stream: fail };
}

type SessionOptions = NonNullable<ConstructorParameters<typeof Http2SessionManager>[2]>;

function dialled(address: string, { tls }: Endpoints, certifiedName: string): { baseUrl: string; options: SessionOptions } {
  const options: SessionOptions & Record<string, unknown> = {};
  if (tls !== undefined) {
    if (certifiedName) {
      options["servername"] = certifiedName;
    }
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
