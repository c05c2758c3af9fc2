/**
 * A trainer's session at the gate: calls in, results out, over one stream that is taken up again when it breaks.
 *
 * What is held and what is under way is in `leases.ts`, what is asked of the flow of calls in `pauses.ts`, one stream in
 * `conversations.ts`. Frames carry what is ready and never wait to fill. Something is sent at least every half heartbeat
 * interval; a gate that is silent for three is taken for gone.
 */

import { hostname } from "node:os";
import type { Client } from "@connectrpc/connect";
import { type ModelCall, unlessAborted } from "./calls.js";
import { Conversation, type Frame, type Party, Wake } from "./conversations.js";
import {
  Aborted,
  Cancelled,
  DeadlineExceeded,
  Internal,
  InvalidArgument,
  isBroken,
  PenstockError,
  SessionLost,
  Unavailable,
} from "./errors.js";
import { extendLeases, type LeaseOptions, leaseCalls } from "./gate/pulls.js";
import { type HostTool, HostTools, toolMessage } from "./gate/tools.js";
import {
  type HostToolCall as HostToolCallMessage,
  type InterceptResponse,
  InterceptService,
  type Welcome,
} from "./gen/penstock/interception/v1/intercept_service_pb.js";
import type { Abortable } from "./handles.js";
import { Leases } from "./leases.js";
import { Pauses } from "./pauses.js";
import { Prompts } from "./prompts.js";
import { Backoff, MAX_MESSAGE_BYTES, pause, type Service } from "./rpc.js";
import { milliseconds } from "./wire.js";

const GOODBYE_MS = 5000;
const SETTLED_MS = 5000;
const MAX_CREDITS = 2 ** 31 - 1;

/** Which rollouts' calls a session wants: those that match every condition that is set; none set = all. */
export interface Selector {
  readonly runId?: string;
  readonly groupId?: string;
  readonly rolloutIds?: readonly string[];
  readonly labels?: Readonly<Record<string, string>>;
}

export interface SessionOptions extends Selector {
  /** Most calls leased and not answered at once. Default 64. */
  readonly credits?: number;
  /** Most bytes of the same. Default 32 MiB. */
  readonly creditBytes?: number;
  /** The newest weights that the trainer has. */
  readonly policyVersion?: number;
  /** Who this is, for people. Default: this machine's name. */
  readonly identity?: string;
  /** Whether calls carry messages and tools beside tokens. */
  readonly messages?: boolean;
  /** Whether they carry the agent's request body. */
  readonly bodies?: boolean;
  /** For how long a broken connection is taken up again. Default 5 min. */
  readonly reconnectTimeoutMs?: number;
  /** What a host tool threw and the agent does not read, with the call where there is one. Default: `console.error`. */
  readonly onToolError?: (error: unknown, call: HostToolCallMessage | undefined) => void;
}

interface Window {
  readonly calls: number;
  readonly bytes: bigint | undefined;
}

function window(calls: number, bytes: number | undefined): Window {
  return { calls, bytes: bytes === undefined ? undefined : BigInt(bytes) };
}

/**
 * Made by `ps.intercept`; `calls()` gives what comes in.
 *
 * A connection that breaks is taken up again for `reconnectTimeoutMs`; after that, and on an error that will not pass, `calls()` and
 * every answer under way reject.
 */
