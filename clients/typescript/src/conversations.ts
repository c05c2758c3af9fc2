/**
 * One stream of a session, from Hello to its end: the order of frames, heartbeats both ways, Goodbye. It knows no calls:
 * `gate/streams.ts` does, and opens the next stream when this one breaks.
 */

import { create, type MessageInitShape } from "@bufbuild/protobuf";
import type { Client } from "@connectrpc/connect";
import { Internal, Unavailable } from "./errors.js";
import {
  type InterceptRequest,
  InterceptRequestSchema,
  type InterceptResponse,
  type InterceptService,
  type Welcome,
} from "./gen/penstock/interception/v1/intercept_service_pb.js";
import type { Service } from "./rpc.js";
import { milliseconds } from "./wire.js";

const HANDSHAKE_MS = 20_000;

/** What a trainer sends. */
export type Frame = NonNullable<MessageInitShape<typeof InterceptRequestSchema>["frame"]>;

/** Whose stream it is. */
export interface Party {
  hello(): Frame;
  /** The stream stands; its frames come once this is fulfilled. */
  welcomed(welcome: Welcome): Promise<void>;
  /** The gate lives. */
  heard(): void;
  /** Takes a frame; the next one is read when it is done. */
  received(frame: InterceptResponse["frame"]): Promise<void> | undefined;
  /** What is ready to be sent; undefined = nothing. */
  next(): Frame | undefined;
  /** Whether it says goodbye once everything is sent. */
  leaves(): boolean;
}

/** Resumes one waiter when something is to be done. */
export class Wake {
  #set = false;
  #waiting: (() => void) | undefined;

  readonly set = (): void => {
    this.#set = true;
    this.#waiting?.();
  };

  /** Returns when it is set, or when the time has passed: whether it was set. */
  async wait(timeoutMs: number): Promise<boolean> {
    if (!this.#set) {
      const { promise, resolve } = Promise.withResolvers<void>();
      this.#waiting = resolve;
      const timer = setTimeout(resolve, timeoutMs);
      await promise;
      clearTimeout(timer);
      this.#waiting = undefined;
    }
    const was = this.#set;
    this.#set = false;
    return was;
  }
}

/** Made for one stream. */
export class Conversation {
  readonly #service: Service;
  readonly #client: Client<typeof InterceptService>;
  readonly #party: Party;
  readonly #wake: Wake;
  readonly #welcomed = Promise.withResolvers<number>();
  readonly #controller = new AbortController();
  #over = false;
  #heard = false;

  constructor(service: Service, client: Client<typeof InterceptService>, party: Party, wake: Wake) {
    this.#service = service;
    this.#client = client;
    this.#party = party;
    this.#wake = wake;
    this.#welcomed.promise.catch(() => {}); // the writer may be gone already
  }

  /** Fulfilled when it ended with our Goodbye; rejects with what else it ended with, or with the signal's reason. */
  async run(ended: AbortSignal): Promise<void> {
    const controller = this.#controller;
    const silent = new Unavailable(`${this.#service.peer} did not answer Hello`, { reason: "HANDSHAKE" });
    let timer = setTimeout(() => controller.abort(silent), HANDSHAKE_MS);
    const signal = AbortSignal.any([controller.signal, ended]);
    try {
      let begun = false;
      for await (const { frame } of this.#client.intercept(this.#requests(), { signal })) {
        this.#heard = true;
        this.#party.heard();
        if (begun) {
          await this.#party.received(frame);
          continue;
        }
        if (frame.case !== "welcome") {
          throw new Internal("The gate's first message was not Welcome", { reason: "PROTOCOL" });
        }
        begun = true;
        clearTimeout(timer);
        const interval = milliseconds(frame.value.heartbeatInterval) || 10_000;
        timer = this.#guard(interval);
        await this.#party.welcomed(frame.value);
        this.#welcomed.resolve(interval);
      }
    } catch (error) {
      signal.throwIfAborted();
      throw this.#service.failure(error);
    } finally {
      clearTimeout(timer);
      this.#over = true;
      this.#welcomed.reject(new Error("the stream is over"));
      controller.abort();
      this.#wake.set();
    }
    if (!this.#party.leaves()) {
      throw new Unavailable(`${this.#service.peer} ended the session`, { reason: "STREAM_ENDED" });
    }
  }

  /**
   * Ends the stream when nothing came for three intervals, whatever is being sent meanwhile. They are counted, not
   * measured: a program that was busy for a minute has not listened for one of them.
   */
  #guard(interval: number): NodeJS.Timeout {
    let silent = 0;
    return setInterval(() => {
      silent = this.#heard ? 0 : silent + 1;
      this.#heard = false;
      if (silent === 3) {
        const message = `${this.#service.peer} stopped sending heartbeats`;
        this.#controller.abort(new Unavailable(message, { reason: "HEARTBEAT_MISSED" }));
      }
    }, interval);
  }

  /** What is sent: Hello, then what is ready as soon as it is, heartbeats in between, Goodbye at the end. */
  async *#requests(): AsyncGenerator<InterceptRequest, void> {
    yield create(InterceptRequestSchema, { frame: this.#party.hello() });
    let interval: number;
    try {
      interval = await this.#welcomed.promise;
    } catch {
      return; // refused, which the reader reports
    }
    while (!this.#over) {
      for (let frame = this.#party.next(); frame !== undefined; frame = this.#party.next()) {
        yield create(InterceptRequestSchema, { frame });
        if (this.#over) {
          return;
        }
      }
      if (this.#party.leaves()) {
        yield create(InterceptRequestSchema, { frame: { case: "goodbye", value: { reason: "closed" } } });
        return;
      }
      if (!(await this.#wake.wait(interval / 2)) && !this.#over) {
        yield create(InterceptRequestSchema, { frame: { case: "heartbeat", value: {} } });
      }
    }
  }
}
