/** The connections to one service: another is opened when each has as many calls as it should. */

import type { ClientHttp2Stream, ClientSessionRequestOptions, OutgoingHttpHeaders } from "node:http2";
import { Http2SessionManager } from "@connectrpc/connect-node";

/** A service takes 256 calls at once on a connection (its max_streams); HTTP/2 makes further ones wait without a word. */
const CALLS_PER_CONNECTION = 200;
const MAX_CONNECTIONS = 64;

interface Connection {
  readonly manager: Http2SessionManager;
  /** Open ones, those that wait for the connection among them. */
  calls: number;
}

/** Stands where a transport has its one session manager. */
export class Pool {
  readonly authority: string;
  readonly #open: () => Http2SessionManager;
  readonly #connections: Connection[];
  readonly #owners = new WeakMap<ClientHttp2Stream, Http2SessionManager>();

  /** @param open makes the manager of one connection, which connects with its first call. */
  constructor(open: () => Http2SessionManager) {
    const first = open();
    this.authority = first.authority;
    this.#open = open;
    this.#connections = [{ manager: first, calls: 0 }];
  }

  /** One call, on the connection with the fewest; rejects as the connection's manager does. */
  async request(
    method: string,
    path: string,
    headers: OutgoingHttpHeaders,
    options: Omit<ClientSessionRequestOptions, "signal">,
  ): Promise<ClientHttp2Stream> {
    const connection = this.#take();
    try {
      const stream = await connection.manager.request(method, path, headers, options);
      this.#owners.set(stream, connection.manager);
      return stream.once("close", () => {
        connection.calls--;
      });
    } catch (error) {
      connection.calls--;
      throw error;
    }
  }

  /** Something came for this call: its connection needs no ping. */
  notifyResponseByteRead(stream: ClientHttp2Stream): void {
    this.#owners.get(stream)?.notifyResponseByteRead(stream);
  }

  /** How many calls each connection has. */
  get calls(): readonly number[] {
    return this.#connections.map(({ calls }) => calls);
  }

  /** Closes the connections; calls that are open end. */
  abort(): void {
    for (const { manager } of this.#connections) {
      manager.abort();
    }
  }

  #take(): Connection {
    let taken = this.#connections.reduce((least, other) => (other.calls < least.calls ? other : least));
    if (taken.calls >= CALLS_PER_CONNECTION && this.#connections.length < MAX_CONNECTIONS) {
      taken = { manager: this.#open(), calls: 0 };
      this.#connections.push(taken);
    }
    taken.calls++;
    return taken;
  }
}