export class InterceptSession {
  readonly #siblings: Set<InterceptSession>;
  readonly #service: Service;
  readonly #client: Client<typeof InterceptService>;
  readonly #options: SessionOptions;
  readonly #wake = new Wake();
  readonly #leases = new Leases(this.#wake.set);
  /** Aborted by `close`: there is no next stream. */
  readonly #closed = new AbortController();
  /** Aborted where the stream is not waited for any more. */
  readonly #ended = new AbortController();
  readonly #connected = Promise.withResolvers<void>();
  readonly #prompts: Prompts;
  #outbox: Frame[] = [];
  #sessionId = "";
  #credits: Window;
  #policyVersion: number | undefined;
  readonly #pauses = new Pauses((frame) => this.#send(frame));
  #goAway: PenstockError | undefined;
  #closing = false;
  #lastReceived = performance.now();
  #failure: PenstockError | undefined;
  #running: Promise<void> | undefined;
  readonly #party: Party = {
    hello: () => this.#hello(),
    welcomed: (welcome) => this.#takeUp(welcome),
    heard: () => {
      this.#lastReceived = performance.now();
    },
    received: (frame) => this.#receive(frame),
    next: () => this.#nextFrame(),
    leaves: () => this.#closing,
  };

  readonly #tools: HostTools;

  private constructor(service: Service, options: SessionOptions, siblings: Set<InterceptSession>) {
    const { credits = 64, creditBytes } = options;
    if (!Number.isInteger(credits) || credits < 1 || credits > MAX_CREDITS) {
      throw new InvalidArgument(`A session needs at least one credit, and at most ${MAX_CREDITS}`, { reason: "CREDITS" });
    }
    this.#siblings = siblings;
    this.#service = service;
    this.#client = service.client(InterceptService);
    this.#prompts = new Prompts(service, this.#client);
    this.#options = options;
    this.#credits = window(credits, creditBytes);
    this.#policyVersion = options.policyVersion;
    this.#tools = new HostTools(this.#wake.set, options.onToolError);
    this.#connected.promise.catch(() => {}); // whoever opens it is told
  }

  /** For the gate: opens a session, which is one of `siblings` until it ends; fulfilled when it stands. */
  static async open(
    service: Service,
    options: SessionOptions,
    siblings: Set<InterceptSession>,
    signal?: AbortSignal,
  ): Promise<InterceptSession> {
    signal?.throwIfAborted();
    const session = new InterceptSession(service, options, siblings);
    siblings.add(session);
    session.#running = session.#run();
    const { promise } = session.#connected;
    try {
      await (signal === undefined ? promise : unlessAborted(promise, signal));
    } catch (error) {
      session.#abandon(new SessionLost("The session was not opened", { reason: "SESSION_CLOSED" }));
      await session.#running;
      throw error;
    }
    return session;
  }

  /** Changes when the gate did not take the old one up again. */
  get sessionId(): string {
    return this.#sessionId;
  }

  /** Calls to answer, oldest first; ends when the session is closed or finished. Several loops may share it. */
  calls(options: { readonly signal?: AbortSignal } = {}): AsyncIterableIterator<ModelCall, undefined> {
    const iterator: AsyncIterableIterator<ModelCall, undefined> = {
      next: async () => {
        const call = await this.nextCall(options.signal);
        return call === undefined ? { done: true, value: undefined } : { done: false, value: call };
      },
      return: async () => ({ done: true, value: undefined }),
      [Symbol.asyncIterator]: () => iterator,
    };
    return iterator;
  }

  /** The next of `calls()`; undefined = there will be no more. */
  async nextCall(signal?: AbortSignal): Promise<ModelCall | undefined> {
    const call = await this.#leases.nextCall(signal);
    if (call === undefined && this.#failure !== undefined && !this.#closing) {
      throw this.#failure;
    }
    return call;
  }

  /** Ends `calls()` once those that have come are handed out: nothing more is expected. */
  finish(): void {
    this.#leases.finish();
  }

  /** Tells the gate which weights are the newest: staleness bounds are judged against it. */
  announce(policyVersion: number): void {
    const value = { policyVersion: BigInt(policyVersion) };
    this.#policyVersion = policyVersion;
    this.#send({ case: "policy", value });
  }

  /** Replaces the window: at most so many calls (0 = none for now) leased and not answered; bytes as before if absent. */
  setCredits(calls: number, bytes?: number): void {
    if (!Number.isInteger(calls) || calls < 0 || calls > MAX_CREDITS) {
      throw new InvalidArgument(`Credits are whole, from 0 to ${MAX_CREDITS}`, { reason: "CREDITS" });
    }
    this.#credits = bytes === undefined ? { ...this.#credits, calls } : window(calls, bytes);
    this.#send({ case: "credits", value: this.#credits });
  }

  /**
   * Holds the calls of this selector, for every session and for the model source; agents see keep-alives.
   *
   * @param reason for the logs, for example "weight sync".
   * @param maxDurationMs after which calls flow again by themselves; absent = 10 min.
   * @returns calls that are leased or dispatched now; answers to them are still taken.
   */
  async pause(reason = "", maxDurationMs?: number): Promise<number> {
    this.#throwIfOver();
    return this.#pauses.pause(reason, maxDurationMs);
  }

  /** Lets calls flow again. */
  async resume(): Promise<void> {
    this.#throwIfOver();
    return this.#pauses.resume();
  }

  /**
   * Offers tools to the agents of rollouts that are created from now on, in any mode; their calls run here until the session ends.
   *
   * Rejects with InvalidArgument TOOL_NAME_RESERVED, TOOL_NOT_ALLOWED, FIELD_INVALID, HOST_TOOL; ResourceExhausted TOOL_OFFER_LIMIT.
   *
   * @param tools in place of what was offered to the same selector before; none = withdraws it.
   * @param options `selector`: whose agents; absent = those whose calls the session wants.
   */
  async offerTools(tools: readonly HostTool[], options: Abortable & { readonly selector?: Selector } = {}): Promise<void> {
    this.#throwIfOver();
    const selector = selectorOf(options.selector ?? this.#options);
    const request = { sessionId: this.#sessionId, selector, tools: tools.map(toolMessage) };
    const undo = this.#tools.offer(tools, selector); // first: a call may come before the answer
    try {
      await this.#service.call((call) => this.#client.registerTools(request, call), {
        signal: options.signal,
        repeatable: true,
      });
    } catch (error) {
      undo();
      throw error;
    }
  }

  /** Sends what is still to be sent and says goodbye: calls without an answer are queued again at once. */
  async close(): Promise<void> {
    const closed = new SessionLost("The session is closed", { reason: "SESSION_CLOSED" });
    this.#closing = true;
    this.#closed.abort(closed);
    this.#wake.set();
    // A gate that does not answer will notice by our silence that we are gone.
    const timer = setTimeout(() => this.#abandon(closed), GOODBYE_MS);
    await this.#running;
    clearTimeout(timer);
    this.#end(closed);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  // The stream.

  #send(frame: Frame): void {
    this.#outbox.push(frame);
    this.#wake.set();
  }

  /** Connects, converses, and connects again until the session is closed or cannot be saved. Never rejects. */
  async #run(): Promise<void> {
    const backoff = new Backoff();
    this.#lastReceived = performance.now();
    try {
      for (;;) {
        const began = performance.now();
        try {
          await new Conversation(this.#service, this.#client, this.#party, this.#wake).run(this.#ended.signal);
          return;
        } catch (error) {
          if (this.#closing || this.#ended.signal.aborted || !passes(error)) {
            throw error;
          }
          if (!this.#sessionId && !(error instanceof Unavailable)) {
            throw error;
          }
          if (performance.now() - began > SETTLED_MS) {
            backoff.reset();
          }
          const wish = this.#goAway ?? error;
          this.#goAway = undefined;
          const { reconnectTimeoutMs = 300_000 } = this.#options;
          if (performance.now() - this.#lastReceived > reconnectTimeoutMs) {
            if (!this.#sessionId) {
              throw error;
            }
            const seconds = Math.round(reconnectTimeoutMs / 1000);
            throw new SessionLost(`The session could not be resumed in ${seconds} s: ${error.message}`, {
              reason: "SESSION_LOST",
              cause: error,
            });
          }
          await pause(backoff.next(wish), this.#closed.signal);
        }
      }
    } catch (error) {
      this.#end(
        error instanceof PenstockError
          ? error
          : new Internal(`The gate's message could not be read: ${String(error)}`, {
              reason: "PROTOCOL",
              cause: error,
            }),
      );
    }
  }

  /** What the session wants now. The outbox begins anew with it: what is queued from here on goes out after Welcome. */
  #hello(): Frame {
    this.#outbox = this.#credits.calls === 0 ? [{ case: "credits", value: this.#credits }] : [];
    this.#outbox.push(...this.#pauses.unanswered);
    const { identity, messages = false, bodies = false } = this.#options;
    return {
      case: "hello",
      value: {
        selector: selectorOf(this.#options),
        // None for now is said by a frame of its own, after Welcome.
        credits: { ...this.#credits, calls: Math.max(1, this.#credits.calls) },
        identity: identity || hostname(),
        policyVersion: this.#policyVersion === undefined ? undefined : BigInt(this.#policyVersion),
        view: { messages, body: bodies, suffixOnly: true },
        maxMessageBytes: BigInt(MAX_MESSAGE_BYTES),
        ...(this.#sessionId && { resumeSessionId: this.#sessionId, held: { callIds: this.#leases.callIds } }),
      },
    };
  }

  /** After Welcome: calls that were lost end, what is unanswered is sent again. */
  async #takeUp(welcome: Welcome): Promise<void> {
    this.#sessionId = welcome.sessionId;
    this.#leases.takenUp(welcome.resumed ? new Set(welcome.heldCallIds) : undefined);
    this.#tools.takenUp(welcome.resumed);
    this.#prompts.clear();
    if (!welcome.resumed) {
      this.#pauses.forgotten();
      for (const { selector, tools } of this.#tools.registrations) {
        const request = { sessionId: welcome.sessionId, selector, tools: [...tools] };
        await this.#service.call((call) => this.#client.registerTools(request, call));
      }
    }
    this.#connected.resolve();
  }

  #nextFrame(): Frame | undefined {
    const frame = this.#outbox.shift();
    if (frame !== undefined) {
      return frame;
    }
    const results = this.#leases.nextResults();
    if (results !== undefined) {
      return { case: "results", value: results };
    }
    const toolResults = this.#tools.next();
    return toolResults === undefined ? undefined : { case: "toolResults", value: toolResults };
  }

  #receive(frame: InterceptResponse["frame"]): Promise<void> | undefined {
    switch (frame.case) {
      case "calls":
        return this.#prompts.completed(frame.value.calls, (call) => this.#leases.leased(call));
      case "acknowledged":
        for (const callId of frame.value.acceptedCallIds) {
          this.#leases.accepted(callId);
        }
        for (const rejected of frame.value.rejected) {
          this.#leases.rejected(rejected);
        }
        break;
      case "cancelled":
        for (const callId of frame.value.callIds) {
          this.#leases.cancelled(callId, frame.value.reason || "CANCELLED");
        }
        break;
      case "rolloutsClosed":
        this.#leases.closed(new Set(frame.value.rolloutIds));
        this.#prompts.forget(frame.value.rolloutIds);
        break;
      case "toolCalls":
        for (const call of frame.value.calls) {
          this.#tools.called(call);
        }
        break;
      case "toolCallsCancelled":
        this.#tools.cancelled(frame.value.toolCallIds);
        break;
      case "toolResultsAcknowledged":
        this.#tools.acknowledged(frame.value);
        break;
      case "paused":
        this.#pauses.paused(frame.value.openCalls);
        break;
      case "resumed":
        this.#pauses.resumed();
        break;
      case "goAway": {
        const { reason, retryAfter } = frame.value;
        this.#goAway = new Unavailable(reason, { reason: "GO_AWAY", retryAfterMs: milliseconds(retryAfter) });
        break;
      }
      default: // heartbeats, and what a newer gate may say
    }
    return undefined;
  }

  #throwIfOver(): void {
    if (this.#failure !== undefined) {
      throw this.#failure;
    }
  }

  /** Ends the stream, or the wait for the next one, at once. */
  #abandon(error: PenstockError): void {
    this.#closing = true;
    this.#closed.abort(error);
    this.#ended.abort(error);
    this.#wake.set();
  }

  /** Nothing comes or goes any more: everybody who waits is told. */
  #end(error: PenstockError): void {
    if (this.#failure !== undefined) {
      return;
    }
    this.#failure = error;
    this.#siblings.delete(this);
    this.#connected.reject(error);
    this.#pauses.end(error);
    this.#leases.end(error);
    this.#tools.end();
  }
}

function selectorOf({ runId, groupId, rolloutIds = [], labels }: Selector) {
  return { runId, groupId, rolloutIds: [...rolloutIds], labels: { ...labels } };
}

/** Whether connecting again may help: the transport broke, or the gate restarts or lost our heartbeats. */
function passes(error: unknown): error is PenstockError {
  if (error instanceof Aborted) {
    return false; // another process took the session over
  }
  if (isBroken(error) || error instanceof Cancelled || error instanceof DeadlineExceeded) {
    return true;
  }
  return error instanceof Internal && error.reason.startsWith("TRANSPORT_");
}

/** The gate's side of a connection: the sessions that are open. */
export class Gate {
  readonly #service: Service;
  readonly #sessions = new Set<InterceptSession>();

  constructor(service: Service) {
    this.#service = service;
  }

  async open(options: SessionOptions, signal?: AbortSignal): Promise<InterceptSession> {
    return InterceptSession.open(this.#service, options, this.#sessions, signal);
  }

  /** Calls without a session. */
  async lease(options: LeaseOptions & Selector): Promise<ModelCall[]> {
    return leaseCalls(this.#service, this.#service.client(InterceptService), options);
  }

  /** Extends the leases of calls without a session. */
  async extend(calls: readonly ModelCall[], options: Abortable): Promise<ModelCall[]> {
    return extendLeases(this.#service, this.#service.client(InterceptService), calls, options);
  }

  /** Says goodbye in each. */
  async close(): Promise<void> {
    await Promise.all([...this.#sessions].map((session) => session.close()));
  }
}
